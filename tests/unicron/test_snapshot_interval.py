"""How often snapshots are taken by themselves: the bounds hold, and all ranks come to the same interval."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.planner.checkpoint_advice import uncovered_mtbf_s
from unicron.snapshot.interval import (
    COST_SHARE,
    FLOOR_BYTES_PER_S,
    KEEP,
    LEAST_EXPONENT,
    LONGEST_REPLICATED_S,
    LONGEST_S,
    MOST_EXPONENT,
    OFTENER,
    RARER,
    WINDOW_S,
    Interval,
    StepTimes,
    best_exponent,
    loss_mtbf_s,
)
from unicron.snapshot.partners import is_replicated

DAY_S = 86_400.0
SITUATIONS = {
    "cost_s": st.floats(1e-6, 1e2),
    "step_s": st.floats(1e-3, 1e2),
    "mtbf_s": st.floats(1.0, 1e12),
    "checkpoint_every": st.sampled_from([0, 1, 5, 50, 1000]),
    "replicated": st.booleans(),
}
situations = st.fixed_dictionaries(SITUATIONS)


@given(situations)
def test_copies_never_cost_more_than_their_share(one: dict[str, Any]) -> None:
    found = best_exponent(**one)
    assume(found < MOST_EXPONENT)
    assert one["cost_s"] <= COST_SHARE * 2**found * one["step_s"] * (1.0 + 1e-9)


@given(situations, st.sampled_from(["cost_s", "mtbf_s"]), st.floats(1.0, 1e3))
def test_copies_are_rarer_the_more_they_cost_and_the_rarer_losses_are(
    one: dict[str, Any], name: str, factor: float
) -> None:
    assert best_exponent(**one) <= best_exponent(**one | {name: one[name] * factor})


@given(situations)
def test_what_a_loss_costs_is_bounded_where_the_cost_of_copies_admits_it(one: dict[str, Any]) -> None:
    steps = 2 ** best_exponent(**one)
    longest_s = LONGEST_REPLICATED_S if one["replicated"] else LONGEST_S
    affordable = 2.0 ** math.ceil(math.log2(max(1.0, one["cost_s"] / (COST_SHARE * one["step_s"]))))
    within = [2**LEAST_EXPONENT, affordable]
    assert steps <= max(longest_s / one["step_s"], *within)
    if one["checkpoint_every"]:
        assert steps <= max(one["checkpoint_every"], *within)


@given(situations)
def test_between_the_bounds_it_is_youngs_interval(one: dict[str, Any]) -> None:
    found = best_exponent(**one | {"checkpoint_every": 0})
    young = math.sqrt(2.0 * one["cost_s"] * one["mtbf_s"]) / one["step_s"]
    least = max(2**LEAST_EXPONENT, one["cost_s"] / (COST_SHARE * one["step_s"]))
    longest = (LONGEST_REPLICATED_S if one["replicated"] else LONGEST_S) / one["step_s"]
    if least <= young / 2 and young <= longest and found < MOST_EXPONENT:
        assert 2**found <= young < 2 ** (found + 1)


def test_the_gpt_of_350_million_parameters_on_one_device() -> None:
    """Copies after every step cost 7.1% of a step of 0.667 s; now they take a tenth of a percent of the time."""
    cost_s, step_s = 0.0476, 0.667
    one: dict[str, Any] = {"cost_s": cost_s, "step_s": step_s, "mtbf_s": 20 * DAY_S, "replicated": False}
    assert 2 ** best_exponent(**one, checkpoint_every=0) == 64
    assert 2 ** best_exponent(**one, checkpoint_every=50) == 32
    assert cost_s / (64 * step_s) < 0.002


@given(st.floats(1e3, 1e8), st.integers(1, 5000), st.booleans())
def test_losses_are_as_rare_as_the_planner_takes_them_to_be(node_mtbf_s: float, nodes: int, replicated: bool) -> None:
    found = loss_mtbf_s(node_mtbf_s, nodes, replicated=replicated)
    assert found == pytest.approx(uncovered_mtbf_s(node_mtbf_s, nodes, int(replicated), WINDOW_S))


def test_a_replica_in_another_domain_makes_copies_rarer() -> None:
    one: dict[str, Any] = {"cost_s": 0.05, "step_s": 0.5, "checkpoint_every": 0}
    alone = best_exponent(**one, mtbf_s=loss_mtbf_s(20 * DAY_S, 1000, replicated=False), replicated=False)
    assert alone < best_exponent(**one, mtbf_s=loss_mtbf_s(20 * DAY_S, 1000, replicated=True), replicated=True)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([("n0", "d0"), ("n1", "d1")], True),
        ([("n0", "d0"), ("n1", "d0")], True),  # one domain: two nodes
        ([("n0", "d0"), ("n0", "d0")], False),
        ([("n0", "d0"), ("n1", "d0"), ("n0", "d0"), ("n2", "d1")], False),  # the first shard has one domain of two
        ([("n0", "d0"), ("n2", "d1"), ("n2", "d1"), ("n0", "d0")], True),
    ],
)
def test_a_state_is_replicated_if_every_shard_is_in_two_domains(places: list[tuple[str, str]], expected: bool) -> None:
    shards = [(rank % (len(places) // 2), 0) for rank in range(len(places))]
    assert is_replicated(places, shards) is expected


def test_one_rank_is_no_replica() -> None:
    assert not is_replicated([("n0", "d0")], [(0, 0)])


# What is measured.


def times(durations_s: list[float | None], cost_s: float = 0.0, *, spread: int = 1) -> StepTimes:
    """Return the times of steps; a snapshot is begun before each None, and costs time in ``spread`` steps."""
    found = StepTimes()
    left = 0
    for duration_s in durations_s:
        if duration_s is None:
            found.begin_copy()
            left = spread
            continue
        found.add(duration_s + (cost_s / spread if left else 0.0), disturbed=False)
        left = max(0, left - 1)
        if not left:
            found.end_copy()
    return found


@pytest.mark.parametrize("spread", [1, 3])
def test_the_cost_is_what_its_steps_take_longer(spread: int) -> None:
    steps: list[float | None] = [1.0] * 4
    found = times([1.0, None, *steps, None, *steps, None, *steps], 0.3, spread=spread)
    assert found.cost_s(0) == pytest.approx(0.3)
    assert found.step_s() == 1.0


def test_the_first_snapshot_of_a_generation_does_not_count() -> None:
    assert times([1.0, None, 1.0, 1.0], 0.3).cost_s(0) is None


def test_without_a_step_between_snapshots_nothing_is_known() -> None:
    found = times([None, 1.0, None, 1.0], 0.3)
    assert (found.cost_s(0), found.step_s()) == (None, None)


def test_a_snapshot_costs_at_least_its_share_of_the_memorys_bandwidth() -> None:
    assert times([None, 1.0, 1.0, None, 1.0], 0.0).cost_s(10**9) == 10**9 / FLOOR_BYTES_PER_S


def test_neither_a_snapshot_nor_a_step_beside_a_checkpoint_counts() -> None:
    found = times([None, 1.0, 1.0, None, 1.0], 0.3)
    found.add(5.0, disturbed=True)
    found.begin_copy()
    found.add(7.0, disturbed=True)
    found.end_copy()
    assert found.step_s() == 1.0
    assert found.cost_s(0) == pytest.approx(0.3)


# What the ranks make of it.


@given(st.lists(st.integers(LEAST_EXPONENT, 12), min_size=1, max_size=4))
def test_the_interval_becomes_the_largest_that_a_rank_wants(best: list[int]) -> None:
    interval = Interval()
    for _ in range(20):
        interval.apply(max(interval.wish(best=one, checkpoint_every=0) for one in best))
    assert interval.exponent == max(best)


@given(st.integers(LEAST_EXPONENT, 12), st.integers(LEAST_EXPONENT, MOST_EXPONENT))
def test_the_interval_becomes_shorter_again_where_all_ranks_want_that(best: int, before: int) -> None:
    interval = Interval()
    interval.exponent = before
    for _ in range(MOST_EXPONENT):
        interval.apply(interval.wish(best=best, checkpoint_every=0))
    assert interval.exponent == best


def test_while_the_cost_is_not_known_the_distances_grow_up_to_that_of_checkpoints() -> None:
    interval = Interval()
    found = []
    for _ in range(7):
        interval.apply(interval.wish(best=None, checkpoint_every=50))
        found.append(interval.steps)
    assert found == [4, 8, 16, 32, 32, 32, 32]


def due(interval: Interval, steps: range, checkpointing: Collection[int] = ()) -> list[int]:
    """Return the boundaries at which a snapshot is begun."""
    found = []
    for applied in steps:
        if interval.is_due(applied, checkpointing=applied in checkpointing):
            interval.begin_copy()
            found.append(applied)
    return found


def test_a_generation_takes_a_snapshot_at_its_first_boundary_and_goes_on_with_the_longest_interval() -> None:
    interval = Interval()
    interval.enter([1, 3, 2])
    assert due(interval, range(11, 33)) == [11, 16, 24, 32]


def test_a_snapshot_waits_for_a_checkpoint_but_not_until_a_further_one_is_due() -> None:
    interval = Interval()
    interval.enter([3])
    assert due(interval, range(9, 40), {*range(16, 19), *range(24, 40)}) == [9, 19, 32]


@given(st.sampled_from([OFTENER, KEEP, RARER]), st.sampled_from([LEAST_EXPONENT, MOST_EXPONENT]))
def test_the_interval_stays_within_what_a_specification_may_say(wish: int, before: int) -> None:
    interval = Interval()
    interval.exponent = before
    interval.apply(wish)
    assert 2**LEAST_EXPONENT <= interval.steps <= 1_000_000
