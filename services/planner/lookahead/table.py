"""The look-ahead: answers for what may happen next, solved before it happens (the paper's lookup table).

After every change of the state, in the background: the loss of any node, its return at once (its agent was restarted),
a node that joins, the end of any task, the failure of any task for which no node is to blame, and a second loss right
after the plan for the first. A worker that cannot be restarted takes its node with it, which is the same problem as the
node's loss.

Where there are slow workers, each way to use them is a problem (``slow_choices.py``). These problems are solved ahead
for all events but second losses and the last resort.

The table is keyed by the content of the problem of each pool, that is, by everything the solver reads of it. So an
answer can be missing but never wrong, and whether an answer was looked up or solved changes no byte of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from services.planner.decide import asked, decide
from services.planner.evolve import evolve
from services.planner.lookahead.next_events import (
    NodeClasses,
    node_join,
    node_joins,
    node_loss,
    task_ends,
    task_failures,
)
from services.planner.lookahead.node_problems import NodeProblems, posed_inputs
from services.planner.placement.cells import NoRoom
from services.planner.problem.problem import horizons_s
from services.planner.problem.slow_choices import has_question, posed_states
from services.planner.state.cluster import State
from shared.errors import InvalidInput
from shared.events.plans import Problem, Solution
from shared.events.union import ErrorDetected, Event
from shared.planning.instance import Inputs, TableCache
from shared.planning.solver import Counts, answer, best_counts, pools_of

HORIZON_S = 60.0
"""How far ahead the table looks at D_running, seconds. If it takes a step on its grid within this time, both sides of
the step are solved."""


class LookAhead:
    """The table of answers. ``solve`` may be called while ``rebuild`` runs in another thread.

    ``hits``: problems whose answer was in the table. ``misses``: problems that had to be solved.
    """

    def __init__(self) -> None:
        """Start with an empty table."""
        self.hits = 0
        self.misses = 0
        self._known: dict[bytes, Counts] = {}
        self._cache = TableCache()

    def __len__(self) -> int:
        return len(self._known)

    def counters(self) -> dict[str, int]:
        """Return the numbers of answers, hits and misses, for the service's readiness report."""
        return {
            "look_ahead_answers": len(self),
            "look_ahead_hits": self.hits,
            "look_ahead_misses": self.misses,
        }

    def solve(self, problem: Problem) -> tuple[Solution, list[Solution]]:
        """Return the answer of ``solve_with_alternatives``. It is a hit if the answers of all pools are known.

        Raises:
            InvalidInput: as ``solve_with_alternatives``.
        """
        pools = [Inputs.of(pool, self._cache) for pool in pools_of(problem)]
        known = [self._known.get(inputs.key()) for inputs in pools]
        if None in known:
            self.misses += 1
        else:
            self.hits += 1
        return answer([(inputs, found or best_counts(inputs)) for inputs, found in zip(pools, known, strict=True)])

    def rebuild(self, state: State, at: datetime, going_on: Callable[[], bool] = lambda: True) -> bool:
        """Solve everything that may come next, and forget what may not come any more.

        An answer that is already known is not solved again. Each answer can be used from the moment it is found.

        Args:
            state: the present state.
            at: the present time.
            going_on: asked before each problem; the rebuild ends early once it returns False.

        Returns:
            Whether the rebuild came to its end.
        """
        known: dict[bytes, Counts] = {}
        self._cache = TableCache()
        for inputs in foreseen(state, at, self._counts, self._cache):
            if not going_on():
                return False
            key = inputs.key()
            found = self._known.get(key) or self._solved(inputs)
            if found is not None:
                self._known[key] = known[key] = found
        self._known = known
        return True

    def _counts(self, inputs: Inputs) -> Counts | None:
        """Return the known or solved answer; None if the problem has none."""
        return self._known.get(inputs.key()) or self._solved(inputs)

    def _solved(self, inputs: Inputs) -> Counts | None:
        """Return the answer; None if the problem has none."""
        try:
            return best_counts(inputs)
        except InvalidInput:
            return None


def foreseen(
    state: State, at: datetime, solved: Callable[[Inputs], Counts | None], cache: TableCache
) -> Iterator[Inputs]:
    """Yield the problems of all next events, likely ones first: losses of nodes, joins, ends, second losses.

    Args:
        state: the present state.
        at: the present time.
        solved: returns the answer to the problem of a first loss, which a second loss follows.
        cache: remembers the arrays of throughput tables.
    """
    classes, hits = NodeClasses(), NodeProblems(at, cache)
    present = classes.of(state)
    firsts: list[tuple[ErrorDetected, State]] = []
    states: list[State] = []
    for lost in present:
        event = node_loss(lost.node, at)
        after = evolve(state, event, at)
        posed = asked(after, event)
        if posed is not None and has_question(posed):
            states += posed_states(posed)
            for way in posed_states(posed):
                yield from posed_inputs(way, at, cache)
        elif posed is not None:
            firsts.append((event, after))
            states.append(posed)
            yield from posed_inputs(posed, at, cache)
    others: list[Event] = [*node_joins(state, at), *task_ends(state, at), *task_failures(state, at)]
    for other in others:
        if (posed := asked(evolve(state, other, at), other)) is not None:
            for way in posed_states(posed):
                states.append(way)
                yield from posed_inputs(way, at, cache)
    later = at + timedelta(seconds=HORIZON_S)
    for posed in states:
        # The later problem differs from the present one only if D_running takes a step on its grid.
        if horizons_s(posed, at) != horizons_s(posed, later):
            yield from posed_inputs(posed, later, cache)
    if has_question(state):
        return
    yield from hits.of(state, present, lambda hit: node_join(state.nodes[hit.node], at))
    for event, after in firsts:
        planned = _planned(after, event, at, solved, cache)
        if planned is not None:
            yield from hits.of(planned, classes.of(planned), lambda hit: node_loss(hit.node, at))


def _planned(
    state: State, event: Event, at: datetime, solved: Callable[[Inputs], Counts | None], cache: TableCache
) -> State | None:
    """Return the state once the plan for the event is made from the answers of the table.

    None: there is no answer, or it cannot be placed beside a cordoned node, and the plan solves another problem.
    """

    def solve(problem: Problem) -> tuple[Solution, list[Solution]]:
        pools = [Inputs.of(pool, cache) for pool in pools_of(problem)]
        found = [(inputs, counts) for inputs in pools if (counts := solved(inputs)) is not None]
        if len(found) < len(pools):
            raise InvalidInput("a pool has no answer")
        return answer(found)

    try:
        answered = decide(state, event, at, solve, digest=False)
    except (NoRoom, InvalidInput):
        return None
    for decided in answered:
        state = evolve(state, decided, at)
    return state
