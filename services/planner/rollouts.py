"""Rollouts: solutions are compared by what they are worth in futures of the cluster (``futures.py``).

The objective G reaches to the next failure, and knows nothing of nodes that come back. Here each candidate
(``candidates.py``) is followed through the same futures, up to a horizon of several failures:

    value = - penalty of the candidate + sum over time of F of the present counts - transitions on the way

What happens on the way, and what it costs, is in ``courses.py``.

**Rule.** Another candidate than the best is taken only if its gain in the mean exceeds ``SURE`` standard errors of that
gain, and ``MARGIN`` of what the transitions of both cost. All candidates see the same futures, so what they have in
common does not scatter.

Everything is computed from the state, the cause's id and the solver's answers, by + - * / and integers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from math import sqrt
from typing import NamedTuple

from services.planner.candidates import candidates
from services.planner.courses import Course
from services.planner.futures import Future, Prospect, futures, prospect
from services.planner.problem import Solve, horizons_s
from services.planner.state import State
from shared.outlook import Outlook, Valued
from shared.planning.counted_draws import seed_of
from shared.planning.performance.ordered_sum import ordered_sum
from shared.planning.solver import pools_of
from shared.plans import Problem, Solution

SURE = 2.0
"""Standard errors that a gain has to exceed: a candidate that is worth no more exceeds that by chance in 1 of 40 plans
(normal distribution) and then costs what it hardly differs by. Draws are stratified, so means scatter less still."""

MARGIN = 0.1
"""Part of what the transitions of a candidate and of the best cost, together, that a gain has to exceed. Times of
transitions are on a grid of powers of 1.1, so each may be wrong by a tenth; and futures are coarse about whom a loss
hits, so that solutions that hardly differ would change places without end."""

MOST_NAMED = 8
"""Nodes away that the plan names with their expected return: those that were lost last."""


class _Drawn(NamedTuple):
    """The futures of a pool. ``kind``: of its workers."""

    kind: str
    problem: Problem
    known: Prospect
    futures: list[Future]

    def returns_s(self) -> dict[str, float]:
        """Return when the nodes away come back in the mean of the futures, at the latest at their end."""
        number, horizon_s = len(self.futures), self.known.horizon_s
        return {
            node.name: ordered_sum(min(each.returns_s[i], horizon_s) for each in self.futures) / number
            for i, node in enumerate(self.known.away[:MOST_NAMED])
        }


class Ranked(NamedTuple):
    """Candidates by what they are worth. ``solutions``: the one to take first, then those to take if it has no room."""

    solutions: list[Solution]
    outlook: Outlook | None


def rank(
    state: State, at: datetime, cause: str, problem: Problem, answer: tuple[Solution, list[Solution]], solve: Solve
) -> Ranked:
    """Return the solutions of a problem, the one to take first.

    Args:
        state: the cluster.
        at: when the plan is made.
        cause: id of the event that the plan answers, from which the futures follow.
        problem: the problem.
        answer: the best solution and the alternatives.
        solve: answers further problems.
    """
    rollouts = int(state.parameter("rollouts"))
    solution, alternatives = answer
    if rollouts < 1 or not problem.tasks:
        return Ranked([solution, *alternatives], None)
    running_s = horizons_s(state, at)
    found = candidates(state, problem, running_s, solution, alternatives, solve)
    if len(found.solutions) < 2:
        return Ranked([solution, *alternatives], None)
    pools = _drawn(state, at, problem, seed_of(cause), rollouts)
    if not pools:
        return Ranked([solution, *alternatives], None)
    values = [[0.0] * rollouts for _ in found.solutions]
    for pool, fewer in zip(pools, found.fewer, strict=True):
        course = Course(pool.problem, pool.known, running_s[pool.kind], found.solutions, fewer)
        for row, counts in zip(values, course.candidates, strict=True):
            for i, each in enumerate(pool.futures):
                row[i] += course.value(counts, each)
    costs = [ordered_sum(term.penalty for term in each.terms) for each in found.solutions]
    valued = [
        _valued(each.label, row, values[0], MARGIN * (cost + costs[0]))
        for each, row, cost in zip(found.solutions, values, costs, strict=True)
    ]
    order = sorted(range(len(valued)), key=lambda i: -valued[i].value)
    better = [i for i in order if i and is_sure(valued[i])]
    first = better[0] if better else 0
    order = [first, *(i for i in order if i != first)]
    outlook = Outlook(
        rollouts=rollouts,
        seed=seed_of(cause),
        horizon_s={pool.kind: pool.known.horizon_s for pool in pools},
        node_loss_per_s=pools[0].known.loss_per_s,
        returns_s={name: seconds for pool in pools for name, seconds in pool.returns_s().items()},
        choices=[valued[i] for i in order],
    )
    # What has no room beside a cordoned node gives way to the best, as without futures.
    kept = [found.solutions[first], *(each for i, each in enumerate(found.solutions) if i != first)]
    return Ranked(kept, outlook)


def _drawn(state: State, at: datetime, problem: Problem, seed: int, rollouts: int) -> list[_Drawn]:
    """Return the futures of each pool that has tasks; none if a pool has no usable node."""
    found = []
    for place, pool in enumerate(pools_of(problem)):
        kind = pool.tasks[0].pool
        known = prospect(state, kind, at)
        if known is None:
            return []
        found.append(_Drawn(kind, pool, known, futures(known, seed, rollouts, place)))
    return found


def is_sure(valued: Valued) -> bool:
    """Return whether the gain exceeds what may be chance, and the error of the costs of transitions."""
    return valued.gain > valued.margin and valued.gain > SURE * valued.gain_error


def _valued(label: str, values: Sequence[float], best: Sequence[float], margin: float) -> Valued:
    """Return the mean value, and the mean and the standard error of the gain over the best, future by future."""
    number = len(values)
    gains = [value - other for value, other in zip(values, best, strict=True)]
    mean = ordered_sum(gains) / number
    squares = ordered_sum((gain - mean) * (gain - mean) for gain in gains)
    # The square root is one of the operations whose every bit IEEE 754 fixes. A single future says nothing of chance.
    error = sqrt(squares / (number * (number - 1)) if number > 1 else mean * mean)
    return Valued(label=label, value=ordered_sum(values) / number, gain=mean, gain_error=error, margin=margin)
