"""The best and the second best assignment, with the proof."""

from __future__ import annotations

import numpy as np

from shared.planning.kernels.arrays import (
    BUDGET_STEP,
    FIRST_BUDGETS,
    MAX_BUDGET,
    SECOND_STEP,
    Int,
    Ints,
    Items,
    Market,
    States,
)
from shared.planning.kernels.relaxation import fill, hulls, losses, price, relative, undominated
from shared.planning.kernels.search import best_within, earlier_gets_more, last_within, level, search


def optimise(
    starts: Ints, counts: Ints, worth: Ints, touched: Ints, moved: Ints, workers: Int, alternatives: bool
) -> tuple[bool, Ints, bool, Ints, Ints]:
    """Return whether there is an assignment, the best, whether there is another, the second best, and the proof.

    Choices are items, one a task. The proof is, in units of the worths: the bound of the relaxation, the price of a
    worker, the worth of the best, the budget (every assignment worth more than bound - budget was looked at), and the
    number of states the search kept.
    """
    nothing = np.zeros(starts.size - 1, np.int64)
    proof = np.zeros(5, np.int64)
    for t in range(starts.size - 1):
        if starts[t] == starts[t + 1]:
            return False, nothing, False, nothing, proof
    weight, capacity = relative(starts, counts, workers)
    if capacity < 0:
        return False, nothing, False, nothing, proof
    kept, kept_starts = undominated(starts, worth, touched, moved)
    vertex, slope, vertex_starts = hulls(kept, kept_starts, weight, worth, capacity)
    at_price, choice = price(vertex, slope, vertex_starts, weight, capacity)
    fill(choice, kept, kept_starts, weight, worth, capacity)
    loss, bound = losses(starts, kept, kept_starts, weight, worth, capacity, at_price)
    items = Items(starts, weight, worth, touched, moved, kept, kept_starts, loss)
    market = Market(capacity, at_price, bound)
    enough = bound
    for t in range(choice.size):
        enough -= worth[choice[t]]
    budget = enough // (FIRST_BUDGETS)
    while True:
        states = search(items, market, budget)
        proof[4] += states.levels[0]
        best, chosen = best_within(states, 0, capacity, choice, at_price)
        lost = budget + 1
        if best >= 0:
            lost = states.loss[best] + at_price * (capacity - states.weight[best])
        if lost <= budget:
            break
        budget = min(enough, max(budget * BUDGET_STEP, np.int64(1)))
    proof[0] = bound
    proof[1] = at_price
    proof[2] = bound - lost
    proof[3] = budget
    if not alternatives:
        return True, chosen, False, chosen, proof
    step = _cheapest_change(chosen, items, capacity)
    enough = lost + step if step >= 0 else np.int64(MAX_BUDGET)
    while True:
        another, second = _second_best(chosen, items, market, budget, states)
        if another or budget >= enough:
            return True, chosen, another, second, proof
        budget = min(enough, max(budget * SECOND_STEP, enough // (FIRST_BUDGETS), np.int64(1)))
        states = search(items, market, budget)


def _cheapest_change(chosen: Ints, items: Items, capacity: Int) -> Int:
    """Return what the least costly change of a single task costs; -1 if none is feasible."""
    left = np.int64(capacity)
    for t in range(chosen.size):
        left -= items.weight[chosen[t]]
    cheapest = np.int64(-1)
    for t in range(chosen.size):
        now = chosen[t]
        for j in range(items.starts[t], items.starts[t + 1]):
            if j == now or items.weight[j] - items.weight[now] > left:
                continue
            cost = items.worth[now] - items.worth[j]
            if cheapest < 0 or cost < cheapest:
                cheapest = cost
    return cheapest


def _second_best(chosen: Ints, items: Items, market: Market, budget: Int, states: States) -> tuple[bool, Ints]:
    """Return whether another assignment than ``chosen`` is within the budget, and the best such.

    Any other leaves ``chosen`` first at some task, for any of its items; from there on the states know the best.
    """
    found = False
    # Loss, tasks touched, workers moved: of the best found, and of the chosen items before the present task.
    best = np.zeros(3, np.int64)
    passed = np.zeros(3, np.int64)
    new = np.zeros(3, np.int64)
    second = chosen.copy()
    room = np.int64(market.capacity)
    for t in range(chosen.size):
        for j in range(items.starts[t], items.starts[t + 1]):
            left = room - items.weight[j]
            if j == chosen[t] or left < 0 or passed[0] + items.loss[j] > budget:
                continue
            first, end = level(states, t + 1)
            s = last_within(states.weight, first, end, left)
            if s < first:
                continue
            new[0] = passed[0] + items.loss[j] + states.loss[s] + market.price * (left - states.weight[s])
            new[1] = passed[1] + items.touched[j] + states.touched[s]
            new[2] = passed[2] + items.moved[j] + states.moved[s]
            order = _compare(new, best) if found else -1
            if new[0] > budget or order > 0:
                continue
            prefix = chosen.copy()
            prefix[t] = j
            candidate = best_within(states, t + 1, left, prefix, market.price)[1]
            if order == 0 and not earlier_gets_more(candidate, second):
                continue
            found = True
            best[:] = new
            second = candidate
        now = chosen[t]
        room -= items.weight[now]
        passed[0] += items.loss[now]
        passed[1] += items.touched[now]
        passed[2] += items.moved[now]
    return found, second


def _compare(a: Ints, b: Ints) -> Int:
    """Return -1, 0 or 1: whether ``a`` comes before, with or after ``b``, number by number."""
    for i in range(a.size):
        if a[i] != b[i]:
            return -1 if a[i] < b[i] else 1
    return 0
