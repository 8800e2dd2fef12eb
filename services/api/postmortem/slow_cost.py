"""What a slow worker cost, by the step times of its task before and while it was slow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from services.api.postmortem.slow_course import Outcome, evidence_steps
from services.api.postmortem.slow_model import SlowCost
from services.api.postmortem.timeline import between_s
from services.api.postmortem.words import seconds
from shared.costs.charges import SECONDS_PER_HOUR, money
from shared.events.union import TaskProgressed
from shared.views.observed_views import SlowdownView


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
