"""The useful counts of each task and their objective values."""

from __future__ import annotations

import math

import numpy as np

from shared.planning.kernels.arrays import (
    TOO_LARGE,
    VALUE_BITS,
    Floats,
    Int,
    Ints,
    Options,
    TableArrays,
    TaskArrays,
    TransitionArrays,
)


def options(tables: TableArrays, tasks: TaskArrays, transitions: TransitionArrays) -> Options:
    """Return the useful counts of each task: those of its table where F is positive, 0, and its current count.

    A required task gets only counts where F is positive. G is computed as in ``waf.py``.
    """
    number = tasks.weight.size
    size = tables.counts.size + 2 * number
    found = Options(
        np.zeros(number + 1, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.float64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
    )
    n = 0
    for t in range(number):
        rate_now = _rate_now(tables, tasks, t)
        zero_due = tasks.required[t] == 0
        current_due = zero_due and 0 < tasks.current[t] <= tasks.limit[t]
        j = tables.starts[t]
        end = tables.starts[t + 1]
        entry = transitions.starts[t]
        while zero_due or current_due or j < end:
            rate = 0.0
            if zero_due:
                k = np.int64(0)
                zero_due = False
            elif j < end and (not current_due or tables.counts[j] <= tasks.current[t]):
                k = tables.counts[j]
                if k >= max(np.int64(1), tasks.necessary[t]):
                    rate = tasks.weight[t] * tables.flop_per_s[j] / tasks.slowdown[t]
                j += 1
                if k > tasks.limit[t]:
                    j = end
                    continue
                if current_due and k == tasks.current[t]:
                    current_due = False
                elif rate <= 0.0:
                    continue
            else:
                k = tasks.current[t]
                current_due = False
            touches = tasks.faulted[t] != 0 or k != tasks.current[t]
            penalty = 0.0
            if touches:
                entry = _first_entry(transitions, entry, transitions.starts[t + 1], k)
                penalty = rate_now * _transition_s(tasks, transitions, t, entry, k)
            found.counts[n] = k
            found.objective[n] = (rate - k * tasks.worker_cost_flop_per_s[t]) * tasks.running_s[t] - penalty
            found.touched[n] = 1 if touches else 0
            found.moved[n] = abs(k - tasks.current[t])
            n += 1
        found.starts[t + 1] = n
    return Options(
        found.starts,
        found.counts[:n].copy(),
        found.objective[:n].copy(),
        found.touched[:n].copy(),
        found.moved[:n].copy(),
    )


def _rate_now(tables: TableArrays, tasks: TaskArrays, t: Int) -> float:
    """Return F of the task at its current count, at full speed (``waf.py``)."""
    rate = 0.0
    least: Int = max(np.int64(1), tasks.necessary[t])
    if tasks.current[t] >= least:
        for j in range(tables.starts[t], tables.starts[t + 1]):
            if tables.counts[j] == tasks.current[t]:
                rate = tasks.weight[t] * tables.flop_per_s[j]
    return rate


def _first_entry(transitions: TransitionArrays, first: Int, end: Int, count: Int) -> Int:
    """Return the first entry from ``first`` on whose count is not below ``count``; ``end`` if there is none."""
    entry = first
    while entry < end and transitions.counts[entry] < count:
        entry += 1
    return entry


def _transition_s(tasks: TaskArrays, transitions: TransitionArrays, t: Int, entry: Int, count: Int) -> float:
    """Return D_transition of the task to ``count``; ``entry``: see ``_first_entry``."""
    if entry < transitions.starts[t + 1] and transitions.counts[entry] == count:
        return float(transitions.seconds[entry])
    if count > tasks.staying[t]:
        return float(tasks.transition_s[t] + tasks.newcomers_s[t])
    return float(tasks.transition_s[t])


def fixed_point(starts: Ints, objective: Floats) -> tuple[Ints, Int]:
    """Return the objective values as integers, and the binary exponent of their unit, or ``TOO_LARGE``."""
    total = 0.0
    for t in range(starts.size - 1):
        largest = 0.0
        for j in range(starts[t], starts[t + 1]):
            largest = max(largest, abs(objective[j]))
        total = total + largest
    fixed = np.zeros(objective.size, np.int64)
    if total == 0.0:
        return fixed, 0
    if not total < math.inf:
        return fixed, TOO_LARGE
    exponent = math.frexp(total)[1] - VALUE_BITS
    for j in range(objective.size):
        fixed[j] = np.int64(np.rint(math.ldexp(objective[j], -exponent)))
    return fixed, exponent
