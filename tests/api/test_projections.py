"""The fold, from hand-written histories in a real log."""

from __future__ import annotations

from services.api import present
from services.api.live import LiveState
from shared.events.plans import Problem, Response, Solution, TaskChange, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import (
    NodeJoined,
    TaskCheckpointed,
    TaskCheckpointFailed,
    TaskCopiesLacking,
    TaskFailed,
    TaskFinished,
    TaskStopped,
    TaskStopRequested,
)
from shared.tasks.specification import TaskState
from shared.views.documents import PlanState
from tests.api.kit import Story, restart, stage


def test_a_submitted_task_is_pending_until_a_plan_answers(story: Story) -> None:
    story.submit()
    task = story.views().tasks["gpt"]
    assert (task.state, task.version) == (TaskState.PENDING, 1)
    assert task.reason


def test_a_plan_that_has_no_workers_for_a_task_queues_it_with_the_reason(story: Story) -> None:
    story.submit()
    story.plan("p0", queued={"gpt": "needs 4 workers, the cluster has 2"})
    views = story.views()
    assert views.tasks["gpt"].state is TaskState.QUEUED
    assert views.tasks["gpt"].reason == "needs 4 workers, the cluster has 2"
    assert views.plans["p0"].state is PlanState.DONE


def test_a_task_is_in_transition_until_its_plan_is_complete_then_runs(story: Story) -> None:
    story.running()
    task = story.views().tasks["gpt"]
    assert task.state is TaskState.RUNNING
    assert [member.worker for member in task.members] == ["n0/0", "n0/1", "n1/0", "n1/1"]
    assert (task.generation, task.step, task.step_s, task.loss) == (1, 11, 1.0, 2.5)
    assert task.pids == {"n0/0": 200, "n0/1": 201, "n1/0": 202, "n1/1": 203}
    assert task.layout is not None
    assert task.layout.data == 4
    story.records = story.records[:5]  # up to the plan
    assert story.views().tasks["gpt"].state is TaskState.TRANSITIONING


def test_after_the_interrupted_step_a_task_is_degraded_and_then_runs_again(story: Story) -> None:
    story.running().process_exit()
    task = story.views().tasks["gpt"]
    assert task.state is TaskState.DEGRADED
    assert len(task.members) == 3
    story.process_restored()
    task = story.views().tasks["gpt"]
    assert (task.state, task.reason, task.generation, len(task.members)) == (TaskState.RUNNING, "", 3, 4)
    assert task.pids["n1/1"] == 300


def test_an_incident_has_the_times_of_its_plan(story: Story) -> None:
    story.running().process_exit().process_restored()
    incident = story.views().incidents["i1"]
    assert incident.occurred_at == story.time(100)
    assert incident.detected_at == story.time(100.5)
    assert incident.planned_at == story.time(101)
    assert incident.resumed_at == story.time(103)
    assert incident.restored_at == story.time(108)
    assert incident.response == "restart"
    assert incident.state_source == "live"
    assert incident.tasks == ["gpt"]


def test_the_incident_of_a_node_names_the_tasks_that_it_hits_before_any_plan(story: Story) -> None:
    story.running()
    lost = {name: {"workers": [f"n1/{slot}"], "generation": 1} for slot, name in enumerate(["small", "gpt"])}
    node = {"kind": ErrorKind.NODE_LOST, "severity": Severity.SEV1, "method": Method.NODE_HEALTH, "node": "n1"}
    story.at(100).error("lost", 99.0, **node, evidence={"tasks": lost})
    story.error("empty", 99.0, **{**node, "node": "n0"}, evidence={"tasks": {}})
    incidents = story.views().incidents
    assert (incidents["lost"].task, incidents["lost"].tasks) == (None, ["gpt", "small"])
    assert incidents["empty"].tasks == []


def test_resumed_falls_back_to_restored_when_no_step_was_interrupted(story: Story) -> None:
    story.running()
    story.at(100).error("i1", 99, task="gpt")
    workers = ["n0/0", "n0/1", "n1/0", "n1/1"]
    change = TaskChange(
        task="gpt",
        reason="nobody holds the state",
        action="move",
        from_generation=1,
        failed=workers,
        prepare=workers,
        target=stage(2, workers, source="checkpoint"),
    )
    story.at(101).plan("p1", change, trigger=Trigger.ERROR, incident="i1")
    sources = dict.fromkeys(workers, "checkpoint")
    story.at(110).moved("p1", "gpt", "restored", 2, step=51, steps_recomputed=40, sources=sources, complete=True)
    incident = story.views().incidents["i1"]
    assert incident.resumed_at == incident.restored_at == story.time(110)
    assert (incident.state_source, incident.steps_recomputed) == ("checkpoint", 40)


def test_a_retry_is_restored_by_its_interrupted_stage(story: Story) -> None:
    story.running()
    story.at(100).error("i1", 99, task="gpt", kind=ErrorKind.CONNECTION, severity=Severity.SEV3)
    workers = ["n0/0", "n0/1", "n1/0", "n1/1"]
    change = TaskChange(
        task="gpt",
        reason="connections broke",
        action="none",
        from_generation=1,
        survivors=workers,
        hold=True,
        interrupted=stage(2, workers, kind="interrupted"),
    )
    story.at(101).plan("p1", change, trigger=Trigger.ERROR, incident="i1", response=Response.RETRY)
    story.at(102).moved("p1", "gpt", "resumed", 2, step=91, complete=True)
    views = story.views()
    assert views.incidents["i1"].restored_at == story.time(102)
    assert views.tasks["gpt"].state is TaskState.RUNNING
    assert views.plans["p1"].state is PlanState.DONE


def test_a_superseded_plan_leaves_its_incident_to_the_next(story: Story) -> None:
    story.running().process_exit()
    story.at(104).error("i2", 103.9, task="gpt", worker="n1/0", node="n1")
    survivors = ["n0/0", "n0/1"]
    change = TaskChange(
        task="gpt",
        reason="another process ended",
        action="move",
        from_generation=2,
        survivors=survivors,
        failed=["n1/0"],
        hold=True,
        interrupted=stage(4, survivors, kind="interrupted"),
        prepare=["n1/0", "n1/1"],
        target=stage(5, ["n0/0", "n0/1", "n1/0", "n1/1"]),
    )
    story.at(104.5).plan("p2", change, trigger=Trigger.ERROR, incident="i2", supersedes=["p1"])
    views = story.views()
    assert views.plans["p1"].state is PlanState.SUPERSEDED
    assert views.plans["p1"].superseded_by == "p2"
    assert views.plans["p2"].incidents == ["i2", "i1"]
    # A late word of the superseded plan changes nothing.
    story.at(104.6).moved("p1", "gpt", "restored", 3, step=95, complete=True)
    assert story.views().incidents["i1"].restored_at is None
    story.at(105).moved("p2", "gpt", "resumed", 4, step=93)
    story.at(109).moved("p2", "gpt", "restored", 5, step=96, complete=True)
    views = story.views()
    assert views.incidents["i1"].resumed_at == story.time(103)
    assert views.incidents["i2"].resumed_at == story.time(105)
    assert views.incidents["i1"].restored_at == views.incidents["i2"].restored_at == story.time(109)
    assert views.tasks["gpt"].state is TaskState.RUNNING


def test_an_escalation_raises_the_severity_and_adds_evidence(story: Story) -> None:
    story.running()
    story.at(100.5)
    first = story.error("i1", 100, task="gpt", worker="n1/1", node="n1", evidence={"exit_code": -9})
    story.at(101).plan("p1", restart(), trigger=Trigger.ERROR, incident="i1", response=Response.RESTART)
    story.at(103).moved("p1", "gpt", "failed", 3, detail="n1/1 does not start", failed_workers=["n1/1"])
    task = story.views().tasks["gpt"]
    assert (task.state, "n1/1 does not start" in task.reason) == (TaskState.TRANSITIONING, True)
    assert story.views().plans["p1"].state is PlanState.FAILED
    story.at(104).error(
        "i1",
        103,
        task="gpt",
        worker="n1/1",
        node="n1",
        kind=ErrorKind.TRANSITION_FAILED,
        severity=Severity.SEV1,
        method=Method.TRANSITION,
        escalates=first.event.event_id,
        evidence={"detail": "n1/1 does not start"},
    )
    views = story.views()
    (incident,) = views.incidents.values()
    assert incident.severity is Severity.SEV1
    assert incident.kind is ErrorKind.PROCESS_EXIT
    assert incident.detected_at == story.time(100.5)
    assert incident.evidence["exit_code"] == -9
    assert incident.evidence["escalations"][0]["evidence"] == {"detail": "n1/1 does not start"}
    assert views.nodes["n1"].state == "isolated"


def test_what_is_milder_in_an_incident_does_not_lower_its_severity(story: Story) -> None:
    story.running()
    lose_node(story)
    story.at(104).error(
        "i1",
        103.5,
        task="gpt",
        worker="n0/1",
        node="n0",
        kind=ErrorKind.TRANSITION_FAILED,
        severity=Severity.SEV2,
        method=Method.TRANSITION,
    )
    views = story.views()
    assert [i.severity for i in views.incidents.values()] == [Severity.SEV1]
    assert views.nodes["n0"].state == "ready"


def shrink(generation: int = 1) -> TaskChange:
    return TaskChange(
        task="gpt",
        reason="node n1 is lost",
        action="none",
        from_generation=generation,
        survivors=["n0/0", "n0/1"],
        failed=["n1/0", "n1/1"],
        hold=True,
        interrupted=stage(2, ["n0/0", "n0/1"], kind="interrupted"),
    )


def lose_node(story: Story) -> None:
    story.at(100).error(
        "i1", 98.5, node="n1", kind=ErrorKind.NODE_LOST, severity=Severity.SEV1, method=Method.NODE_HEALTH
    )
    story.at(100.1).plan("p1", shrink(), trigger=Trigger.ERROR, incident="i1")
    story.at(103).moved("p1", "gpt", "resumed", 2, step=91, complete=True)


def test_releasing_what_is_left_over_ends_the_incident_with_the_step(story: Story) -> None:
    """A plan without a target, whose last milestone is a release: the members trained all the while."""
    story.running()
    story.at(100).error(
        "i1", 98.5, node="n1", kind=ErrorKind.NODE_LOST, severity=Severity.SEV1, method=Method.NODE_HEALTH
    )
    change = shrink().model_copy(update={"release": ["n2/0"]})
    story.at(100.1).plan("p1", change, trigger=Trigger.ERROR, incident="i1")
    story.at(103).moved("p1", "gpt", "resumed", 2, step=91)
    assert story.views().incidents["i1"].restored_at is None
    story.at(104).moved("p1", "gpt", "released", 2, step=91, complete=True)
    views = story.views()
    assert views.incidents["i1"].restored_at == story.time(103)
    assert views.plans["p1"].state is PlanState.DONE
    assert (views.tasks["gpt"].state, "2 of 4" in views.tasks["gpt"].reason) == (TaskState.DEGRADED, True)


def test_a_task_that_lost_workers_is_degraded_until_it_is_planned_anew(story: Story) -> None:
    story.running()
    lose_node(story)
    views = story.views()
    assert views.nodes["n1"].state == "lost"
    assert views.tasks["gpt"].state is TaskState.DEGRADED
    assert "2 of 4" in views.tasks["gpt"].reason
    assert views.incidents["i1"].tasks == ["gpt"]
    assert views.incidents["i1"].restored_at == story.time(103)
    story.at(200).node("n1")
    change = TaskChange(
        task="gpt",
        reason="node n1 joined",
        action="move",
        from_generation=2,
        survivors=["n0/0", "n0/1"],
        prepare=["n1/0", "n1/1"],
        target=stage(3, ["n0/0", "n0/1", "n1/0", "n1/1"]),
    )
    story.at(201).plan("p2", change, trigger=Trigger.NODE_JOINED)
    story.at(205).moved("p2", "gpt", "restored", 3, step=120, complete=True)
    views = story.views()
    assert views.nodes["n1"].state == "ready"
    assert views.tasks["gpt"].state is TaskState.RUNNING


def test_the_solver_asked_anew_sets_what_full_strength_is(story: Story) -> None:
    story.running()
    lose_node(story)
    story.at(200).node("n1")
    solution = Solution(label="best", assignment={"gpt": 2}, objective=1.0, terms=[])
    problem = Problem(workers=4, tasks=[])
    story.at(201).plan("p2", trigger=Trigger.NODE_JOINED, problem=problem, solution=solution)
    assert story.views().tasks["gpt"].state is TaskState.RUNNING


def test_a_lost_node_that_nobody_used_is_restored_by_its_plan(story: Story) -> None:
    story.running()
    story.node("n2")
    story.at(100).error("i1", 98.5, node="n2", kind=ErrorKind.NODE_LOST, severity=Severity.SEV1)
    story.at(101).plan("p1", trigger=Trigger.ERROR, incident="i1", response=Response.NONE)
    assert story.views().incidents["i1"].restored_at == story.time(101)


def test_stopping_and_stopped(story: Story) -> None:
    story.running()
    story.at(50).add(TaskStopRequested, task="gpt")
    assert story.views().tasks["gpt"].state is TaskState.STOPPING
    change = TaskChange(task="gpt", reason="asked to stop", action="stop", from_generation=1)
    story.at(51).plan("p1", change, trigger=Trigger.STOP_REQUESTED)
    assert story.views().tasks["gpt"].state is TaskState.STOPPING
    story.at(55).add(TaskStopped, task="gpt", generation=1, step=44, path="/checkpoint")
    story.at(56).moved("p1", "gpt", "ended", 1, complete=True)
    views = story.views()
    task = views.tasks["gpt"]
    assert (task.state, task.step, task.checkpoint, task.checkpoint_step) == (
        TaskState.STOPPED,
        44,
        "/checkpoint",
        44,
    )
    assert views.plans["p1"].state is PlanState.DONE


def test_a_paused_task_is_queued(story: Story) -> None:
    story.running()
    change = TaskChange(task="gpt", reason="a heavier task needs all", action="pause", from_generation=1)
    story.at(50).plan("p1", change, queued={"gpt": "a heavier task has all workers"})
    assert story.views().tasks["gpt"].state is TaskState.TRANSITIONING
    story.at(54).add(TaskStopped, task="gpt", generation=1, step=40, path="/c40")  # it has saved its state
    task = story.views().tasks["gpt"]
    assert (task.state, task.ended_at, task.checkpoint) == (TaskState.TRANSITIONING, None, "/c40")
    story.at(55).moved("p1", "gpt", "ended", 1, complete=True)
    task = story.views().tasks["gpt"]
    assert (task.state, task.reason, task.members) == (TaskState.QUEUED, "a heavier task has all workers", [])


def test_success_and_failure_keep_what_the_user_needs(story: Story) -> None:
    story.running("good")
    story.running("bad")
    story.at(80).add(
        TaskFinished, task="good", generation=1, step=100, samples_sha256="ab", parameters_path="/p", loss=1.5
    )
    story.at(81).error("i1", 80, task="bad")
    story.at(82).add(
        TaskFailed, task="bad", generation=1, step=3, reason="too often", traceback="Traceback", incident="i1"
    )
    views = story.views()
    good, bad = views.tasks["good"], views.tasks["bad"]
    assert good.state is TaskState.SUCCEEDED
    assert good.result is not None
    assert (good.result.steps, good.result.samples_sha256, good.result.parameters_path) == (100, "ab", "/p")
    assert (bad.state, bad.reason, bad.traceback) == (TaskState.FAILED, "too often", "Traceback")
    assert views.incidents["i1"].response == "fail-task"
    change = TaskChange(task="bad", reason="it has failed", action="end", from_generation=1)
    story.at(83).plan("p1", change, trigger=Trigger.TASK_ENDED)
    story.at(84).moved("p1", "bad", "ended", 1, complete=True)
    assert story.views().tasks["bad"].state is TaskState.FAILED


def test_a_failed_checkpoint_shows_until_one_is_written(story: Story) -> None:
    story.running()
    story.at(40).add(TaskCheckpointed, task="gpt", generation=1, step=30, path="/c30")
    story.at(41).add(TaskCheckpointFailed, task="gpt", generation=1, step=40, worker="n0/0", reason="full")
    task = story.views().tasks["gpt"]
    assert (task.state, task.checkpoint_step) == (TaskState.RUNNING, 30)
    failure = task.checkpoint_failure
    assert failure is not None
    assert (failure.step, failure.worker, failure.reason, failure.at) == (40, "n0/0", "full", story.time(41))
    story.at(42).add(TaskCheckpointed, task="gpt", generation=1, step=50, path="/c50")
    assert story.views().tasks["gpt"].checkpoint_failure is None


def test_a_lack_of_copies_shows_until_all_are_there_again(story: Story) -> None:
    story.running()
    lack = {"task": "gpt", "generation": 1, "worker": "n0/0"}
    story.at(41).add(TaskCopiesLacking, step=40, reason="gone", **lack)
    task = story.views().tasks["gpt"]
    lacks = task.copies_lacking
    assert lacks is not None
    assert (lacks.step, lacks.worker, lacks.reason, lacks.at) == (40, "n0/0", "gone", story.time(41))
    assert task.checkpoint_failure is None
    shown = present.task(task, LiveState())
    assert shown.copies_lacking is not None
    assert shown.reason == ""
    story.at(42).add(TaskCheckpointed, task="gpt", generation=1, step=50, path="/c50")
    assert story.views().tasks["gpt"].copies_lacking is not None
    story.at(43).add(TaskCopiesLacking, step=51, ended=True, **lack)
    assert story.views().tasks["gpt"].copies_lacking is None


def test_a_resubmitted_task_starts_afresh(story: Story) -> None:
    story.running()
    story.at(40).add(TaskCheckpointed, task="gpt", generation=1, step=30, path="/c30")
    assert story.views().tasks["gpt"].checkpoint_step == 30
    story.at(50).add(TaskStopped, task="gpt", generation=1, step=40, path="/c40")
    story.at(60).submit()
    task = story.views().tasks["gpt"]
    assert (task.state, task.members, task.result) == (TaskState.PENDING, [], None)
    assert task.version == 5


def test_older_generations_do_not_move_a_task_back(story: Story) -> None:
    story.running().process_exit().process_restored()
    story.at(110).progress("gpt", 20, 9.0, generation=1)
    task = story.views().tasks["gpt"]
    assert (task.step, task.step_s) == (95, 1.0)


def test_a_new_incarnation_replaces_a_node(story: Story) -> None:
    story.node("n0")
    story.add(NodeJoined, node="n0", incarnation="second", agent_pid=7, domain="rack", workers=["n0/0"])
    (node,) = story.views().nodes.values()
    assert (node.incarnation, node.agent_pid, node.workers, node.position) == ("second", 7, ["n0/0"], 1)
