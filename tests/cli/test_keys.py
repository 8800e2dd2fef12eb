"""``unicron keys`` and ``unicron node``: they need no server of Unicron."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cli.main import main
from shared.bus import credentials
from shared.bus.connection import Bus
from shared.errors import AccessDenied
from shared.messages.signals import HEARTBEATS
from shared.nats.nats_server import NatsServer
from tests.condition import until

LIMIT_S = 40.0


def test_from_no_key_to_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = str(tmp_path / "keys")
    assert main(["node", "add", "n0", "--keys", keys]) == 3
    assert "unicron keys make" in capsys.readouterr().err
    assert main(["keys", "make", "--keys", keys, "--server", "control"]) == 2
    assert "'control' is not nats://HOST:PORT" in capsys.readouterr().err
    assert main(["keys", "make", "--keys", keys, "--server", "nats://control:4222"]) == 0
    assert capsys.readouterr().out == f"{keys}\n"
    assert main(["node", "add", "n0", "--keys", keys]) == 0
    found = capsys.readouterr()
    assert credentials.read(Path(found.out.strip())).servers == ["nats://control:4222"]
    assert "SIGHUP" in found.err, "no server runs here"
    assert main(["node", "add", "n0", "--keys", keys]) == 4
    assert main(["node", "add", "N 0", "--keys", keys]) == 2
    capsys.readouterr()
    assert main(["node", "add", "n1", "--keys", keys, "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"node": "n1", "credential": f"{keys}/nodes/n1.json", "reloaded": False}
    assert main(["node", "remove", "n1", "--keys", keys]) == 0
    assert main(["node", "remove", "n1", "--keys", keys]) == 3


def test_the_keys_of_nodes_in_one_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    place = ("--keys", str(keys), "--server", "nats://n0:4222")
    assert main(["keys", "make", *place, "--node", "n0", "--node", "N 1"]) == 2
    assert "'N 1' must be" in capsys.readouterr().err
    assert not keys.exists()
    assert main(["keys", "make", *place, "--node", "n0"]) == 0
    first = credentials.read(keys / "nodes" / "n0.json")
    assert (
        main(["keys", "make", "--keys", str(keys), "--server", "nats://n1:4222", "--node", "n0", "--node", "n1"]) == 0
    )
    found = [credentials.read(keys / "nodes" / f"{name}.json") for name in ("n0", "n1")]
    assert [credential.servers for credential in found] == [["nats://n1:4222"]] * 2
    assert found[0].seed == first.seed


async def test_a_running_server_knows_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with NatsServer(tmp_path / "nats") as server:
        place = ("--keys", str(server.keys.path), "-o", "json")
        assert await asyncio.to_thread(main, ["node", "add", "n0", *place]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["reloaded"] is True
        credential = credentials.read(Path(answer["credential"]))
        bus = await _connected(server, credential)
        assert await asyncio.to_thread(main, ["node", "remove", "n0", *place]) == 0
        await until(lambda: "Authorization Violation" in bus.trouble, seen=lambda: bus.trouble)
        await bus.send(HEARTBEATS.at("n0"), b"kept by the client")
        await bus.close()
        with pytest.raises(AccessDenied):
            await Bus.connect(server.url, credential=credential, name="again")


async def _connected(server: NatsServer, credential: credentials.Credential) -> Bus:
    """Connect as soon as the server has reloaded."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await Bus.connect(server.url, credential=credential, name="n0")
            except AccessDenied:
                pass
