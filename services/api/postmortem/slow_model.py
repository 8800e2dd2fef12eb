"""What the post-mortem of a slow worker says. Times are UTC; worker-seconds of its cost are a model's."""

from __future__ import annotations

from pydantic import BaseModel, Field

from services.api.postmortem.model import AlikeIncident, DecidedPlan, Injection, Moment, Phase, StateSource
from services.api.slow_worker_models import SlowWorker
from services.api.times import Time


class SlowCost(BaseModel):
    """What a slow worker cost so far: a model, since no step failed and the task trained on.

    ``workers``: of the task, all of which wait in each step for the slow one. ``waited_worker_s``: while they waited;
    ``paused_worker_s``: from the decision until it was carried out, at most; ``unused_worker_s``: of the slow worker
    itself, once no task used it. ``money``: price of the three. ``further_hour_worker_s``: of each further hour in
    which the task would have waited. ``assumptions``: in words.
    """

    workers: int
    waited_worker_s: float
    paused_worker_s: float
    unused_worker_s: float
    money: float
    further_hour_worker_s: float
    assumptions: list[str]

    @property
    def worker_s(self) -> float:
        """Worker-seconds of all parts."""
        return self.waited_worker_s + self.paused_worker_s + self.unused_worker_s


class SlowWorkerPostMortem(BaseModel):
    """The post-mortem of a slow worker.

    Attributes:
        slow: the slowdown, as ``GET /v1/slow-workers/{id}`` shows it.
        headline: what happened, in one sentence.
        now: how it stands, in words.
        began_at: since when the worker was slow; None: the log does not say.
        began: how that is known, in words.
        injected: the fault that somebody asked for before, as a test.
        found: what found it and how late, in words.
        statements: what was measured.
        detected: position in the log of the event that found it.
        last: position in the log of the last line of the time line.
        carried_out_at: when the last of its plans was carried out; None: it is not, or there is none.
        timeline: from the beginning on.
        phases: from the beginning until the plan was carried out.
        plans: that answered it, in order.
        sources: where state came from.
        cost: so far; None: the log does not say since when the worker was slow, or how long steps took before.
        before: earlier slowdowns of workers of the node, the newest first.
        incidents_before: earlier incidents of the node, the newest first.
        currency: of ``cost.money``.
        left_out: what the page does not have, and why; in words.
        as_of: the time that costs are computed for.
        position: of the log up to which the page knows it.
    """

    slow: SlowWorker
    headline: str
    now: str
    began_at: Time | None
    began: str
    injected: Injection | None = None
    found: str
    statements: list[str]
    detected: int
    last: int
    carried_out_at: Time | None
    timeline: list[Moment]
    phases: list[Phase]
    plans: list[DecidedPlan]
    sources: list[StateSource]
    cost: SlowCost | None
    before: list[SlowWorker]
    incidents_before: list[AlikeIncident] = Field(default_factory=list)
    currency: str
    left_out: list[str] = Field(default_factory=list)
    as_of: Time
    position: int
