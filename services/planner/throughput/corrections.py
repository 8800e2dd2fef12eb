"""Corrections: measured over modelled throughput, of each layout, and in general where nothing was measured.

A correction is a power of 1.1. It changes only when a measurement leaves its hysteresis, so that the noise of step
times neither changes plans nor invalidates answers of the look-ahead. ``tables.py`` applies corrections.
"""

from __future__ import annotations

from services.planner.state.cluster import Corrections, HardwareLayout, State, Task, mean_of
from services.planner.throughput.model import flop_per_step, hardware_of, is_rated, modelled_flop_per_s

CORRECTION_BASE = 1.1
"""Corrections are powers of this number: 10% is finer than the hysteresis and coarser than the noise of a median."""

MAX_EXPONENT = 300
"""Largest exponent of a correction: 1.1 ** 300 is 2.6e12, further from the model than any plausible measurement."""


def measure(state: State, task: Task, layout: HardwareLayout, step_s: float) -> dict[HardwareLayout, int]:
    """Return ``Task.measured`` after a step time in ``layout``; the same object if no correction changes.

    The correction assumed before the first measurement of a layout has the same hysteresis as a measured one.
    """
    modelled = modelled_flop_per_s(task.spec, layout, hardware_of(state, layout.hardware))
    present = task.measured.get(layout)
    believed = present if present is not None else believed_exponent(state, task, layout.hardware)
    ratio = flop_per_step(task.spec) / step_s / modelled
    exponent = corrected_exponent(believed, ratio, state.parameter("throughput_hysteresis"))
    return task.measured if exponent == present else {**task.measured, layout: exponent}


def forget_rates(state: State) -> State:
    """Return the state without the corrections that refer to ``worker_flop_per_s``, after that setting has changed."""
    for task in state.every_task():
        kept = {layout: exponent for layout, exponent in task.measured.items() if not is_rated(layout.hardware)}
        if kept != task.measured:
            state = state.with_changed(task.name, measured=kept)
    return state


def exponent_of(state: State, task: Task, hardware: str) -> int:
    """Return the task's general correction on that kind of hardware, as an exponent of 1.1; 0 if unknown."""
    return believed_exponent(state, task, hardware) or 0


def believed_exponent(state: State, task: Task, hardware: str) -> int | None:
    """Return the mean of the task's measured layouts, else that of all measured tasks; None without measurement.

    What is measured of a task of whose model nothing is known says nothing of others, nor they of it.
    """
    own = task.general_exponent(hardware) if task.measured else None
    if own is not None or not task.spec.model_known:
        return own
    number, total = state.ended_corrections.get(hardware, Corrections(0, 0))
    for other in state.tasks.values():
        if other.measured and other.spec.model_known and (exponent := other.general_exponent(hardware)) is not None:
            number, total = number + 1, total + exponent
    return mean_of(Corrections(number, total))


def correction(exponent: int) -> float:
    """Return 1.1 ** exponent by repeated multiplication. A library's power function may differ between machines."""
    factor = 1.0
    for _ in range(abs(exponent)):
        factor = factor * CORRECTION_BASE
    return factor if exponent >= 0 else 1.0 / factor


def corrected_exponent(present: int | None, ratio: float, hysteresis: float) -> int:
    """Return the exponent for a ratio of measured to modelled throughput.

    Args:
        present: the exponent up to now, which stays while the ratio is within the hysteresis; None: no measurement yet.
        ratio: measured over modelled throughput.
        hysteresis: tolerated relative deviation from the present correction.
    """
    if present is not None:
        relative = ratio / correction(present)
        if 1.0 - hysteresis <= relative <= 1.0 + hysteresis:
            return present
    return _nearest_exponent(ratio)


def _nearest_exponent(ratio: float) -> int:
    """Return the exponent of the power of 1.1 that is nearest to the ratio by relative distance."""
    if ratio < 1.0:
        return -_nearest_exponent(1.0 / ratio) if ratio > 0.0 else -MAX_EXPONENT
    exponent = 0
    below = 1.0
    while exponent < MAX_EXPONENT and below * CORRECTION_BASE <= ratio:
        below = below * CORRECTION_BASE
        exponent += 1
    nearer_above = ratio / below > below * CORRECTION_BASE / ratio
    return exponent + 1 if nearer_above and exponent < MAX_EXPONENT else exponent
