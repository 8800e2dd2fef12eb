"""How long to train between two checkpoints: the formulas against what they minimise, and what plans advise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.api.plan_text import explain
from services.planner.checkpoint_advice import checkpoint_every_s, interval_s, uncovered_mtbf_s
from shared.errors import InvalidInput
from tests.planner.kit import World, running


def wasted(every_s: float, cost_s: float, mtbf_s: float) -> float:
    """Wall time per time of progress (Daly 2006, equation 13, without the time to restart).

    With exponential failures, a segment of ``every_s + cost_s`` takes M (exp((every + cost) / M) - 1) in the mean.
    """
    return mtbf_s * math.expm1((every_s + cost_s) / mtbf_s) / every_s


@given(st.floats(0.01, 1e3), st.floats(1e3, 1e7))
def test_no_other_interval_wastes_noticeably_less(cost_s: float, mtbf_s: float) -> None:
    best_s = interval_s(cost_s, mtbf_s)
    least = min(wasted(best_s * factor, cost_s, mtbf_s) for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0))
    assert wasted(best_s, cost_s, mtbf_s) <= least * 1.01


def test_cheap_checkpoints_follow_young() -> None:
    assert interval_s(1.0, 1e6) == pytest.approx(math.sqrt(2e6), rel=2e-3)


def test_checkpoints_that_cost_more_than_failures_are_as_rare_as_those() -> None:
    assert interval_s(500.0, 200.0) == 200.0


@pytest.mark.parametrize(("cost_s", "mtbf_s", "field"), [(0.0, 1.0, "cost_s"), (1.0, -1.0, "mtbf_s")])
def test_times_are_positive(cost_s: float, mtbf_s: float, field: str) -> None:
    with pytest.raises(InvalidInput, match=f"{field}.*above 0"):
        interval_s(cost_s, mtbf_s)


def test_copies_make_losses_rare_that_read_a_checkpoint() -> None:
    assert uncovered_mtbf_s(1e6, 10, 0, 100.0) == 1e5
    assert uncovered_mtbf_s(1e6, 10, 1, 100.0) == 1e5 * 1e4


def test_plans_advise_shorter_intervals_where_nodes_are_lost_more_often() -> None:
    def advised(losses: int, **checkpoint: int) -> float:
        w = World(mtbf_node_s=1e6)
        for node in ("n0", "n1", "n2", "n3"):
            w.join(node)
        for _ in range(losses):
            w.lose("n3")
            w.join("n3")
        plan = w.submit("a", steps=10**9, workers={"min": 1}, checkpoint=checkpoint)
        assert plan.checkpoint_every_s == checkpoint_every_s(w.state, w.now)
        w.complete(plan)
        return w.lose("n3").checkpoint_every_s["a"]

    assert advised(0) > advised(20)


def test_a_task_that_leaves_is_given_no_advice() -> None:
    w = running(mtbf_node_s=1e6)
    assert set(w.submit("b", steps=10**9, weight=1e-3).checkpoint_every_s) == {"a", "b"}
    assert set(w.finish("a").checkpoint_every_s) == {"b"}


def test_a_plan_says_how_often_to_write_checkpoints() -> None:
    assert "these checkpoints lose the least: a every" in explain(running().lose("n1"))


def test_a_task_with_copies_needs_fewer_checkpoints() -> None:
    def advised(memory_every: int | str) -> float:
        w = World(mtbf_node_s=1e6)
        for node in ("n0", "n1"):
            w.join(node)
        parallel = {"distributed_optimizer": True}
        checkpoint = {"memory_every": memory_every}
        w.complete(w.submit("a", steps=10**9, workers={"min": 1}, checkpoint=checkpoint, parallel=parallel))
        return checkpoint_every_s(w.state, w.now)["a"]

    assert advised(1) == advised("auto") > 10.0 * advised(0)
