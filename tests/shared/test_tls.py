"""TLS between the bus and NATS: who vouches for the server, and nobody on the way who leaves it out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shared.bus import credentials
from shared.bus.connection import Bus
from shared.bus.credentials import Credential
from shared.errors import Corrupt, InvalidInput
from shared.nats.certificates import issue, new_authority
from shared.nats.key_directory import KeyDirectory
from tests.condition import until
from tests.nats_server import OpenServer

LIMIT_S = 40.0


def tls_server(directory: Path) -> OpenServer:
    """Return a server with TLS, on loopback."""
    server = OpenServer(directory, tls=("localhost",))
    server.keys.make(["nats://localhost:4222"])
    return server


async def fails(url: str, credential: Credential, failed: Callable[[], bool]) -> None:
    """Connect until that has failed once; a server that is refused is tried again, as one that is away."""
    connecting = asyncio.create_task(Bus.connect(url, credential=credential, name="test", timeout_s=3600.0))
    try:
        await until(failed)
        assert not connecting.done()
    finally:
        connecting.cancel()
        await asyncio.wait({connecting})


async def echo(data: bytes) -> bytes:
    return data


async def test_messages_go_through_and_the_connection_comes_back(tmp_path: Path) -> None:
    async with tls_server(tmp_path) as server:
        assert server.credential.servers == ["tls://localhost:4222"]
        bus = await Bus.connect(server.url, credential=server.credential, name="test")
        other = await Bus.connect(server.url, credential=server.credential, name="other")
        await other.answer("echo", lambda _, data: echo(data))
        assert await bus.request("echo", b"x", timeout_s=LIMIT_S) == b"x"
        assert bus.addresses == ("127.0.0.1", "127.0.0.1")
        await server.kill()
        await server.start()
        await bus.wait_connected()
        await other.wait_connected()
        assert await bus.request("echo", b"x", timeout_s=LIMIT_S) == b"x"
        await other.close()
        await bus.close()


async def test_a_server_for_which_another_authority_vouches_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = new_authority(datetime.now(UTC)).certificate
    async with tls_server(tmp_path) as server:
        for ca in (stranger, ""):
            credential = server.credential.model_copy(update={"ca": ca})
            caplog.clear()
            await fails(server.url, credential, lambda: "CERTIFICATE_VERIFY_FAILED" in caplog.text)


async def test_a_server_with_another_name_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with tls_server(tmp_path) as server:
        url = server.url.replace("localhost", "127.0.0.1")
        await fails(url, server.credential, lambda: "IP address mismatch" in caplog.text)


async def test_a_client_without_tls_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with tls_server(tmp_path) as server:
        url = server.url.replace("tls://", "nats://")
        await fails(url, server.credential, lambda: "bus test: " in caplog.text)


async def test_nothing_is_sent_to_a_server_that_says_it_has_no_tls(tmp_path: Path) -> None:
    """Whoever is on the way can say so in the server's place: its first line is otherwise not encrypted."""
    heard: list[bytes] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "X", "version": "2.15.1", "max_payload": 1024, "headers": True, "nonce": "abc"}
        writer.write(b"INFO " + json.dumps({**info, "auth_required": True, "tls_required": False}).encode() + b"\r\n")
        heard.append(await reader.read(4096))
        writer.close()

    keys = KeyDirectory(tmp_path)
    keys.make(["nats://localhost:4222"])
    keys.certify(["localhost"], datetime.now(UTC))
    between = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = between.sockets[0].getsockname()[1]
    credential = credentials.read(keys.credential_file("planner"))
    async with between:
        await fails(f"tls://localhost:{port}", credential, lambda: bool(heard))
    assert not any(b"CONNECT" in data or b"nkey" in data for data in heard)


def test_another_certificate_leaves_the_credentials_valid(tmp_path: Path) -> None:
    keys = KeyDirectory(tmp_path)
    keys.make(["nats://control:4222"])
    keys.certify(["control"], datetime.now(UTC))
    node = keys.add_node("n0").read_text()
    certificate = (tmp_path / "server.pem").read_text()
    keys.certify(["control", "198.51.100.1"], datetime.now(UTC))
    assert (tmp_path / "server.pem").read_text() != certificate
    assert keys.credential_file("node/n0").read_text() == node
    assert json.loads(node)["ca"] == (tmp_path / "ca.pem").read_text()
    assert json.loads(node)["servers"] == ["tls://control:4222"]
    for name in ("ca-key.pem", "server-key.pem"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("names", [[], [""], ["a b"], ["tls://control"], ["control:4222"]])
def test_what_is_no_name_is_refused(tmp_path: Path, names: list[str]) -> None:
    keys = KeyDirectory(tmp_path)
    keys.make(more=[])
    with pytest.raises(InvalidInput, match="name"):
        keys.certify(names, datetime.now(UTC))
    assert not (tmp_path / "ca.pem").exists()


def test_a_damaged_authority(tmp_path: Path) -> None:
    authority = new_authority(datetime.now(UTC))
    with pytest.raises(Corrupt, match="authority"):
        issue(type(authority)(authority.certificate, "x"), ["control"], datetime.now(UTC))
