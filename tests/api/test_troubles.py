"""What is wrong now: each cause once, with what to do about it, what it costs, and who takes care of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from services.api.cluster_metrics import FAILED_FOR
from services.api.live import LiveState
from services.api.postmortem.gather import known
from services.api.postmortem.words import failure_worker_s
from services.api.requests import trouble_requests
from services.api.troubles.causes import causes
from services.api.troubles.findings import read_findings
from shared.bus.connection import Bus
from shared.events.measurements import Measurement
from shared.events.plans import Response, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import (
    IncidentAcknowledged,
    IncidentNoted,
    NodeDraining,
    NodeJoined,
    NodeMeasured,
    NodeReported,
    NodeReportHeld,
    NodeReturned,
    TaskFailed,
    TaskSubmitted,
    TroubleAcknowledged,
    TroubleEnded,
    WorkerSlowed,
)
from shared.interface.first_look import Trouble
from shared.interface.readiness import Check
from shared.log.journal import Journal
from shared.messages.reachability import Reachability, Unreachable
from shared.service.tokens import Scope
from shared.settings.model import Settings
from tests.api.kit import PRICE, Server, Story, bearer, offline_gateway, serving, spec
from tests.api.test_tasks import refused
from tests.condition import until

WORKS = [Check(name=name, ok=True) for name in ("bus", "log", "nodes", "detector", "planner", "transition", "api")]


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    made = Story(tmp_path / "log.db")
    yield made.running()
    made.log.close()


def troubles(story: Story, tmp_path: Path, checks: list[Check] = WORKS, live: LiveState | None = None) -> list[Trouble]:
    """Return what is wrong at the present time of the story."""
    with offline_gateway(tmp_path / "run", story.records) as gateway, gateway.store.reading() as views:
        return causes(read_findings(views, gateway.cluster(views), live or LiveState(), checks, story.time()))


@pytest.fixture(autouse=True)
def run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()


def lose(story: Story, node: str, incident: str) -> None:
    about: dict[str, Any] = {"kind": ErrorKind.NODE_LOST, "severity": Severity.SEV1, "method": Method.NODE_HEALTH}
    story.error(incident, story.seconds - 1, node=node, **about)


def test_nothing_is_wrong_where_all_trains(story: Story, tmp_path: Path) -> None:
    assert troubles(story.at(30), tmp_path) == []


def test_a_stuck_incident_says_since_when_against_usual_what_it_costs_and_what_to_do(
    story: Story, tmp_path: Path
) -> None:
    story.process_exit().process_restored()
    story.at(200.5).error("i2", 200, task="gpt", node="n1", worker="n1/1", rank=3, generation=3, step=190)
    (early,) = troubles(story.at(202), tmp_path)
    assert (early.state, early.usual_s, early.late_s, early.grave) == ("open", 8.0, None, True)
    assert early.todo == [
        "Wait: it is being healed. `unicron status` says whether every part of the control plane works."
    ]
    (late,) = troubles(story.at(240), tmp_path)
    assert (late.state, late.usual_s, late.late_s) == ("stuck", 8.0, 32.0)
    assert late.what == "SEV2: process-exit of n1/1; hits gpt"
    assert late.since == story.time(200)
    assert late.money_per_hour == pytest.approx(4 * PRICE)
    assert late.cost_basis == "4 workers standing still: no plan yet"
    assert late.todo == ["It is stuck: `unicron status -o wide` says how far each part is, the log of that part why."]
    assert (late.by, late.incidents, late.tasks) == (None, ["i2"], ["gpt"])


@pytest.mark.parametrize(("of_node", "workers", "fault_s"), [(False, 4, 200.0), (True, 2, 199.5)])
def test_what_an_incident_without_a_plan_loses_each_hour_is_what_its_post_mortem_grows_by(
    story: Story, tmp_path: Path, of_node: bool, workers: int, fault_s: float
) -> None:
    story.at(200.5)
    if of_node:
        lose(story, "n1", "i2")
    else:
        story.error("i2", 200, task="gpt", node="n1", worker="n1/1", rank=3, generation=3, step=190)
    story.at(240)
    (found,) = troubles(story, tmp_path)
    with offline_gateway(tmp_path / "run", story.records) as gateway, gateway.store.reading() as views:
        cluster = gateway.cluster(views)
        now, later = (known(views, "i2", cluster, story.time(at)).incident.cost for at in (240, 240 + 3600))
    assert found.money_per_hour == pytest.approx(workers * PRICE)
    assert later.failure_money - now.failure_money == pytest.approx(found.money_per_hour)
    assert failure_worker_s(now) == pytest.approx(workers * (240 - fault_s))


def test_the_cost_of_an_incident_is_what_the_report_adds_each_hour(story: Story, tmp_path: Path) -> None:
    story.process_exit()  # three workers train again, one is being started
    (found,) = troubles(story.at(104), tmp_path)
    assert found.money_per_hour == pytest.approx(PRICE)
    assert found.cost_basis == "1 worker lost or standing still"


def test_who_takes_care_of_it_comes_before_who_has_written_a_note(story: Story, tmp_path: Path) -> None:
    story.process_exit()
    story.at(102).add(IncidentNoted, incident="i1", actor="uid/7", text="switch 4?")
    (found,) = troubles(story, tmp_path)
    assert (found.by, found.acknowledged, found.note) == ("uid/7", False, "switch 4?")
    story.at(103).add(IncidentAcknowledged, incident="i1", actor="uid/9")
    (found,) = troubles(story, tmp_path)
    assert (found.by, found.acknowledged, found.note) == ("uid/9", True, "switch 4?")


def test_who_takes_care_of_a_cause_that_is_no_incident_is_said_until_it_ends(story: Story, tmp_path: Path) -> None:
    story.at(50).add(TaskFailed, task="gpt", generation=1, step=9, reason="no such file: /data/x")
    (found,) = troubles(story, tmp_path)
    assert (found.by, found.acknowledged) == (None, False)
    for user in ("uid/9", "uid/7"):
        story.at(60).add(TroubleAcknowledged, key=found.key, what=found.what, actor=user)
    (taken,) = troubles(story, tmp_path)
    assert (taken.key, taken.by, taken.acknowledged) == (found.key, "uid/9", True)
    story.at(70).add(TroubleEnded, key=found.key)
    assert troubles(story, tmp_path) == [found]


def test_the_nodes_of_a_rack_that_are_lost_together_are_one_cause(story: Story, tmp_path: Path) -> None:
    for number, rack in enumerate(["r1"] * 5 + ["r2"], start=10):
        node = f"n{number}"
        story.add(NodeJoined, node=node, incarnation=node, agent_pid=1, domain=rack, workers=[f"{node}/0", f"{node}/1"])
    for number in range(10, 16):
        story.at(100 + number)
        lose(story, f"n{number}", f"i{number}")
    story.at(400)
    lose(story, "n0", "i0")
    by_incident = {one.incidents[0]: one for one in troubles(story.at(401), tmp_path)}
    assert by_incident.keys() == {"i10", "i15", "i0"}
    lost = by_incident["i10"]
    assert lost.what == "SEV1: node-lost of 5 nodes of r1: n10, n11, n12 and 2 more"
    assert lost.nodes == [f"n{number}" for number in range(10, 15)]
    assert lost.incidents == [f"i{number}" for number in range(10, 15)]
    assert lost.todo == ["n10 is lost: start the machine, or the service on it; the node joins again by itself."]
    assert lost.money_per_hour == pytest.approx(10 * PRICE)


def fail(story: Story, task: str, reason: str) -> None:
    story.add(TaskSubmitted, task=task, spec=spec(task), actor=f"uid/{len(task)}")
    story.add(TaskFailed, task=task, generation=0, step=7, reason=reason)


def test_tasks_that_fail_alike_are_one_cause_for_a_day(story: Story, tmp_path: Path) -> None:
    for task in ("a", "b", "c", "d", "e"):
        fail(story, task, "no such file\n  line 1")
    fail(story, "other", "out of memory")
    by_words = {one.what: one for one in troubles(story, tmp_path)}
    assert by_words.keys() == {"e, d, c and 2 more failed: no such file", "other failed: out of memory"}
    first = by_words["other failed: out of memory"]
    assert first.todo == ["Mend the cause, then `unicron resume other`; `unicron logs other` has its output."]
    assert (first.money_per_hour, first.owners, first.by) == (0.0, ["uid/5"], None)
    story.at(story.seconds + (FAILED_FOR + timedelta(seconds=1)).total_seconds())
    assert troubles(story, tmp_path) == []


def test_a_task_that_an_incident_ended_leads_to_it(story: Story, tmp_path: Path) -> None:
    story.process_exit().process_restored()
    story.at(110).add(TaskFailed, task="gpt", generation=3, step=95, reason="4 times at step 91", incident="i1")
    story.add(IncidentAcknowledged, incident="i1", actor="uid/9")
    (found,) = troubles(story, tmp_path)
    assert (found.kind, found.incidents, found.by) == ("task-failed", ["i1"], "uid/9")


def test_tasks_that_wait_for_workers_are_one_cause_that_is_not_grave(story: Story, tmp_path: Path) -> None:
    for task in ("one", "two"):
        story.add(TaskSubmitted, task=task, spec=spec(task))
    why = {"one": "needs 9 workers", "two": "needs 9 workers"}
    story.plan("p9", trigger=Trigger.TASK_SUBMITTED, response=Response.NONE, queued=why)
    (found,) = troubles(story, tmp_path)
    assert (found.kind, found.grave, found.money_per_hour) == ("queue", False, 0.0)
    assert found.what == "one, two wait for workers: needs 9 workers"


def test_slow_workers_in_use_are_a_cause_with_a_bound_of_their_cost(story: Story, tmp_path: Path) -> None:
    story.at(30).add(
        WorkerSlowed, task="gpt", generation=1, node="n0", worker="n0/0", rank=0, step=12, slowdown=2.5, event_id="s1"
    )
    (found,) = troubles(story, tmp_path)
    assert (found.kind, found.grave, found.slow_workers) == ("slow-workers", False, ["s1"])
    assert found.what == "n0/0 of gpt is 2.50 times as slow as its peers"
    assert found.money_per_hour == pytest.approx(4 * 0.6 * PRICE)
    assert found.cost_basis == "at most: all 4 workers of gpt wait for the slowest"


def test_unreachable_nodes_are_one_cause_for_each_failure_domain(story: Story, tmp_path: Path) -> None:
    silent = {name: Unreachable(since=story.time(20 - number)) for number, name in enumerate(("n0", "n1"))}
    live = LiveState(reachability=Reachability(unreachable=silent))
    (found,) = troubles(story, tmp_path, live=live)
    assert (found.kind, found.nodes, found.since) == ("unreachable", ["n0", "n1"], story.time(19))
    assert found.what == "No heartbeats of 2 nodes of default: n0, n1"
    assert found.money_per_hour is None


def test_a_report_on_which_nothing_follows_needs_an_operator(story: Story, tmp_path: Path) -> None:
    for node in ("n0", "n1"):
        about = {"node": node, "actor": "token/slurm", "key": "drain"}
        expires_at = story.time(story.seconds + 600)
        story.add(NodeReported, severity="warning", reason="a fan", expires_at=expires_at, **about)
        assert [one.kind for one in troubles(story, tmp_path)] == (["reported"] if node == "n1" else [])
        story.add(NodeReportHeld, node=node, report="token/slurm/drain", why="budget", reason="it has taken 1 of 2")
    (found,) = troubles(story, tmp_path)
    assert (found.nodes, found.grave, found.needs_somebody) == (["n0", "n1"], False, True)
    assert found.what == "token/slurm reports of n0, n1: drain, a fan; not acted on: it has taken 1 of 2"
    assert "unicron drain n0" in found.todo[0]
    story.add(NodeDraining, node="n0", by="user", timeout_s=1.0, report="token/slurm/drain")
    assert [one.nodes for one in troubles(story, tmp_path)] == [["n1"]]
    assert troubles(story.at(story.seconds + 601), tmp_path) == []


def test_a_node_that_its_preflight_keeps_out_needs_an_operator(story: Story, tmp_path: Path) -> None:
    about = {"node": "n9", "incarnation": "i", "agent_pid": 1, "domain": "d", "workers": ["n9/0"]}
    found = {"measurement": Measurement(device="a", count=2), "verdict": "refused", "reason": "disk read: 1 MB/s"}
    story.add(NodeMeasured, **about, **found)
    (trouble,) = troubles(story, tmp_path)
    assert (trouble.kind, trouble.nodes, trouble.needs_somebody) == ("reported", ["n9"], True)
    assert trouble.what == "The preflight of n9 was refused: disk read: 1 MB/s"
    assert "unicron return n9" in trouble.todo[0]
    story.add(NodeReturned, node="n9", incarnation="i", actor="uid/0")
    assert troubles(story, tmp_path) == []


def test_a_node_in_use_that_is_slow_beside_later_ones_needs_an_operator(story: Story, tmp_path: Path) -> None:
    about = {"node": "n0", "incarnation": "i", "agent_pid": 1, "domain": "d", "workers": ["n0/0"]}
    found = {"measurement": Measurement(device="a", count=2), "verdict": "slow", "reason": "disk read: 1 MB/s"}
    story.add(NodeMeasured, **about, **found)
    (trouble,) = troubles(story, tmp_path)
    assert (trouble.kind, trouble.nodes, trouble.state, trouble.needs_somebody) == ("reported", ["n0"], "slow", True)
    assert trouble.what == "The preflight of n0 has found it slow: disk read: 1 MB/s"
    story.add(NodeMeasured, **about, **found | {"verdict": "accepted", "reason": ""})
    assert troubles(story, tmp_path) == []


def test_a_part_of_the_control_plane_that_is_away_comes_first_and_keeps_incidents_open(
    story: Story, tmp_path: Path
) -> None:
    story.process_exit()
    away = [Check(name="planner", ok=False, detail="no answer"), *WORKS]
    first, second = troubles(story, tmp_path, checks=away)
    assert first.what == "The control plane does not work (planner: no answer)"
    assert first.todo == ["Start planner again (`unicron control`, or its unit); its log says why it is away."]
    assert (first.grave, first.money_per_hour) == (True, None)
    assert second.todo == ["Nothing heals it while the control plane is away."]


async def test_the_answer_has_the_sum_and_the_state_of_the_control_plane(api: Server) -> None:
    recorded = await api.append(TaskSubmitted, task="broken", spec=spec("broken"))
    recorded = await api.append(TaskFailed, task="broken", generation=0, step=7, reason="no such file")
    await api.projected(recorded.position)
    found = (await api.http.get("/v1/troubles")).json()
    assert [one["kind"] for one in found["items"]] == ["control-plane", "task-failed"]
    assert (found["more"], found["money_per_hour"], found["currency"]) == (0, 0.0, "USD")
    assert not found["status"]["ready"]
    assert {check["name"] for check in found["status"]["checks"]} >= {"bus", "log", "planner"}


@pytest.fixture
async def looking(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, bus: Bus, journal: Journal
) -> AsyncIterator[Server]:
    """A gateway that looks for what is over all the time."""
    monkeypatch.setattr(trouble_requests, "LOOK_S", 0.05)
    async with serving(settings, bus, journal) as server:
        yield server


async def test_a_cause_is_acknowledged_once_and_no_longer_than_it_lasts(looking: Server, settings: Settings) -> None:
    api = looking

    async def failed() -> dict[str, Any]:
        found = (await api.http.get("/v1/troubles")).json()["items"]
        return next(one for one in found if one["kind"] == "task-failed")

    await api.append(TaskSubmitted, task="broken", spec=spec("broken"))
    recorded = await api.append(TaskFailed, task="broken", generation=0, step=7, reason="no such file: /data/x")
    await api.projected(recorded.position)
    path = f"/v1/troubles/{(await failed())['key']}/acknowledge"
    refused(await api.http.post(path, headers=bearer(settings, Scope.READ)), 403, "forbidden")
    refused(await api.http.post("/v1/troubles/queue/acknowledge"), 404, "not-found")
    taken = (await api.http.post(path, headers=bearer(settings, Scope.SUBMIT))).json()
    assert (taken["acknowledged"], taken["by"].partition("/")[0]) == (True, "token")
    assert (await api.http.post(path)).json() == taken
    assert await failed() == taken
    event = api.journal.log.read()[-1].event
    assert isinstance(event, TroubleAcknowledged)
    assert (event.what, event.actor) == (taken["what"], taken["by"])

    recorded = await api.append(TaskSubmitted, task="broken", spec=spec("broken"))
    await api.projected(recorded.position)
    await until(lambda: api.journal.log.read()[-1].event.type == "trouble.ended")
    recorded = await api.append(TaskFailed, task="broken", generation=0, step=7, reason="no such file: /data/x")
    await api.projected(recorded.position)
    assert ((await failed())["key"], (await failed())["acknowledged"]) == (taken["key"], False)
    assert [one.event.type for one in api.journal.log.read()].count("trouble.ended") == 1
