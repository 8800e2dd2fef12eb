"""Events of what was observed and broke nothing: slow workers, anomalies of a task's numbers, and injected faults."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from shared.event_base import EventBase, NodeEvent, TaskEvent

AnomalyKind = Literal["loss-spike", "throughput-regression", "slow-link"]
"""What is unusual of a task that trains on. A slow worker is an event of its own (``WorkerSlowed``)."""


class WorkerSlowed(NodeEvent):
    """A worker computes slower than its peers, or no longer does. The detector appends it when that has changed.

    ``worker``: of this node. ``slowdown``: its own compute time over that of its peers, for the same work; 1.0: it is
    as fast as they are again. ``task``, ``generation``, ``rank``, ``step``: in which it was measured; ``step`` is the
    first one at which the change could be decided. ``evidence``: details for people; no decision uses them.
    """

    type: Literal["worker.slowed"] = "worker.slowed"
    schema_version: Literal[1] = 1
    worker: str
    slowdown: float = Field(ge=1.0)
    task: str
    generation: int
    rank: int | None = None
    step: int = 0
    evidence: dict[str, Any] = Field(default_factory=dict)


class AnomalyObserved(TaskEvent):
    """A number of a task is unusual, and training goes on: no process is replaced because of it.

    ``kind``: what. ``value``: the number, ``expected``: the usual one, in the unit that ``evidence`` names. ``worker``,
    ``node``, ``rank``: where, if it belongs to one. ``ended``: the number is usual again; ``value`` is the present one.
    """

    type: Literal["anomaly.observed"] = "anomaly.observed"
    schema_version: Literal[1] = 1
    kind: AnomalyKind
    generation: int
    step: int
    value: float
    expected: float
    detected_at: datetime
    worker: str | None = None
    node: str | None = None
    rank: int | None = None
    ended: bool = False
    evidence: dict[str, Any] = Field(default_factory=dict)


class FaultInjected(EventBase):
    """A user asked for a fault, to test what follows (``unicron inject``). It is in the log before the fault happens.

    ``fault``: its kind with its argument, such as ``kill`` or ``xid=79``. ``task``, ``rank``, ``step``: of a fault of a
    rank; ``step`` None: the next one that the rank begins. ``node``: of a fault of a node. ``actor``: who, as of a
    submission.
    """

    type: Literal["fault.injected"] = "fault.injected"
    schema_version: Literal[1] = 1
    fault: str
    task: str | None = None
    rank: int | None = None
    step: int | None = None
    node: str | None = None
    actor: str = ""

    @property
    def stream(self) -> str:
        """The stream of the task or of the node that the fault is for."""
        return f"task/{self.task}" if self.task is not None else f"node/{self.node}"
