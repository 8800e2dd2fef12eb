"""Hangs and collective time-outs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.detector.state import stalls
from shared.events.plans import TaskChange
from shared.events.severities import ErrorKind, Severity
from shared.events.union import ErrorDetected
from shared.messages.signals import WorkerStatus
from tests.agent.kit import stage
from tests.detector.kit import LIMITS, Cluster, at, plan, timed


def status(worker: str, **fields: Any) -> WorkerStatus:
    base = {"worker": worker, "state": "training", "task": "gpt", "generation": 1, "step": 10, "phase": "compute"}
    return WorkerStatus.model_validate({**base, "progress_age_s": 0.0, **fields})


def find(*statuses: WorkerStatus, mean_s: float | None = 0.2, **rest: Any) -> stalls.Stall | None:
    options = {"previous_mean_s": None, "growth": 1.0, "data_parallel_only": True, **rest}
    return stalls.find({s.worker: s for s in statuses}, mean_s=mean_s, limits=LIMITS.stalls, **options)


def test_the_rank_that_has_not_reached_the_collective_hangs() -> None:
    waiting = [status(w, phase="reduce", progress_age_s=4.0) for w in ("n0/0", "n1/0")]
    stall = find(*waiting, status("n2/0", progress_age_s=4.5, micro_batch=1))
    assert stall is not None
    assert (stall.kind, stall.workers) == (ErrorKind.HANG, ("n2/0",))
    assert (stall.stalled_s, stall.limit_s) == (4.0, 3.0)


def test_a_collective_that_all_have_reached_times_out() -> None:
    stall = find(*(status(f"n{i}/0", phase="reduce", progress_age_s=6.0 + i) for i in range(3)))
    assert stall is not None
    assert (stall.kind, stall.workers) == (ErrorKind.COLLECTIVE_TIMEOUT, ())


def test_a_collective_that_all_have_reached_is_given_more_time_than_a_rank() -> None:
    """It moves data in other threads, whose waits for a CPU are not counted."""
    assert find(*(status(f"n{i}/0", phase="reduce", progress_age_s=4.9) for i in range(3))) is None


def test_a_rank_that_never_made_progress_shows_no_stall() -> None:
    """Nothing is known of it: the others may wait for it as they should."""
    known = [status(w, phase="reduce", progress_age_s=200.0) for w in ("n0/0", "n1/0")]
    assert find(*known) is not None
    assert find(*known, status("n2/0", progress_age_s=None)) is None


def test_a_stopped_process_is_the_cause_wherever_it_stands() -> None:
    waiting = [status(w, phase="reduce", progress_age_s=4.0) for w in ("n0/0", "n1/0")]
    stall = find(*waiting, status("n2/0", phase="reduce", progress_age_s=4.5, process_state="T"))
    assert stall is not None
    assert (stall.kind, stall.workers) == (ErrorKind.HANG, ("n2/0",))


def test_one_rank_that_goes_on_means_no_hang() -> None:
    assert find(status("n0/0", progress_age_s=9.0), status("n1/0", progress_age_s=0.5)) is None


@pytest.mark.parametrize(
    ("mean_s", "age_s", "hangs"),
    [(0.2, 2.9, False), (0.2, 3.0, False), (0.2, 3.1, True), (4.0, 11.9, False), (4.0, 12.1, True)],
)
def test_the_limit_is_three_mean_steps_and_at_least_the_floor(mean_s: float, age_s: float, hangs: bool) -> None:
    assert (find(status("n0/0", progress_age_s=age_s), mean_s=mean_s) is not None) is hangs


def test_time_without_a_cpu_does_not_count_against_a_rank() -> None:
    waiting = status("n0/0", phase="reduce", progress_age_s=9.0)
    assert find(waiting, status("n1/0", progress_age_s=9.0, starved_s=6.1)) is None
    stall = find(waiting, status("n1/0", progress_age_s=9.0, starved_s=5.9))
    assert stall is not None
    assert stall.workers == ("n1/0",)
    assert stall.stalled_s == pytest.approx(3.1)


def test_steps_that_vary_much_are_given_more_time() -> None:
    late = status("n0/0", progress_age_s=6.1)
    assert find(late, mean_s=1.0, deviation_s=0.8) is not None
    assert find(late, mean_s=1.0, deviation_s=0.9) is None


@pytest.mark.parametrize("phase", ["setup", "checkpoint", "waiting"])
def test_slow_regions_have_their_own_limit(phase: str) -> None:
    assert find(status("n0/0", phase=phase, progress_age_s=100.0), status("n1/0", progress_age_s=100.0)) is None
    stall = find(status("n0/0", phase=phase, progress_age_s=121.0), status("n1/0", progress_age_s=121.0))
    assert stall is not None
    assert stall.limit_s == 120.0


def test_the_first_step_of_a_generation_is_given_more_time() -> None:
    assert find(status("n0/0", progress_age_s=14.0), mean_s=None, previous_mean_s=0.2) is None
    assert find(status("n0/0", progress_age_s=16.0), mean_s=None, previous_mean_s=0.2) is not None
    # More workers are no reason for a shorter limit.
    stall = find(status("n0/0", progress_age_s=31.0), mean_s=None, previous_mean_s=2.0, growth=0.5)
    assert stall is not None
    assert stall.limit_s == 30.0
    # Half the workers: a step takes twice as long.
    assert find(status("n0/0", progress_age_s=50.0), mean_s=None, previous_mean_s=2.0, growth=2.0) is None
    # Nothing known at all.
    assert find(status("n0/0", progress_age_s=100.0), mean_s=None) is None


def test_with_tensor_or_pipeline_parallelism_the_rank_furthest_behind_is_the_cause() -> None:
    ranks = [status("n0/0", micro_batch=3, progress_age_s=4.0), status("n1/0", micro_batch=2, progress_age_s=5.0)]
    stall = find(*ranks, data_parallel_only=False)
    assert stall is not None
    assert stall.workers == ("n1/0",)


def test_with_data_parallelism_all_ranks_that_are_late_are_the_cause() -> None:
    late = [status("n1/0", progress_age_s=4.0), status("n2/0", micro_batch=2, progress_age_s=4.0)]
    stall = find(status("n0/0", phase="reduce", progress_age_s=4.0), *late)
    assert stall is not None
    assert stall.workers == ("n1/0", "n2/0")


@pytest.mark.parametrize(
    ("behind", "ahead"),
    [
        ({"micro_batch": 1, "progress_age_s": 4.0}, {"micro_batch": 2, "progress_age_s": 5.0}),
        ({"micro_batch": None, "progress_age_s": 4.0}, {"micro_batch": 1, "progress_age_s": 5.0}),
        ({"step": 9, "phase": "update", "progress_age_s": 4.0}, {"progress_age_s": 5.0}),
        ({"phase": "begun", "progress_age_s": 4.0}, {"progress_age_s": 5.0}),
        ({"phase": "setup", "progress_age_s": 130.0}, {"phase": "begun", "progress_age_s": 140.0}),
        ({"progress_age_s": 5.0}, {"progress_age_s": 4.0}),  # equally far, and for longer
    ],
)
def test_the_rank_furthest_behind_is_the_one_with_the_least_done(behind: dict[str, Any], ahead: dict[str, Any]) -> None:
    for first, last in (("n0/0", "n1/0"), ("n1/0", "n0/0")):
        stall = find(status(first, **behind), status(last, **ahead), data_parallel_only=False)
        assert stall is not None
        assert stall.workers == (first,)


def test_a_rank_that_has_done_no_part_of_joining_is_behind_one_that_has_done_a_part() -> None:
    ranks = [status(f"n{i}/0", phase="setup", setup_parts=i or None, progress_age_s=6.0) for i in range(2)]
    stall = find(*ranks, setup_s=0.1)
    assert stall is not None
    assert (stall.workers, stall.limit_s) == (("n0/0",), 5.0)


@pytest.mark.parametrize(
    ("progress_age_s", "starved_s", "own_s"), [(None, 0.0, None), (0.5, 0.2, 0.3), (0.5, 0.6, 0.0)]
)
def test_the_time_in_which_a_rank_could_run(
    progress_age_s: float | None, starved_s: float, own_s: float | None
) -> None:
    found = stalls.own_age_s(status("n0/0", progress_age_s=progress_age_s, starved_s=starved_s))
    assert found == (own_s if own_s is None else pytest.approx(own_s))


@pytest.mark.parametrize(
    ("fields", "unheeded_s"),
    [
        ({"hold_age_s": 4.0, "progress_age_s": 9.0}, 4.0),
        ({"hold_age_s": 9.0, "progress_age_s": 4.0, "starved_s": 1.0}, 3.0),  # a micro-batch has ended since
        ({"hold_age_s": 0.5, "progress_age_s": 9.0, "starved_s": 0.7}, 0.0),
        ({"hold_age_s": None, "progress_age_s": 9.0}, 0.0),
        ({"hold_age_s": 4.0, "progress_age_s": None}, 0.0),
        ({"hold_age_s": 4.0, "progress_age_s": 9.0, "state": "waiting"}, 0.0),
    ],
)
def test_the_time_in_which_a_rank_could_have_left_its_step(fields: dict[str, Any], unheeded_s: float) -> None:
    assert stalls.unheeded_hold_s(status("n0/0", **fields)) == unheeded_s


@pytest.mark.parametrize(("mean_s", "limit_s"), [(None, 0.5), (0.1, 0.5), (2.0, 6.0)])
def test_a_process_may_be_stopped_for_three_mean_steps_and_at_least_the_floor(
    mean_s: float | None, limit_s: float
) -> None:
    assert stalls.stopped_limit_s(mean_s, replace(LIMITS.stalls, stop_floor_s=0.5)) == limit_s


def hang(cluster: Cluster, seconds: float, *, generation: int = 1) -> None:
    cluster.generation = generation
    for node in ("n0", "n1"):
        cluster.beat(node, seconds, step=10, phase="reduce", progress_age_s=4.0)
    cluster.beat("n2", seconds, step=10, progress_age_s=4.1, process_state="T")


def test_a_stopped_rank_becomes_a_hang_with_its_evidence() -> None:
    cluster = Cluster()
    timed(cluster, 0.2, 0.2)
    hang(cluster, 8.0)
    events = cluster.tick(8.1)
    assert [type(e) for e in events] == [ErrorDetected]
    error = events[0]
    assert isinstance(error, ErrorDetected)
    assert (error.kind, error.severity, error.worker) == (ErrorKind.HANG, Severity.SEV2, "n2/0")
    assert (at(8.1) - error.occurred_at).total_seconds() == 4.0
    assert error.evidence["ranks"]["n2/0"]["process_state"] == "T"
    assert error.evidence["workers"] == ["n2/0"]
    assert error.evidence["mean_step_s"] == pytest.approx(0.2)
    assert cluster.tick(8.2) == []


@pytest.mark.parametrize("hold", [True, False])
def test_ranks_that_are_held_are_not_judged_and_those_that_drain_are(hold: bool) -> None:
    """A hold breaks the collectives on purpose; a drain needs every rank to finish its step."""
    cluster = Cluster()
    timed(cluster, 0.2, 0.2)
    change = TaskChange(
        task="gpt",
        reason="grow",
        action="move",
        from_generation=1,
        survivors=cluster.workers,
        hold=hold,
        target=stage(2, ["n0/0"]),
    )
    cluster.fold(plan("p2", "joined", change))
    hang(cluster, 8.0)
    assert [e.kind for e in cluster.tick(8.1)] == ([] if hold else [ErrorKind.HANG])


def test_ranks_of_another_generation_are_not_judged() -> None:
    cluster = Cluster()
    timed(cluster, 0.2, 0.2)
    hang(cluster, 8.0, generation=2)
    assert cluster.tick(8.1) == []
