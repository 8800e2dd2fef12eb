"""Durations by age: what they say of how long something will still last."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.durations import EDGES_S, NOTHING, Observed, bin_of, rates_per_s, remaining_s

DURATIONS = st.lists(st.tuples(st.floats(0.0, 1e7), st.booleans()), max_size=20)
DAY_S = 86_400.0


def observed(durations: list[tuple[float, bool]]) -> Observed:
    found = NOTHING
    for duration_s, ended in durations:
        found = found.with_one(duration_s, ended=ended)
    return found


def until_s(observations: Observed, age_s: float, *, prior_s: float = DAY_S) -> float:
    """The median of what remains: the hazard of ln 2."""
    return remaining_s(rates_per_s(observations, prior_s), age_s, math.log(2.0))


@given(DURATIONS)
def test_all_time_and_all_ends_are_in_a_bin(durations: list[tuple[float, bool]]) -> None:
    found = observed(durations)
    assert sum(found.spent_s) == pytest.approx(sum(duration_s for duration_s, _ in durations))
    assert sum(found.ends) == sum(ended for _, ended in durations)


@given(st.floats(1.0, 1e6))
def test_the_prior_is_one_duration_of_its_mean(prior_s: float) -> None:
    ends = (*EDGES_S[1:], math.inf)
    times = [prior_s**2 * (1 / (prior_s + a) - 1 / (prior_s + b)) for a, b in zip(EDGES_S, ends, strict=True)]
    assert sum(times) == pytest.approx(prior_s)
    rates = rates_per_s(NOTHING, prior_s)
    assert sum(r * t for r, t in zip(rates, times, strict=True)) == pytest.approx(1.0)


@given(DURATIONS, st.floats(0.0, 1e6), st.floats(1e-9, 30.0))
def test_what_remains_is_where_the_rates_add_up_to_the_hazard(
    durations: list[tuple[float, bool]], age_s: float, hazard: float
) -> None:
    rates = rates_per_s(observed(durations), DAY_S)
    end_s = age_s + remaining_s(rates, age_s, hazard)
    total = 0.0
    for bin_, (since, until) in enumerate(zip(EDGES_S, (*EDGES_S[1:], math.inf), strict=True)):
        total += rates[bin_] * max(0.0, min(end_s, until) - max(age_s, since))
    assert total == pytest.approx(hazard, rel=1e-6, abs=1e-9)


def test_a_few_short_repairs_outweigh_the_prior() -> None:
    assert until_s(NOTHING, 0.0) > 8 * 3600
    short = observed([(600.0, True), (900.0, True), (300.0, True)])
    assert until_s(short, 0.0) < 1800


def test_what_lasts_longer_than_all_before_is_not_expected_soon() -> None:
    short = observed([(600.0, True), (900.0, True), (300.0, True)])
    assert until_s(short, 6 * 3600.0) > 4 * 3600


def test_what_has_not_ended_counts_with_its_time() -> None:
    away = observed([(600.0, True)] + [(900.0, False)] * 20)
    assert until_s(away, 0.0) > 3 * until_s(observed([(600.0, True)]), 0.0)


@pytest.mark.parametrize(("age_s", "number"), [(-1.0, 0), (0.0, 0), (59.9, 0), (60.0, 1), (1e9, len(EDGES_S) - 1)])
def test_bins(age_s: float, number: int) -> None:
    assert bin_of(age_s) == number
