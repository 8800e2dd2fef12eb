"""What an incident would have cost with another answer, by models that are said to be such (docs/costs.md). Pure.

The inputs of the models follow from the plans as they were decided: the fold keeps them with the incident
(``other_answers_to``). A request adds the incident's cost and the present time (``counterfactuals``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime

from shared.events.severities import Severity
from shared.interface.costs import Counterfactual, IncidentCost
from shared.views.documents import Impact, IncidentView, PlanView
from shared.views.incident_parts import OtherAnswers, RestartCost, SolverPlan, StoodStill

_RESTART = [
    "every process of the tasks that the fault interrupted ends, and they start again on as many workers",
    "a spare takes the place of what is lost at once",
    "a start takes as long as the task's last start from nothing",
    "steps since the newest checkpoint are computed again, at the rate before the fault",
]
_WAIT = [
    "every process of the tasks that the fault interrupted ends, and nothing takes the place of the node's workers",
    "these tasks stand until the node is back, and start again then on as many workers as before",
    *_RESTART[2:],
]
_SHRINK = [
    "all other tasks keep their workers",
    "both plans achieve what the planner's model says, and stay until the solver's next plan",
    "changing over costs as much as it did",
]


def other_answers_to(incident: IncidentView, plans: Sequence[PlanView]) -> OtherAnswers:
    """Return the inputs of an incident's models. ``plans``: the plans that have answered it up to now, in order."""
    solved = next((plan for plan in plans if plan.solved), None)
    solver_plan = None
    if solved is not None:
        solver_plan = SolverPlan(
            position=solved.position, decided_at=solved.decided_at, gain_flop_per_s=solved.gain_flop_per_s
        )
    interrupted = list(_interrupted(plans))
    restart = _restart(incident, interrupted)
    return OtherAnswers(
        restart=restart,
        solver_plan=solver_plan,
        stood_still=_stood_still(incident, interrupted) if restart is not None else None,
        back_at=incident.other_answers.back_at,
    )


def counterfactuals(
    others: OtherAnswers, cost: IncidentCost, next_solved: Callable[[int], datetime | None], as_of: datetime
) -> list[Counterfactual]:
    """Return what other answers would have cost; only those of which the log says enough.

    Args:
        others: the inputs of the incident's models.
        cost: the incident's cost.
        next_solved: returns when the first plan of the solver behind a position was decided; None: there is none.
        as_of: stands in for the next plan of the solver, and for the return of the node, where there is none.
    """
    found = []
    if others.restart is not None:
        found.append(Counterfactual(answer="plain-restart", **others.restart.model_dump(), assumptions=_RESTART))
        if others.stood_still is not None:
            found.append(_waited(others.restart, others.stood_still, others.back_at or as_of))
    plan = others.solver_plan
    if plan is not None and plan.gain_flop_per_s is not None:
        lasted_s = ((next_solved(plan.position) or as_of) - plan.decided_at).total_seconds()
        lost = cost.lost_flop + plan.gain_flop_per_s * max(lasted_s, 0.0)
        found.append(
            Counterfactual(answer="only-failed-task-shrinks", worker_s=None, lost_flop=lost, assumptions=_SHRINK)
        )
    return found


def _waited(restart: RestartCost, stood: StoodStill, back_at: datetime) -> Counterfactual:
    """Return what it would have cost to wait until the node was back."""
    still_s = max((back_at - stood.since).total_seconds(), 0.0)
    return Counterfactual(
        answer="wait-for-the-node",
        worker_s=restart.worker_s + stood.workers * still_s,
        lost_flop=restart.lost_flop + stood.waf_flop_per_s * still_s,
        assumptions=_WAIT,
    )


def _stood_still(incident: IncidentView, impacts: Sequence[Impact]) -> StoodStill | None:
    """Return what stands still while a node is waited for; None if the incident took no node."""
    if incident.severity is not Severity.SEV1 or incident.node is None:
        return None
    return StoodStill(
        workers=sum(len(impact.before) for impact in impacts),
        waf_flop_per_s=sum(impact.waf_flop_per_s for impact in impacts),
        since=incident.detected_at,
    )


def _interrupted(answers: Iterable[PlanView]) -> Iterator[Impact]:
    """Yield the first impact on each task that the fault interrupted."""
    seen: set[str] = set()
    for plan in answers:
        for task, impact in plan.impacts.items():
            if impact.faulted and impact.before and task not in seen:
                seen.add(task)
                yield impact


def _restart(incident: IncidentView, impacts: Sequence[Impact]) -> RestartCost | None:
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
    return RestartCost(worker_s=worker_s, lost_flop=lost_flop)
