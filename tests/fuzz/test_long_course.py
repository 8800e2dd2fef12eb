"""The long course (``make fuzz``): all services and an agent as processes, and everything that can be sent to them.

``UNICRON_FUZZ_S``: how long, in seconds; ``UNICRON_FUZZ_SEED``: the seed of the first round.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from cli.stack.child import Child
from services.api import main, openapi
from shared.bus.connection import Bus
from shared.errors import Undecodable
from shared.messages.signals import HEARTBEATS, Heartbeat
from shared.settings.model import Settings
from tests.agent.kit import SPEC
from tests.agent.program import running
from tests.condition import until
from tests.fuzz.bus_course import course as bus_course
from tests.fuzz.bus_course import readable
from tests.fuzz.http_course import course as http_course
from tests.fuzz.samples import Target, agent_targets, service_targets
from tests.nats_server import OpenServer

LENGTH_S = float(os.environ.get("UNICRON_FUZZ_S", "600"))
SEED = int(os.environ.get("UNICRON_FUZZ_SEED", "1"))

SERVICES = ("detector", "planner", "transition", "api")

WARM_ROUNDS = 2
"""Rounds in which a process loads what it uses, and fills what it keeps."""

MOST_GROWTH_MIB = 50.0
"""Of a process after that: as in ``benchmarks/gateway.py``."""

WORK_S = 120.0
"""For a task of five steps, on a busy machine and behind all that was submitted before it."""

WITHOUT = ("POST /v1/nodes/{name}/agent/restart",)
"""Other processes would follow, whose memory says nothing."""

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(LENGTH_S + 900)]


def harmless(target: Target, data: bytes) -> bool:
    """Return whether a message changes nothing: one that can be read is carried out."""
    return not readable(target, data) or target.subject.startswith("unicron.files")


async def test_nothing_that_is_sent_ends_a_process(nats: OpenServer, bus: Bus, tmp_path: Path) -> None:
    document = openapi.document(main.application())
    settings = Settings(run_dir=tmp_path, nats_url=nats.url, nats_credential=nats.credential_file)
    (tmp_path / "services").mkdir()
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat. " * 50)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")} | {
        "UNICRON_RUN_DIR": str(tmp_path),
        "UNICRON_NATS_URL": nats.url,
        "UNICRON_NATS_CREDENTIAL": str(nats.credential_file),
        "UNICRON_PORT": "0",
        "UNICRON_REQUESTS_PER_S": "0",  # any number
    }
    async with AsyncExitStack() as stack:
        processes: dict[str, psutil.Process] = {}
        for name in SERVICES:
            child = Child(name, f"services.{name}.main", environment, tmp_path)
            stack.push_async_callback(child.end)
            processes[name] = psutil.Process((await child.start()).pid)
        program = await stack.enter_async_context(running(settings, "n0", tmp_path / "agent.log"))
        await program.ready()
        for found in psutil.Process(program.process.pid).children():
            processes[f"agent {found.pid}"] = found
        url = f"http://127.0.0.1:{int((tmp_path / 'services' / 'api.port').read_text())}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=WORK_S))
        # Requests that name what there is stop the first one; the other one's rank sends junk to the end.
        await _submit(http, tmp_path, "gpt", "train", steps=1_000_000)
        await _submit(http, tmp_path, "junk", "junk", steps=1_000_000)

        memory: list[dict[str, int]] = []
        requests = messages = number = 0
        until_s = time.monotonic() + LENGTH_S
        incarnation = await _incarnation(bus, "n0")
        while time.monotonic() < until_s or number <= WARM_ROUNDS + 1:
            seed, number = SEED + number, number + 1
            targets = [*agent_targets("n0", incarnation), *service_targets("n0")]
            there = {name: [name[0]] for name in ("plan", "incident", "slowdown")}
            there |= {"name": ["gpt", "n0"], "task": ["gpt"], "code": ["opened-before"], "digest": ["0" * 64]}
            # One after the other: on Python 3.11 two threads of hypothesis are in each other's way (recursion limit).
            requests += (
                await asyncio.to_thread(http_course, url, document, examples=5, seed=seed, there=there, without=WITHOUT)
            ).total()
            await http.post("/v1/nodes/n0/return")  # it has been drained
            messages += (await bus_course(bus, targets, examples=20, seed=seed, wanted=harmless)).total()
            assert all(process.is_running() for process in processes.values()), processes
            memory.append({name: process.memory_info().rss for name, process in processes.items()})
        for name in ("gpt", "junk"):
            await http.post(f"/v1/tasks/{name}/stop", json={"lose_steps": True})
        await _submit(http, tmp_path, "last", "finish", steps=100)
        await _succeeds(http, "last")
        ready = (await http.get("/readyz")).json()
        assert ready["ready"], ready
    logs = [tmp_path / "agent.log", *(tmp_path / "services").glob("*.log")]
    assert not [path.name for path in logs if "Traceback" in path.read_text()]
    counters = {check["name"]: check["counters"].get("undecodable", 0) for check in ready["checks"]}
    assert all(counters[name] > 0 for name in ("bus", "nodes", "detector")), counters
    growth_mib = {name: (memory[-1][name] - memory[WARM_ROUNDS][name]) / 2**20 for name in memory[-1]}
    growth = ", ".join(f"{name} {mib:.1f}" for name, mib in growth_mib.items())
    print(f"{number} rounds, {requests} requests, {messages} messages; growth of memory in MiB: {growth}")
    assert max(growth_mib.values()) < MOST_GROWTH_MIB, growth_mib


async def _incarnation(bus: Bus, node: str) -> str:
    """Return the incarnation of a node's agent."""
    heard: asyncio.Future[Heartbeat] = asyncio.get_running_loop().create_future()

    async def hear(_: str, data: bytes) -> None:
        with contextlib.suppress(Undecodable):
            heartbeat = HEARTBEATS.request.decode(data)
            if not heard.done():
                heard.set_result(heartbeat)

    await bus.listen(HEARTBEATS.at(node), hear)
    async with asyncio.timeout(WORK_S):
        return (await heard).incarnation


async def _submit(http: httpx.AsyncClient, folder: Path, name: str, behaviour: str, *, steps: int) -> None:
    """Submit a task whose ranks follow ``tests.agent.stand_in``."""
    spec = {**SPEC, "name": name, "data": str(folder / "corpus.txt"), "steps": steps, "env": {"BEHAVIOUR": behaviour}}
    answer = await http.post("/v1/tasks", json={**spec, "workers": {"min": 1, "max": 1}, "weight": 1e6})
    assert answer.status_code == 201, answer.text


async def _succeeds(http: httpx.AsyncClient, name: str) -> None:
    async def succeeded() -> bool:
        task = (await http.get(f"/v1/tasks/{name}")).json()
        assert task["state"] != "failed", task
        return bool(task["state"] == "succeeded")

    await until(succeeded, f"{name} succeeds", limit_s=WORK_S)
