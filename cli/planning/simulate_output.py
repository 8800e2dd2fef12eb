"""What ``unicron simulate`` prints and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cli.output import print_json_line, print_table
from simulator.outcome import Outcome
from simulator.report.page import Material, page, seconds, si
from simulator.report.summary import Comparison, PolicyLine, compare
from simulator.workloads.workload import Workload

if TYPE_CHECKING:
    from simulator.report.plots import PictureFormat

_SHARES = {
    "USEFUL": ("useful",),
    "DETECT": ("detection",),
    "MOVING": ("transition_incident", "transition_planned"),
    "RECOMP": ("recompute",),
    "LOST": ("lost",),
    "SUB-H": ("sub_healthy",),
    "UNUSED": ("idle", "unscheduled"),
}
"""Columns of the second table, each with the kinds of time in it: few enough for a terminal of 80 columns."""


@dataclass(frozen=True)
class Results:
    """The outcomes of all runs: ``outcomes`` by policy, in the order of the seeds; ``workload`` of the first seed."""

    workload: Workload
    outcomes: Mapping[str, Sequence[Outcome]]
    wall_s: float
    command: str

    @cached_property
    def comparison(self) -> Comparison:
        """The means of all seeds."""
        return compare(self.workload.trace.name, self.outcomes, self.wall_s, endless=self.workload.endless)

    @property
    def of_first_seed(self) -> dict[str, Outcome]:
        """The outcome of each policy with the first seed."""
        return {name: runs[0] for name, runs in self.outcomes.items()}


def show(results: Results, output: str) -> None:
    """Print the results as a table, as a line of JSON, or as a page."""
    if output == "json":
        print_json_line(results.comparison.document())
    elif output == "html":
        print(_page(results), end="")
    else:
        _show_tables(results.comparison)


def write_plots(results: Results, folder: Path, file_format: PictureFormat) -> None:
    """Write each plot to a file of its own."""
    from simulator.report.plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw(results.workload.trace, results.of_first_seed, results.comparison.policies, file_format)
    for name, content in pictures.items():
        (folder / f"{name}.{file_format}").write_bytes(content)


def _page(results: Results) -> str:
    from simulator.policies import POLICIES

    return page(Material(results.comparison, results.workload, results.of_first_seed, POLICIES, results.command))


def _show_tables(comparison: Comparison) -> None:
    lines = comparison.policies
    print_table(
        ("POLICY", "WAF", "95% +-", "RATIO", "BOUND", "MOVES", "P50", "P99"),
        [
            (
                line.name,
                si(line.accumulated_waf_flop, "FLOP"),
                _half_width(line),
                _ratio(line.ratio_to_megatron),
                _ratio(line.ratio_to_oracle),
                line.transitions,
                seconds(line.recovery_p50_s),
                seconds(line.recovery_p99_s),
            )
            for line in lines
        ],
    )
    print()
    print_table(("POLICY", *_SHARES), [(line.name, *_shares(line)) for line in lines if line.worker_s])
    if not comparison.endless:
        print()
        tasks = sorted({task for line in lines for task in line.completed_s})
        rows = [(line.name, *(seconds(line.completed_s.get(task)) for task in tasks)) for line in lines]
        print_table(("COMPLETED AFTER", *tasks), rows)
    count = "1 seed" if comparison.seeds == 1 else f"means of {comparison.seeds} seeds"
    print(f"\n{comparison.trace}, {count}; simulated in {seconds(comparison.wall_s)}")
    print("WAF: accumulated, 95%: of its mean; RATIO: to megatron's, BOUND: to the oracle's")
    print("MOVES: transitions; P50, P99: from a fault to the next step")
    print("USEFUL to UNUSED: % of the worker-seconds (MOVING, UNUSED: two kinds each)")


def _half_width(line: PolicyLine) -> str:
    low, high = line.interval
    mean = line.accumulated_waf_flop
    return f"{100 * (high - low) / 2 / mean:.2f}%" if mean and high > low else "-"


def _shares(line: PolicyLine) -> list[str]:
    total = sum(line.worker_s.values())
    named = {kind for kinds in _SHARES.values() for kind in kinds}
    assert line.worker_s.keys() <= named, line.worker_s.keys() - named
    return [f"{100 * sum(line.worker_s.get(kind, 0.0) for kind in kinds) / total:.2f}" for kinds in _SHARES.values()]


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"
