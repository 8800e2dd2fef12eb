from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.outcome import WafPoint
from simulator.report.page import seconds, si
from simulator.report.plots import absences, accumulated, steps
from tests.simulator.report_kit import DAY_S, outcome, trace

POINTS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=20).map(
    lambda pairs: [WafPoint(*pair) for pair in sorted(pairs, key=lambda pair: pair[0])]
)


@given(POINTS, st.floats(1, 100))
def test_steps_go_from_0_to_the_horizon(points: list[WafPoint], horizon_s: float) -> None:
    times, rates = steps(points, horizon_s)
    assert (times[0], times[-1], len(rates)) == (0.0, horizon_s, len(times))
    assert all(a < b for a, b in itertools.pairwise(times))
    at_end = [rate for at_s, rate in points if at_s <= horizon_s]
    assert rates[-1] == (at_end[-1] if at_end else 0.0)


def test_the_curve_ends_at_what_remains() -> None:
    times, done = accumulated(outcome(rate=2e15, share=0.9))
    assert times == [0.0, DAY_S, 2 * DAY_S, 4 * DAY_S]
    assert done == pytest.approx([0.0, 0.9 * 2e15 * DAY_S, 0.9 * 3e15 * DAY_S, 0.9 * 7e15 * DAY_S])


def test_nothing_done_is_a_curve_of_zeros() -> None:
    assert accumulated(outcome(rate=0.0))[1] == [0.0] * 4
    assert accumulated(outcome(waf=[], accumulated_waf_flop=0.0))[1] == [0.0, 0.0]


def test_a_node_is_away_until_it_first_joins_and_from_its_loss_to_its_return() -> None:
    assert absences(trace()) == {"n0": [], "n1": [(DAY_S, 3 * DAY_S)], "n2": [(0.0, 2 * DAY_S)]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0 FLOP"), (999.0, "999 FLOP"), (6.2154e22, "62.15 ZFLOP"), (1e15, "1 PFLOP"), (5e33, "5000 QFLOP")],
)
def test_amounts_have_si_prefixes(value: float, expected: str) -> None:
    assert si(value, "FLOP") == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "-"), (0.0312, "0.0312 s"), (119.0, "119 s"), (4080.0, "68 min"), (10_800.0, "3 h"), (604_800.0, "7 d")],
)
def test_times_have_the_unit_of_a_person(value: float | None, expected: str) -> None:
    assert seconds(value) == expected
