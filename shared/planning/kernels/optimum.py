"""The best and the second best assignment, with the proof."""

from __future__ import annotations

import numpy as np

from shared.planning.kernels.arrays import (
    BUDGET_STEP,
    FIRST_BUDGETS,
    MAX_BUDGET,
    SECOND_STEP,
    Choices,
    Int,
    Ints,
    Items,
    Market,
    Optimum,
    ProofNumbers,
    States,
)
from shared.planning.kernels.relaxation import envelopes, fill, market, price, relative, undominated
from shared.planning.kernels.search import best_within, earlier_gets_more, last_within, level, search


def optimise(choices: Choices, workers: Int, alternatives: bool) -> Optimum:
    """Return the best assignment of at most ``workers`` workers, with its proof, and the second best.

    ``alternatives``: whether the second best is searched for.
    """
    nothing = np.zeros(choices.starts.size - 1, np.int64)
    zero = np.int64(0)
    infeasible = Optimum(False, nothing, False, nothing, ProofNumbers(zero, zero, zero, zero, zero))
    for t in range(choices.starts.size - 1):
        if choices.starts[t] == choices.starts[t + 1]:
            return infeasible
    weight, capacity = relative(choices.starts, choices.counts, workers)
    if capacity < 0:
        return infeasible
    kept, kept_starts = undominated(choices)
    items = Items(choices.starts, weight, choices.value, choices.touched, choices.moved, kept, kept_starts)
    at_price, choice = price(envelopes(items, capacity), weight, capacity)
    fill(choice, items, capacity)
    sold = market(items, capacity, at_price)
    enough = sold.bound
    for t in range(choice.size):
        enough -= items.value[choice[t]]
    budget = enough // FIRST_BUDGETS
    searched = np.int64(0)
    while True:
        states = search(items, sold, budget)
        searched += states.levels[0]
        best, chosen = best_within(states, 0, capacity, choice, at_price)
        lost = budget + 1
        if best >= 0:
            lost = states.loss[best] + at_price * (capacity - states.weight[best])
        if lost <= budget:
            break
        budget = min(enough, max(budget * BUDGET_STEP, np.int64(1)))
    proof = ProofNumbers(sold.bound, at_price, sold.bound - lost, budget, searched)
    if not alternatives:
        return Optimum(True, chosen, False, chosen, proof)
    step = _cheapest_change(chosen, items, capacity)
    enough = lost + step if step >= 0 else np.int64(MAX_BUDGET)
    while True:
        another, second = _second_best(chosen, items, sold, budget, states)
        if another or budget >= enough:
            return Optimum(True, chosen, another, second, proof)
        budget = min(enough, max(budget * SECOND_STEP, enough // FIRST_BUDGETS, np.int64(1)))
        states = search(items, sold, budget)


def _cheapest_change(chosen: Ints, items: Items, capacity: Int) -> Int:
    """Return the least value that a change of a single task costs; -1 if no change is feasible."""
    left = np.int64(capacity)
    for t in range(chosen.size):
        left -= items.weight[chosen[t]]
    cheapest = np.int64(-1)
    for t in range(chosen.size):
        now = chosen[t]
        for j in range(items.starts[t], items.starts[t + 1]):
            if j == now or items.weight[j] - items.weight[now] > left:
                continue
            cost = items.value[now] - items.value[j]
            if cheapest < 0 or cost < cheapest:
                cheapest = cost
    return cheapest


def _second_best(chosen: Ints, items: Items, sold: Market, budget: Int, states: States) -> tuple[bool, Ints]:
    """Return whether there is another assignment within the budget than ``chosen``, and the best such assignment.

    Any other assignment leaves ``chosen`` first at some task, for one of its items. The states know the best rest.
    """
    found = False
    # Loss, tasks touched, workers moved: of the best found, and of the chosen items before the present task.
    best = np.zeros(3, np.int64)
    passed = np.zeros(3, np.int64)
    new = np.zeros(3, np.int64)
    second = chosen.copy()
    room = np.int64(sold.capacity)
    for t in range(chosen.size):
        for j in range(items.starts[t], items.starts[t + 1]):
            left = room - items.weight[j]
            if j == chosen[t] or left < 0 or passed[0] + sold.loss[j] > budget:
                continue
            first, end = level(states, t + 1)
            s = last_within(states.weight, first, end, left)
            if s < first:
                continue
            new[0] = passed[0] + sold.loss[j] + states.loss[s] + sold.price * (left - states.weight[s])
            new[1] = passed[1] + items.touched[j] + states.touched[s]
            new[2] = passed[2] + items.moved[j] + states.moved[s]
            order = _compare(new, best) if found else -1
            if new[0] > budget or order > 0:
                continue
            prefix = chosen.copy()
            prefix[t] = j
            candidate = best_within(states, t + 1, left, prefix, sold.price)[1]
            if order == 0 and not earlier_gets_more(candidate, second):
                continue
            found = True
            best[:] = new
            second = candidate
        now = chosen[t]
        room -= items.weight[now]
        passed[0] += sold.loss[now]
        passed[1] += items.touched[now]
        passed[2] += items.moved[now]
    return found, second


def _compare(a: Ints, b: Ints) -> Int:
    """Return -1, 0 or 1: whether ``a`` comes before, with or after ``b``, compared number by number."""
    for i in range(a.size):
        if a[i] != b[i]:
            return -1 if a[i] < b[i] else 1
    return 0
