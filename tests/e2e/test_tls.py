"""The whole system with TLS between all processes and NATS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from cli.stack.stack import Stack
from tests.e2e.kit import Client, Pace, processes_of, rank, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two nodes of one worker each, with TLS."""
    run_dir = tmp_path_factory.mktemp("tls") / "run"
    async with Stack(run_dir, nodes=2, workers_per_node=1, tls=True) as started:
        yield started
    assert processes_of(run_dir) == []


async def test_a_killed_rank_is_healed_and_the_task_succeeds(secured: Stack, corpus: Path, tmp_path: Path) -> None:
    pace = Pace(tmp_path, 0.01)

    def course() -> None:
        with Client(secured.url) as client:
            client.submit(pace.of(small_task("secured", corpus)))
            task = client.until_step("secured", 5)
            os.kill(rank(task, 1)["pid"], signal.SIGKILL)
            client.until("it is healed", lambda: [i for i in client.incidents("secured") if i["restored_at"]])
            pace.end()
            client.until_state("secured", "succeeded")
            [incident] = client.incidents("secured")
            assert (incident["kind"], incident["severity"]) == ("process-exit", "SEV2")

    await asyncio.to_thread(course)


async def test_every_connection_to_nats_is_of_a_process_of_the_stack_and_no_other_way_leads_in(secured: Stack) -> None:
    assert secured.nats.url.startswith("tls://")
    port = secured.nats.port
    clients = {
        c.raddr.port
        for c in psutil.Process(secured.nats.pid).net_connections("tcp")
        if c.status == psutil.CONN_ESTABLISHED
    }
    assert len(clients) >= 6, "four services and two agents"
    # A server without TLS speaks first; this one waits for a handshake and answers nothing else.
    with socket.create_connection(("127.0.0.1", port), timeout=40) as plain:
        plain.sendall(b"CONNECT {}\r\nPING\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert not plain.recv(4096).startswith((b"INFO", b"PONG"))
