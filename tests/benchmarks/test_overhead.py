"""When the comparison with stock Megatron has enough pairs of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.overhead_model import Workload
from benchmarks.overhead_rank import Plan, is_decided


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "bound", "decided"),
    [
        (0.004, 1.01, True),  # met: the interval is below the bound
        (0.004, 1.0, False),  # the bound lies inside
        (0.004, 0.99, True),  # missed: the interval is above the bound
        (0.2, 1.5, False),  # wider than asked for
    ],
)
def test_a_ratio_is_decided_once_its_interval_is_narrow_and_on_one_side_of_the_bound(
    spread: float, bound: float, decided: bool
) -> None:
    ratios = [1.0 + spread * (i - 25) / 25 for i in range(51)]
    assert is_decided(ratios, bound, width=0.02) is decided


def test_the_ranks_read_the_plan_that_was_written(tmp_path: Path) -> None:
    for plan in (
        Plan(work=Workload(tensor=2, sequence_parallel=True), most_pairs=50, most_s=70, bounds={"wall time": 1.01}),
        Plan(work=Workload()),
    ):
        plan.write(tmp_path)
        assert Plan.read(tmp_path) == plan
