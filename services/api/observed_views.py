"""Parts of the views: slow workers of nodes, and anomalies of tasks that last."""

from __future__ import annotations

from datetime import datetime

from shared.model import Model


class OpenAnomaly(Model):
    """A number of a task that is unusual, until it is usual again; ``value`` and ``expected`` in ``unit``.

    ``node``, ``peer``: of a slow link.
    """

    kind: str
    generation: int
    step: int
    value: float
    expected: float
    unit: str = ""
    at: datetime
    node: str | None = None
    peer: str | None = None


class SlowWorker(Model):
    """A worker that computes slower than its peers. ``task``, ``step``: in which it was measured last."""

    worker: str
    slowdown: float
    task: str
    step: int
    since: datetime
