"""What is remembered of the causes of errors, by node and by task. Part of the detector's state, folded from the log.

A *cause* is the kind of an error with the class of its text (``error_classes.py``), or with its name where no class
says more. ``causes.py`` decides from what is remembered here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from services.detector.state.error_classes import FROM_OUTSIDE, OOM_KILLED
from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind
from shared.events.union import ErrorDetected, FaultInjected

REMEMBERED = 32
"""Most occurrences that are remembered of a node, and of a task: twice the highest limit that can be set
(``shared.settings.escalation``), since twice a worker's limit makes an error two severities worse."""

DRILL_S = 600.0
"""How long an injected fault explains an error: until the step for which it was asked has come."""

_OF_PROGRAMS = frozenset({ErrorKind.EXCEPTION, ErrorKind.NON_FINITE, ErrorKind.PROCESS_EXIT})
"""Kinds that a bug of a program can cause again and again. A hang is left out: whoever looks at a process with a
debugger stops it."""

_NOT_OF_NODES = frozenset(
    {
        *("gpu-assert", "gpu-out-of-memory", "nccl-usage", "data", "data-worker", "arithmetic", "shared-memory-full"),
        *("open-files", "threads", "ports"),
        *("nccl-remote", "collective-timeout", "gloo", "rendezvous", "network"),
    }
)
"""Classes of errors (``error_classes.py``) that say more of the program, or of other nodes, than of this node."""


class Occurrence(NamedTuple):
    """An error event, as far as the rules need it.

    Attributes:
        at: when it was detected.
        cause: see above.
        node: the node that it names.
        worker: the worker that it names.
        task: the task that it names.
        step: the task's.
        own: whether it counts as the node's own fault (``is_own``).
        of_program: whether a bug of a program can be its cause.
    """

    at: datetime
    cause: str
    node: str | None
    worker: str | None
    task: str | None
    step: int | None
    own: bool
    of_program: bool

    @property
    def fault(self) -> tuple[str | None, int | None, datetime | None]:
        """What is equal for errors of one fault: ranks fail alike at one step, and again when they repeat it."""
        return (self.task, self.step, None) if self.task is not None else (None, None, self.at)


class FailedStart(NamedTuple):
    """The failure of a process that a plan had started, before it trained.

    Attributes:
        at: when it was detected.
        way: what failed: the cause, or for a hang its kind.
        node: where it was detected.
        task: the task of the process.
        error: id of the error event.
    """

    at: datetime
    way: str
    node: str
    task: str
    error: str


class Drill(NamedTuple):
    """A fault that a user has asked for (``fault.injected``), whose errors say nothing about nodes and programs."""

    at: datetime
    task: str | None
    rank: int | None
    node: str | None

    def explains(self, event: ErrorDetected) -> bool:
        """Return whether the fault is the reason for an error."""
        if not 0.0 <= (event.detected_at - self.at).total_seconds() <= DRILL_S:
            return False
        if self.node is not None:
            return event.node == self.node
        return event.task == self.task and (self.rank is None or event.rank in (self.rank, None))


@dataclass(slots=True)
class CauseHistory:
    """The newest occurrences of causes.

    Attributes:
        nodes: node -> its occurrences, the newest at the end.
        tasks: task -> the same.
        drills: injected faults that no error has shown yet.
        starts: node -> the newest failures of processes that were started there.
    """

    nodes: dict[str, list[Occurrence]] = field(default_factory=dict)
    tasks: dict[str, list[Occurrence]] = field(default_factory=dict)
    drills: list[Drill] = field(default_factory=list)
    starts: dict[str, list[FailedStart]] = field(default_factory=dict)

    def add(self, event: ErrorDetected, evidence: Evidence) -> None:
        """Note an error event. An escalation of an earlier one is the same occurrence."""
        drill = self.drill_of(event)
        if drill is not None:
            self.drills.remove(drill)
        if drill is None and (failed := failed_start(event, evidence)) is not None:
            self.starts[failed.node] = [*self.starts.get(failed.node, ()), failed][-REMEMBERED:]
        if drill is not None or event.escalates is not None:
            return
        occurred = occurrence(event, evidence)
        for known, place in ((self.nodes, event.node), (self.tasks, event.task)):
            if place is not None:
                others = [one for one in known.get(place, ()) if not _is_same(one, occurred)]
                known[place] = [*others, occurred][-REMEMBERED:]

    def inject(self, event: FaultInjected) -> None:
        """Note an injected fault."""
        self.drills = [*self.drills, Drill(event.occurred_at, event.task, event.rank, event.node)][-REMEMBERED:]

    def drill_of(self, event: ErrorDetected) -> Drill | None:
        """Return the injected fault that is the reason for an error, the first one; None: it is no drill."""
        return next((drill for drill in self.drills if drill.explains(event)), None)

    def forget_node(self, node: str) -> None:
        """Begin anew with a node that an operator has looked at."""
        self.nodes.pop(node, None)
        self.starts.pop(node, None)

    def forget_task(self, task: str) -> None:
        """Begin anew with a task that was submitted, or has ended."""
        self.tasks.pop(task, None)


def occurrence(event: ErrorDetected, evidence: Evidence) -> Occurrence:
    """Return an error event as an occurrence of its cause."""
    named = evidence.error_class or _name(evidence.failure)
    return Occurrence(
        at=event.detected_at,
        cause=f"{event.kind.value}/{named}" if named else event.kind.value,
        node=event.node,
        worker=event.worker,
        task=event.task,
        step=event.step,
        own=is_own(event, evidence),
        of_program=event.kind in _OF_PROGRAMS and not is_from_outside(evidence),
    )


def failed_start(event: ErrorDetected, evidence: Evidence) -> FailedStart | None:
    """Return an error event as a failed start; None if it is no failed start, or somebody has ended the process."""
    if not evidence.starting or event.node is None or event.task is None or is_from_outside(evidence):
        return None
    way = event.kind.value if event.kind is ErrorKind.HANG else occurrence(event, evidence).cause
    return FailedStart(event.detected_at, way, event.node, event.task, event.event_id)


def may_be_of_machine(event: ErrorDetected, evidence: Evidence) -> bool:
    """Return whether what has failed, by what it says, may be the machine.

    An exception and the end of a process say so by their class, and a hang may always be one of a device or a driver. A
    plan that failed since a process ended or raised says no more than that; where it had no answer, the node may be to
    blame.
    """
    of_plan = (evidence.failure or "").startswith(f"{ErrorKind.TRANSITION_FAILED.value}/")
    if evidence.code or (event.kind in _OF_PROGRAMS and not of_plan):
        return _is_class_of_machine(evidence)
    return True


def is_own(event: ErrorDetected, evidence: Evidence) -> bool:
    """Return whether an error counts as its node's own fault: it says that the machine failed, and not a program.

    An exception does so by its class only, and so does the end of a process. If several ranks hang, none is known to be
    at fault.
    """
    if event.kind in (ErrorKind.NODE_LOST, ErrorKind.DEVICE):
        return True
    if event.kind is ErrorKind.HANG:
        return len(evidence.workers) == 1
    if event.kind not in (ErrorKind.PROCESS_EXIT, ErrorKind.EXCEPTION) or is_from_outside(evidence):
        return False
    return _is_class_of_machine(evidence)


def _is_class_of_machine(evidence: Evidence) -> bool:
    return bool(evidence.error_class) and evidence.error_class not in _NOT_OF_NODES


def is_from_outside(evidence: Evidence) -> bool:
    """Return whether somebody else has ended the process. The kernel, which ends some for memory, does not count."""
    return _name(evidence.failure) in FROM_OUTSIDE and evidence.error_class != OOM_KILLED.name


def _name(failure: str | None) -> str:
    """Return the name of the error in the key of a failure (``faults.Fault.key``)."""
    return (failure or "").partition("/")[2].rpartition("/step ")[0]


def _is_same(one: Occurrence, other: Occurrence) -> bool:
    """Return whether two occurrences on one worker count once: the same cause at the same step of a task."""
    return (one.cause, one.worker, one.fault) == (other.cause, other.worker, other.fault)
