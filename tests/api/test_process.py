"""The service as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest

from tests.nats_server import OpenServer

ROOT = Path(__file__).parents[2]


def environment(bus_server: OpenServer, run_dir: Path, port: int = 0) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "UNICRON_RUN_DIR": str(run_dir),
        "UNICRON_NATS_URL": bus_server.url,
        "UNICRON_NATS_CREDENTIAL": str(bus_server.credential_file),
        "UNICRON_PORT": str(port),
    }


async def start(values: dict[str, str], folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "services.api.main",
        env=values,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_it_says_ready_writes_its_port_and_ends_on_sigterm_with_streams_open(
    bus_server: OpenServer, tmp_path: Path
) -> None:
    process = await start(environment(bus_server, tmp_path), tmp_path)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(100):
            assert await process.stdout.readline() == b"ready\n"
        url = f"http://127.0.0.1:{(tmp_path / 'services' / 'api.port').read_text().strip()}"
        async with httpx.AsyncClient(base_url=url, timeout=40) as http:
            async with http.stream("GET", "/v1/events?follow=true") as response:
                lines = response.aiter_lines()
                assert await anext(lines) == ": unicron events"
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(100):
                    assert [line async for line in lines if line] == []
        async with asyncio.timeout(100):
            out, err = await process.communicate()
        assert (process.returncode, out) == (0, b"")
        assert b"Traceback" not in err
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
async def test_a_port_that_is_taken_is_said_and_exits_5(bus_server: OpenServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = await start(environment(bus_server, tmp_path, taken.getsockname()[1]), tmp_path)
        async with asyncio.timeout(100):
            out, err = await process.communicate()
    assert (process.returncode, out) == (5, b"")
    assert b"cannot listen on 127.0.0.1" in err
