"""Answers of the interface about slow workers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from services.api.times import Time


class SlowWorker(BaseModel):
    """A slowdown of a worker. The task trains on, so it is no incident.

    ``slowdown``: own compute time over that of its peers, as measured last; ``worst``: the largest. ``task``,
    ``generation``, ``rank``, ``step``: in which it was found. ``ended``: why it is over, in words; null: it is not.
    ``plans``: that answered it. ``position``: of the event that found it in the log.
    """

    id: str
    worker: str
    node: str
    task: str
    generation: int
    rank: int | None
    step: int
    slowdown: float
    worst: float
    found_at: Time
    ended_at: Time | None
    ended: str | None
    plans: list[str]
    evidence: dict[str, Any]
    position: int
