"""Gathers what the post-mortem of an incident needs: views in one transaction, and its records of the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from services.api import present
from services.api.postmortem import evidence, timeline, words
from services.api.postmortem.alike import EXAMINED, alike
from services.api.postmortem.course import course
from services.api.postmortem.decided import Answers, answers, decided
from services.api.postmortem.injections import can_have_caused, injected
from services.api.postmortem.model import PostMortem, Shortfall
from services.api.postmortem.standing import headline, held_back, shortfalls, standing, todo
from services.api.store.accounts import Accounts
from services.api.store.readers import ViewReader
from services.api.store.tables import INCIDENTS, NODES, SPANS, TASKS
from shared.costs.counterfactuals import counterfactuals
from shared.costs.report import incident_cost
from shared.events.union import Recorded
from shared.interface.models import Incident, IncidentFacts
from shared.log.log import EventLog
from shared.views.documents import ClusterView, IncidentView, NodeState
from shared.views.incident_parts import median_s, stuck_s


@dataclass(frozen=True)
class Known:
    """What the projections know of an incident.

    ``earlier``: incidents, the newest first. ``short``: times in which tasks have fewer workers because of it.
    ``node``: present state of its node. ``waits``: what there is to do about its tasks that wait after failures.
    """

    view: IncidentView
    incident: Incident
    answers: Answers
    earlier: Sequence[IncidentView]
    short: Sequence[Shortfall]
    node: NodeState | None
    position: int
    waits: Sequence[str] = ()


def lateness(
    cluster: ClusterView, incident: IncidentFacts | IncidentView, now: datetime
) -> tuple[float | None, float | None]:
    """Return how long an open incident should take, and how late it is, in seconds; None: as of ``IncidentAmounts``."""
    if incident.closed_at is not None:
        return None, None
    usual_s = median_s(cluster.usual, incident.kind)
    return usual_s, stuck_s(usual_s, (now - incident.occurred_at).total_seconds())


def known(views: ViewReader, name: str, cluster: ClusterView, now: datetime) -> Known:
    """Return what the projections know of an incident.

    Raises:
        NotFound: there is no such incident.
    """
    view = views.find(INCIDENTS, name)
    amounts = Accounts(views, now).incidents([name])
    cost = incident_cost(amounts.get(name), cluster.price_per_worker_hour)
    others = counterfactuals(view.other_answers, cost, views.next_solved, now)
    facts = present.incident_facts(view)
    usual, late = lateness(cluster, facts, now)
    shown = Incident(**facts.model_dump(), cost=cost, counterfactuals=others, usual_s=usual, stuck_s=late)
    keys = [*view.past_shortfalls, *view.shortfalls]
    spans = sorted(views.several(SPANS, keys).values(), key=lambda span: (span.start, span.position))
    node = views.get(NODES, view.node) if view.node is not None else None
    return Known(
        view=view,
        incident=shown,
        answers=answers(views, view.plans, view.position),
        earlier=views.newest(INCIDENTS, before=view.position, limit=EXAMINED),
        short=shortfalls(spans, view.closed_at),
        node=None if node is None else node.state,
        position=views.position(),
        waits=held_back(views.several(TASKS, view.tasks).values()),
    )


def post_mortem(
    found: Known, log: EventLog, cluster: ClusterView, now: datetime, away: Sequence[str] = ()
) -> PostMortem:
    """Return the post-mortem.

    Args:
        found: what the projections know.
        log: is read.
        cluster: of the projections.
        now: the present.
        away: parts of the control plane that do not work, in words, where the incident is open.

    Raises:
        Unavailable: the log does not answer.
    """
    incident, left_out = found.incident, list[str]()
    view = found.view
    records = _records(found, log, left_out)
    short = [_proved(one, records) for one in found.short]
    return PostMortem(
        incident=incident,
        headline=headline(incident, short, timeline.back_at(records), now),
        kind_words=words.KINDS[incident.kind],
        severity_words=words.SEVERITIES[incident.severity],
        injected=injected(
            log,
            view.position,
            view.occurred_at,
            task=view.task,
            rank=view.rank,
            node=view.node,
            of=lambda asked: can_have_caused(asked, view.kind, view.occurred_at),
        ),
        found=timeline.found_by(incident),
        statements=evidence.statements(incident.evidence),
        ranks=evidence.rank_states(incident.evidence),
        failed=timeline.failed_workers(records),
        detected=view.position,
        last=max((record.position for record in records), default=view.position),
        closed=incident.closed_at is not None,
        standing=standing(incident, short, now),
        todo=todo(incident, found.node, short, away, found.waits),
        shortfalls=short,
        timeline=timeline.timeline(incident.occurred_at, records),
        phases=timeline.phases(incident, records),
        plans=decided(found.answers, log, left_out),
        sources=timeline.sources(records),
        alike=alike(view, found.earlier),
        currency=cluster.currency,
        left_out=left_out,
        as_of=now,
        position=found.position,
    )


def _records(found: Known, log: EventLog, left_out: list[str]) -> list[Recorded]:
    """Return the records of the incident's course, with those that ended a shortfall."""
    incident = found.incident
    ends_of_shortfalls = {one.until for one in found.short if one.until is not None}
    ends = None if incident.closed_at is None else max(ends_of_shortfalls | {incident.closed_at})
    records = course(
        log,
        found.view.position,
        ends,
        timeline.TYPES,
        lambda record: timeline.belongs(record, incident) or record.recorded_at in ends_of_shortfalls,
        left_out,
    )
    return timeline.without_later_returns(records)


def _proved(short: Shortfall, records: Sequence[Recorded]) -> Shortfall:
    """Return a shortfall with the position of the record that ended it."""
    position = next((record.position for record in records if record.recorded_at == short.until), None)
    return short.model_copy(update={"position": position})
