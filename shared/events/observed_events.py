"""Events of what was observed: slow workers, unusual numbers, injected faults, and all that was seen of one fault."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from shared.events.base import ClusterEvent, EventBase, NodeEvent, TaskEvent
from shared.events.severities import ErrorKind, Method
from shared.model import Model

AnomalyKind = Literal["loss-spike", "throughput-regression", "slow-link"]
"""What is unusual of a task that trains on. A slow worker is an event of its own (``WorkerSlowed``)."""


class WorkerSlowed(NodeEvent):
    """A worker computes slower than its peers, or no longer does. The detector appends it when that has changed.

    ``worker``: the worker, on this node. ``slowdown``: its own compute time over that of its peers, for the same work;
    1.0: it is as fast as they are again. ``task``, ``generation``, ``rank``, ``step``: where it was measured; ``step``
    is the first step at which the change could be decided. ``evidence``: details for people; no decision uses them.

    ``ends``: set in the planner's own events of this type only. It is the id of the event that called the worker as
    fast again; the planner did not trust it at once, and does so now (docs/planner.md, "Slow workers").
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
    ends: str | None = Field(default=None, exclude_if=lambda value: value is None)


class TaskCheckpointFailed(TaskEvent):
    """The checkpoint of ``step`` could not be written, for a reason that is new since the last one that was.

    No node is to blame, and training goes on. Behind the last step the task waits until result and state are written.
    ``worker``: the worker that reported it. ``reason``: in words.
    """

    type: Literal["task.checkpoint-failed"] = "task.checkpoint-failed"
    schema_version: Literal[1] = 1
    generation: int
    step: int
    worker: str
    reason: str


class TaskResultUnwritten(TaskEvent):
    """The task has done all steps and cannot write its result: it waits without workers, which others may have.

    What is done is kept: in a checkpoint, or in its nodes' memory. ``reason``: in words. ``worker``: the worker that
    reported it. ``retry_at``: when the task is to have workers again, to write only. ``ended``: that time has come
    (appended by a timer of the planner), or a node sees that the storage has returned (by the detector).
    """

    type: Literal["task.result-unwritten"] = "task.result-unwritten"
    schema_version: Literal[1] = 1
    generation: int
    step: int
    worker: str
    reason: str
    retry_at: datetime
    ended: bool = Field(default=False, exclude_if=lambda ended: not ended)


class TaskCopiesLacking(TaskEvent):
    """In-memory copies that a recovery would rely on are missing, for a reason that is new since all were there.

    No node is to blame, and training goes on; until they are there again, a fault may cost the steps since the newest
    checkpoint. ``worker``: the worker that reported it. ``reason``: in words. ``ended``: whether all copies, those of
    ``step``, are there again; ``reason`` is empty then.
    """

    type: Literal["task.copies-lacking"] = "task.copies-lacking"
    schema_version: Literal[1] = 1
    generation: int
    step: int
    worker: str
    reason: str = ""
    ended: bool = Field(default=False, exclude_if=lambda ended: not ended)


class TaskIdentified(TaskEvent):
    """What the members of a task have agreed to be when it first trained since its submission.

    ``identity``: field -> value: hashes of code, settings, data, versions of libraries (``unicron.join.identity``).
    ``changed``: in words, what is not as it was when the task of this name last trained before that submission, and
    what is taken over by it.
    """

    type: Literal["task.identified"] = "task.identified"
    schema_version: Literal[1] = 1
    generation: int
    step: int
    identity: dict[str, str]
    changed: list[str] = Field(default_factory=list, exclude_if=lambda changed: not changed)


class AnomalyObserved(TaskEvent):
    """A number of a task is unusual, and training goes on: no process is replaced because of it.

    ``kind``: which number. ``value``: the number, ``expected``: the usual one, in the unit that ``evidence`` names.
    ``worker``, ``node``, ``rank``: where, if it belongs to one; ``peer``: the other node of a slow link. ``ended``: the
    number is usual again; ``value`` is the present one.
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
    peer: str | None = None
    rank: int | None = None
    ended: bool = False
    evidence: dict[str, Any] = Field(default_factory=dict)


class FaultInjected(EventBase):
    """A user asked for a fault, to test what follows (``unicron inject``). It is in the log before the fault happens.

    ``fault``: its kind with its argument, such as ``kill`` or ``xid=79``. ``task``, ``rank``, ``step``: those of a
    fault of a rank; ``step`` None: the next step that the rank begins. ``node``: the node of a fault of a node.
    ``actor``: who asked, as in a submission.
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


class Observation(Model):
    """What one method saw of a fault at one place.

    ``error``: the name of the error, such as an exception's type or a signal. ``detail``: a line of text. ``at``: the
    best estimate of when it occurred.
    """

    method: Method
    kind: ErrorKind
    node: str | None = None
    worker: str | None = None
    rank: int | None = None
    error: str = ""
    detail: str = ""
    at: datetime


class IncidentObserved(ClusterEvent):
    """What ranks and methods saw of one fault, the error event of the incident included; no plan follows from it.

    ``task``: the task of the error event. ``observations``: what was seen, in the order in which it came. ``omitted``:
    how many more observations there were. ``root_cause``: the observation that the others follow from
    (``services.detector.incidents.observations.ORDER``).
    """

    type: Literal["incident.observed"] = "incident.observed"
    schema_version: Literal[1] = 1
    incident: str
    task: str | None = None
    observations: list[Observation]
    omitted: int = 0
    root_cause: Observation
