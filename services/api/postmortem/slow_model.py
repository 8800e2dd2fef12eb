"""What the post-mortem of a slow worker says. Times are UTC; worker-seconds of its cost are a model's."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from services.api.postmortem.model import AlikeIncident, FaultPage
from shared.interface.models import SlowWorker
from shared.text import Time


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


class SlowWorkerPostMortem(FaultPage):
    """The post-mortem of a slow worker.

    Attributes:
        slow: the slowdown, as ``GET /v1/slow-workers/{id}`` shows it.
        began_at: since when the worker was slow; None: the log does not say.
        began: how that is known, in words.
        carried_out_at: when the newest of its plans was carried out; None: it is not, or there is none.
        cost: so far; None: the log does not say since when the worker was slow, or how long steps took before.
        before: earlier slowdowns of workers of the node, the newest first.
        incidents_before: earlier incidents of the node, the newest first.
    """

    slow: SlowWorker
    began_at: Time | None
    began: str
    carried_out_at: Time | None
    cost: SlowCost | None
    before: list[SlowWorker]
    incidents_before: list[AlikeIncident]

    @property
    def evidence(self) -> dict[str, Any]:
        """What was measured, as the log has it."""
        return self.slow.evidence
