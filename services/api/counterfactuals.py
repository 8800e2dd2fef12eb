"""What an incident would have cost with another answer, by models that are said to be such (docs/costs.md). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from services.api.cost_models import Counterfactual, IncidentCost
from services.api.views import Impact, IncidentView, PlanView

_RESTART = [
    "every process of the tasks that the fault interrupted ends, and they start again on as many workers",
    "a spare takes the place of what is lost at once",
    "a start takes as long as the task's last start from nothing",
    "steps since the newest checkpoint are computed again, at the rate before the fault",
]
_SHRINK = [
    "all other tasks keep their workers",
    "both plans achieve what the planner's model says, and stay until the solver's next plan",
    "changing over costs as much as it did",
]


class Answers:
    """Plans, to compare answers with.

    Args:
        plans: by id, at least those of the incidents.
        next_solved: returns when the first plan of the solver behind a position was decided; None: there is none.
        as_of: stands in for the next plan of the solver, where there is none.
    """

    def __init__(
        self, plans: Mapping[str, PlanView], next_solved: Callable[[int], datetime | None], as_of: datetime
    ) -> None:
        self._plans = plans
        self._next_solved = next_solved
        self._as_of = as_of

    def counterfactuals(self, incident: IncidentView, cost: IncidentCost) -> list[Counterfactual]:
        """Return what other answers would have cost; only those of which the log says enough."""
        answers = [self._plans[name] for name in incident.plans if name in self._plans]
        found = [_plain_restart(incident, list(_interrupted(answers))), self._shrunk(answers, cost)]
        return [one for one in found if one is not None]

    def _shrunk(self, answers: Iterable[PlanView], cost: IncidentCost) -> Counterfactual | None:
        """Return what it would have cost to shrink only the failed tasks, by the first answer of the solver."""
        plan = next((plan for plan in answers if plan.solved), None)
        if plan is None or plan.gain_flop_per_s is None:
            return None
        end = self._next_solved(plan.position) or self._as_of
        lasted_s = (end - plan.decided_at).total_seconds()
        lost = cost.lost_flop + plan.gain_flop_per_s * max(lasted_s, 0.0)
        return Counterfactual(answer="only-failed-task-shrinks", worker_s=None, lost_flop=lost, assumptions=_SHRINK)


def _interrupted(answers: Iterable[PlanView]) -> Iterator[Impact]:
    """Yield the first impact on each task that the fault interrupted."""
    seen: set[str] = set()
    for plan in answers:
        for task, impact in plan.impacts.items():
            if impact.faulted and impact.before and task not in seen:
                seen.add(task)
                yield impact


def _plain_restart(incident: IncidentView, impacts: Sequence[Impact]) -> Counterfactual | None:
    """Return what a restart from the checkpoint would have cost; None if some task's start was never measured."""
    if not impacts or not all(impact.start_s for impact in impacts):
        return None
    worker_s = lost_flop = 0.0
    detection_s = max((incident.detected_at - incident.occurred_at).total_seconds(), 0.0)
    for impact in impacts:
        step = max(impact.step, (incident.step or 0) if incident.task == impact.task else 0)
        lost_s = detection_s + impact.start_s + max(step - impact.saved_step, 0) * impact.step_before_s
        worker_s += len(impact.before) * lost_s
        lost_flop += impact.waf_flop_per_s * lost_s
    return Counterfactual(answer="plain-restart", worker_s=worker_s, lost_flop=lost_flop, assumptions=_RESTART)
