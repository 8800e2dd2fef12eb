"""Fresh starts, which compile and fill caches; work between two steps; and what truly hangs there."""

from __future__ import annotations

from typing import Any

import pytest

from services.detector.decisions.inputs import StacksGiven
from services.detector.progress import hangs
from services.detector.progress.standstill import StacksQuestion
from services.detector.state.stalls import COLD_FACTOR, COLD_FLOOR_S, COLD_STEPS
from shared.events.severities import ErrorKind
from shared.events.union import TaskFailed
from shared.messages.stacks import GroupRecord, Operation, RankReport, StacksReply
from tests.detector.hanging import drain_plan
from tests.detector.kit import LIMITS, Cluster, at, moved, only_error, restart_plan, timed

HARD_S = LIMITS.stalls.hard_s
SLOW_S = LIMITS.stalls.slow_region_timeout_s


def started(first_step_s: float | None = 12.0) -> Cluster:
    """A task whose first processes took a while for their first step; then its steps took 0.1 s."""
    cluster = Cluster(trained=False)
    durations = {"rebuild": 0.2} if first_step_s is None else {"rebuild": 0.2, "first_step": first_step_s}
    cluster.fold(moved("p1", 1, "restored", complete=True, durations_s=durations))
    timed(cluster, 0.1, 0.1, 0.1)
    return cluster


def replaced(cluster: Cluster) -> None:
    """Rank 1 was killed; the survivors have finished its step, and its successor joins them in generation 3."""
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    cluster.fold(moved("p2", 2, "resumed", step=17, durations_s={"rebuild": 0.2}))


def waiting_for(cluster: Cluster, age_s: float, *, generation: int = 3, **newcomer: Any) -> list[Any]:
    """n1's process has made no progress for a time, and the others wait for it."""
    fields = {"generation": generation, "progress_age_s": age_s, "idle_s": age_s}
    for name in ("n0", "n2"):
        cluster.beat(name, 500.0, **fields, phase="reduce", steps_done=99)
    cluster.beat("n1", 500.0, **{**fields, "phase": "begun", "steps_done": 0, **newcomer})
    return cluster.tick(500.0)


@pytest.mark.parametrize(("seen_s", "limit_s"), [(0.5, COLD_FLOOR_S), (12.0, COLD_FACTOR * 12.0), (100.0, HARD_S)])
def test_a_fresh_process_has_the_time_that_fresh_starts_of_its_task_take(seen_s: float, limit_s: float) -> None:
    cluster = started(seen_s)
    replaced(cluster)
    assert waiting_for(cluster, limit_s - 0.1) == []
    hang = only_error(waiting_for(cluster, limit_s + 0.1))
    assert (hang.kind, hang.worker, hang.evidence["limit_s"]) == (ErrorKind.HANG, "n1/0", limit_s)
    assert hang.evidence["limit_source"] == "cold"


def test_the_longest_fresh_start_counts_and_what_survivors_take_does_not() -> None:
    cluster = started(12.0)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    cluster.fold(moved("p2", 2, "resumed", step=17, durations_s={"first_step": 50.0}))
    assert cluster.monitor.state.tasks["gpt"].cold_s == 12.0
    cluster.fold(moved("p2", 3, "restored", step=18, durations_s={"first_step": 15.0, "redistribute": 1.0}))
    assert cluster.monitor.state.tasks["gpt"].cold_s == 16.0


def test_the_first_processes_of_a_task_have_the_time_of_a_slow_region() -> None:
    cluster = Cluster(trained=False)
    assert waiting_for(cluster, SLOW_S - 1.0, generation=1) == []
    assert only_error(waiting_for(cluster, SLOW_S + 1.0, generation=1)).worker == "n1/0"


@pytest.mark.parametrize("phase", ["begun", "compute"])
def test_a_fresh_process_that_is_at_work_has_until_the_hard_limit(phase: str) -> None:
    cluster = started(1.0)
    replaced(cluster)
    assert waiting_for(cluster, HARD_S - 1.0, phase=phase, idle_s=COLD_FLOOR_S - 1.0) == []
    hang = only_error(waiting_for(cluster, HARD_S + 1.0, phase=phase, idle_s=0.0))
    assert (hang.worker, hang.evidence["limit_s"], hang.evidence["limit_source"]) == ("n1/0", HARD_S, "hard")


def test_what_is_busy_for_a_while_and_idle_then_is_judged_by_the_time_in_which_it_was_idle() -> None:
    cluster = started(1.0)
    replaced(cluster)
    assert waiting_for(cluster, 100.0, idle_s=COLD_FLOOR_S - 1.0) == []
    assert only_error(waiting_for(cluster, 100.0, idle_s=COLD_FLOOR_S + 1.0)).worker == "n1/0"


def test_a_fresh_process_that_waits_busily_in_a_collective_is_not_at_work() -> None:
    """A collective on a device keeps both processor and device busy."""
    cluster = started(1.0)
    replaced(cluster)
    assert waiting_for(cluster, 100.0, idle_s=0.0) == []
    wait = GroupRecord(group="0", ranks=[0, 1, 2], entered=1, waits=[Operation(sequence=1, name="barrier")])
    assert waiting_for(cluster, 0.6 * HARD_S, idle_s=0.0) == []
    question = StacksQuestion("n1", "gpt", 3, 0.1)  # at half of the hard limit the ranks were asked
    reply = StacksReply(node="n1", workers={"n1/0": RankReport(rank=1, groups=[wait])})
    cluster.monitor.feed(StacksGiven(question, reply), at(0.0))
    assert only_error(waiting_for(cluster, 0.6 * HARD_S + 1.0, idle_s=0.0)).worker == "n1/0"


def test_all_ranks_in_a_collective_of_a_first_step_are_found_within_the_limit_of_a_fresh_start() -> None:
    cluster = started(1.0)
    replaced(cluster)
    assert waiting_for(cluster, COLD_FLOOR_S - 0.1, phase="reduce", idle_s=0.0) == []
    stuck = only_error(waiting_for(cluster, COLD_FLOOR_S + 0.1, phase="reduce", idle_s=0.0))
    assert stuck.kind is ErrorKind.COLLECTIVE_TIMEOUT


@pytest.mark.parametrize(("steps_done", "is_cold"), [(COLD_STEPS - 1, True), (COLD_STEPS, False)])
def test_the_first_steps_of_a_process_are_those_of_a_fresh_start(steps_done: int, is_cold: bool) -> None:
    """Kernels are compiled again in the second step."""
    cluster = started(1.0)
    replaced(cluster)
    cluster.fold(moved("p2", 3, "restored", step=18, complete=True))
    cluster.generation = 3
    timed(cluster, 0.1, 0.1)
    assert (waiting_for(cluster, 10.0, steps_done=steps_done) == []) is is_cold


def test_a_survivor_in_the_first_step_of_a_new_group_has_the_time_of_a_fresh_start() -> None:
    cluster = started(12.0)
    replaced(cluster)
    assert waiting_for(cluster, 59.0, steps_done=99) == []
    assert only_error(waiting_for(cluster, 61.0, steps_done=99)).worker == "n1/0"


def test_a_rank_that_spins_in_a_warm_step_is_found_as_ever() -> None:
    cluster = started()
    for name in ("n0", "n2"):
        cluster.beat(name, 500.0, progress_age_s=4.0, phase="reduce", steps_done=50)
    cluster.beat("n1", 500.0, progress_age_s=4.0, idle_s=0.0, steps_done=50)
    assert only_error(cluster.tick(500.0)).evidence["limit_s"] == 3.0


@pytest.mark.parametrize(("steps_timed", "limit_s"), [(0, HARD_S), (1, 15.0)])
def test_a_survivor_that_spins_while_a_process_is_started_is_at_work_in_its_first_step_only(
    steps_timed: int, limit_s: float
) -> None:
    """The survivors train in the interrupted stage meanwhile, for as long as the start takes."""
    cluster = started(1.0)
    replaced(cluster)
    fields = {"generation": 2, "steps_done": 50, "steps_timed": steps_timed}

    def spinning(age_s: float) -> list[Any]:
        cluster.beat("n0", 500.0, **fields, progress_age_s=age_s, phase="reduce")
        cluster.beat("n2", 500.0, **fields, progress_age_s=age_s, phase="compute", idle_s=0.0)
        return cluster.tick(500.0)

    assert spinning(limit_s - 1.0) == []
    assert only_error(spinning(limit_s + 1.0)).worker == "n2/0"


@pytest.mark.parametrize(("steps_timed", "limit_s"), [(0, 60.0), (1, 3.0)])
def test_a_survivor_that_is_to_leave_a_step_has_the_time_of_a_fresh_start_in_the_first_one_only(
    steps_timed: int, limit_s: float
) -> None:
    cluster = started(12.0)
    replaced(cluster)
    second = only_error(cluster.signal(cluster.exited("n0/0", 2.0, generation=2), 2.0))
    restart_plan("p3", second, cluster, "n0/0", generation=2)

    def deaf(age_s: float) -> list[Any]:
        fields = {"steps_done": 50, "steps_timed": steps_timed, "hold_age_s": age_s, "progress_age_s": age_s}
        cluster.beat("n2", 500.0, generation=2, phase="compute", idle_s=age_s, **fields)
        return cluster.tick(500.0)

    assert deaf(limit_s - 0.1) == []
    assert only_error(deaf(limit_s + 0.1)).worker == "n2/0"


@pytest.mark.parametrize(("parts", "limit_s"), [(1, HARD_S), (2, COLD_FLOOR_S)])
def test_a_fresh_process_that_joins_has_that_time_too_and_in_build_what_it_does_is_work(
    parts: int, limit_s: float
) -> None:
    cluster = started(1.0)
    replaced(cluster)

    def joining(age_s: float) -> list[Any]:
        for name in ("n0", "n2"):
            cluster.beat(name, 500.0, generation=3, progress_age_s=age_s, phase="begun", steps_done=9)
        fields = {"phase": "setup", "setup_parts": parts, "steps_done": 0, "idle_s": 0.0}
        cluster.beat("n1", 500.0, generation=3, progress_age_s=age_s, **fields)
        return cluster.tick(500.0)

    assert joining(limit_s - 1.0) == []
    assert only_error(joining(limit_s + 1.0)).worker == "n1/0"


def test_a_fresh_process_that_is_held_while_it_compiles_is_not_blamed() -> None:
    """Another rank fails meanwhile: the newcomer cannot leave its step."""
    cluster = started(12.0)
    replaced(cluster)
    second = only_error(cluster.signal(cluster.exited("n2/0", 2.0, generation=3), 2.0))
    restart_plan("p3", second, cluster, "n2/0", generation=3)

    def held(age_s: float, idle_s: float) -> list[Any]:
        cluster.beat("n0", 500.0, state="waiting", phase="waiting", generation=3, progress_age_s=age_s)
        fields = {"phase": "begun", "steps_done": 0, "hold_age_s": age_s, "progress_age_s": age_s + 3.0}
        cluster.beat("n1", 500.0, generation=3, idle_s=idle_s, **fields)
        return cluster.tick(500.0)

    assert held(59.0, idle_s=62.0) == []
    assert held(HARD_S - 1.0, idle_s=10.0) == []
    hang = only_error(held(61.0, idle_s=64.0))
    assert (hang.worker, hang.evidence["limit_s"]) == ("n1/0", 60.0)


# ---- between two steps


@pytest.mark.parametrize(("idle", "limit_s"), [(True, SLOW_S), (False, HARD_S)])
@pytest.mark.parametrize("phase", ["ended", "aside"])
def test_a_rank_that_evaluates_between_two_steps_has_minutes(phase: str, idle: bool, limit_s: float) -> None:
    cluster = started()

    def evaluating(age_s: float) -> list[Any]:
        for name in ("n0", "n2"):
            cluster.beat(name, 500.0, progress_age_s=age_s, phase="reduce", steps_done=50, step=40)
        fields = {"phase": phase, "steps_done": 50, "step": 40, "idle_s": age_s if idle else 0.0}
        cluster.beat("n1", 500.0, progress_age_s=age_s, **fields)
        return cluster.tick(500.0)

    assert evaluating(limit_s - 1.0) == []
    hang = only_error(evaluating(limit_s + 1.0))
    assert (hang.kind, hang.worker) == (ErrorKind.HANG, "n1/0")
    assert "run.heartbeat()" in hang.evidence["advice"]


def test_a_task_that_fails_since_its_evaluation_is_too_long_says_what_to_call() -> None:
    cluster = Cluster(max_restarts=0)
    timed(cluster, 0.1, 0.1)
    for name in cluster.names:
        cluster.beat(name, 500.0, progress_age_s=SLOW_S + 1.0, phase="ended", step=40)
    (failed,) = [event for event in cluster.tick(500.0) if isinstance(event, TaskFailed)]
    assert failed.reason.startswith("hang (ended) at step 40 happened 1 times")
    assert "run.heartbeat()" in failed.reason


def test_a_survivor_that_evaluates_while_it_is_held_is_not_blamed() -> None:
    cluster = started()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")

    def held(age_s: float) -> list[Any]:
        cluster.beat("n0", 500.0, state="waiting", phase="waiting", progress_age_s=age_s)
        fields = {"phase": "ended", "steps_done": 50, "hold_age_s": age_s, "progress_age_s": age_s, "idle_s": age_s}
        cluster.beat("n2", 500.0, **fields)
        return cluster.tick(500.0)

    assert held(SLOW_S - 1.0) == []
    assert only_error(held(SLOW_S + 1.0)).worker == "n2/0"


# ---- beside links


def test_a_first_step_that_would_be_long_for_warm_ranks_has_the_links_asked_and_nothing_else() -> None:
    cluster = started(12.0)
    for name in cluster.names:
        cluster.beat(name, 1.0, probe=f"{name}:1")
    drain_plan(cluster)
    cluster.fold(moved("p2", 2, "restored", complete=True))
    cluster.generation = 2
    for name in cluster.names:
        cluster.beat(name, 500.0, probe=f"{name}:1", progress_age_s=20.0, phase="reduce")
    cluster.monitor.echo(at(500.0))
    task = cluster.monitor.state.tasks["gpt"]
    suspected = hangs.of_training(cluster.monitor.state, task, LIMITS.stalls, at(500.0))
    assert suspected is not None
    assert not suspected.certain
    decision = cluster.monitor.tick(at(500.0))
    assert decision.events == []
    assert {question.witness for question in decision.probes} == set(cluster.names)
