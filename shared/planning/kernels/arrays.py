"""Types and constants of the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int: TypeAlias = Any
"""A whole number: int64 where compiled, int or numpy's int64 where not (which numpy's types would tell apart)."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WORTH_BITS = 58
"""The greatest worths of all tasks add up to less than 2**58. Float64 has 53 bits: nothing of a sum is lost."""

TOO_LARGE = -(10**6)
"""In place of an exponent: the worths do not add up to a float64."""

MAX_BUDGET = 1 << 61
"""More than any feasible assignment can lose (2**58 of worth on either side of zero, and the price of all workers)."""

BUDGET_STEP = 2
"""Factor between two budgets: the last search costs more than all before it, and is not far above what is needed."""

FIRST_BUDGETS = 64
"""The first budget is this part of what is known to be enough."""

SECOND_STEP = 2
"""The same for the second best, which is often just beyond: searches grow faster than their budget."""

FILLING_ROUNDS = 16
"""Steps of the greedy improvement of the first assignment. Each halves, about, what is left."""

PRICES = 12
"""Prices at which the tasks before are bound, besides the one of the relaxation."""

FIRST_ROOM = 1024
"""States for which there is room at first; it doubles."""


class Items(NamedTuple):
    """The counts to choose from: task ``t``'s are ``starts[t] .. starts[t + 1]``, by increasing weight.

    ``weight``: the count above the task's least, in units that all share. ``touched``, ``moved``: what ties go by.
    ``kept``, ``kept_starts``: those that no smaller one beats. ``loss``: see ``relaxation.losses``.
    """

    starts: Ints
    weight: Ints
    worth: Ints
    touched: Ints
    moved: Ints
    kept: Ints
    kept_starts: Ints
    loss: Ints


class Market(NamedTuple):
    """``capacity``: the weight that fits. ``price``: of a unit of weight. ``bound``: what that price proves."""

    capacity: Int
    price: Int
    bound: Int


class States(NamedTuple):
    """Partial assignments: those of tasks t.. are ``levels[t + 1] .. levels[t]``, by increasing weight.

    ``item``: of task t (-1: no task at all). ``parent``: the state of tasks t + 1...
    """

    levels: Ints
    weight: Ints
    loss: Ints
    touched: Ints
    moved: Ints
    item: Ints
    parent: Ints
