"""How often any regular law could choose well among vTrain's layouts at a fixed batch.

    python -m benchmarks.throughput_ceiling

The rows are linear in layers and micro-batches, so each (hidden, tensor, micro-batch) has one measured time of a layer.
The model's time of a layer is replaced by that measured time; by the nearest times (least squares) that do not fall as
the micro-batch grows; and by the nearest that do not fall as micro-batch or hidden size grow. The last two are fitted
to the very rows they are judged on: a law that more work never takes less time, however it is calibrated, is unlikely
to do better. There are no bounds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from benchmarks import throughput_data
from benchmarks.report import Report, run
from benchmarks.throughput_data import Row
from benchmarks.throughput_errors import Point, choice_quality, predict
from shared.planning.performance.calibration import stack
from shared.planning.performance.hardware import profile
from shared.planning.performance.layer import layer_cost

Cell = tuple[int, int, int]
"""Hidden size, tensor-parallel size, micro-batch: what decides a layer's time in these rows."""

HIDDEN, TENSOR, MICRO_BATCH = (1024, 2048), (1, 2, 4, 8), (1, 2, 4, 8)
ROUNDS = 500
"""Of alternating projections (Dykstra); they settle well before."""


def cell_of(row: Row) -> Cell:
    """The cell that a row's layers belong to."""
    return row.shape.hidden, row.layout.tensor, row.layout.micro_batch


def measured_cells(rows: list[Row]) -> dict[Cell, float]:
    """Seconds of one layer and micro-batch, from the rows without a pipeline.

    Least squares over time = n (layers x cell + a) + layers x c_d + e_d, with n micro-batches and d replicas. Where
    only one n was measured, c_d is taken from the model's update, which is small.
    """
    cells: dict[Cell, float] = {}
    for key in sorted({cell_of(row) for row in rows}):
        members = [row for row in rows if cell_of(row) == key and row.layout.pipeline == 1]
        replicas = sorted({row.layout.data for row in members})
        several = len({_load(row) for row in members}) > 1
        matrix, seconds = [], []
        for row in members:
            n, layers, d = _load(row), row.shape.layers, row.layout.data
            line = [float(n * layers), float(n)]
            rest = 0.0
            if several:
                line += [float(layers * (d == one)) for one in replicas] + [float(d == one) for one in replicas]
            else:
                parts = predict(row).predicted.breakdown
                rest = parts.data_comm_s + parts.optimizer_s
            matrix.append(line)
            seconds.append(row.measured_s - rest)
        cells[key] = float(np.linalg.lstsq(np.array(matrix), np.array(seconds), rcond=None)[0][0])
    return cells


def _load(row: Row) -> int:
    return row.layout.micro_batches(row.global_batch)


def non_decreasing(values: Sequence[float]) -> list[float]:
    """The nearest sequence that does not fall (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (later, m), (earlier, n) = blocks.pop(), blocks.pop()
            blocks.append(((earlier * n + later * m) / (n + m), n + m))
    return [value for value, count in blocks for _ in range(count)]


def rising_with_micro_batch(cells: dict[Cell, float]) -> dict[Cell, float]:
    """The nearest cells that do not fall as the micro-batch grows."""
    lines = [[(h, t, b) for b in MICRO_BATCH] for h in HIDDEN for t in TENSOR]
    return _project(cells, lines)


def rising_with_work(cells: dict[Cell, float]) -> dict[Cell, float]:
    """The nearest cells that do not fall as the micro-batch or the hidden size grows (Dykstra's projections)."""
    lines = [[(h, t, b) for h in HIDDEN] for t in TENSOR for b in MICRO_BATCH]
    found = dict(cells)
    first = second = dict.fromkeys(cells, 0.0)
    for _ in range(ROUNDS):
        shifted = {key: found[key] + first[key] for key in cells}
        middle = rising_with_micro_batch(shifted)
        first = {key: shifted[key] - middle[key] for key in cells}
        shifted = {key: middle[key] + second[key] for key in cells}
        found = _project(shifted, lines)
        second = {key: shifted[key] - found[key] for key in cells}
    return found


def _project(cells: dict[Cell, float], lines: list[list[Cell]]) -> dict[Cell, float]:
    return {
        key: value
        for line in lines
        for key, value in zip(line, non_decreasing([cells[key] for key in line]), strict=True)
    }


def replaced(points: list[Point], cells: dict[Cell, float]) -> list[Point]:
    """The model's predictions with the time of a layer and micro-batch taken from ``cells``."""
    hardware = profile("a100-80")
    constants = stack(hardware.stack)
    found = []
    for point in points:
        row, layout = point.row, point.row.layout
        own = layer_cost(row.shape, layout.tensor, layout.micro_batch, layout.recompute, False, hardware, constants)
        stage = row.shape.layers // layout.pipeline
        passes = _load(row) * stage + row.shape.layers - stage
        parts = point.predicted.breakdown
        parts = parts._replace(compute_s=parts.compute_s + passes * (cells[cell_of(row)] - own.total_s))
        found.append(Point(row, point.predicted._replace(breakdown=parts)))
    return found


def measure(report: Report) -> None:
    """Print how often each law chooses well."""
    rows = throughput_data.vtrain()
    points = [predict(row) for row in rows]
    cells = measured_cells(rows)
    laws = {
        "model": points,
        "measured layers": replaced(points, cells),
        "measured layers, never falling with the micro-batch": replaced(points, rising_with_micro_batch(cells)),
        "measured layers, never falling with micro-batch or hidden size": replaced(points, rising_with_work(cells)),
    }
    for name, law in laws.items():
        good, total = choice_quality(law, by_batch=True)
        error = 100 * sum(abs(point.error) for point in law) / len(law)
        percent = round(100 * good / total, 1)
        report.line("law", law=name, good=good, cases=total, percent=percent, mean_absolute_percent=round(error, 2))


if __name__ == "__main__":
    sys.exit(run(measure))
