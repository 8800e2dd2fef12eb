from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.report.intervals import mean_interval, student_t


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 19, 20, 99, 100, 999])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_quantiles_are_those_of_scipy(degrees: int, confidence: float) -> None:
    import scipy.stats

    assert student_t(degrees, confidence) == pytest.approx(scipy.stats.t.ppf(0.5 + confidence / 2, degrees), rel=1e-9)


@given(st.lists(st.floats(1e18, 1e24), min_size=2, max_size=40))
def test_the_interval_is_that_of_scipy(values: list[float]) -> None:
    import scipy.stats

    found = mean_interval(values)
    spread = scipy.stats.sem(values)
    if spread <= 1e-9 * found.mean:  # scipy's sum of equal values is not exact
        assert found.low <= found.mean <= found.high
        return
    low, high = scipy.stats.t.interval(0.95, len(values) - 1, loc=found.mean, scale=spread)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9)
    assert found.mean == pytest.approx(math.fsum(values) / len(values))


def test_one_value_is_its_own_interval() -> None:
    assert mean_interval([7.0]) == (7.0, 7.0, 7.0)


def test_no_value_has_no_mean() -> None:
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])
