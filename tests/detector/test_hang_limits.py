"""For how long ranks may stand still before they count as hanging."""

from __future__ import annotations

from typing import Any

import pytest

from shared.events.severities import ErrorKind
from tests.detector.hanging import drain_plan, held_from, joining, stalled, stopped_from
from tests.detector.kit import Cluster, moved, only_error, restart_plan, timed


def test_a_task_with_uneven_steps_is_given_more_time() -> None:
    cluster = Cluster()
    timed(cluster, 1.0, 3.0, 1.0, 3.0)
    assert stalled(cluster, 7.9, "n1") == []
    assert only_error(stalled(cluster, 8.1, "n1")).evidence["limit_s"] == 8.0


def test_a_task_with_uneven_steps_is_given_more_time_while_it_drains() -> None:
    cluster = Cluster()
    timed(cluster, 1.0, 3.0, 1.0, 3.0)
    drain_plan(cluster)
    assert stalled(cluster, 7.9, "n1") == []
    assert only_error(stalled(cluster, 8.1, "n1")).evidence["limit_s"] == 8.0


def test_a_task_with_uneven_steps_is_given_more_time_to_leave_one() -> None:
    cluster = Cluster()
    timed(cluster, 1.0, 3.0, 1.0, 3.0)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    assert held_from(cluster, 1.0, 9.0) == []
    assert only_error(held_from(cluster, 1.0, 9.25)).evidence["limit_s"] == 8.0


@pytest.mark.parametrize(("phase", "limit_s"), [("compute", 3.0), ("setup", 8.0), ("checkpoint", None)])
def test_a_rank_that_is_held_while_it_joins_has_the_time_that_joining_takes(phase: str, limit_s: float | None) -> None:
    """A rank in the user's ``build`` cannot leave it."""
    cluster = Cluster(trained=False)
    cluster.fold(moved("p1", 1, "restored", complete=True, durations_s={"rebuild": 1.5, "agree": 0.1}))
    timed(cluster, 0.1, 0.1)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    if limit_s is None:
        assert held_from(cluster, 1.0, 12.0, phase=phase) == []
    else:
        assert held_from(cluster, 1.0, 1.0 + limit_s, phase=phase) == []
        hang = only_error(held_from(cluster, 1.0, 1.25 + limit_s, phase=phase))
        assert (hang.kind, hang.worker, hang.evidence["limit_s"]) == (ErrorKind.HANG, "n2/0", limit_s)


def test_the_first_step_of_a_generation_is_judged_by_the_steps_of_the_one_before() -> None:
    """With fewer workers each of them has more to do."""
    cluster = Cluster()
    timed(cluster, 2.0, 2.0)
    drain_plan(cluster)
    cluster.fold(moved("p2", 2, "restored", complete=True))
    cluster.generation = 2
    assert stalled(cluster, 44.9, "n1") == []
    hang = only_error(stalled(cluster, 45.1, "n1"))
    assert (hang.generation, hang.evidence["limit_s"]) == (2, 45.0)


def test_the_first_step_of_a_stage_of_a_plan_is_judged_by_the_steps_before_it() -> None:
    """Two survivors finish the step that the third rank's end broke, while its successor starts."""
    cluster = Cluster()
    timed(cluster, 2.0, 2.0)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")

    def finishing(age_s: float) -> list[Any]:
        for name in ("n0", "n2"):
            cluster.beat(name, 500.0, generation=2, progress_age_s=age_s)
        cluster.beat("n1", 500.0, state="ready", generation=2, phase=None, progress_age_s=None)
        return cluster.tick(500.0)

    assert finishing(44.9) == []
    hang = only_error(finishing(45.1))
    assert (hang.generation, hang.evidence["limit_s"], hang.evidence["workers"]) == (2, 45.0, ["n0/0", "n2/0"])


@pytest.mark.parametrize(
    ("source", "limit_s"), [("live", 5.0), ("take", 5.0), ("checkpoint", 120.0), ("initial", 120.0)]
)
def test_only_a_state_from_memory_bounds_the_time_of_joining(source: str, limit_s: float) -> None:
    """How long a read from storage takes is not known."""
    cluster = Cluster()
    timed(cluster, 0.1, 0.1)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0", source=source)
    cluster.fold(moved("p2", 2, "resumed", step=17, durations_s={"rebuild": 0.3, "agree": 0.1}))
    parts: dict[str, int | None] = {"n0": 2, "n1": 1, "n2": 2}
    assert joining(cluster, limit_s - 0.1, parts) == []
    assert only_error(joining(cluster, limit_s + 0.1, parts)).evidence["limit_s"] == limit_s


def test_a_task_with_slow_steps_may_be_stopped_for_longer_in_any_phase() -> None:
    cluster = Cluster()
    timed(cluster, 2.0, 2.0)
    assert stopped_from(cluster, "n2", 1.0, 7.0, phase="checkpoint") == []
    hang = only_error(stopped_from(cluster, "n2", 7.25, 7.25, phase="checkpoint"))
    assert (hang.kind, hang.worker) == (ErrorKind.HANG, "n2/0")
    assert (hang.evidence["stalled_s"], hang.evidence["limit_s"]) == (6.25, 6.0)
