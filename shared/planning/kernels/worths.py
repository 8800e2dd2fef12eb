"""What each task may get and what it is worth."""

from __future__ import annotations

import math

import numpy as np

from shared.planning.kernels.arrays import TOO_LARGE, WORTH_BITS, Floats, Int, Ints


def options(
    table_starts: Ints,
    table_counts: Ints,
    table_flop_per_s: Floats,
    weight: Floats,
    necessary: Ints,
    limit: Ints,
    current: Ints,
    faulted: Ints,
    required: Ints,
    running_s: Floats,
    transition_s: Floats,
    staying: Ints,
    newcomers_s: Floats,
    moves_starts: Ints,
    moves_counts: Ints,
    moves_s: Floats,
) -> tuple[Ints, Ints, Floats, Ints, Ints]:
    """Return each task's useful counts with G, whether they touch it and the workers moved (``waf.py``, ``solver.py``).

    Tables and moves are by increasing count. ``moves``: D_transition of single new counts.
    """
    tasks = weight.size
    size = table_counts.size + 2 * tasks
    starts = np.zeros(tasks + 1, np.int64)
    counts = np.zeros(size, np.int64)
    worth = np.zeros(size, np.float64)
    touched = np.zeros(size, np.int64)
    moved = np.zeros(size, np.int64)
    n = 0
    for t in range(tasks):
        least = max(np.int64(1), necessary[t])
        rate_now = 0.0
        for j in range(table_starts[t], table_starts[t + 1]):
            if table_counts[j] == current[t] and current[t] >= least:
                rate_now = weight[t] * table_flop_per_s[j]
        free = required[t] == 0
        zero_due = free
        current_due = free and 0 < current[t] <= limit[t]
        j = table_starts[t]
        end = table_starts[t + 1]
        move = moves_starts[t]
        while zero_due or current_due or j < end:
            rate = 0.0
            if zero_due:
                k = np.int64(0)
                zero_due = False
            elif j < end and (not current_due or table_counts[j] <= current[t]):
                k = table_counts[j]
                if k >= least:
                    rate = weight[t] * table_flop_per_s[j]
                j += 1
                if k > limit[t]:
                    j = end
                    continue
                if current_due and k == current[t]:
                    current_due = False
                elif rate <= 0.0:
                    continue
            else:
                k = current[t]
                current_due = False
            touches = faulted[t] != 0 or k != current[t]
            penalty = 0.0
            if touches:
                move_s = transition_s[t] + newcomers_s[t] if k > staying[t] else transition_s[t]
                while move < moves_starts[t + 1] and moves_counts[move] < k:
                    move += 1
                if move < moves_starts[t + 1] and moves_counts[move] == k:
                    move_s = moves_s[move]
                penalty = rate_now * move_s
            counts[n] = k
            worth[n] = rate * running_s[t] - penalty
            touched[n] = 1 if touches else 0
            moved[n] = abs(k - current[t])
            n += 1
        starts[t + 1] = n
    return starts, counts[:n].copy(), worth[:n].copy(), touched[:n].copy(), moved[:n].copy()


def fixed_point(starts: Ints, worth: Floats) -> tuple[Ints, Int]:
    """Return the worths as integers and the binary exponent of their unit, or ``TOO_LARGE``."""
    total = 0.0
    for t in range(starts.size - 1):
        largest = 0.0
        for j in range(starts[t], starts[t + 1]):
            largest = max(largest, abs(worth[j]))
        total = total + largest
    fixed = np.zeros(worth.size, np.int64)
    if total == 0.0:
        return fixed, 0
    if not total < math.inf:
        return fixed, TOO_LARGE
    exponent = math.frexp(total)[1] - WORTH_BITS
    for j in range(worth.size):
        fixed[j] = np.int64(np.rint(math.ldexp(worth[j], -exponent)))
    return fixed, exponent
