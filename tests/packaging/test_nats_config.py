"""The real server reads deploy/nats/nats.conf, and the probe talks to it."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg

from shared.bus import credentials
from shared.bus.connection import Bus
from shared.bus.identities import node_identity
from shared.nats.key_directory import KeyDirectory
from shared.nats.nats_server import MAX_PAYLOAD_BYTES
from shared.settings.model import Settings
from tests.condition import until_blocking

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "deploy" / "nats" / "nats.conf"
SERVER = Path(sys.executable).parent / "nats-server"


@pytest.fixture
def keys(tmp_path: Path) -> KeyDirectory:
    """The key directory, beside which the configuration lies."""
    made = KeyDirectory(tmp_path / "keys")
    made.make(more=[node_identity(Settings().node)])
    return made


@pytest.fixture
def server(tmp_path: Path, keys: KeyDirectory) -> Iterator[tuple[str, str]]:
    """The addresses, for clients and for figures, of a server with the shipped configuration."""
    with running(tmp_path) as addresses:
        yield addresses


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[str, str]]:
    """Run a server with the shipped configuration in a folder that has the key directory; give its addresses.

    Only address, ports and folder are those of the test: the server has no flag that overrides a configured folder.
    """
    text = CONFIG.read_text()
    for old, new in {
        '"0.0.0.0:4222"': '"127.0.0.1:-1"',
        '"0.0.0.0:8222"': '"127.0.0.1:-1"',
        "/data": str(folder / "store"),
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    config = folder / "nats.conf"
    config.write_text(text + f'ports_file_dir: "{folder}"\n')
    process = subprocess.Popen([SERVER, "--config", config], stderr=subprocess.DEVNULL)
    try:
        ports = folder / f"nats-server_{process.pid}.ports"

        def given() -> bool:
            assert process.poll() is None, "the server ended"
            return ports.exists() and ports.read_text().endswith("}")

        until_blocking(given)
        addresses = json.loads(ports.read_text())
        client, figures = addresses["nats"][0], addresses["monitoring"][0]
        until_blocking(lambda: healthy(figures))
        yield client, figures
    finally:
        process.terminate()
        process.wait(10)


def healthy(url: str) -> bool:
    try:
        return bool(get(url + "/healthz")["status"] == "ok")
    except OSError:
        return False


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=40) as answer:
        data: dict[str, Any] = json.load(answer)
        return data


def test_refused_without_keys(tmp_path: Path) -> None:
    config = shutil.copy(CONFIG, tmp_path)
    result = subprocess.run([SERVER, "-t", "--config", config], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "authorization.conf" in result.stderr + result.stdout


def test_acknowledged_means_on_disk(server: tuple[str, str]) -> None:
    variables = get(server[1] + "/varz")
    assert variables["jetstream"]["config"]["sync_always"] is True
    assert variables["auth_required"] is True
    assert variables["max_payload"] == MAX_PAYLOAD_BYTES


@pytest.mark.slow
async def test_with_tls_it_finds_its_certificate_where_a_container_has_it(tmp_path: Path, keys: KeyDirectory) -> None:
    """The operator's key directory is elsewhere, as beside docker-compose.yml; the container's is beside nats.conf."""
    container = tmp_path / "etc" / "nats"
    keys.make(["nats://localhost:4222"])
    keys.certify(["localhost"], datetime.now(UTC), container / "keys")
    container.mkdir(parents=True)
    shutil.move(keys.path, container)
    moved = KeyDirectory(container / "keys")
    with running(container) as (client, _):
        credential = credentials.read(moved.credential_file("planner"))
        assert credential.servers == ["tls://localhost:4222"]
        url = f"tls://localhost:{client.rpartition(':')[2]}"
        bus = await Bus.connect(url, credential=credential, name="planner")

        async def answer(_: bytes) -> bytes:
            return b'{"ready": true}'

        await bus.answer("unicron.health.planner", lambda _, data: answer(data))
        done = await asyncio.to_thread(probe, url, moved.credential_file("planner"), "planner")
        assert done.returncode == 0, done.stderr
        plain = url.replace("tls:", "nats:")
        done = await asyncio.to_thread(probe, plain, moved.credential_file("planner"), "planner")
        assert done.returncode == 1, "there is no way in without TLS"
        await bus.close()


def probe(url: str, credential: Path, service: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", str(ROOT / "deploy" / "healthcheck.py"), service],
        env={
            **os.environ,
            "UNICRON_NATS_URL": url,
            "UNICRON_NATS_CREDENTIAL": str(credential),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("service", "name"),
    [("planner", "planner"), ("agent", f"agent-{Settings().node}")],
)
async def test_the_probe_succeeds_only_while_the_service_is_ready(
    service: str, name: str, server: tuple[str, str], keys: KeyDirectory
) -> None:
    url = server[0]
    identity = service if service != "agent" else node_identity(Settings().node)
    own, other = keys.credential_file(identity), keys.credential_file("detector")
    client = await nats.connect(url, nkeys_seed_str=credentials.read(own).seed)
    health = {"name": name, "pid": 1, "ready": False}

    async def answer(message: Msg) -> None:
        await message.respond(json.dumps(health).encode())

    subscription = await client.subscribe(f"unicron.health.{name}", cb=answer)
    await client.flush()
    starting = await asyncio.to_thread(probe, url, own, service)
    health["ready"] = True
    ready = await asyncio.to_thread(probe, url, own, service)
    forbidden = await asyncio.to_thread(probe, url, other, service)
    await subscription.unsubscribe()
    await client.flush()
    gone = await asyncio.to_thread(probe, url, own, service)
    await client.close()
    assert [p.returncode for p in (starting, ready, forbidden, gone)] == [1, 0, 1, 1]
    assert "Traceback" not in starting.stderr + forbidden.stderr + gone.stderr
