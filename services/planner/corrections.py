"""Measured over modelled throughput: per layout, and in general for layouts and tasks that were not measured yet.

A correction is a power of 1.1 and moves only when a measurement leaves its hysteresis, so that the noise of step
times changes no plan and throws away no look-ahead.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from services.planner.state import Size, State, Task
from services.planner.throughput import flop_per_step, hardware_of, is_rated, modelled_flop_per_s

CORRECTION_BASE = 1.1
"""Corrections are powers of this: steps of 10%, finer than the hysteresis, coarser than the noise of a median."""

MAX_EXPONENT = 300
"""1.1 ** 300 is 2.6e12: further from the model than any measurement can honestly be."""


def measure(state: State, task: Task, size: Size, step_s: float) -> dict[Size, int]:
    """Return ``Task.measured`` after a step time on ``size``; the same object if it changes no correction.

    What was believed of a layout before its first measurement has the same hysteresis as a measurement.
    """
    modelled = modelled_flop_per_s(task.spec, size, hardware_of(state, size.hardware))
    present = task.measured.get(size)
    believed = present if present is not None else believed_exponent(state, task, size.hardware)
    ratio = flop_per_step(task.spec) / step_s / modelled
    exponent = corrected_exponent(believed, ratio, state.parameter("throughput_hysteresis"))
    return task.measured if exponent == present else {**task.measured, size: exponent}


def forget_rates(state: State) -> State:
    """Return the state without what was measured against the setting ``worker_flop_per_s``, which has changed."""
    tasks = {
        name: task.model_copy(
            update={"measured": {size: e for size, e in task.measured.items() if not is_rated(size.hardware)}}
        )
        for name, task in state.tasks.items()
    }
    return state.model_copy(update={"tasks": tasks})


def exponent_of(state: State, task: Task, hardware: str) -> int:
    """Return the correction of the task in general on that kind of hardware: 1.1 ** exponent; 0 if nothing is known."""
    return believed_exponent(state, task, hardware) or 0


def believed_exponent(state: State, task: Task, hardware: str) -> int | None:
    """Return the mean of the task's measured layouts, else that of all measured tasks; None: nothing was measured."""
    if task.measured and (own := general_exponent(task, hardware)) is not None:
        return own
    others = (general_exponent(other, hardware) for other in state.tasks.values() if other.measured)
    return _mean(exponent for exponent in others if exponent is not None)


def general_exponent(task: Task, hardware: str) -> int | None:
    """Return the mean of the task's measured layouts on that kind of hardware; None if there is none."""
    return _mean(exponent for size, exponent in task.measured.items() if size.hardware == hardware)


def _mean(exponents: Iterable[int]) -> int | None:
    """Return the rounded mean: one more that equals it leaves it as it is."""
    found = list(exponents)
    return (2 * sum(found) + len(found)) // (2 * len(found)) if found else None


@lru_cache(maxsize=2 * MAX_EXPONENT + 1)
def correction(exponent: int) -> float:
    """Return 1.1 ** exponent by repeated multiplication (no library power: it may differ between machines)."""
    factor = 1.0
    for _ in range(abs(exponent)):
        factor = factor * CORRECTION_BASE
    return factor if exponent >= 0 else 1.0 / factor


def corrected_exponent(present: int | None, ratio: float, hysteresis: float) -> int:
    """Return the exponent for a measured / modelled ratio.

    ``present`` stays while the ratio is within ``hysteresis`` (relative) of what it says; None: nothing measured yet.
    """
    if present is not None:
        relative = ratio / correction(present)
        if 1.0 - hysteresis <= relative <= 1.0 + hysteresis:
            return present
    return _nearest_exponent(ratio)


def _nearest_exponent(ratio: float) -> int:
    """Return the exponent of the power of 1.1 nearest to the ratio (by relative distance)."""
    if ratio < 1.0:
        return -_nearest_exponent(1.0 / ratio) if ratio > 0.0 else -MAX_EXPONENT
    exponent = 0
    below = 1.0
    while exponent < MAX_EXPONENT and below * CORRECTION_BASE <= ratio:
        below = below * CORRECTION_BASE
        exponent += 1
    nearer_above = ratio / below > below * CORRECTION_BASE / ratio
    return exponent + 1 if nearer_above and exponent < MAX_EXPONENT else exponent
