"""The exact search within a budget of losses."""

from __future__ import annotations

import numpy as np

from shared.planning.kernels.arrays import FIRST_ROOM, PRICES, Int, Ints, Items, Market, States


def search(items: Items, market: Market, budget: Int) -> States:
    """Return all partial assignments, of the last tasks on, that a choice within the budget can end with.

    A state is left out if a lighter or equal one is better, or if no whole assignment within the budget has it: by what
    the tasks before can weigh, or by the bound of what they can gain. (That is taken at several prices: it holds at
    each.) Where two are equally good, the larger count of the earlier task stays.
    """
    capacity, at_price, bound = market.capacity, market.price, market.bound
    tasks = items.starts.size - 1
    core, core_starts = _core(items, budget)
    lightest, heaviest = _reach(core, core_starts, items.weight)
    prices = np.zeros(PRICES, np.int64)
    for i in range(PRICES):
        # A half, a quarter ... above and below.
        prices[i] = at_price + (at_price >> (i // 2 + 1)) * (1 - 2 * (i % 2))
    before = _bounds_before(items, capacity, prices)
    slots = _slots(capacity)
    states = _first_state(tasks)
    n = np.int64(1)
    gained = np.int64(0)
    for t in range(tasks - 1, -1, -1):
        sample = core[core_starts[t]]
        gained += items.loss[sample] + items.worth[sample] - at_price * items.weight[sample]
        first, end = level(states, t + 1)
        for i in range(core_starts[t + 1] - 1, core_starts[t] - 1, -1):
            j = core[i]
            for s in range(first, end):
                w = states.weight[s] + items.weight[j]
                if w + lightest[t] > capacity:
                    break
                loss = states.loss[s] + items.loss[j]
                if loss > budget:
                    continue
                idle = capacity - w - heaviest[t]
                if idle > 0 and loss + at_price * idle > budget:
                    continue
                needed = bound - budget - (gained - loss + at_price * w)
                hopeless = False
                for q in range(PRICES):
                    if before[q, t] + prices[q] * (capacity - w) < needed:
                        hopeless = True
                        break
                if not hopeless:
                    _offer(slots, w, loss, states.touched[s] + items.touched[j], states.moved[s] + items.moved[j], j, s)
        states, n = _collect(slots, states, n, at_price)
        states.levels[t] = n
    return states


def _slots(capacity: Int) -> States:
    """Return a place for one state of each weight; those without an item are free. Keeps the range in use in levels."""
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
    """Return the states of no task at all: one that weighs nothing."""
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
    """Put a state into the place of its weight unless what is there is as good."""
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
    """Append the states of all places but those that a lighter one beats, and free the places; return the new end."""
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
    """Return whether the lighter state is worth more than that at weight ``w``, or as much and better in ties."""
    gain = at_price * (w - states.weight[s]) - (slots.loss[w] - states.loss[s])
    if gain != 0:
        return bool(gain < 0)
    if slots.touched[w] != states.touched[s]:
        return bool(slots.touched[w] > states.touched[s])
    return bool(slots.moved[w] > states.moved[s])


def _with_room(states: States, size: Int) -> States:
    """Return the states with room for at least ``size``."""
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


def _core(items: Items, budget: Int) -> tuple[Ints, Ints]:
    """Return the kept items that lose no more than the budget; each task has one (that which loses nothing)."""
    core = np.zeros(items.kept.size, np.int64)
    core_starts = np.zeros(items.kept_starts.size, np.int64)
    n = 0
    for t in range(items.kept_starts.size - 1):
        for i in range(items.kept_starts[t], items.kept_starts[t + 1]):
            if items.loss[items.kept[i]] <= budget:
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
    """Return, for each price, what all tasks before each task are worth at most at that price."""
    before = np.zeros((prices.size, items.kept_starts.size), np.int64)
    for q in range(prices.size):
        for t in range(items.kept_starts.size - 1):
            first = items.kept[items.kept_starts[t]]
            best = items.worth[first] - prices[q] * items.weight[first]
            for i in range(items.kept_starts[t], items.kept_starts[t + 1]):
                j = items.kept[i]
                if items.weight[j] > capacity:
                    break
                best = max(best, items.worth[j] - prices[q] * items.weight[j])
            before[q, t + 1] = before[q, t] + best
    return before


def level(states: States, task: Int) -> tuple[Int, Int]:
    """Return where the states of tasks ``task``.. begin and end."""
    first = states.levels[task + 1] if task + 2 < states.levels.size else np.int64(0)
    return first, states.levels[task]


def walk(states: States, state: Int, task: Int, choice: Ints) -> None:
    """Write the items of a state of tasks ``task``.. into ``choice``."""
    s = state
    for t in range(task, choice.size):
        choice[t] = states.item[s]
        s = states.parent[s]


def best_within(states: States, task: Int, limit: Int, prefix: Ints, at_price: Int) -> tuple[Int, Ints]:
    """Return the best state of tasks ``task``.. no heavier than ``limit`` (-1: none) and ``prefix`` completed by it.

    States are by weight and none is worse than a lighter one, so it is the last, or one that equals it.
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
    """Return whether, at the first task where the two choices differ, ``a`` gives more (items are by count)."""
    for t in range(a.size):
        if a[t] != b[t]:
            return bool(a[t] > b[t])
    return False
