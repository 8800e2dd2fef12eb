"""Fit the throughput model's constants to published measurements and write ``calibration.json``.

    python -m benchmarks.calibrate_throughput [--write | --cross-validate]

Two steps. First the collectives' constants from the all-reduce tables alone. Then the rest by seeded random descent on
the mean absolute relative error, each data set weighing the same (so that 1,440 small rows do not drown 8 large
ones), and on the regret of the choice among measured layouts. MT-NLG is not fitted. The fit is deterministic and takes
minutes. There are no bounds; ``tests/planner/test_performance_measurements.py`` has them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import throughput_data
from benchmarks.report import Report, run
from benchmarks.throughput_data import Row
from shared.planning.performance import calibration
from shared.planning.performance.calibration import Calibration
from shared.planning.performance.collectives import Group, all_reduce_s
from shared.planning.performance.hardware import Hardware, profile
from shared.planning.performance.iteration import iteration

FITTED_ON = ("korthikanti", "sc21", "megatron2020", "vtrain")
STACK = "megatron-2021"
REGRET_WEIGHT = 8.0
"""How much the mean regret of the choice of layout counts beside the mean errors."""

WEIGHTS = {"vtrain, padded": 0.5}
"""The vTrain rows name no vocabulary. The odd default explains their times better (at t = 1 a micro-batch's fixed time
grows with h as a slow product does); the padded one counts half, so that neither reading is far off."""

SOFTNESS = 0.02
"""Relative difference of predicted times at which a layout counts e times less."""
TARGET = Path(calibration.__file__).parent / "calibration.json"

TOLERATED = 0.03
"""Regret that counts for nothing: a choice is good within 5%."""

SEED = 3
TRIALS = 700

COLLECTIVE_BOUNDS = {"collective_s": (1e-6, 1e-4), "intra_fraction": (0.5, 1.0)}
BOUNDS = {
    "matmul_fraction": (0.85, 1.0),
    "unaligned_fraction": (0.25, 0.5),
    "memory_fraction": (0.6, 0.9),
    "kernel_s": (3e-6, 2e-5),
    "host_layer_s": (8e-4, 1.2e-3),
    "host_spread": (0.0, 0.4),
}
"""What is fitted and the range physics allows. Not fitted: ``cross_entropy_bytes`` and ``optimizer_bytes``, which are
counted; ``inner_half``, which the tables leave open (16 and 190 fit equally, with other ``matmul_fraction``): four
stages of 32 deep; ``inter_fraction``, which no table isolates (NCCL reaches about 0.85)."""

START = {
    "matmul_fraction": 0.97,
    "unaligned_fraction": 0.3,
    "memory_fraction": 0.73,
    "kernel_s": 9e-6,
    "host_layer_s": 1e-3,
    "host_spread": 0.15,
}
V100_START = 0.927
"""Where the descent begins; the last is the V100's sustained fraction. Not what was fitted before, so that a second run
writes the same."""


def descend(
    start: dict[str, float], bounds: dict[str, tuple[float, float]], loss: Callable[[dict[str, float]], float]
) -> dict[str, float]:
    """Minimise ``loss`` by seeded random steps on one to three constants at a time, ever shorter ones."""
    draw = random.Random(SEED)
    best, value = dict(start), loss(start)
    names = sorted(bounds)
    for trial_number in range(TRIALS):
        length = 0.2 * (1.0 - trial_number / TRIALS) + 0.02
        trial = dict(best)
        for name in draw.sample(names, min(len(names), draw.choice((1, 1, 2, 3)))):
            low, high = bounds[name]
            trial[name] = min(high, max(low, best[name] + draw.gauss(0.0, length) * (high - low)))
        got = loss(trial)
        if got < value:
            best, value = trial, got
    return best


def _with(constants: Calibration, numbers: dict[str, float]) -> Calibration:
    return constants._replace(**numbers)  # type: ignore[arg-type]


def fit_collectives(start: Calibration) -> Calibration:
    """Fit the fixed time and the bandwidth share of NVLink collectives (the hop latency is in the profile)."""
    points = [(n, size, s) for n in (2, 4, 8) for size, s in throughput_data.all_reduce(n)[::8]]
    hardware = profile("a100-80")

    def loss(trial: dict[str, float]) -> float:
        constants = _with(start, trial)
        errors = (all_reduce_s(size, Group(n, 1), hardware, constants) / s - 1.0 for n, size, s in points)
        return sum(e * e for e in errors) / len(points)

    found = descend({name: getattr(start, name) for name in COLLECTIVE_BOUNDS}, COLLECTIVE_BOUNDS, loss)
    return _with(start, found)


def error(row: Row, hardware: Hardware, constants: Calibration) -> float:
    """Relative error of the predicted iteration time."""
    predicted = iteration(row.shape, row.global_batch, row.layout, hardware, constants).iteration_s
    return predicted / row.measured_s - 1.0


def regret(groups: list[list[Row]], constants: Calibration) -> float:
    """How much longer than the best measured layout the predicted choice takes, on average.

    The choice is softened (a layout predicted ``SOFTNESS`` slower counts e times less) so that the fit sees a slope.
    """
    total = 0.0
    for group in groups:
        hardware = profile(group[0].hardware)
        times = [iteration(r.shape, r.global_batch, r.layout, hardware, constants).iteration_s for r in group]
        fastest, best = min(times), min(r.measured_s for r in group)
        weights = [math.exp((1.0 - time / fastest) / SOFTNESS) for time in times]
        excess = sum(w * max(0.0, r.measured_s / best - 1.0 - TOLERATED) for w, r in zip(weights, group, strict=True))
        total += excess / sum(weights)
    return total / len(groups)


def fit(start: Calibration, v100: float, left_out_hidden: int = 0) -> tuple[Calibration, float, float]:
    """Fit the remaining constants and the sustained fraction of the V100; return them and the loss.

    ``left_out_hidden``: vTrain's models of this hidden size are not looked at.
    """
    rows = {name: throughput_data.SETS[name]()[:: 5 if name == "vtrain" else 1] for name in FITTED_ON}
    rows["vtrain, padded"] = throughput_data.vtrain(throughput_data.PADDED_VOCABULARY)[2::5]
    for name in ("vtrain", "vtrain, padded"):
        rows[name] = [row for row in rows[name] if row.shape.hidden != left_out_hidden]
    groups = [g for g in throughput_data.choices(throughput_data.vtrain()) if g[0].shape.hidden != left_out_hidden]

    def loss(trial: dict[str, float]) -> float:
        numbers = dict(trial)
        volta = profile("v100")._replace(sustained_fraction=numbers.pop("v100"))
        constants = _with(start, numbers)
        total = 0.0
        for name, members in rows.items():
            absolute = 0.0
            for row in members:
                hardware = volta if row.hardware == "v100" else profile(row.hardware)
                absolute += abs(error(row, hardware, constants))
            total += absolute / len(members) * WEIGHTS.get(name, 1.0)
        return total + REGRET_WEIGHT * regret(groups, constants)

    bounds = {**BOUNDS, "v100": (0.6, 0.95)}
    start = _with(start, START)
    begin = {**{name: float(getattr(start, name)) for name in BOUNDS}, "v100": v100}
    found = descend(begin, bounds, loss)
    final = loss(found)
    volta = found.pop("v100")
    return _with(start, found), volta, final


def rounded(constants: Calibration) -> dict[str, Any]:
    """Three significant digits: the data say no more."""
    return {
        name: value if isinstance(value, bool) else float(f"{value:.3g}") for name, value in constants._asdict().items()
    }


def cross_validate(start: Calibration, v100: float, report: Report) -> None:
    """Print error and choice for vTrain's models of each hidden size, with constants fitted without them.

    The other models differ only in layers and share every layer's time, so leaving out single models proves nothing.
    """
    hardware = profile("a100-80")
    for hidden in sorted({row.shape.hidden for row in throughput_data.vtrain()}):
        constants, _, _ = fit(start, v100, hidden)
        rows = [row for row in throughput_data.vtrain() if row.shape.hidden == hidden]
        times = {
            row: iteration(row.shape, row.global_batch, row.layout, hardware, constants).iteration_s for row in rows
        }
        absolute = sum(abs(times[row] / row.measured_s - 1.0) for row in rows) / len(rows)
        groups = throughput_data.choices(rows)
        good = sum(
            min(group, key=times.__getitem__).measured_s <= 1.05 * min(row.measured_s for row in group)
            for group in groups
        )
        choice = {"good": good, "cases": len(groups)}
        percent = round(100 * absolute, 2)
        report.line(
            "cross-validation",
            **{"left out": f"vtrain h{hidden}", "mean_absolute_percent": percent, "choice, by batch": choice},
        )


def calibrate(options: argparse.Namespace, report: Report) -> None:
    """Fit and print; with ``--write``, replace the fitted stack in the file."""
    start = fit_collectives(calibration.stack(STACK))
    if options.cross_validate:
        cross_validate(start, V100_START, report)
        return
    constants, volta, loss = fit(start, V100_START)
    values = rounded(constants)
    report.line("fit", **{"constants": values, "v100 sustained_fraction": round(volta, 3), "loss": loss})
    if options.write:
        stacks = json.loads(TARGET.read_text())
        stacks[STACK] = values
        TARGET.write_text(json.dumps(stacks, indent=2) + "\n")


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cross-validate", action="store_true", help="fit without each hidden size of vTrain instead")
    parser.add_argument("--write", action="store_true", help="replace the fitted stack in calibration.json")
    options = parser.parse_args()
    return run(partial(calibrate, options))


if __name__ == "__main__":
    sys.exit(main())
