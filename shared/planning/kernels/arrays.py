"""Types and constants of the kernels.

An *item* is one worker count of one task. The items of all tasks lie in one array, task after task, in the order of
increasing count. Arrays named ``starts`` have one entry more than there are tasks: entries ``starts[t]`` to
``starts[t + 1]`` of the other arrays of the same tuple belong to task ``t``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int: TypeAlias = Any
"""An integer: int64 in compiled code; int or numpy's int64 in plain Python, which numpy's types would tell apart."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

VALUE_BITS = 58
"""The greatest objective values of all tasks add up to less than 2**58. A float64 has 53 bits, so no sum loses any."""

TOO_LARGE = -(10**6)
"""Value of the exponent if the objective values do not add up to a float64."""

MAX_BUDGET = 1 << 61
"""More than any feasible assignment can lose: 2**58 of value on either side of zero, and the price of all workers."""

BUDGET_STEP = 2
"""Factor between two budgets. The last search costs more than all searches before it."""

FIRST_BUDGETS = 64
"""The first budget is the known sufficient budget divided by this number."""

SECOND_STEP = 2
"""Factor between two budgets in the search for the second best assignment."""

FILLING_ROUNDS = 16
"""Most steps of the greedy improvement of the first assignment. Each step roughly halves the workers that are left."""

PRICES = 12
"""Number of prices, besides the price of the relaxation, at which the tasks before a task are bounded."""

FIRST_ROOM = 1024
"""Number of states that fit at first; the room doubles when it is full."""


class TableArrays(NamedTuple):
    """Throughput tables of all tasks: worker counts, increasing for each task, and FLOP/s at each count."""

    starts: Ints
    counts: Ints
    flop_per_s: Floats


class TaskArrays(NamedTuple):
    """Numbers of ``TaskProblem``, one entry for each task. ``limit``: the most workers that the task may get."""

    weight: Floats
    necessary: Ints
    limit: Ints
    current: Ints
    faulted: Ints
    required: Ints
    running_s: Floats
    transition_s: Floats
    staying: Ints
    newcomers_s: Floats
    slowdown: Floats
    worker_cost_flop_per_s: Floats


class TransitionArrays(NamedTuple):
    """``TaskProblem.transition_to_s`` of all tasks: new counts, increasing for each task, and D_transition in s."""

    starts: Ints
    counts: Ints
    seconds: Floats


class Options(NamedTuple):
    """The useful counts of each task, and G of each in weighted FLOP.

    ``touched``: 1 if the count disturbs the task, else 0. ``moved``: workers that the task gains or loses.
    """

    starts: Ints
    counts: Ints
    objective: Floats
    touched: Ints
    moved: Ints


class Choices(NamedTuple):
    """``Options`` with G as a fixed-point number, ``value``: what the exact search reads."""

    starts: Ints
    counts: Ints
    value: Ints
    touched: Ints
    moved: Ints


class Items(NamedTuple):
    """The items of ``Choices`` by relative weight.

    ``weight``: the count above the least count of the task, in units that all tasks share. ``kept``: indices of the
    items that no lighter item of the same task dominates; ``kept_starts``: where those of each task begin.
    """

    starts: Ints
    weight: Ints
    value: Ints
    touched: Ints
    moved: Ints
    kept: Ints
    kept_starts: Ints


class Envelopes(NamedTuple):
    """Concave envelopes: the vertices (items) of each task, and the slope of the edge before each vertex."""

    starts: Ints
    vertex: Ints
    slope: Ints


class Market(NamedTuple):
    """What a price of workers proves.

    ``capacity``: the weight that fits. ``price``: value of a unit of weight. ``bound``: no assignment has a greater
    value. ``loss``: for each item, how far its value less its price is below the greatest such difference of its task.
    """

    capacity: Int
    price: Int
    bound: Int
    loss: Ints


class States(NamedTuple):
    """Partial assignments: the states of the tasks from t on are ``levels[t + 1] .. levels[t]``, by increasing weight.

    ``item``: the item of task t (-1: the empty assignment). ``parent``: the state of the tasks from t + 1 on.
    """

    levels: Ints
    weight: Ints
    loss: Ints
    touched: Ints
    moved: Ints
    item: Ints
    parent: Ints


class ProofNumbers(NamedTuple):
    """The proof of the best assignment, in units of the fixed-point values.

    ``bound``: the bound of the relaxation. ``price``: the price of a worker. ``value``: that of the best assignment.
    ``budget``: every assignment of a value above ``bound - budget`` was looked at. ``states``: partial assignments that
    the search kept.
    """

    bound: Int
    price: Int
    value: Int
    budget: Int
    states: Int


class Optimum(NamedTuple):
    """The best and the second best assignment, as one item for each task, and the proof of the best.

    ``feasible``: whether there is an assignment. ``has_second``: whether ``second`` was asked for and exists.
    """

    feasible: bool
    best: Ints
    has_second: bool
    second: Ints
    proof: ProofNumbers
