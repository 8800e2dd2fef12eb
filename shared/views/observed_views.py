"""Views of what breaks nothing: slow workers, and anomalies of tasks that last."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from shared.model import Model


class OpenAnomaly(Model):
    """A number of a task that is unusual, until it is usual again; ``value`` and ``expected`` in ``unit``.

    ``node``, ``peer``: the two nodes of a slow link.
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
    """A worker that computes slower than its peers. ``task``, ``step``: where it was measured last.

    ``id``: that of its slowdown (``SlowdownView``). ``newest``: id of the newest event about it.
    """

    id: str
    newest: str
    worker: str
    slowdown: float
    task: str
    step: int
    since: datetime


class SlowdownView(Model):
    """One slowdown of a worker: from the event that found it to the one with which it was over.

    ``id``: that of the first event. ``slowdown``: own compute time over that of its peers, by the newest event;
    ``worst``: the largest. ``task``, ``generation``, ``rank``, ``step``, ``evidence``: those of the first event.
    ``ended``: why it is over, in words. ``plans``: the plans to which an event about it has led, and those that took
    over from such a plan.
    """

    id: str
    position: int
    worker: str
    node: str
    task: str
    generation: int
    rank: int | None
    step: int
    slowdown: float
    worst: float
    found_at: datetime
    ended_at: datetime | None = None
    ended: str = ""
    evidence: dict[str, Any] = Field(default_factory=dict)
    plans: list[str] = Field(default_factory=list)
