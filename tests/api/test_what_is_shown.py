"""What is said of incidents is true: while they last, of tasks with replaced workers, and of those that fail."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.api import present
from services.api.live import LiveState
from services.api.postmortem import page
from services.api.postmortem.gather import known, post_mortem
from services.api.postmortem.model import PostMortem
from services.api.store.fold_metrics import FoldMetrics
from services.api.store.projection_store import Store
from shared.bus.connection import Bus
from shared.events.plans import Response, TaskChange, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import (
    ErrorDetected,
    PlanDecided,
    TaskCheckpointed,
    TaskCheckpointFailed,
    TaskCopiesLacking,
    TaskFailed,
    TaskFinished,
    TaskStopRequested,
)
from shared.log.journal import Journal
from shared.messages.health import HEALTH, Health
from shared.messages.signals import Heartbeat, WorkerStatus
from shared.settings.model import Settings
from shared.views.incident_parts import LEAST_LATE_S, NEVER_HEALED_S, REMEMBERED, median_s, stuck_s, with_duration
from tests.api.kit import Server, Story, cost_report, restart, serving, stage


def shown(story: Story, folder: Path, now: datetime, incident: str = "i1", away: tuple[str, ...] = ()) -> PostMortem:
    """Return the post-mortem of an incident as the gateway makes it."""
    store = Store(f"sqlite:///{folder / 'projections.db'}")
    try:
        store.fold(list(story.log.read_all()))
        with store.reading() as views:
            cluster = story.views().cluster["cluster"]
            found = known(views, incident, cluster, now)
            return post_mortem(found, story.log, cluster, now, away)
    finally:
        store.close()


def ends(story: Story, at_s: float, plan: str = "p2", supersedes: tuple[str, ...] = ("p1",)) -> None:
    """Have the plan that frees the workers of an ended task be carried out."""
    over = TaskChange(task="gpt", reason="it has ended", action="end", from_generation=3)
    story.at(at_s).plan(plan, over, trigger=Trigger.TASK_ENDED, supersedes=list(supersedes))
    story.at(at_s + 0.3).moved(plan, "gpt", "ended", 3, complete=True)


def test_while_an_incident_is_open_there_is_never_nothing_to_do(story: Story, tmp_path: Path) -> None:
    story.running().process_exit()
    made = shown(story, tmp_path, story.time(104))
    assert made.todo == [
        "Wait: it is being healed. `unicron status` says whether every part of the control plane works."
    ]
    away = shown(story, tmp_path, story.time(104), away=("transition: no answer within 1 s",))
    assert "transition: no answer within 1 s" in away.todo[0]
    text = page.markdown(away)
    assert "no answer within 1 s" in text
    assert "Nothing" not in text


@pytest.mark.parametrize("kind", list(ErrorKind))
@pytest.mark.parametrize(
    "severity", [Severity.SEV2, *(pytest.param(s, marks=pytest.mark.slow) for s in Severity if s != Severity.SEV2)]
)
def test_no_kind_of_open_incident_says_nothing(
    story: Story, tmp_path: Path, kind: ErrorKind, severity: Severity
) -> None:
    story.running()
    story.at(100.5).error("i1", 100, task="gpt", node="n1", worker="n1/1", kind=kind, severity=severity)
    made = shown(story, tmp_path, story.time(101))
    assert made.todo
    assert not any("Nothing" in line for line in made.todo)


def test_an_incident_that_takes_longer_than_its_kind_usually_does_is_stuck(story: Story, tmp_path: Path) -> None:
    story.running().process_exit().process_restored()  # takes 8 s
    story.at(200.5).error("i2", 200, task="gpt", node="n1", worker="n1/1", rank=3, generation=3, step=90)
    story.at(201).plan("p2", restart(), trigger=Trigger.ERROR, response=Response.RESTART, incident="i2")
    early = shown(story, tmp_path, story.time(210), "i2")
    assert (early.incident.usual_s, early.incident.stuck_s) == (8.0, None)
    assert early.headline.endswith("open for 10.00 s (usually 8.00 s)")
    late = shown(story, tmp_path, story.time(240), "i2")
    assert late.incident.stuck_s == 32.0
    assert late.headline.endswith("not at planned strength yet: stuck, 32.00 s longer than usual (median 8 s)")
    assert "stuck, 32.00 s longer than usual (median 8 s)" in late.standing[0]
    assert late.todo == ["It is stuck: `unicron status -o wide` says how far each part is, the log of that part why."]
    over = shown(story, tmp_path, story.time(240), "i1")
    assert (over.incident.usual_s, over.incident.stuck_s) == (None, None)


def test_the_median_is_of_the_newest_of_the_kind() -> None:
    usual = with_duration({}, ErrorKind.HANG, "other", 1e6)
    for number in range(3 * REMEMBERED):
        usual = with_duration(usual, ErrorKind.EXCEPTION, f"i{number}", float(number))
    assert len(usual["exception"]) == REMEMBERED
    assert median_s(usual, ErrorKind.EXCEPTION) == 3 * REMEMBERED - 1 - REMEMBERED // 2
    assert median_s(usual, ErrorKind.DEVICE) is None
    # Healed once more after an escalation, an incident counts once.
    again = with_duration({"hang": {"i": 3.0}}, ErrorKind.HANG, "i", 9.0)
    assert again == {"hang": {"i": 9.0}}


def test_a_short_median_leaves_time_for_a_busy_machine() -> None:
    assert stuck_s(0.5, 0.5 + LEAST_LATE_S - 0.01) is None
    assert stuck_s(0.5, 0.5 + LEAST_LATE_S) == LEAST_LATE_S
    assert stuck_s(60.0, 119.0) is None
    assert stuck_s(60.0, 120.0) == 60.0
    assert stuck_s(None, NEVER_HEALED_S - 1.0) is None  # none of its kind was healed before
    assert stuck_s(None, NEVER_HEALED_S + 1.0) == 1.0


def lose_two_get_one(story: Story) -> Story:
    """Have a task of three workers lose two with their node, one of which an idle worker replaces."""
    before, after = ["n0/0", "n1/0", "n1/1"], ["n0/0", "n2/0"]
    story.at(0).cluster()
    for name, workers in (("n0", 1), ("n1", 2), ("n2", 1)):
        story.node(name, workers)
    story.at(1).submit("gpt")
    start = TaskChange(
        task="gpt",
        reason="submitted",
        action="move",
        from_generation=0,
        prepare=before,
        target=stage(1, before, source="initial"),
    )
    story.at(2).plan("start", start)
    story.at(10).moved("start", "gpt", "restored", 1, step=1, complete=True)
    lost = {"kind": ErrorKind.NODE_LOST, "severity": Severity.SEV1, "method": Method.NODE_HEALTH}
    story.at(100).error("i1", 98.5, node="n1", **lost)
    change = TaskChange(
        task="gpt",
        reason="node n1 is lost",
        action="move",
        from_generation=1,
        survivors=["n0/0"],
        failed=["n1/0", "n1/1"],
        hold=True,
        interrupted=stage(2, ["n0/0"], kind="interrupted"),
        prepare=["n2/0"],
        target=stage(3, after),
    )
    story.at(100.1).plan("p1", change, trigger=Trigger.ERROR, response=Response.RECONFIGURE, incident="i1")
    story.at(102).moved("p1", "gpt", "resumed", 2, step=50)
    story.at(104).moved("p1", "gpt", "restored", 3, step=51, complete=True)
    return story


def test_a_headline_counts_the_workers_that_replace_lost_ones(story: Story, tmp_path: Path) -> None:
    lose_two_get_one(story)
    assert len(story.views().tasks["gpt"].planned) == 2  # what the plan and ``ps`` say
    made = shown(story, tmp_path, story.time(110))
    assert [(one.workers, one.before) for one in made.shortfalls] == [(2, 3)]
    assert "gpt on 2 of 3 workers" in made.headline
    assert "gpt went on with 2 of 3 workers, and still has fewer than before." in made.standing
    assert "gpt has fewer workers than before: `unicron show gpt` says what it waits for." in made.todo


def test_a_headline_follows_later_plans(story: Story, tmp_path: Path) -> None:
    lose_two_get_one(story)
    fewer = TaskChange(task="gpt", reason="fewer", action="move", from_generation=3, target=stage(4, ["n0/0"]))
    story.at(120).plan("p2", fewer, trigger=Trigger.TASK_SUBMITTED)
    story.at(121).moved("p2", "gpt", "restored", 4, step=60, complete=True)
    assert "gpt on 1 of 3 workers" in shown(story, tmp_path, story.time(130)).headline


def fail_after_restart(story: Story) -> Story:
    """Have a task fail while it is restarted: its incident ends without having been healed."""
    story.running().process_exit()
    story.at(106).add(TaskFailed, task="gpt", generation=3, step=91, reason="four times", incident="i1")
    ends(story, 106.1)
    return story


def test_a_fault_that_ended_in_failure_has_no_figures_of_recovery(story: Story, tmp_path: Path) -> None:
    fail_after_restart(story)
    incident = story.views().incidents["i1"]
    assert (incident.resumed_at, incident.restored_at) == (None, None)
    assert incident.closed_at == story.time(106.4)
    made = shown(story, tmp_path, story.time(120))
    assert made.closed
    assert made.headline.endswith("; gpt failed")
    assert {phase.name for phase in made.phases} == {"detection", "decision", "end", "all of it"}
    assert made.incident.counterfactuals == []
    for text in (page.markdown(made), page.html(made)):
        assert "planned strength" not in text
        assert "until the workers trained again" not in text
    (row,) = cost_report(story.views(), story.time(120)).incidents
    assert row.failed_tasks == {"gpt": "four times"}


def test_a_task_that_fails_after_it_was_healed_was_not_healed(story: Story) -> None:
    story.running().process_exit().process_restored()
    assert story.views().incidents["i1"].restored_at == story.time(108)
    story.at(130).add(TaskFailed, task="gpt", generation=3, step=99, reason="again", incident="i1")
    incident = story.views().incidents["i1"]
    assert (incident.resumed_at, incident.restored_at) == (None, None)
    assert incident.closed_at == story.time(130)
    assert incident.failed_tasks == {"gpt": "again"}


def test_a_failure_that_no_plan_answers_is_over(story: Story) -> None:
    story.running()
    story.at(100.5).error("i1", 100, task="gpt", node="n1", worker="n1/1")
    story.at(101).add(TaskFailed, task="gpt", generation=1, step=90, reason="a bug", incident="i1")
    incident = story.views().incidents["i1"]
    assert (incident.restored_at, incident.closed_at) == (None, story.time(101))


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_task_that_is_stopped_was_not_healed_and_one_that_succeeds_was(story: Story, succeeds: bool) -> None:
    story.running().process_exit()
    if succeeds:
        finished = {"samples_sha256": "0" * 64, "parameters_path": "/result"}
        story.at(105).add(TaskFinished, task="gpt", generation=2, step=100, **finished)
        ends(story, 105.1)
    else:
        story.at(105).add(TaskStopRequested, task="gpt")
        change = TaskChange(task="gpt", reason="asked to stop", action="stop", from_generation=2)
        story.at(105.1).plan("p2", change, trigger=Trigger.STOP_REQUESTED, supersedes=["p1"])
        story.at(105.4).moved("p2", "gpt", "ended", 3, complete=True)
    incident = story.views().incidents["i1"]
    assert incident.closed_at == story.time(105.4)
    assert incident.restored_at == (story.time(105.4) if succeeds else None)


def test_no_metric_counts_a_failure_as_a_recovery(story: Story, tmp_path: Path) -> None:
    fail_after_restart(story)
    registry = CollectorRegistry()
    store = Store(f"sqlite:///{tmp_path / 'projections.db'}")
    try:
        store.fold(list(story.log.read_all()), FoldMetrics(registry).folded)
    finally:
        store.close()
    samples = {sample.name: sample for metric in registry.collect() for sample in metric.samples}
    assert samples["unicron_incident_detection_seconds_count"].value > 0.0
    assert "unicron_incident_recovery_seconds_count" not in samples
    assert story.views().cluster["cluster"].usual == {}


def fail_again(story: Story, number: int, at_s: float, incident: str = "i1", **fields: Any) -> None:
    """Have the process of n1/1 fail as before, and be restarted."""
    about = {"task": "gpt", "node": "n1", "worker": "n1/1", "rank": 3, "generation": 1 + 2 * number, "step": 90}
    story.at(at_s + 0.5).error(incident, at_s, event_id=f"e{number}", **about, **fields)
    plan, cause = f"a{number}", f"e{number}"
    answer = {"trigger": Trigger.ERROR, "response": Response.RESTART, "incident": incident, "changes": [restart()]}
    story.at(at_s + 1).add(PlanDecided, plan=plan, cause=cause, **answer)
    story.at(at_s + 3).moved(plan, "gpt", "resumed", 2, incident=incident, step=91)
    story.at(at_s + 8).moved(plan, "gpt", "restored", 3, incident=incident, step=95, complete=True)


def test_attempts_are_inside_of_one_incident(story: Story, tmp_path: Path) -> None:
    story.running()
    fail_again(story, 0, 100.0)
    fail_again(story, 1, 200.0, repeats="e0")
    fail_again(story, 2, 300.0, repeats="e1")
    (incident,) = story.views().incidents.values()
    assert [one.event for one in incident.attempts] == ["e0", "e1", "e2"]
    assert incident.plans == ["a0", "a1", "a2"]
    assert "escalations" not in incident.evidence
    made = shown(story, tmp_path, story.time(320))
    assert "The same failure came 3 times in a row" in made.standing[0]
    assert [moment.what for moment in made.timeline if "once more" in moment.what] == [
        "the same failure once more, on n1/1 (SEV2)"
    ] * 2
    # An attempt costs what an incident of its own has cost in older logs.
    views = story.views()
    whole = cost_report(views, story.time(320))
    apart = Story(tmp_path / "apart.db")
    apart.running()
    for number in range(3):
        fail_again(apart, number, 100.0 * (number + 1), incident=f"i{number}")
    separate = cost_report(apart.views(), apart.time(320))
    apart.log.close()
    assert len(separate.incidents) == 3
    assert whole.categories == separate.categories
    for name in ("detection_worker_s", "transition_worker_s", "lost_flop"):
        assert getattr(whole.incidents[0], name) == pytest.approx(sum(getattr(one, name) for one in separate.incidents))


def test_an_attempt_opens_its_incident_again(story: Story) -> None:
    story.running()
    fail_again(story, 0, 100.0)
    assert story.views().incidents["i1"].restored_at == story.time(108)
    story.at(200.5).error("i1", 200, event_id="e1", repeats="e0", task="gpt", node="n1", worker="n1/1")
    incident = story.views().incidents["i1"]
    assert (incident.restored_at, incident.closed_at) == (None, None)


async def test_status_says_of_every_part_whether_it_works_and_how_far_behind_it_is(api: Server, bus: Bus) -> None:
    await api.join("n0", "n1")
    answers = {"detector": Health(ready=True, handled=0), "planner": Health(detail="waiting for the log", handled=2)}
    for name, health in answers.items():

        async def answer(_: None, health: Health = health) -> Health:
            return health

        await bus.serve(HEALTH, answer, name)
    found = await api.http.get("/v1/status")
    assert found.status_code == 200
    parts = {one["name"]: one for one in found.json()["checks"]}
    last = api.journal.log.last_position()
    assert (parts["detector"]["ok"], parts["detector"]["lag"]) == (True, last)
    assert (parts["planner"]["ok"], parts["planner"]["detail"]) == (False, "waiting for the log")
    assert parts["planner"]["lag"] == last - 2
    assert (parts["transition"]["ok"], parts["transition"]["lag"]) == (False, None)
    assert parts["api"]["lag"] == 0
    assert not found.json()["ready"]
    assert (await api.http.get("/readyz")).status_code == 503


async def test_metrics_name_what_alerts_tell_of(api: Server) -> None:
    await api.join("n0", "n1")
    lost = {"kind": ErrorKind.NODE_LOST, "severity": Severity.SEV1, "method": Method.NODE_HEALTH}
    await api.append(ErrorDetected, incident="i1", node="n1", detected_at=datetime.now(UTC), **lost)
    assert (await api.http.post("/v1/tasks", json=api.spec("broken"))).status_code == 201
    failed = await api.append(TaskFailed, task="broken", generation=0, step=7, reason="no such file")
    await api.projected(failed.position)
    text = (await api.http.get("/metrics")).text
    assert 'unicron_node_away{node="n1",state="lost"} 1.0' in text
    assert 'node="n0"' not in text
    assert 'unicron_task_failed{task="broken"} 1.0' in text
    assert "unicron_incidents_stuck 0.0" in text
    assert "unicron_task_copies_lacking{" not in text
    deleted = await api.http.delete("/v1/tasks/broken")
    assert deleted.status_code == 200
    assert "unicron_task_failed{" not in (await api.http.get("/metrics")).text


async def test_a_lack_of_copies_is_shown_and_measured_until_all_are_there_again(api: Server) -> None:
    await api.join("n0")
    assert (await api.http.post("/v1/tasks", json=api.spec("bare"))).status_code == 201
    about = {"task": "bare", "generation": 1, "step": 7, "worker": "n0/0"}
    lack = await api.append(TaskCopiesLacking, reason="gone", **about)
    await api.projected(lack.position)
    shown = (await api.http.get("/v1/tasks/bare")).json()["copies_lacking"]
    assert (shown["step"], shown["worker"], shown["reason"]) == (7, "n0/0", "gone")
    assert 'unicron_task_copies_lacking{task="bare"} 1.0' in (await api.http.get("/metrics")).text
    again = await api.append(TaskCopiesLacking, ended=True, **about)
    await api.projected(again.position)
    assert (await api.http.get("/v1/tasks/bare")).json()["copies_lacking"] is None
    assert "unicron_task_copies_lacking{" not in (await api.http.get("/metrics")).text


def test_ranks_that_fail_alike_in_one_generation_are_one_attempt(story: Story, tmp_path: Path) -> None:
    story.running()
    about = {"task": "gpt", "kind": ErrorKind.EXCEPTION, "method": Method.EXCEPTION, "step": 90}
    story.at(100.5).error("i1", 100, event_id="e0", worker="n1/1", node="n1", generation=1, **about)
    story.error("i1", 100, event_id="e1", repeats="e0", worker="n0/0", node="n0", generation=1, **about)
    assert not any("in a row" in line for line in shown(story, tmp_path, story.time(101)).standing)
    story.at(110.5).error("i1", 110, event_id="e2", repeats="e1", worker="n0/0", node="n0", generation=3, **about)
    assert "The same failure came 2 times in a row" in shown(story, tmp_path, story.time(111)).standing[0]


def test_a_task_that_waits_for_its_storage_says_so_until_its_script_goes_on(story: Story) -> None:
    story.running()
    steps = story.views().tasks["gpt"].spec.steps
    failed = {"task": "gpt", "generation": 1, "worker": "n0/0"}
    story.at(40).add(TaskCheckpointFailed, step=steps - 1, reason="no room", **failed)
    assert present.task(story.views().tasks["gpt"], LiveState()).reason == ""
    story.at(41).add(TaskCheckpointed, task="gpt", generation=1, step=steps, path="/c")
    story.at(42).add(TaskCheckpointFailed, step=steps, reason="all steps are done", **failed)
    view = story.views().tasks["gpt"]
    for phase, reason in (
        ("checkpoint", "waits for its storage: all steps are done"),
        ("tail", "all steps are done and"),
    ):
        worker = WorkerStatus(worker="n0/0", state="training", task="gpt", generation=1, rank=0, phase=phase)
        beat = Heartbeat(
            node="n0",
            incarnation="one",
            agent_pid=4,
            sequence=1,
            sent_at=story.time(43),
            interval_s=1.0,
            workers=[worker],
        )
        assert present.task(view, LiveState(heartbeats={"n0": beat})).reason.startswith(reason)
    assert present.task(view, LiveState()).reason == "waits for its storage: all steps are done"
    story.at(44).add(TaskFinished, task="gpt", generation=1, step=steps, samples_sha256="a", parameters_path="/p")
    assert present.task(story.views().tasks["gpt"], LiveState()).reason == "all steps done"


async def test_a_cost_report_can_do_without_its_breakdowns(settings: Settings, bus: Bus, journal: Journal) -> None:
    story = Story(settings.run_dir / "log.db")
    story.running()
    story.log.close()
    async with serving(settings, bus, journal) as server:
        whole = (await server.http.get("/v1/costs")).json()
        brief = (await server.http.get("/v1/costs?breakdowns=false")).json()
    assert whole["breakdowns"]["node"]
    assert (brief["breakdowns"], brief["currency"]) == ({}, whole["currency"])
    assert brief.keys() == whole.keys()


async def test_a_list_of_tasks_can_do_without_their_ranks(settings: Settings, bus: Bus, journal: Journal) -> None:
    story = Story(settings.run_dir / "log.db")
    story.running()
    story.log.close()
    async with serving(settings, bus, journal) as server:
        (whole,) = (await server.http.get("/v1/tasks")).json()["items"]
        (brief,) = (await server.http.get("/v1/tasks?ranks=false")).json()["items"]
    assert len(whole["ranks"]) == whole["workers"] == 4
    assert brief == {**whole, "ranks": []}
