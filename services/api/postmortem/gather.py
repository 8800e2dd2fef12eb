"""Gathers what a post-mortem needs: views in one transaction, and the incident's records of the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from services.api import present
from services.api.accounts import Accounts
from services.api.costs import incident_cost
from services.api.counterfactuals import counterfactuals
from services.api.flop_text import flop
from services.api.models import Incident
from services.api.plan_text import explain
from services.api.postmortem import evidence, timeline, words
from services.api.postmortem.alike import EXAMINED, alike
from services.api.postmortem.counts import count_reasons, unused
from services.api.postmortem.model import DecidedPlan, Injection, PostMortem, Replanned
from services.api.postmortem.replanning import replanned
from services.api.readers import ViewReader
from services.api.tables import INCIDENTS, PLANS
from services.api.views import ClusterView, IncidentView, PlanView
from shared.errors import Archived
from shared.events import ErrorDetected, FaultInjected, PlanDecided, Recorded
from shared.log.log import EventLog
from shared.plans import LoggedTable, Problem, Response

MOST_RECORDS = 20_000
"""Records that are looked through behind the fault: on a busy cluster, hours. A course that lasts longer is cut, and
the page says so."""

PAGE = 1000
"""Records that are read at a time."""

INJECTION_RECORDS = 200
"""Records before the fault among which a request to inject it is looked for: it strikes at the rank's next step."""

MOST_PLANS = 200
"""Plans before one in which its throughput tables are looked for: a table is logged again once no plan names it."""


@dataclass(frozen=True)
class Known:
    """What the projections know of an incident. ``plans``: that answered it, and the solver's plan before them."""

    view: IncidentView
    incident: Incident
    plans: Sequence[PlanView]
    solved_before: Sequence[PlanView]
    earlier: Sequence[IncidentView]
    position: int


def known(views: ViewReader, name: str, cluster: ClusterView, now: datetime) -> Known:
    """Return what the projections know of an incident.

    Raises:
        NotFound: there is no such incident.
    """
    view = views.find(INCIDENTS, name)
    amounts = Accounts(views, now).incidents([name])
    cost = incident_cost(amounts.get(name), cluster.price_per_worker_hour)
    others = counterfactuals(view.other_answers, cost, views.next_solved, now)
    shown = Incident(**present.incident_facts(view).model_dump(), cost=cost, counterfactuals=others)
    found = views.several(PLANS, view.plans)
    plans = [found[plan] for plan in view.plans if plan in found]
    first = plans[0].position if plans else view.position
    return Known(
        view=view,
        incident=shown,
        plans=plans,
        solved_before=[plan for plan in views.newest(PLANS, before=first, limit=MOST_PLANS) if plan.solved],
        earlier=views.newest(INCIDENTS, before=view.position, limit=EXAMINED),
        position=views.position(),
    )


def post_mortem(found: Known, log: EventLog, cluster: ClusterView, now: datetime) -> PostMortem:
    """Return the post-mortem. ``found``: what the projections know; ``log``: is read.

    Raises:
        Unavailable: the log does not answer.
    """
    incident, left_out = found.incident, list[str]()
    records = _records(found, log, left_out)
    return PostMortem(
        incident=incident,
        headline=timeline.headline(incident),
        kind_words=words.KINDS[incident.kind],
        severity_words=words.SEVERITIES[incident.severity],
        injected=_injected(found, log),
        found=timeline.found_by(incident),
        statements=evidence.statements(incident.evidence),
        ranks=evidence.rank_states(incident.evidence),
        failed=timeline.failed_workers(records),
        detected=found.view.position,
        last=max((record.position for record in records), default=found.view.position),
        closed=incident.restored_at is not None,
        timeline=timeline.timeline(incident, records),
        phases=timeline.phases(incident, records),
        plans=[_plan(found, plan, log, left_out) for plan in found.plans],
        sources=timeline.sources(records),
        alike=alike(found.view, found.earlier),
        currency=cluster.currency,
        left_out=left_out,
        as_of=now,
        position=found.position,
    )


def _records(found: Known, log: EventLog, left_out: list[str]) -> list[Recorded]:
    """Return the incident's records, in the order of the log."""
    after, read, records = found.view.position - 1, 0, list[Recorded]()
    ends = found.incident.restored_at
    while read < MOST_RECORDS:
        try:
            page = log.read(after=after, limit=PAGE, types=timeline.TYPES)
        except Archived as err:
            left_out.append(f"the time line: {err.detail}")
            return records
        records += [record for record in page if timeline.belongs(record, found.incident)]
        read += len(page)
        if len(page) < PAGE or (ends is not None and page[-1].recorded_at > ends + _LATE):
            return records
        after = page[-1].position
    left_out.append(f"what happened more than {MOST_RECORDS} records behind the fault")
    return records


def _injected(found: Known, log: EventLog) -> Injection | None:
    """Return the newest fault that a user had asked for at this place, if no other incident was found there since."""
    before, view = found.view.position, found.view
    kinds = ("fault.injected", "error.detected")
    try:
        page = log.read(after=max(before - 1 - INJECTION_RECORDS, 0), limit=INJECTION_RECORDS, types=kinds)
    except Archived:
        return None
    newest: Injection | None = None
    for record in page:
        event = record.event
        if record.position >= before:
            break
        if isinstance(event, FaultInjected) and (
            (event.task, event.rank) == (view.task, view.rank) if event.task else event.node == view.node
        ):
            before_s = max((view.occurred_at - event.occurred_at).total_seconds(), 0.0)
            newest = Injection(fault=event.fault, actor=event.actor, before_s=before_s, position=record.position)
        elif isinstance(event, ErrorDetected) and (event.task, event.rank, event.node) == (
            view.task,
            view.rank,
            view.node,
        ):
            newest = None
    return newest


_LATE = timedelta(seconds=30)
"""How much later than the end of its last phase a record of an incident may come: a report that waited for the bus."""


def _plan(found: Known, view: PlanView, log: EventLog, left_out: list[str]) -> DecidedPlan:
    event = _event(log, view)
    if event is None:
        left_out.append(f"plan {view.id}: position {view.position} is archived")
        return DecidedPlan(id=view.id, position=view.position, decided_at=view.decided_at, words="")
    shown = DecidedPlan(
        id=view.id, position=view.position, decided_at=view.decided_at, words=explain(event), note=_note(event)
    )
    if event.problem is None or event.solution is None:
        return shown.model_copy(update={"replanned": _replanned(found, view, log)})
    earlier = [plan for plan in (*found.plans, *found.solved_before) if plan.solved and plan.position < view.position]
    problem = _whole(event, log, sorted(earlier, key=lambda plan: -plan.position))
    if problem is None:
        left_out.append(f"why plan {view.id} gives no other numbers: its throughput tables are too far back in the log")
        return shown
    given = event.solution.assignment
    return shown.model_copy(
        update={"counts": count_reasons(problem, event.solution), "unused_workers": unused(problem, given)}
    )


def _note(plan: PlanDecided) -> str:
    """Return what the answer follows from, where its words need that."""
    if plan.response in (Response.RESTART, Response.RETRY):
        what = "retried in place" if plan.response is Response.RETRY else "started again on its node"
        return (
            f"The answer to this severity is fixed: what failed is {what}, and every task keeps its number of workers."
        )
    if plan.outlook is None or not plan.outlook.choices:
        return ""
    chosen = plan.outlook.choices[0]
    if chosen.label == "best":
        return "It is worth most up to the next failure, and in the mean of the futures too."
    futures = f"the mean of {plan.outlook.rollouts} futures of the cluster"
    return (
        f"Up to the next failure another answer is worth more; in {futures} this one is, by {flop(chosen.gain)}. "
        "The table below compares up to the next failure only."
    )


def _replanned(found: Known, view: PlanView, log: EventLog) -> list[Replanned]:
    """Return what re-planning would have given, by the newest problem before the plan."""
    before = [plan for plan in found.solved_before if plan.position < view.position]
    basis = _event(log, before[0]) if before else None
    problem = _whole(basis, log, before[1:]) if basis is not None else None
    if basis is None or basis.solution is None or problem is None:
        return []
    given = basis.solution.assignment
    keeps_free = basis.outlook is not None and basis.solution.label != "best"
    models = [
        replanned(
            basis.plan,
            problem,
            given,
            name,
            len(impact.before),
            len(impact.before) - len(impact.survivors),
            keeps_free=keeps_free,
        )
        for name, impact in sorted(view.impacts.items())
        if impact.faulted
    ]
    return [model for model in models if model is not None]


def _event(log: EventLog, view: PlanView) -> PlanDecided | None:
    """Return a plan's event; None if it is archived and the segment is not at hand."""
    try:
        records = log.read(after=view.position - 1, limit=1)
    except Archived:
        return None
    event = records[0].event if records else None
    return event if isinstance(event, PlanDecided) else None


def _whole(plan: PlanDecided, log: EventLog, before: Sequence[PlanView]) -> Problem | None:
    """Return a plan's problem with its throughput tables, which it or plans before it have.

    None: the plan has no problem, or the tables are not found.

    Args:
        plan: whose problem is wanted.
        log: is read.
        before: the solver's plans before it, the newest first.
    """
    if plan.problem is None:
        return None
    tables: dict[str, LoggedTable] = dict(plan.tables)
    wanted = {task.table for task in plan.problem.tasks if task.table}
    for view in before:
        if wanted <= tables.keys():
            break
        event = _event(log, view)
        tables = {**(event.tables if event is not None else {}), **tables}
    return plan.problem.with_tables(tables) if wanted <= tables.keys() else None
