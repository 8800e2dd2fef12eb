"""Parts of the views of incidents: notes of users, how long a kind usually takes, costs of other answers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from datetime import datetime

from pydantic import BaseModel

from shared.events.severities import ErrorKind, Severity
from shared.model import Model
from shared.text import Time

REMEMBERED = 15
"""Number of incidents of a kind whose times are remembered, the newest: enough that a single long one is not the
median."""

TIMES_USUAL = 2.0
"""An open incident is stuck once it has taken so many times as long as the median of its kind: half as long again is
what a busy machine makes of it."""

LEAST_LATE_S = 5.0
"""Least time, seconds, by which an incident has to be later than the median to be stuck: a retry in place has a median
below a second."""

NEVER_HEALED_S = 600.0
"""Age from which an open incident is stuck where none of its kind was healed before. Chosen: far above any recovery,
and short beside a night."""

Usual = dict[str, dict[str, float]]
"""Kind -> incident -> seconds from the fault until its tasks were back at planned strength."""


def with_duration(usual: Usual, kind: ErrorKind, incident: str, seconds: float) -> Usual:
    """Return the times with that of an incident that is over; the oldest of its kind leaves."""
    known = {name: value for name, value in usual.get(kind.value, {}).items() if name != incident}
    newest = [*known.items(), (incident, seconds)][-REMEMBERED:]
    return {**usual, kind.value: dict(newest)}


def median_s(usual: Mapping[str, Mapping[str, float]], kind: ErrorKind) -> float | None:
    """Return how long an incident of a kind usually takes, in seconds; None: none has been healed yet."""
    times = usual.get(kind.value)
    return statistics.median(times.values()) if times else None


def stuck_s(usual_s: float | None, age_s: float) -> float | None:
    """Return how much longer than usual an open incident takes, in seconds; None: it is not stuck.

    Args:
        usual_s: how long one of its kind usually takes; None: not known, so that ``NEVER_HEALED_S`` counts.
        age_s: seconds since the fault.
    """
    if usual_s is None:
        return age_s - NEVER_HEALED_S if age_s >= NEVER_HEALED_S else None
    return age_s - usual_s if age_s >= max(TIMES_USUAL * usual_s, usual_s + LEAST_LATE_S) else None


def than_usual(usual_s: float | None) -> str:
    """Return what a stuck incident takes longer than, in words. ``usual_s``: as for ``stuck_s``."""
    if usual_s is None:
        return f"the {NEVER_HEALED_S:g} s that are allowed where none of its kind was healed before"
    return f"usual (median {usual_s:.3g} s)"


class Attempt(Model):
    """One occurrence of an incident's failure: the first, and each that repeats it.

    ``event``: id of the event in the log. ``plan``, ``response``: those of the plan that answered it; empty: none has
    yet.
    """

    event: str
    occurred_at: datetime
    detected_at: datetime
    severity: Severity
    node: str | None = None
    worker: str | None = None
    rank: int | None = None
    generation: int | None = None
    step: int | None = None
    plan: str = ""
    response: str = ""


class FailureAttempt(BaseModel):
    """One occurrence of the same failure. ``plan``, ``response``: the answer; null: there is none yet."""

    occurred_at: Time
    detected_at: Time
    severity: Severity
    node: str | None
    worker: str | None
    rank: int | None
    generation: int | None
    step: int | None
    plan: str | None
    response: str | None


class Note(Model):
    """What a user has written about an incident. ``by``: ``uid/<uid>`` or ``token/<name>``."""

    text: str
    by: str
    at: datetime


class Acknowledgement(Model):
    """Who takes care of an incident, and since when."""

    by: str
    at: datetime


class TakenCause(Acknowledgement):
    """Who takes care of a cause of trouble. ``event_id``: of the event that says so."""

    event_id: str


class RestartCost(Model):
    """What a plain restart would have cost, by its model."""

    worker_s: float
    lost_flop: float


class SolverPlan(Model):
    """The first plan of the solver that answered an incident. ``gain_flop_per_s``: as in ``PlanView``."""

    position: int
    decided_at: datetime
    gain_flop_per_s: float | None


class StoodStill(Model):
    """What would have stood until the node of an incident is back: the tasks that the fault interrupted.

    ``workers``, ``waf_flop_per_s``: those of these tasks before the fault. ``since``: when it was detected.
    """

    workers: int
    waf_flop_per_s: float
    since: datetime


class OtherAnswers(Model):
    """The inputs of the models of other answers to an incident.

    ``restart``: None where the log says too little. ``solver_plan``: None if the solver made none of the plans.
    ``stood_still``: None if no node was lost or isolated, or where the log says too little; ``back_at``: when the node
    was back, or left for good.
    """

    restart: RestartCost | None = None
    solver_plan: SolverPlan | None = None
    stood_still: StoodStill | None = None
    back_at: datetime | None = None
