"""The planner's fold of the log, and what answers its problems.

An answer (the events that ``decide`` returns for one cause) is folded right after its cause and skipped when the log
delivers it later (``StateFold``). The state behind the answer to event k therefore contains every event up to k, and
every answer to an event before k (docs/architecture.md, "Folding and deciding"). The service (``main``), replay
(``replay``) and the simulator all fold through ``Fold``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from services.planner.decide import decide
from services.planner.evolve import evolve
from services.planner.problem.problem import Solve
from services.planner.state.cluster import State
from shared.errors import UnknownPolicy
from shared.events.plans import Problem, Solution
from shared.events.union import Event, Recorded
from shared.planning.solver import solve_with_alternatives
from shared.service.core import StateFold

Policies = Mapping[str, Solve]
"""The functions with which policies other than the live planner's answer problems, by the names in simulated
histories."""

NO_POLICIES: Policies = MappingProxyType({})
"""The policies that a program knows if it knows only the live planner's, which decides in every running system's
log."""


class Fold(StateFold[State]):
    """The planner's state, advanced record by record.

    For each record: ``take`` it; if that returns True, ``decide`` or look up the answer, then fold it by ``answer``.
    """

    def __init__(
        self,
        solve: Solve = solve_with_alternatives,
        state: State | None = None,
        policies: Policies = NO_POLICIES,
    ) -> None:
        """Start before the first event, or behind a later one.

        Args:
            solve: the solver, or a replacement that returns the same answers (``lookahead``).
            state: to start from; None: that before the first event.
            policies: the function that answers in place of ``solve`` if the log names a policy
                (``cluster.configured``).
        """
        super().__init__(evolve, state if state is not None else State())
        self._solve = solve
        self._policies = policies

    @property
    def policy(self) -> str:
        """The policy that the log names; empty: the live planner's own."""
        return self.state.config.policy if self.state.config is not None else ""

    @property
    def knows_policy(self) -> bool:
        """Whether this fold can decide as the policy that the log names."""
        return not self.policy or self.policy in self._policies

    def solve(self, problem: Problem) -> tuple[Solution, list[Solution]]:
        """Answer a problem as the policy that the log names.

        Raises:
            UnknownPolicy: this program does not know that policy. No other policy decides in its place.
        """
        if not self.knows_policy:
            known = ", ".join(sorted(self._policies)) or "none but the live planner's"
            raise UnknownPolicy(f"policy: {self.policy!r} of the log is not known here; known are: {known}")
        return (self._policies[self.policy] if self.policy else self._solve)(problem)

    def decide(self, record: Recorded) -> list[Event]:
        """Return the answer to the record that was taken last; empty if the record calls for none.

        Raises:
            UnknownPolicy: the solver is asked, and the log names a policy that is not known here.
        """
        return decide(self.state, record.event, record.recorded_at, self.solve)
