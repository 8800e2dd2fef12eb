"""What the benchmark of the simulator makes of outcomes."""

from __future__ import annotations

import pytest

from benchmarks.evaluation_runs import gain, mean_waf
from benchmarks.evaluation_targets import PublishedRatio, published_ratios
from tests.simulator.report_kit import DAY_S, outcome


def test_the_published_ratios_are_read_one_by_one() -> None:
    found = published_ratios()
    assert len(found) == 8
    assert PublishedRatio("trace-b", "megatron", 1.9, "read") in found
    assert PublishedRatio("trace-a", "oobleck", 3.7, "recalled") in found
    assert PublishedRatio("trace-b", "varuna", 5.8, "recalled") in found


def test_gains_are_paired_by_seed() -> None:
    theirs = [outcome("megatron", seed, rate=rate) for seed, rate in enumerate((1e15, 2e15, 4e15))]
    ours = [outcome("unicron", seed, rate=rate) for seed, rate in enumerate((1.1e15, 2.2e15, 4e15))]
    found = gain(ours, theirs)
    assert found.mean.mean == pytest.approx(0.2 / 3)
    assert found.worst == pytest.approx(0.0)
    assert found.mean.low < 0.0 < found.mean.high, "three seeds, one without a gain, prove nothing"
    assert mean_waf(theirs) == pytest.approx(3.5 * DAY_S * 7e15 / 3)
