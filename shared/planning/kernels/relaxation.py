"""The reduction: undominated counts, concave envelopes, the price of a worker, the bound it proves."""

from __future__ import annotations

import numpy as np

from shared.planning.kernels.arrays import FILLING_ROUNDS, MAX_BUDGET, Int, Ints


def relative(starts: Ints, counts: Ints, workers: Int) -> tuple[Ints, Int]:
    """Return each count as weight above its task's least, and the capacity left for them (negative: infeasible).

    Both in units of the greatest common divisor of the weights.
    """
    weight = np.zeros(counts.size, np.int64)
    capacity = np.int64(workers)
    unit = np.int64(0)
    for t in range(starts.size - 1):
        least = counts[starts[t]]
        capacity -= least
        for j in range(starts[t], starts[t + 1]):
            weight[j] = counts[j] - least
            a = weight[j]
            while a != 0:
                unit, a = a, unit % a
    if capacity < 0:
        return weight, capacity
    if unit > 1:
        for j in range(weight.size):
            weight[j] //= unit
        capacity //= unit
    useful = np.int64(0)
    for t in range(starts.size - 1):
        useful += weight[starts[t + 1] - 1]
    return weight, min(capacity, useful)


def undominated(starts: Ints, worth: Ints, touched: Ints, moved: Ints) -> tuple[Ints, Ints]:
    """Return the items that no smaller count of their task beats, and where each task's begin among them.

    Beaten: worth less; or as much but touching more; or as much, moving more. With any other tasks' counts, the smaller
    count is feasible too and better. Complete ties stay: the name decides between them.
    """
    kept = np.zeros(worth.size, np.int64)
    kept_starts = np.zeros(starts.size, np.int64)
    n = 0
    for t in range(starts.size - 1):
        best: Int = np.int64(-1)
        for j in range(starts[t], starts[t + 1]):
            if best >= 0:
                if worth[j] < worth[best]:
                    continue
                if worth[j] == worth[best]:
                    if touched[j] > touched[best]:
                        continue
                    if touched[j] == touched[best] and moved[j] > moved[best]:
                        continue
            best = np.int64(j)
            kept[n] = j
            n += 1
        kept_starts[t + 1] = n
    return kept[:n].copy(), kept_starts


def hulls(kept: Ints, kept_starts: Ints, weight: Ints, worth: Ints, capacity: Int) -> tuple[Ints, Ints, Ints]:
    """Return the vertices of each task's concave envelope, the slope of the edge before each, and where tasks begin.

    Slopes are rounded down: the price that is taken from them may be any number, and only its quality suffers.
    """
    vertex = np.zeros(kept.size, np.int64)
    slope = np.zeros(kept.size, np.int64)
    vertex_starts = np.zeros(kept_starts.size, np.int64)
    n = 0
    for t in range(kept_starts.size - 1):
        first = n
        for i in range(kept_starts[t], kept_starts[t + 1]):
            j = kept[i]
            if weight[j] > capacity:
                break
            rise = np.int64(0)
            while n > first:
                last = vertex[n - 1]
                rise = (worth[j] - worth[last]) // (weight[j] - weight[last])
                if n - 1 > first and rise >= slope[n - 1]:
                    n -= 1
                else:
                    break
            vertex[n] = j
            slope[n] = rise
            n += 1
        vertex_starts[t + 1] = n
    return vertex[:n].copy(), slope[:n].copy(), vertex_starts


def price(vertex: Ints, slope: Ints, vertex_starts: Ints, weight: Ints, capacity: Int) -> tuple[Int, Ints]:
    """Return the least price of a worker at which all that is worth its price fits, and that choice (an item a task).

    This is the dual of the linear relaxation. Every edge above the price is at least that steep and the next would
    not fit, so price * capacity is no more than the worths these edges gain: below 2**60.
    """
    tasks = vertex_starts.size - 1
    low: Int = np.int64(-1)
    high: Int = np.int64(0)
    for i in range(slope.size):
        high = max(high, slope[i])
    while high - low > 1:
        middle = (low + high) // 2
        if _weight_above(vertex, slope, vertex_starts, weight, middle) <= capacity:
            high = middle
        else:
            low = middle
    choice = np.zeros(tasks, np.int64)
    for t in range(tasks):
        choice[t] = vertex[_last_above(slope, vertex_starts[t], vertex_starts[t + 1], high)]
    return high, choice


def _weight_above(vertex: Ints, slope: Ints, vertex_starts: Ints, weight: Ints, least: Int) -> Int:
    """Return the workers that all edges steeper than ``least`` ask for."""
    total: Int = np.int64(0)
    for t in range(vertex_starts.size - 1):
        total += weight[vertex[_last_above(slope, vertex_starts[t], vertex_starts[t + 1], least)]]
    return total


def _last_above(slope: Ints, first: Int, end: Int, least: Int) -> Int:
    """Return the last vertex whose edge is steeper than ``least``; slopes decrease. At least the first."""
    low = first
    high = end
    while high - low > 1:
        middle = (low + high) // 2
        if slope[middle] > least:
            low = middle
        else:
            high = middle
    return low


def fill(choice: Ints, kept: Ints, kept_starts: Ints, weight: Ints, worth: Ints, capacity: Int) -> None:
    """Improve a feasible choice in place: again and again the exchange at one task that gains most."""
    left = np.int64(capacity)
    for t in range(choice.size):
        left -= weight[choice[t]]
    for _ in range(FILLING_ROUNDS):
        gain = np.int64(0)
        task = -1
        item: Int = np.int64(-1)
        for t in range(choice.size):
            now = choice[t]
            for i in range(kept_starts[t], kept_starts[t + 1]):
                j = kept[i]
                if weight[j] - weight[now] > left:
                    break
                if worth[j] - worth[now] > gain:
                    gain = worth[j] - worth[now]
                    task = t
                    item = j
        if task < 0:
            return
        left -= weight[item] - weight[choice[task]]
        choice[task] = item


def losses(
    starts: Ints, kept: Ints, kept_starts: Ints, weight: Ints, worth: Ints, capacity: Int, at_price: Int
) -> tuple[Ints, Int]:
    """Return what each item loses against its task's best at this price, and the bound that the price proves.

    No assignment is worth more than bound = sum of the best (worth - price * weight) + price * capacity, and one that
    is feasible is worth bound - its losses - price * workers left.
    """
    loss = np.zeros(worth.size, np.int64)
    bound = np.int64(at_price) * capacity
    best: Int
    for t in range(starts.size - 1):
        first = kept[kept_starts[t]]
        best = worth[first] - at_price * weight[first]
        for i in range(kept_starts[t], kept_starts[t + 1]):
            j = kept[i]
            if weight[j] > capacity:
                break
            best = max(best, worth[j] - at_price * weight[j])
        for j in range(starts[t], starts[t + 1]):
            if weight[j] <= capacity:
                loss[j] = best - (worth[j] - at_price * weight[j])
            else:
                loss[j] = MAX_BUDGET + 1
        bound += best
    return loss, bound
