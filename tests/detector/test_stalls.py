"""Hangs and collective time-outs."""

from __future__ import annotations

from typing import Any

import pytest

from services.detector import stalls
from shared.events import ErrorDetected
from shared.plans import TaskChange
from shared.severities import ErrorKind, Severity
from shared.signals import WorkerStatus
from tests.detector.kit import LIMITS, Cluster, at, plan, stage


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


def test_a_stopped_process_is_the_cause_wherever_it_stands() -> None:
    waiting = [status(w, phase="reduce", progress_age_s=4.0) for w in ("n0/0", "n1/0")]
    stall = find(*waiting, status("n2/0", phase="reduce", progress_age_s=4.5, process_state="T"))
    assert stall is not None
    assert (stall.kind, stall.workers) == (ErrorKind.HANG, ("n2/0",))


def test_one_rank_that_goes_on_means_no_hang() -> None:
    assert find(status("n0/0", progress_age_s=9.0), status("n1/0", progress_age_s=0.5)) is None


@pytest.mark.parametrize(
    ("mean_s", "age_s", "hangs"), [(0.2, 2.9, False), (0.2, 3.1, True), (4.0, 11.9, False), (4.0, 12.1, True)]
)
def test_the_limit_is_three_mean_steps_and_at_least_the_floor(mean_s: float, age_s: float, hangs: bool) -> None:
    assert (find(status("n0/0", progress_age_s=age_s), mean_s=mean_s) is not None) is hangs


def test_time_without_a_cpu_is_not_held_against_a_rank() -> None:
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
    # Half the workers: a step takes twice as long.
    assert find(status("n0/0", progress_age_s=50.0), mean_s=None, previous_mean_s=2.0, growth=2.0) is None
    # Nothing known at all.
    assert find(status("n0/0", progress_age_s=100.0), mean_s=None) is None


def test_with_tensor_or_pipeline_parallelism_the_rank_furthest_behind_is_the_cause() -> None:
    ranks = [status("n0/0", micro_batch=3, progress_age_s=4.0), status("n1/0", micro_batch=2, progress_age_s=5.0)]
    stall = find(*ranks, data_parallel_only=False)
    assert stall is not None
    assert stall.workers == ("n1/0",)


def hang(cluster: Cluster, seconds: float, *, generation: int = 1) -> None:
    cluster.generation = generation
    for node in ("n0", "n1"):
        cluster.beat(node, seconds, step=10, phase="reduce", progress_age_s=4.0)
    cluster.beat("n2", seconds, step=10, progress_age_s=4.1, process_state="T")


def timed(cluster: Cluster) -> None:
    for step in range(1, 4):
        cluster.beat("n0", step / 4, step=step, step_s=0.2, steps_timed=step)


def test_a_stopped_rank_becomes_a_hang_with_its_evidence() -> None:
    cluster = Cluster()
    timed(cluster)
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
def test_ranks_that_a_plan_holds_are_not_judged_those_that_drain_are(hold: bool) -> None:
    """A hold breaks the collectives on purpose; a drain needs every rank to finish its step."""
    cluster = Cluster()
    timed(cluster)
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
    timed(cluster)
    hang(cluster, 8.0, generation=2)
    assert cluster.tick(8.1) == []
