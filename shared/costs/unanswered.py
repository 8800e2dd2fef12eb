"""What open incidents cost while no plan answers them: the workers of their tasks wait. Pure.

Claims follow from plans (``shared/costs/claims.py``): the first one claims, for each task that the fault has broken,
the time of all its workers since the fault. Until there is one, the ledger has that time as training, and an incident
that nobody answers, the worst of all, would cost nothing. So what the coming plan will claim is claimed here, for what
is said of the incident alone: the time since the fault, of all workers that the task is to have. The workers of a node
that the incident has taken are ``lost`` already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime

from shared.costs.charges import settle
from shared.costs.claims import Claim, Part
from shared.costs.settlement import Amounts, add_worker_s, no_amounts
from shared.events.severities import Severity
from shared.tasks.specification import ENDED
from shared.views.documents import IncidentView, TaskView


def is_unanswered(incident: IncidentView) -> bool:
    """Return whether an incident is open, and no plan has answered it."""
    return incident.closed_at is None and incident.planned_at is None


def unanswered_amounts(
    incidents: Iterable[IncidentView],
    tasks: Mapping[str, TaskView],
    rate_of: Callable[[TaskView, int], float],
    as_of: datetime,
) -> tuple[dict[str, Amounts], dict[str, Amounts]]:
    """Return the amounts of incidents that no plan has answered, and what each further second adds to them.

    A worker that waits for two of them is counted once, for the older one.

    Args:
        incidents: those that are open.
        tasks: the tasks that they hit, by name.
        rate_of: returns the FLOP/s of a task on a number of workers (``shared.projections.rates.rate_flop_per_s``).
        as_of: the present.
    """
    ordered = sorted(filter(is_unanswered, incidents), key=lambda one: one.position)
    claims = [claim for incident in ordered for claim in _claims(incident, tasks, rate_of, as_of)]
    sums: dict[str, Amounts] = {}
    growth: dict[str, Amounts] = {}
    for charge in settle(claims):
        add_worker_s(sums.setdefault(charge.claim.incident, no_amounts()), charge.claim, charge.worker_s)
        if charge.intervals and charge.intervals[-1][1] >= as_of.timestamp():
            each_s = growth.setdefault(charge.claim.incident, no_amounts())
            add_worker_s(each_s, charge.claim, float(len(charge.workers)))
    return sums, growth


def _claims(
    incident: IncidentView,
    tasks: Mapping[str, TaskView],
    rate_of: Callable[[TaskView, int], float],
    as_of: datetime,
) -> Iterator[Claim]:
    taken = incident.node if incident.severity is Severity.SEV1 else None
    fault_s, detected_s, now_s = (at.timestamp() for at in (incident.occurred_at, incident.detected_at, as_of))
    for name in incident.tasks:
        task = tasks.get(name)
        if task is None or task.state in ENDED or not task.planned:
            continue
        workers = tuple(w for w in task.planned if taken is None or w.rpartition("/")[0] != taken)
        rate = task.spec.weight * rate_of(task, len(task.planned)) / len(task.planned)
        known_s = min(detected_s, now_s)
        for start_s, end_s, part in ((fault_s, known_s, Part.DETECTION), (known_s, now_s, Part.TRANSITION)):
            if workers and end_s > start_s:
                yield Claim(workers, start_s, end_s, part, name, incident.id, rate)
