"""The other resources, over a history that other services wrote."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from services.api.routers.health import SERVICES
from services.api.store.projection_store import Store, database_url
from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.events.union import NodeJoined, TaskStopped
from shared.log.journal import Journal
from shared.messages.health import HEALTH
from shared.messages.signals import HEARTBEATS, Heartbeat, WorkerStatus
from shared.model import utc_now
from shared.settings.model import Settings
from tests.api.kit import Server, Story, serving
from tests.condition import until

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00")


@pytest.fixture
async def healed(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    """The gateway over the story of a process that was lost and restarted."""
    story = Story(settings.run_dir / "log.db")
    story.running().process_exit().process_restored()
    story.log.close()
    async with serving(settings, bus, journal) as server:
        yield server


async def test_an_incident_has_all_of_its_contract(healed: Server) -> None:
    page = (await healed.http.get("/v1/incidents")).json()
    (incident,) = page["items"]
    assert page["next_cursor"] is None
    assert incident["restored_at"] == "2025-03-01T12:01:48.000000+00:00"
    assert all(TIME.fullmatch(value) for name, value in incident.items() if name.endswith("_at"))
    expected = {
        "id": "i1",
        "kind": "process-exit",
        "severity": "SEV2",
        "method": "process-supervision",
        "node": "n1",
        "worker": "n1/1",
        "task": "gpt",
        "rank": 3,
        "step": 90,
        "response": "restart",
        "state_source": "live",
        "steps_recomputed": 0,
        "evidence": {},
    }
    assert {name: incident[name] for name in expected} == expected
    cost = incident["cost"]
    # Detection 4 x 0.5 s; transition 3 x (103 - 100.5), 3 x (108 - 106) and 1 x (108 - 100.5).
    assert cost["detection_worker_s"] == pytest.approx(2.0)
    assert cost["transition_worker_s"] == pytest.approx(7.5 + 6.0 + 7.5)
    assert cost["recompute_worker_s"] == cost["sub_healthy_worker_s"] == 0.0
    assert cost["money"] == pytest.approx(23.0 / 1000)
    assert (await healed.http.get("/v1/incidents/i1")).json() == incident
    for query, count in (("task=gpt", 1), ("task=gp", 0), ("state=closed", 1), ("state=open", 0)):
        assert len((await healed.http.get(f"/v1/incidents?{query}")).json()["items"]) == count


async def test_costs_add_up(healed: Server) -> None:
    costs = (await healed.http.get("/v1/costs")).json()
    (task,) = costs["tasks"]
    assert costs["currency"] == "EUR"
    assert costs["sum_check"]["ok"]
    assert costs["totals"]["failure_worker_s"] == pytest.approx(23.0)
    failure = ("detection_worker_s", "transition_worker_s", "recompute_worker_s", "sub_healthy_worker_s")
    parts = sum(task[part] for part in (*failure, "training_worker_s", "planned_worker_s"))
    assert parts == pytest.approx(task["worker_s"])
    assert task["planned_worker_s"] == pytest.approx(4 * 8.0)  # planned at 2, first step done at 10
    assert 0 < task["goodput_fraction"] < 1
    assert sum(costs["categories"].values()) == pytest.approx(costs["allocated_worker_s"], rel=1e-9)
    window = {"from": "2025-03-01T12:00:00Z", "to": "2025-03-01T12:02:30Z", "bucket": "week"}
    first = (await healed.http.get("/v1/costs", params=window)).json()
    expected = {
        "detection": 2.0,
        "transition_incident": 21.0,
        "transition_planned": 32.0,
        "idle": 4.0,
        "unscheduled": 4.0,
    }
    assert {kind: first["categories"][kind] for kind in expected} == pytest.approx(expected)
    assert first["allocated_worker_s"] == first["buckets"][0]["allocated_worker_s"] == pytest.approx(600.0)
    assert sum(first["categories"].values()) == pytest.approx(600.0)
    refused = await healed.http.get("/v1/costs", params={"from": window["to"], "to": window["from"]})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "to")


async def test_plans_and_events(healed: Server) -> None:
    plans = (await healed.http.get("/v1/plans")).json()["items"]
    assert [(plan["id"], plan["state"], plan["tasks"]) for plan in plans] == [
        ("start", "done", ["gpt"]),
        ("p1", "done", ["gpt"]),
    ]
    plan = (await healed.http.get("/v1/plans/p1")).json()
    assert plan["words"]
    assert plan["inputs_sha256"] == plan["event"]["inputs_sha256"]
    assert plan["event"]["changes"][0]["failed"] == ["n1/1"]
    assert [milestone["phase"] for milestone in plan["milestones"]] == ["held", "resumed", "drained", "restored"]
    everything = (await healed.http.get("/v1/events", params={"limit": 1000})).json()
    assert [item["position"] for item in everything["items"]] == list(range(1, len(everything["items"]) + 1))
    page = (await healed.http.get("/v1/events", params={"limit": 3})).json()
    rest = (await healed.http.get("/v1/events", params={"cursor": page["next_cursor"], "limit": 1000})).json()
    assert page["items"] + rest["items"] == everything["items"]
    assert rest["next_cursor"] is None
    assert everything["items"][0]["type"] == "cluster.configured"


async def test_the_event_stream_goes_on_with_new_events(healed: Server) -> None:
    last = (await healed.http.get("/v1/events?limit=1000")).json()["items"][-1]["position"]
    async with healed.http.stream("GET", "/v1/events", params={"follow": True, "after": last - 1}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()
        seen: list[tuple[int, str]] = []
        async with asyncio.timeout(40):
            async for line in lines:
                if line.startswith("data:"):
                    record = json.loads(line.removeprefix("data:"))
                    seen.append((record["position"], record["type"]))
                    if len(seen) == 1:
                        await healed.append(TaskStopped, task="gpt", generation=3, step=99, path="")
                    if len(seen) == 2:
                        break
    assert seen == [(last, "state.moved"), (last + 1, "task.stopped")]


def beat(node: str, sequence: int, *workers: WorkerStatus) -> bytes:
    heartbeat = Heartbeat(
        node=node,
        incarnation="one",
        agent_pid=4,
        sequence=sequence,
        sent_at=datetime(2025, 3, 1, 13, tzinfo=UTC),
        interval_s=0.25,
        workers=list(workers),
    )
    return heartbeat.model_dump_json().encode()


async def test_heartbeats_show_live_state(healed: Server, bus: Bus) -> None:
    began_at = utc_now()
    await bus.send(HEARTBEATS.at("n0"), b"no heartbeat")
    await bus.send(HEARTBEATS.at("n9"), beat("n0", 99))  # n9 does not speak for n0
    for count in range(1, 4):
        status = WorkerStatus(
            worker="n0/0",
            state="training",
            task="gpt",
            generation=3,
            rank=0,
            pid=999,
            step=95 + count,
            step_s=0.5,
            steps_timed=count,
            loss=1.25,
        )
        await bus.send(HEARTBEATS.at("n0"), beat("n0", count, status))

    async def heard() -> bool:
        return bool((await healed.http.get("/v1/tasks/gpt")).json()["step"] == 98)

    await until(heard)
    task = (await healed.http.get("/v1/tasks/gpt")).json()
    assert (task["loss"], task["state"], task["workers"]) == (1.25, "running", 4)
    first = {"rank": 0, "worker": "n0/0", "node": "n0", "pid": 999, "state": "training", "slowdown": 1.0}
    assert task["ranks"][0] == first
    assert task["ranks"][3]["pid"] == 300
    model = task["spec"]["model"]
    s, h, n, v = model["sequence_length"], model["hidden"], model["layers"], model["vocabulary"]
    flop = 72 * s * n * h * h * (1 + s / (6 * h) + v / (12 * n * h))
    assert task["throughput_flop_per_s"] == pytest.approx(8 * flop / 0.5)
    assert task["waf_flop_per_s"] == task["throughput_flop_per_s"]
    nodes = (await healed.http.get("/v1/nodes")).json()["items"]
    assert [node["name"] for node in nodes] == ["n0", "n1"]
    # When it arrived: the node's own clock, by which it was sent in 2025, is wrong.
    assert began_at <= datetime.fromisoformat(nodes[0]["last_heartbeat_at"]) <= utc_now()
    own = {"slowdown": 1.0, "device": None}
    assert nodes[0]["workers"][0] == {"worker": "n0/0", "task": "gpt", "rank": 0, "state": "training", **own}
    assert nodes[1]["workers"][1] == {"worker": "n1/1", "task": "gpt", "rank": 3, "state": "unknown", **own}
    assert (nodes[1]["state"], nodes[1]["agent_pid"], nodes[1]["last_heartbeat_at"]) == ("ready", 100, None)


async def names(server: Server) -> list[str]:
    return [task["name"] for task in (await server.http.get("/v1/tasks")).json()["items"]]


async def test_projections_outlive_the_process(settings: Settings, bus: Bus, journal: Journal) -> None:
    async with serving(settings, bus, journal) as server:
        await server.http.post("/v1/tasks", json=server.spec("first"))
    story = Story(settings.run_dir / "log.db")
    story.submit("second")
    story.log.close()
    async with serving(settings, bus, journal) as server:
        assert await names(server) == ["first", "second"]


async def test_projections_of_another_log_are_folded_again(settings: Settings, bus: Bus, journal: Journal) -> None:
    other, story = Story(settings.run_dir / "other.db"), Story(settings.run_dir / "log.db")
    other.submit("other")
    story.submit("mine")
    store = Store(database_url(settings, "projections"))
    store.fold(other.records)
    for closed in (store, other.log, story.log):
        closed.close()
    async with serving(settings, bus, journal) as server:
        assert await names(server) == ["mine"]


async def test_readiness_names_what_is_missing(api: Server, bus: Bus) -> None:
    assert (await api.http.get("/healthz")).json() == {"status": "ok"}
    response = await api.http.get("/readyz")
    assert response.status_code == 503
    missing = {check["name"] for check in response.json()["checks"] if not check["ok"]}
    assert missing == {"nodes", *SERVICES}

    async def ready(_: bytes) -> bytes:
        return json.dumps({"ready": True}).encode()

    for name in SERVICES:
        await bus.answer(HEALTH.at(name), lambda _, data: ready(data))
    recorded = await api.append(NodeJoined, node="n0", incarnation="x", agent_pid=1, domain="default", workers=["n0/0"])
    await api.projected(recorded.position)
    response = await api.http.get("/readyz")
    assert (response.status_code, response.json()["ready"]) == (200, True)


async def test_readiness_names_the_active_process_and_those_that_stand_by(api: Server, bus: Bus) -> None:
    alive = {"active"}

    async def answer(process: str, _subject: str, _data: bytes) -> bytes:
        if process not in alive:
            raise Unavailable("it has ended")
        shown = {"process": f"host/{process}", "active": process == "active", "handled": 0, "ready": True}
        return json.dumps({**shown, "token": 7 if process == "active" else 0}).encode()

    for process in ("standby", "active"):
        await bus.answer(HEALTH.at("planner"), functools.partial(answer, process))

    async def planner() -> dict[str, Any]:
        checks = (await api.http.get("/v1/status")).json()["checks"]
        return next(check for check in checks if check["name"] == "planner")

    assert (await planner())["instances"] == []  # one process is what the check itself says
    alive.add("standby")
    found = await planner()
    assert (found["ok"], found["lag"]) == (True, 0)
    assert [(one["process"], one["active"], one["token"], one["lag"]) for one in found["instances"]] == [
        ("process active on host", True, 7, 0),
        ("process standby on host", False, 0, 0),
    ]
    alive.remove("active")
    found = await planner()
    assert (found["ok"], found["detail"]) == (False, "none is active: 1 stand by")


async def log_check(api: Server) -> tuple[bool, str]:
    response = await api.http.get("/readyz")
    (check,) = (check for check in response.json()["checks"] if check["name"] == "log")
    return check["ok"], check["detail"]


@pytest.mark.slow
async def test_readiness_says_that_the_log_cannot_be_written(api: Server, settings: Settings) -> None:
    assert (await log_check(api))[0]
    with closing(sqlite3.connect(settings.run_dir / "log.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(2):  # the second finds the first check still waiting
            began_s = time.monotonic()
            assert await log_check(api) == (False, "it could not be written within 2 s")
            assert time.monotonic() - began_s < 10

    async def writable() -> bool:
        return (await log_check(api))[0]

    await until(writable)


async def test_readiness_says_that_the_disk_is_full(api: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    ok, detail = await log_check(api)
    assert (ok, detail.endswith("its disk is full")) == (False, True)


async def test_output_is_streamed_until_the_task_ends(healed: Server, settings: Settings) -> None:
    """No agent answers; the api's own run directory has everything, as where all machines share it."""
    output = settings.run_dir / "tasks" / "gpt" / "output"
    output.mkdir(parents=True)
    (output / "1-n0-0.log").write_text("old\n")
    for other in ("1-n0-1", "1-n1-0"):
        (output / f"{other}.log").write_text("")
    (output / "3-n1-1.log").write_text("hello\nno end")
    (output / "3-store-n0.log").write_text("not a rank's\n")
    everything = await healed.http.get("/v1/tasks/gpt/logs")
    assert everything.text == "n0/0 | old\nn1/1 | hello\nn1/1 | no end\n"
    assert (await healed.http.get("/v1/tasks/gpt/logs?rank=3")).text == "hello\nno end\n"
    headers = {"Accept": "application/x-ndjson"}
    lines = (await healed.http.get("/v1/tasks/gpt/logs?rank=0", headers=headers)).text.splitlines()
    assert [json.loads(line) for line in lines] == [{"worker": "n0/0", "generation": 1, "line": "old"}]
    assert (await healed.http.get("/v1/tasks/gpt/logs?rank=4")).status_code == 404
    async with healed.http.stream("GET", "/v1/tasks/gpt/logs", params={"rank": 3, "follow": True}) as response:
        followed = []
        async with asyncio.timeout(40):
            async for line in response.aiter_lines():
                followed.append(line)
                if line == "hello":
                    (output / "3-n1-1.log").write_text("hello\nno end yet\n")
                    (output / "4-n1-1.log").write_text("a new generation\n")
                if line == "a new generation":
                    await healed.append(TaskStopped, task="gpt", generation=4, step=99, path="")
    assert followed == ["hello", "no end yet", "a new generation"]


async def test_the_head_of_the_log_can_be_noted(healed: Server) -> None:
    events = (await healed.http.get("/v1/events", params={"limit": 1000})).json()["items"]
    head = (await healed.http.get("/v1/log/head")).json()
    assert head["position"] == events[-1]["position"]
    assert (head["hash"], head["recorded_at"]) == (events[-1]["hash"], events[-1]["recorded_at"])
    assert (await healed.http.get("/v1/log/heads")).json() == []


async def test_the_interface_is_described(api: Server) -> None:
    page = (await api.http.get("/docs")).text
    files = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert [name for name in files if not name.startswith("/static-offline-docs/")] == []  # none from elsewhere
    assert {(await api.http.get(name)).status_code for name in files} == {200}
    paths = (await api.http.get("/openapi.json")).json()["paths"]
    assert "application/yaml" in paths["/v1/tasks"]["post"]["requestBody"]["content"]
