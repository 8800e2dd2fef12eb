"""The exact search for the assignments within a budget of losses."""

from __future__ import annotations

import numpy as np

from shared.planning.kernels.arrays import FIRST_ROOM, PRICES, Int, Ints, Items, Market, States
from shared.planning.kernels.relaxation import best_surplus


def search(items: Items, market: Market, budget: Int) -> States:
    """Return all partial assignments, of the last tasks on, with which a choice within the budget can end.

    A state is left out if a lighter or equally heavy state is better, or if no whole assignment within the budget
    contains it: by the weight that the tasks before can have, or by the bound of their gain. That bound is taken at
    several prices, since it is valid at each. Of two equally good states, that with the larger count of the earlier
    task stays.
    """
    capacity, at_price, loss = market.capacity, market.price, market.loss
    tasks = items.starts.size - 1
    core, core_starts = _core(items, loss, budget)
    lightest, heaviest = _reach(core, core_starts, items.weight)
    prices = _prices(at_price)
    before = _bounds_before(items, capacity, prices)
    slots = _slots(capacity)
    states = _first_state(tasks)
    n = np.int64(1)
    gained = np.int64(0)
    for t in range(tasks - 1, -1, -1):
        sample = core[core_starts[t]]
        gained += loss[sample] + items.value[sample] - at_price * items.weight[sample]
        first, end = level(states, t + 1)
        for i in range(core_starts[t + 1] - 1, core_starts[t] - 1, -1):
            j = core[i]
            for s in range(first, end):
                w = states.weight[s] + items.weight[j]
                if w + lightest[t] > capacity:
                    break
                lost = states.loss[s] + loss[j]
                if lost > budget:
                    continue
                idle = capacity - w - heaviest[t]
                if idle > 0 and lost + at_price * idle > budget:
                    continue
                needed = market.bound - budget - (gained - lost + at_price * w)
                if not _is_out_of_reach(before, prices, t, capacity - w, needed):
                    _offer(slots, w, lost, states.touched[s] + items.touched[j], states.moved[s] + items.moved[j], j, s)
        states, n = _collect(slots, states, n, at_price)
        states.levels[t] = n
    return states


def _prices(at_price: Int) -> Ints:
    """Return the prices that are a half, a quarter, ... above and below the price of the relaxation."""
    prices = np.zeros(PRICES, np.int64)
    for i in range(PRICES):
        prices[i] = at_price + (at_price >> (i // 2 + 1)) * (1 - 2 * (i % 2))
    return prices


def _is_out_of_reach(before: Ints, prices: Ints, t: Int, left: Int, needed: Int) -> bool:
    """Return whether the tasks before t have, at one of the prices, less than the value needed on ``left`` workers."""
    for q in range(PRICES):
        if before[q, t] + prices[q] * left < needed:
            return True
    return False


def _slots(capacity: Int) -> States:
    """Return one slot for a state of each weight.

    A slot without an item is free. ``levels`` has the range of weights in use.
    """
    size = capacity + 1
    return States(
        np.array([size, -1]),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.full(size, -1, np.int64),
        np.zeros(size, np.int64),
    )


def _first_state(tasks: Int) -> States:
    """Return the states of the empty assignment, which has no weight."""
    levels = np.zeros(tasks + 2, np.int64)
    levels[tasks] = 1
    return States(
        levels,
        np.zeros(FIRST_ROOM, np.int64),
        np.zeros(FIRST_ROOM, np.int64),
        np.zeros(FIRST_ROOM, np.int64),
        np.zeros(FIRST_ROOM, np.int64),
        np.full(FIRST_ROOM, -1, np.int64),
        np.full(FIRST_ROOM, -1, np.int64),
    )


def _offer(slots: States, w: Int, loss: Int, touched: Int, moved: Int, item: Int, parent: Int) -> None:
    """Put a state into the slot of its weight, unless the state in the slot is as good."""
    if slots.item[w] >= 0:
        if loss > slots.loss[w]:
            return
        if loss == slots.loss[w]:
            if touched > slots.touched[w]:
                return
            if touched == slots.touched[w] and moved >= slots.moved[w]:
                return
    slots.loss[w] = loss
    slots.touched[w] = touched
    slots.moved[w] = moved
    slots.item[w] = item
    slots.parent[w] = parent
    slots.levels[0] = min(slots.levels[0], w)
    slots.levels[1] = max(slots.levels[1], w)


def _collect(slots: States, states: States, n: Int, at_price: Int) -> tuple[States, Int]:
    """Append the states of all slots, except those that a lighter state beats, and free the slots.

    Returns the states and their new end.
    """
    low, high = slots.levels[0], slots.levels[1]
    slots.levels[0] = slots.item.size
    slots.levels[1] = -1
    if n + high + 1 - low > states.item.size:
        used = np.int64(0)
        for w in range(low, high + 1):
            if slots.item[w] >= 0:
                used += 1
        states = _with_room(states, n + used)
    begin = n
    for w in range(low, high + 1):
        if slots.item[w] < 0:
            continue
        if n == begin or not _beats(states, n - 1, slots, w, at_price):
            states.weight[n] = w
            states.loss[n] = slots.loss[w]
            states.touched[n] = slots.touched[w]
            states.moved[n] = slots.moved[w]
            states.item[n] = slots.item[w]
            states.parent[n] = slots.parent[w]
            n += 1
        slots.item[w] = -1
    return states, n


def _beats(states: States, s: Int, slots: States, w: Int, at_price: Int) -> bool:
    """Return whether the lighter state has more value than the state in slot ``w``, or as much and better ties."""
    gain = at_price * (w - states.weight[s]) - (slots.loss[w] - states.loss[s])
    if gain != 0:
        return bool(gain < 0)
    if slots.touched[w] != states.touched[s]:
        return bool(slots.touched[w] > states.touched[s])
    return bool(slots.moved[w] > states.moved[s])


def _with_room(states: States, size: Int) -> States:
    """Return the states with room for at least ``size`` states."""
    room = states.item.size
    if size <= room:
        return states
    while room < size:
        room *= 2
    return States(
        states.levels,
        _grown(states.weight, room),
        _grown(states.loss, room),
        _grown(states.touched, room),
        _grown(states.moved, room),
        _grown(states.item, room),
        _grown(states.parent, room),
    )


def _grown(values: Ints, size: Int) -> Ints:
    grown = np.full(size, -1, np.int64)
    grown[: values.size] = values
    return grown


def _core(items: Items, loss: Ints, budget: Int) -> tuple[Ints, Ints]:
    """Return the kept items that lose at most the budget. Each task has at least one: that which loses nothing."""
    core = np.zeros(items.kept.size, np.int64)
    core_starts = np.zeros(items.kept_starts.size, np.int64)
    n = 0
    for t in range(items.kept_starts.size - 1):
        for i in range(items.kept_starts[t], items.kept_starts[t + 1]):
            if loss[items.kept[i]] <= budget:
                core[n] = items.kept[i]
                n += 1
        core_starts[t + 1] = n
    return core[:n].copy(), core_starts


def _reach(core: Ints, core_starts: Ints, weight: Ints) -> tuple[Ints, Ints]:
    """Return the least and the greatest weight of all tasks before each task."""
    lightest = np.zeros(core_starts.size, np.int64)
    heaviest = np.zeros(core_starts.size, np.int64)
    for t in range(core_starts.size - 1):
        lightest[t + 1] = lightest[t] + weight[core[core_starts[t]]]
        heaviest[t + 1] = heaviest[t] + weight[core[core_starts[t + 1] - 1]]
    return lightest, heaviest


def _bounds_before(items: Items, capacity: Int, prices: Ints) -> Ints:
    """Return, for each price, an upper bound on the surplus of all tasks before each task at that price."""
    before = np.zeros((prices.size, items.kept_starts.size), np.int64)
    for q in range(prices.size):
        for t in range(items.kept_starts.size - 1):
            before[q, t + 1] = before[q, t] + best_surplus(items, t, capacity, prices[q])
    return before


def level(states: States, task: Int) -> tuple[Int, Int]:
    """Return where the states of the tasks from ``task`` on begin and end."""
    first = states.levels[task + 1] if task + 2 < states.levels.size else np.int64(0)
    return first, states.levels[task]


def walk(states: States, state: Int, task: Int, choice: Ints) -> None:
    """Write the items of a state of the tasks from ``task`` on into ``choice``."""
    s = state
    for t in range(task, choice.size):
        choice[t] = states.item[s]
        s = states.parent[s]


def best_within(states: States, task: Int, limit: Int, prefix: Ints, at_price: Int) -> tuple[Int, Ints]:
    """Return the best state of the tasks from ``task`` on no heavier than ``limit``, and the prefix completed by it.

    The state is -1 if there is none. States are ordered by weight, and none is worse than a lighter one, so the best is
    the last state, or one that ties with it.
    """
    choice = prefix.copy()
    first, end = level(states, task)
    last = last_within(states.weight, first, end, limit)
    if last < first:
        return np.int64(-1), choice
    walk(states, last, task, choice)
    best = last
    s = last - 1
    while s >= first and states.touched[s] == states.touched[last] and states.moved[s] == states.moved[last]:
        if at_price * (states.weight[last] - states.weight[s]) != states.loss[last] - states.loss[s]:
            break
        other = prefix.copy()
        walk(states, s, task, other)
        if earlier_gets_more(other, choice):
            choice = other
            best = s
        s -= 1
    return best, choice


def last_within(weight: Ints, first: Int, end: Int, limit: Int) -> Int:
    """Return the last state no heavier than ``limit``; ``first - 1`` if there is none."""
    low = first - 1
    high = end
    while high - low > 1:
        middle = (low + high) // 2
        if weight[middle] <= limit:
            low = middle
        else:
            high = middle
    return low


def earlier_gets_more(a: Ints, b: Ints) -> bool:
    """Return whether ``a`` gives more at the first task where the choices differ. Items are ordered by count."""
    for t in range(a.size):
        if a[t] != b[t]:
            return bool(a[t] > b[t])
    return False
