"""A bounded, seeded course of requests to all operations of the REST API."""

from __future__ import annotations

import asyncio
import functools

import pytest

from services.api import main, openapi
from services.api.computations import Computations
from services.api.gateway import Gateway
from shared.bus import Bus
from shared.events import WorkerSlowed
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.settings import Settings
from tests.api.kit import Story, serving
from tests.fuzz.http_course import course

THERE = {
    "name": ["n0"],
    "task": ["n0"],
    "incident": ["i1"],
    "slowdown": ["slow"],
    "plan": ["start", "p1"],
    "code": ["opened-before"],
}

EXAMPLES = 4
"""Of each operation and way: seconds of processor time in all."""


async def test_no_request_is_answered_otherwise_than_the_document_says(
    settings: Settings, bus: Bus, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(settings.run_dir / "log.db")
    story.running("n0").process_exit(name="n0").process_restored(name="n0")  # its task has the name of a node
    about = {"node": "n1", "worker": "n1/1", "task": "n0", "generation": 3, "rank": 3, "step": 120}
    story.at(130).add(WorkerSlowed, event_id="slow", slowdown=2.0, **about)
    story.log.close()
    quick = functools.partial(Gateway, computations=Computations(limit_s=0.3))  # whatever is asked for
    monkeypatch.setattr(main, "Gateway", quick)
    document = openapi.document(main.application())
    async with Journal(log, bus) as journal, serving(settings, bus, journal) as server:
        found = await asyncio.to_thread(course, server.url, document, examples=EXAMPLES, seed=1, there=THERE)
        assert (await server.http.get("/healthz")).status_code == 200
        assert (await server.http.post("/v1/tasks", json=server.spec("afterwards"))).status_code == 201
    operations = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert {operation for operation, _ in found} == operations
    # The result of a task that runs, resuming and deleting it, faults, limits (there is no detector), nodes and
    # computations that need more than there is, and changes under a tag that is not the present one are in vain.
    shown = {operation for operation, status in found if status < 300}
    assert len(shown) >= len(operations) - 12, sorted(found)
