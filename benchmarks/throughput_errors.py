"""Print how far the throughput model is from published measurements, and draw it.

    python -m benchmarks.throughput_errors [--rows] [--plot docs/throughput.svg]

There are no bounds; ``tests/planner/test_performance_measurements.py`` has them.
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import throughput_data
from benchmarks.report import Report, run
from benchmarks.throughput_data import Row
from shared.planning.performance.calibration import stack
from shared.planning.performance.hardware import profile
from shared.planning.performance.search import Estimate, estimate

TOLERANCE = 0.05
"""A choice counts as good within this of the best measured time."""

OTHER_STACKS = ("llama3 h100", "bloom")
"""Held-out runs of training software that the model does not describe (Meta's own; DeepSpeed's pipeline engine)."""

COLOURS = {
    "korthikanti": "#1b6ca8",
    "sc21": "#c8553d",
    "mtnlg": "#7a5195",
    "megatron2020": "#2f8f5b",
    "vtrain": "#b0b0b0",
    "held out": "#e0a100",
}


class Point(NamedTuple):
    """A measured row and the model's prediction."""

    row: Row
    predicted: Estimate

    @property
    def error(self) -> float:
        """Relative error of the predicted time."""
        return self.predicted.iteration_s / self.row.measured_s - 1.0


def predict(row: Row) -> Point:
    """Evaluate the layout that was measured."""
    hardware = profile(row.hardware)
    return Point(row, estimate(row.shape, row.global_batch, row.layout, hardware, stack(hardware.stack)))


def summary(points: list[Point]) -> dict[str, float]:
    """Mean absolute, greatest absolute and mean signed relative error in percent."""
    errors = [point.error for point in points]
    worst = max(errors, key=abs)
    return {
        "rows": len(errors),
        "mean_absolute_percent": round(100 * sum(map(abs, errors)) / len(errors), 2),
        "worst_percent": round(100 * worst, 1),
        "bias_percent": round(100 * sum(errors) / len(errors), 2),
        "do_not_fit": sum(p.predicted.memory.total_bytes > profile(p.row.hardware).memory_bytes for p in points),
    }


def choice_quality(points: list[Point], *, by_batch: bool) -> tuple[int, int]:
    """How often the layout predicted fastest is measured within 5% of the best measured one, of how many cases.

    A case is a model on a number of workers: at each global batch, or (by time per sequence) at any.
    """
    cases: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        row = point.row
        key = (row.shape, row.layout.workers, row.global_batch if by_batch else 0)
        cases.setdefault(key, []).append(point)
    good = total = 0
    for members in cases.values():
        if len(members) < 2:
            continue
        chosen = min(members, key=lambda p: p.predicted.iteration_s / p.row.global_batch)
        best = min(p.row.measured_s / p.row.global_batch for p in members)
        good += chosen.row.measured_s / chosen.row.global_batch <= (1.0 + TOLERANCE) * best
        total += 1
    return good, total


def svg(points: list[Point]) -> str:
    """Measured against predicted seconds, both logarithmic; lines at equality and at 20% off."""
    size, edge = 560, 60
    low, high = math.log10(0.04), math.log10(300.0)

    def at(seconds: float) -> float:
        return edge + (math.log10(seconds) - low) / (high - low) * (size - 2 * edge)

    def line(factor: float, style: str) -> str:
        x1, x2 = 0.05, 240.0
        ends = (
            f'x1="{at(x1):.1f}" y1="{size - at(x1 * factor):.1f}" x2="{at(x2):.1f}" y2="{size - at(x2 * factor):.1f}"'
        )
        return f'<line {ends} stroke="#444" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="12">',
        f'<rect width="{size}" height="{size}" fill="white"/>',
        line(1.0, ""),
        *(line(factor, 'stroke-dasharray="3 4" opacity="0.5"') for factor in (0.8, 1.2)),
    ]
    for tick in (0.1, 1.0, 10.0, 100.0):
        parts.append(f'<text x="{at(tick):.1f}" y="{size - edge + 18}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="{edge - 8}" y="{size - at(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for point in sorted(points, key=lambda p: p.row.source != "vtrain"):
        radius = 1.2 if point.row.source == "vtrain" else 3.5
        place = f'cx="{at(point.row.measured_s):.1f}" cy="{size - at(point.predicted.iteration_s):.1f}"'
        parts.append(f'<circle {place} r="{radius}" fill="{COLOURS[point.row.source]}" fill-opacity="0.75"/>')
    for number, (source, colour) in enumerate(COLOURS.items()):
        y = edge + 16 * number
        parts.append(f'<circle cx="{edge + 10}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{edge + 20}" y="{y + 4}">{source}</text>')
    parts.append(f'<text x="{size / 2}" y="{size - 14}" text-anchor="middle">measured iteration (s)</text>')
    parts.append(f'<text transform="translate(16 {size / 2}) rotate(-90)" text-anchor="middle">predicted (s)</text>')
    parts.append(f'<text x="{size / 2}" y="30" text-anchor="middle">dashed: 20% off</text>')
    return "\n".join([*parts, "</svg>", ""])


def print_rows(points: list[Point], report: Report) -> None:
    """Print measured and predicted seconds of each row."""
    for point in points:
        row, seconds = point.row, point.predicted.iteration_s
        report.line("row", name=row.name, measured_s=row.measured_s, predicted_s=seconds, error=round(point.error, 3))


def measure(options: argparse.Namespace, report: Report) -> None:
    """Print the errors of each set; with ``--plot``, draw them."""
    points: list[Point] = []
    for name, read in throughput_data.SETS.items():
        members = [predict(row) for row in read()]
        points += members
        report.line("fitted", set=name, **summary(members))
        if options.rows and name != "vtrain":
            print_rows(members, report)
    others = [predict(row) for row in throughput_data.held_out()]
    for name in dict.fromkeys(point.row.source for point in others):
        members = [point for point in others if point.row.source == name]
        report.line("held out", set=name, **summary(members))
        if options.rows:
            print_rows(members, report)
    megatron = [point for point in others if point.row.source not in OTHER_STACKS]
    report.line("held out", set="all on Megatron-LM", **summary(megatron))
    small = [point for point in points if point.row.source == "vtrain"]
    padded = [predict(row) for row in throughput_data.vtrain(throughput_data.PADDED_VOCABULARY)]
    report.line("fitted", set="vtrain, vocabulary 51200", **summary(padded))
    for by_batch in (False, True):
        good, total = choice_quality(small, by_batch=by_batch)
        case = "model, workers, batch" if by_batch else "model, workers"
        report.line("choice", choice=case, good=good, cases=total, percent=round(100 * good / total, 1))
    if options.plot:
        # A quarter of the many small rows shows where they lie, and keeps the file small.
        drawn = [p for p in points if p.row.source != "vtrain"] + small[::4]
        drawn += [Point(p.row._replace(source="held out"), p.predicted) for p in others]
        options.plot.write_text(svg(drawn))


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="every row but vTrain's")
    parser.add_argument("--plot", type=Path, help="write an SVG here")
    options = parser.parse_args()
    return run(partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
