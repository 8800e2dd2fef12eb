"""What is seen of one incident while it is watched. Part of the detector's state: telemetry, until it is in the log."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from shared.events import Observation


@dataclass(slots=True)
class IncidentWatch:
    """An incident whose further observations are collected (``observations.py``).

    Attributes:
        incident: its id.
        task: of the error event; None for a fault of a node.
        tasks: those that the fault hit.
        worker: the worker that the error event names.
        node: the node that it names.
        due_at: when the collection ends.
        observations: what was seen, the error event itself first.
        omitted: how many observations were left out.
    """

    incident: str
    task: str | None
    tasks: frozenset[str]
    worker: str | None
    node: str | None
    due_at: datetime
    observations: list[Observation] = field(default_factory=list)
    omitted: int = 0
