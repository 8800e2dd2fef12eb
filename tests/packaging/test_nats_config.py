"""The real server reads deploy/nats/nats.conf, and the probe talks to it."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg

from shared import credentials
from shared.identities import node_identity
from shared.key_directory import KeyDirectory
from shared.nats_server import MAX_PAYLOAD_BYTES
from shared.settings import Settings

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
    """The addresses, for clients and for figures, of a server with the shipped configuration.

    Only address, ports and folder are those of the test: the server has no flag that overrides a configured folder.
    """
    text = CONFIG.read_text()
    for old, new in {
        '"0.0.0.0:4222"': '"127.0.0.1:-1"',
        '"0.0.0.0:8222"': '"127.0.0.1:-1"',
        "/data": str(tmp_path / "store"),
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    config = tmp_path / "nats.conf"
    config.write_text(text + f'ports_file_dir: "{tmp_path}"\n')
    process = subprocess.Popen([SERVER, "--config", config], stderr=subprocess.DEVNULL)
    try:
        ports = tmp_path / f"nats-server_{process.pid}.ports"
        wait_until(lambda: ports.exists() and ports.read_text().endswith("}"), process)
        addresses = json.loads(ports.read_text())
        client, figures = addresses["nats"][0], addresses["monitoring"][0]
        wait_until(lambda: healthy(figures), process)
        yield client, figures
    finally:
        process.terminate()
        process.wait(10)


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server is not ready in time"
        time.sleep(0.02)


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


@pytest.mark.parametrize(("service", "name"), [("planner", "planner"), ("agent", f"agent-{Settings().node}")])
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
