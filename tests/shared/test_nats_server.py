"""The embedded server: health, keys, restarts, and its end with its parent."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.nats.nats_server import NatsServer, find_binary
from tests.condition import until
from tests.nats_server import OpenServer

ROOT = Path(__file__).parents[2]


def test_the_binary_is_found() -> None:
    assert os.access(find_binary(), os.X_OK)


async def test_it_is_healthy_when_started(nats: OpenServer) -> None:
    bus = await Bus.connect(nats.url, credential=nats.credential, name="test")
    account = await bus.jetstream.account_info()
    assert account.streams == 0
    await bus.close()
    assert nats.running
    assert nats.url == f"nats://127.0.0.1:{nats.port}"


async def test_it_listens_on_loopback_only_and_keeps_its_keys_to_itself(nats: OpenServer) -> None:
    text = (nats.directory / "server.conf").read_text()
    assert f'"127.0.0.1:{nats.port}"' in text or '"127.0.0.1:-1"' in text
    assert "sync_interval: always" in text
    assert (nats.directory / "server.conf").stat().st_mode & 0o077 == 0
    assert nats.credential.seed not in (nats.keys.path / "authorization.conf").read_text()
    assert nats.keys.credential_file("api").stat().st_mode & 0o077 == 0
    assert os.getsid(nats.pid) == nats.pid


async def test_stop_and_start_again(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    await server.start()  # has no effect
    pid, port = server.pid, server.port
    await server.stop()
    await server.stop()
    assert not server.running
    with pytest.raises(Unavailable, match="not running"):
        _ = server.pid
    await server.start()
    assert (server.port, server.pid != pid) == (port, True)
    await server.stop()


async def test_a_server_that_is_kept_comes_back_unless_somebody_has_ended_it(tmp_path: Path) -> None:
    server = OpenServer(tmp_path)
    await server.start()
    port, before = server.port, server.pid
    keeping = asyncio.create_task(server.keep(3))
    try:
        os.kill(before, signal.SIGTERM)

        async def is_back() -> bool:
            if not server.running or server.pid == before:
                return False
            try:
                bus = await Bus.connect(server.url, credential=server.credential, name="test")
            except Unavailable:
                return False
            await bus.close()
            return True

        await until(is_back, "it is started again")
        assert server.port == port
        await server.kill()
        assert not server.running
        await server.start()  # as whoever has killed it does

        def keeps_ending() -> bool:
            if server.running:
                os.kill(server.pid, signal.SIGKILL)
            return keeping.done()

        await until(keeps_ending, "it is given up")
        with pytest.raises(Unavailable, match="ended 4 times in a minute"):
            await keeping
    finally:
        keeping.cancel()
        await server.stop()


async def test_a_port_that_is_taken(nats: NatsServer, tmp_path: Path) -> None:
    second = NatsServer(tmp_path / "second", port=nats.port)
    with pytest.raises(Unavailable, match="address already in use"):
        await second.start()
    assert not second.running


async def test_a_folder_with_odd_characters(tmp_path: Path) -> None:
    folder = tmp_path / 'a "quoted" $HOME {brace} ü' / ("x" * 200)
    async with OpenServer(folder) as server:
        bus = await Bus.connect(server.url, credential=server.credential, name="test")
        await bus.close()


_PARENT = """
import asyncio, sys
from pathlib import Path
from shared.nats.nats_server import NatsServer

async def main():
    server = NatsServer(Path(sys.argv[1]))
    await server.start()
    print(server.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert parent.stdout is not None
        server = os.pidfd_open(int(parent.stdout.readline()))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    ended, _, _ = select.select([server], [], [], 10)
    os.close(server)
    assert ended


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    task = asyncio.create_task(server.start())
    await asyncio.sleep(0)  # the task runs up to where it waits for the server
    assert server.running
    ended = os.pidfd_open(server.pid)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not server.running
    ready, _, _ = select.select([ended], [], [], 10)
    os.close(ended)
    assert ready


async def test_jetstream_limits_in_use(nats: NatsServer) -> None:
    """The server's greeting to a client contains the configured limit for messages."""
    reader, writer = await asyncio.open_connection("127.0.0.1", nats.port)
    greeting = json.loads((await reader.readline()).removeprefix(b"INFO "))
    assert greeting["max_payload"] == 8 << 20
    assert greeting["auth_required"] is True
    writer.close()
    await writer.wait_closed()
