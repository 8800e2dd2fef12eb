"""A bounded, seeded course of requests to all operations of the REST API."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import pytest

from services.api import main, openapi
from services.api.gateway import Gateway
from services.api.http.computations import Computations
from shared.bus.connection import Bus
from shared.events.union import WorkerSlowed
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.settings.model import Settings
from shared.tasks.code_archive import code_of, pack
from tests.api.kit import Server, Story, serving
from tests.fuzz.http_course import course

THERE = {
    "name": ["n0"],
    "task": ["n0"],
    "incident": ["i1"],
    "key": ["control-plane"],
    "slowdown": ["slow"],
    "plan": ["start", "p1"],
    "code": ["opened-before"],
}

IN_VAIN = {
    "PUT /v1/code/{digest}",  # few bytes are an archive, and none is the one of a digest
    "GET /v1/tasks/{name}/result",  # the task runs
    "POST /v1/tasks/{name}/resume",
    "DELETE /v1/tasks/{name}",
    "GET /readyz",  # there are no services but the gateway, and no agents
    "GET /v1/limits",
    "GET /v1/limits/{task}",
    "POST /v1/nodes/{name}/agent/restart",
    "POST /v1/nodes/{name}/return",
    "POST /v1/nodes/{name}/faults",  # faults are not allowed here
    "POST /v1/tasks/{name}/faults",
    "GET /open/{code}",  # a code holds once
    "GET /v1/plan/throughput",  # its parameters seldom describe a model
}
"""The operations that no request of the course need succeed in."""

EXAMPLES = 2
"""Of each operation and way, of which one leads somewhere: `make fuzz` sends requests for minutes."""


async def shipped(server: Server) -> str:
    """Send the code of a task; return its digest."""
    archive = pack(Path(__file__).parent, [Path(__file__).name])
    digest = code_of(archive).digest
    answer = await server.http.put(f"/v1/code/{digest}", content=archive, headers={"Content-Type": "application/x-tar"})
    assert answer.status_code == 201, answer.text
    return digest


async def test_no_request_is_answered_otherwise_than_the_document_says(
    settings: Settings, bus: Bus, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(settings.run_dir / "log.db")
    story.running("n0").process_exit(name="n0").process_restored(name="n0")  # its task has the name of a node
    about = {"node": "n1", "worker": "n1/1", "task": "n0", "generation": 3, "rank": 3, "step": 120}
    story.at(130).add(WorkerSlowed, event_id="slow", slowdown=2.0, **about)
    story.log.close()
    quick = functools.partial(Gateway, computations=Computations(limit_s=10.0))  # enough on a busy machine
    monkeypatch.setattr(main, "Gateway", quick)
    document = openapi.document(main.application())
    async with Journal(log, bus) as journal, serving(settings, bus, journal) as server:
        there = THERE | {"digest": [await shipped(server)]}
        found = await asyncio.to_thread(course, server.url, document, examples=EXAMPLES, seed=1, there=there)
        assert (await server.http.get("/healthz")).status_code == 200
        assert (await server.http.post("/v1/tasks", json=server.spec("afterwards"))).status_code == 201
    operations = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert {operation for operation, _ in found} == operations
    shown = {operation for operation, status in found if status < 300}
    assert operations - shown <= IN_VAIN, sorted(found)
