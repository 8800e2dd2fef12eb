"""Gathers what the post-mortem of a slow worker needs: views in one transaction, and records of the log.

What the worker cost follows from the step times of its task before and while it was slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from services.api import present
from services.api.postmortem import timeline
from services.api.postmortem.alike import EXAMINED, SHOWN, shown
from services.api.postmortem.course import course
from services.api.postmortem.decided import Answers, answers, decided
from services.api.postmortem.injections import injected, slows_down
from services.api.postmortem.model import Injection, SlowCost, SlowWorkerPostMortem
from services.api.postmortem.slow_course import Outcome, evidence_steps, is_part, outcome, phases, time_of_step
from services.api.postmortem.timeline import between_s
from services.api.postmortem.words import clock, seconds
from services.api.store.readers import ViewReader
from services.api.store.tables import INCIDENTS, SLOWDOWNS
from shared.costs.charges import SECONDS_PER_HOUR, money
from shared.errors import Archived
from shared.events.union import Recorded, TaskProgressed
from shared.log.log import EventLog
from shared.views.documents import ClusterView, IncidentView
from shared.views.observed_views import SlowdownView

TYPES = ("worker.slowed", "plan.decided", "state.moved")
"""The types of the records of which a time line is made."""

PROGRESS_RECORDS = 2_000
"""Records before the one that found the worker, among which its task's progress is looked for: some twenty steps ago it
was reported at least once, beside what other tasks reported."""


@dataclass(frozen=True)
class Pace:
    """How long the steps of the slow worker's task took, seconds: before it was slow, and until it was found."""

    before_s: float
    slow_s: float

    @property
    def lost_part(self) -> float:
        """The part of its workers' time that the task lost while one was slow."""
        return max(1.0 - self.before_s / self.slow_s, 0.0)


def pace(view: SlowdownView, progress: Sequence[TaskProgressed], began_at: datetime | None) -> Pace | None:
    """Return how long the task's steps took; None: the log does not say.

    Args:
        view: of the slowdown.
        progress: reports of the task's progress before the worker was found.
        began_at: since when it was slow.
    """
    steps = evidence_steps(view.evidence)
    before = [event.step_s for event in progress if event.step_s > 0.0 and event.step <= view.step - steps]
    slow_s = between_s(began_at, view.found_at)
    if not steps or not before or not slow_s:
        return None
    return Pace(before_s=before[-1], slow_s=slow_s / steps)


def cost(
    view: SlowdownView,
    workers: int,
    steps: Pace,
    began_at: datetime,
    chosen: Outcome,
    carried_out_at: datetime | None,
    price_per_worker_hour: float,
    now: datetime,
) -> SlowCost:
    """Return what a slow worker cost so far.

    Args:
        view: of the slowdown.
        workers: of the task while it was slow.
        steps: how long the task's steps took.
        began_at: since when it was slow.
        chosen: what plans have made of it.
        carried_out_at: when the newest plan was carried out; None: it is not.
        price_per_worker_hour: of the cluster.
        now: up to when costs are computed.
    """
    over = view.ended_at or now
    decided_at = chosen.decided_at
    lost_part = steps.lost_part
    waited_until = over if decided_at is None else min(decided_at, over)
    waited = workers * lost_part * max((waited_until - began_at).total_seconds(), 0.0)
    paused = unused = 0.0
    if decided_at is not None:
        paused = workers * max(((carried_out_at or now) - decided_at).total_seconds(), 0.0)
        if carried_out_at is not None and not chosen.used_by:
            unused = max((over - carried_out_at).total_seconds(), 0.0)
    assumptions = [
        f"steps of {view.task}, which all {workers} workers do together, took {seconds(steps.slow_s)} from then on "
        f"until it was found, and {seconds(steps.before_s)} before (reports of progress): {lost_part:.0%} of the "
        "workers' time was lost, and would have been for as long as nothing was done",
        "from the decision until it was carried out they did not train at all, which is the most that it can have cost",
    ]
    if unused:
        assumptions.append("the slow worker itself is counted while no task used it")
    return SlowCost(
        workers=workers,
        waited_worker_s=waited,
        paused_worker_s=paused,
        unused_worker_s=unused,
        money=money(waited + paused + unused, price_per_worker_hour),
        further_hour_worker_s=workers * lost_part * SECONDS_PER_HOUR,
        assumptions=assumptions if decided_at is not None else assumptions[:1],
    )


@dataclass(frozen=True)
class KnownSlowdown:
    """What the projections know of a slowdown. ``earlier``, ``incidents``: of its node, the newest first."""

    view: SlowdownView
    answers: Answers
    earlier: Sequence[SlowdownView]
    incidents: Sequence[IncidentView]
    position: int


def known_slowdown(views: ViewReader, name: str) -> KnownSlowdown:
    """Return what the projections know of a slowdown.

    Raises:
        NotFound: there is no such slowdown.
    """
    view = views.find(SLOWDOWNS, name)
    earlier = views.newest(SLOWDOWNS, before=view.position, limit=EXAMINED)
    incidents = views.newest(INCIDENTS, before=view.position, limit=EXAMINED)
    return KnownSlowdown(
        view=view,
        answers=answers(views, view.plans, view.position),
        earlier=[one for one in earlier if one.node == view.node],
        incidents=[one for one in incidents if one.node == view.node],
        position=views.position(),
    )


def slow_post_mortem(found: KnownSlowdown, log: EventLog, cluster: ClusterView, now: datetime) -> SlowWorkerPostMortem:
    """Return the post-mortem. ``found``: what the projections know; ``log``: is read.

    Raises:
        Unavailable: the log does not answer.
    """
    view, left_out = found.view, list[str]()
    carried_out_at = _carried_out_at(found.answers)
    plans = {plan.id for plan in found.answers.plans}
    ends = max((at for at in (carried_out_at, view.ended_at) if at is not None), default=None)
    records = course(log, view.position, ends, TYPES, lambda record: is_part(record, view, plans), left_out)
    progress = _progress(view, log)
    asked = injected(
        log,
        view.position,
        view.found_at,
        task=view.task,
        rank=view.rank,
        node=view.node,
        of=slows_down,
        within=PROGRESS_RECORDS,
    )
    began_at, began = _began(view, progress, asked)
    chosen = outcome(view, records)
    costs = None
    if began_at is not None and (steps := pace(view, progress, began_at)) is not None:
        workers, price = progress[-1].workers, cluster.price_per_worker_hour
        costs = cost(view, workers, steps, began_at, chosen, carried_out_at, price, now)
    return SlowWorkerPostMortem(
        slow=present.slow_worker(view),
        headline=f"{view.worker} of {view.task} was {view.worst:.3g} times as slow as its peers",
        standing=[_standing(view, chosen, carried_out_at)],
        began_at=began_at,
        began=began,
        injected=asked,
        found=_found(view, began_at),
        statements=_statements(view),
        detected=view.position,
        last=max((record.position for record in records), default=view.position),
        carried_out_at=carried_out_at,
        timeline=timeline.timeline(began_at or view.found_at, [*_asked(log, asked), *records]),
        phases=phases(view, began_at, carried_out_at, records),
        plans=decided(found.answers, log, left_out),
        sources=timeline.sources(records),
        cost=costs,
        before=[present.slow_worker(one) for one in found.earlier[:SHOWN]],
        incidents_before=[shown(one, [f"node {view.node}"]) for one in found.incidents[:SHOWN]],
        currency=cluster.currency,
        left_out=left_out,
        as_of=now,
        position=found.position,
    )


def _carried_out_at(found: Answers) -> datetime | None:
    """Return when the newest plan was carried out for all tasks; None: it is not, or there is none."""
    if not found.plans or found.plans[-1].outstanding:
        return None
    newest = found.plans[-1]
    times = [impact.closed_at for impact in newest.impacts.values() if impact.closed_at is not None]
    return max(times, default=newest.decided_at)


def _progress(view: SlowdownView, log: EventLog) -> list[TaskProgressed]:
    """Return the reports of the task's progress before it was found, of the same generation."""
    try:
        page = log.read(
            after=max(view.position - 1 - PROGRESS_RECORDS, 0), limit=PROGRESS_RECORDS, types=("task.progressed",)
        )
    except Archived:
        return []
    return [
        event
        for record in page
        if isinstance(event := record.event, TaskProgressed)
        and (event.task, event.generation) == (view.task, view.generation)
        and event.step <= view.step
    ]


def _began(
    view: SlowdownView, progress: Sequence[TaskProgressed], asked: Injection | None
) -> tuple[datetime | None, str]:
    """Return since when the worker was slow, and how that is known."""
    steps = evidence_steps(view.evidence)
    done = [*((event.step, event.occurred_at) for event in progress), (view.step, view.found_at)]
    at = time_of_step(done, view.step - steps) if steps else None
    if at is None:
        return None, "the log does not say since when"
    if asked is not None and at < (asked_at := view.found_at - timedelta(seconds=asked.before_s)):
        return asked_at, "since the fault was asked for, as a test"
    return at, f"about, by the reports of progress: {steps} steps spoke against the worker when it was found"


def _asked(log: EventLog, asked: Injection | None) -> list[Recorded]:
    """Return the record of the fault that was asked for."""
    return log.read(after=asked.position - 1, limit=1) if asked is not None else []


def _standing(view: SlowdownView, outcome: Outcome, carried_out_at: datetime | None) -> str:
    """Return how it stands, in a sentence."""
    if view.ended_at is not None:
        return f"Over since {clock(view.ended_at)} UTC: {view.ended}."
    slow = f"It is still slow ({view.slowdown:.3g} times)"
    if outcome.label is None:
        return f"{slow}, and no plan has answered that: {view.task} waits for it in every step."
    if outcome.decided_at is None:
        return f"{slow}, and {view.task} waits for it in every step: nothing else was worth enough more."
    if carried_out_at is None:
        return f"{slow}; the plan is not carried out yet."
    if not outcome.used_by:
        return f"{slow}, and no task uses it since {clock(carried_out_at)} UTC."
    if outcome.label == "dealt-by-speed":
        return f"{slow}; {outcome.used_by} gives its replica less work since {clock(carried_out_at)} UTC."
    return f"{slow}; {outcome.used_by} uses it since {clock(carried_out_at)} UTC."


def _found(view: SlowdownView, began_at: datetime | None) -> str:
    """Return what found it and how late, in words."""
    late_s = between_s(began_at, view.found_at)
    steps = evidence_steps(view.evidence)
    words = "The times that the ranks' own computing takes, compared in every step, found it"
    if steps:
        words += f" once {steps} steps had spoken against it"
    return f"{words}: {seconds(late_s)} after it began." if late_s is not None else f"{words}."


def _statements(view: SlowdownView) -> list[str]:
    """Return what was measured, in words."""
    known = view.evidence
    found = []
    if isinstance(measured := known.get("measured"), float):
        found.append(
            f"Measured: {measured:.3g} times the median of {known.get('peers')} peers for the same work, in the median "
            f"of {known.get('steps')} steps. Slowdowns are published as powers of 1.1."
        )
    if isinstance(spread := known.get("spread"), float):
        found.append(f"Robust standard deviation of the logarithms of such ratios, before it was slow: {spread:.2g}.")
    if view.slowdown != view.worst:
        found.append(f"By the newest measurement it is {view.slowdown:.3g} times as slow.")
    return found
