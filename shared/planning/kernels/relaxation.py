"""The reduction: undominated items, concave envelopes, the price of a worker, and the bound that the price proves."""

from __future__ import annotations

import numpy as np

from shared.planning.kernels.arrays import FILLING_ROUNDS, MAX_BUDGET, Choices, Envelopes, Int, Ints, Items, Market


def relative(starts: Ints, counts: Ints, workers: Int) -> tuple[Ints, Int]:
    """Return the weight of each item, its count above its task's least count, and the capacity left for the weights.

    Both are in units of the greatest common divisor of the weights. A negative capacity means that the least counts
    alone do not fit.
    """
    weight = np.zeros(counts.size, np.int64)
    capacity = np.int64(workers)
    unit = np.int64(0)
    for t in range(starts.size - 1):
        least = counts[starts[t]]
        capacity -= least
        for j in range(starts[t], starts[t + 1]):
            weight[j] = counts[j] - least
            unit = _common_divisor(weight[j], unit)
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


def _common_divisor(a: Int, b: Int) -> Int:
    """Return the greatest common divisor of two numbers that are not negative."""
    while a != 0:
        b, a = a, b % a
    return b


def undominated(choices: Choices) -> tuple[Ints, Ints]:
    """Return the items that no smaller count of the same task dominates, and where those of each task begin.

    A smaller count dominates an item that has less value; or as much value and touches more; or as much value, touches
    as much and moves more workers. It is feasible with any counts of the other tasks, and better. Complete ties stay,
    because the name decides between them.
    """
    kept = np.zeros(choices.value.size, np.int64)
    kept_starts = np.zeros(choices.starts.size, np.int64)
    n = 0
    for t in range(choices.starts.size - 1):
        best: Int = np.int64(-1)
        for j in range(choices.starts[t], choices.starts[t + 1]):
            if best >= 0 and _dominates(choices, best, j):
                continue
            best = np.int64(j)
            kept[n] = j
            n += 1
        kept_starts[t + 1] = n
    return kept[:n].copy(), kept_starts


def _dominates(choices: Choices, smaller: Int, item: Int) -> bool:
    """Return whether the item of a smaller count dominates another item of the same task."""
    if choices.value[item] != choices.value[smaller]:
        return bool(choices.value[item] < choices.value[smaller])
    if choices.touched[item] != choices.touched[smaller]:
        return bool(choices.touched[item] > choices.touched[smaller])
    return bool(choices.moved[item] > choices.moved[smaller])


def envelopes(items: Items, capacity: Int) -> Envelopes:
    """Return the concave envelope of each task's undominated items that fit.

    Slopes are rounded down. Any number may serve as the price that is taken from them; only its quality suffers.
    """
    vertex = np.zeros(items.kept.size, np.int64)
    slope = np.zeros(items.kept.size, np.int64)
    starts = np.zeros(items.kept_starts.size, np.int64)
    n = 0
    for t in range(items.kept_starts.size - 1):
        first = n
        for i in range(items.kept_starts[t], items.kept_starts[t + 1]):
            j = items.kept[i]
            if items.weight[j] > capacity:
                break
            rise = np.int64(0)
            while n > first:
                last = vertex[n - 1]
                rise = (items.value[j] - items.value[last]) // (items.weight[j] - items.weight[last])
                if n - 1 > first and rise >= slope[n - 1]:
                    n -= 1
                else:
                    break
            vertex[n] = j
            slope[n] = rise
            n += 1
        starts[t + 1] = n
    return Envelopes(starts, vertex[:n].copy(), slope[:n].copy())


def price(lines: Envelopes, weight: Ints, capacity: Int) -> tuple[Int, Ints]:
    """Return the least price at which all edges steeper than the price fit, and the choice of items at that price.

    This is the dual of the linear relaxation. Every edge above the price is at least that steep, and the next edge
    would not fit, so price * capacity is at most the value that these edges gain: below 2**60.
    """
    tasks = lines.starts.size - 1
    low: Int = np.int64(-1)
    high: Int = np.int64(0)
    for i in range(lines.slope.size):
        high = max(high, lines.slope[i])
    while high - low > 1:
        middle = (low + high) // 2
        if _weight_above(lines, weight, middle) <= capacity:
            high = middle
        else:
            low = middle
    choice = np.zeros(tasks, np.int64)
    for t in range(tasks):
        choice[t] = lines.vertex[_last_above(lines.slope, lines.starts[t], lines.starts[t + 1], high)]
    return high, choice


def _weight_above(lines: Envelopes, weight: Ints, least: Int) -> Int:
    """Return the weight of all edges steeper than ``least``."""
    total: Int = np.int64(0)
    for t in range(lines.starts.size - 1):
        total += weight[lines.vertex[_last_above(lines.slope, lines.starts[t], lines.starts[t + 1], least)]]
    return total


def _last_above(slope: Ints, first: Int, end: Int, least: Int) -> Int:
    """Return the last vertex whose edge is steeper than ``least``, or ``first``. Slopes decrease."""
    low = first
    high = end
    while high - low > 1:
        middle = (low + high) // 2
        if slope[middle] > least:
            low = middle
        else:
            high = middle
    return low


def fill(choice: Ints, items: Items, capacity: Int) -> None:
    """Improve a feasible choice in place by the exchange at one task that gains most, again and again."""
    left = np.int64(capacity)
    for t in range(choice.size):
        left -= items.weight[choice[t]]
    for _ in range(FILLING_ROUNDS):
        gain = np.int64(0)
        task = -1
        item: Int = np.int64(-1)
        for t in range(choice.size):
            now = choice[t]
            for i in range(items.kept_starts[t], items.kept_starts[t + 1]):
                j = items.kept[i]
                if items.weight[j] - items.weight[now] > left:
                    break
                if items.value[j] - items.value[now] > gain:
                    gain = items.value[j] - items.value[now]
                    task = t
                    item = j
        if task < 0:
            return
        left -= items.weight[item] - items.weight[choice[task]]
        choice[task] = item


def market(items: Items, capacity: Int, at_price: Int) -> Market:
    """Return what the price proves.

    No assignment has a value above bound = sum of the best (value - price * weight) + price * capacity. A feasible
    assignment has the value bound - its losses - price * unused capacity.
    """
    loss = np.zeros(items.value.size, np.int64)
    bound = np.int64(at_price) * capacity
    for t in range(items.starts.size - 1):
        best = best_surplus(items, t, capacity, at_price)
        for j in range(items.starts[t], items.starts[t + 1]):
            if items.weight[j] <= capacity:
                loss[j] = best - (items.value[j] - at_price * items.weight[j])
            else:
                loss[j] = MAX_BUDGET + 1
        bound += best
    return Market(capacity, at_price, bound, loss)


def best_surplus(items: Items, t: Int, capacity: Int, at_price: Int) -> Int:
    """Return the greatest value - price * weight of the task's items that fit."""
    first = items.kept[items.kept_starts[t]]
    best: Int = items.value[first] - at_price * items.weight[first]
    for i in range(items.kept_starts[t], items.kept_starts[t + 1]):
        j = items.kept[i]
        if items.weight[j] > capacity:
            break
        best = max(best, items.value[j] - at_price * items.weight[j])
    return best
