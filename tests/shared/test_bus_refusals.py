"""The bus where the server refuses its credential: a mistake in the settings, a key taken away, keys read anew."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.bus import credentials
from shared.bus.connection import Bus
from shared.bus.credentials import new_seed
from shared.bus.nats_client import refused_pauses_s
from shared.errors import AccessDenied
from tests.condition import until
from tests.nats_server import OpenServer

LIMIT_S = 30.0


async def test_a_wrong_key(nats: OpenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused at once, and not waited for like a server that is away."""
    monkeypatch.setattr("shared.bus.connection.CONNECT_TIMEOUT_S", 1e6)
    wrong = nats.credential.model_copy(update={"seed": new_seed()})
    with pytest.raises(AccessDenied, match="Authorization Violation"):
        await Bus.connect(nats.url, credential=wrong, name="test")


async def test_a_key_that_is_refused_is_an_outage_until_it_is_accepted_again(tmp_path: Path) -> None:
    """As where an operator mends a mistake. New credentials come with a restart of the process."""
    async with OpenServer(tmp_path) as server:
        bus = await Bus.connect(server.url, credential=server.credential, name="test")
        await bus.answer("echo", lambda _, data: _echo(data))
        server.refuse()
        await until(lambda: "Authorization Violation" in bus.trouble, seen=lambda: bus.trouble)
        assert bus.trouble.startswith("access-denied: the NATS server refuses the credential")
        assert not bus.closed
        another = credentials.read(server.keys.credential_file("planner"))
        with pytest.raises(AccessDenied, match="access-denied"):
            await bus.request("echo", b"", timeout_s=0.1)
        other = await Bus.connect(server.url, credential=another, name="other")
        with pytest.raises(AccessDenied):
            await Bus.connect(server.url, credential=server.credential, name="who starts now")
        await other.close()
        waiting = asyncio.create_task(bus.wait_connected())
        await bus.send("test", b"kept until the connection is back")
        server.accept()
        async with asyncio.timeout(LIMIT_S):
            await waiting
        assert bus.trouble == ""
        other = await Bus.connect(server.url, credential=server.credential, name="other")
        assert await other.request("echo", b"x", timeout_s=LIMIT_S) == b"x"
        await other.close()
        await bus.close()


async def test_closing_while_a_server_refuses_does_not_wait_for_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.connection.refused_pauses_s", lambda: itertools.repeat(3600.0))
    async with OpenServer(tmp_path) as server:
        bus = await Bus.connect(server.url, credential=server.credential, name="test")
        server.refuse()
        await until(lambda: "Authorization Violation" in bus.trouble, seen=lambda: bus.trouble)
        async with asyncio.timeout(LIMIT_S):
            await bus.close()
        assert bus.closed
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_pauses_after_refusals_grow_up_to_a_limit() -> None:
    pauses_s = list(itertools.islice(refused_pauses_s(), 8))
    for pause_s, least_s in zip(pauses_s, [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0], strict=True):
        assert least_s <= pause_s <= least_s + 0.1 + 1e-9


async def test_a_process_that_starts_while_the_server_reads_its_keys_is_not_refused(nats: OpenServer) -> None:
    async with reloading_under(nats) as url:
        bus = await Bus.connect(url, credential=nats.credential, name="test")
    assert bus.connected
    await bus.close()


@asynccontextmanager
async def reloading_under(nats: OpenServer) -> AsyncIterator[str]:
    """Yield a URL whose first client has connected, and not sent its credential, when the server reads new keys."""
    held = False

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal held
        host, port = nats.url.removeprefix("nats://").split(":")
        from_server, to_server = await asyncio.open_connection(host, int(port))
        info = await from_server.readline()
        assert json.loads(info.removeprefix(b"INFO "))["auth_required"]
        if not held:
            held = True
            nats.keys.add_node("another")
            nats.reload()
            # The server's answer to the reload: the connection has not said who it is.
            info += await from_server.readline()
            assert b"Authorization Violation" in info
        writer.write(info)
        await asyncio.gather(carry(from_server, writer), carry(reader, to_server))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _echo(data: bytes) -> bytes:
    return data
