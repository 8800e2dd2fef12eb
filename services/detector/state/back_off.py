"""A task that fails again in the same way: how long it waits, what counts against it, and when it is given to a person.

A first failure is answered at once. The same failure again, without a new step between, waits before its processes are
started, or before it is retried in place: ``FIRST_WAIT_S``, then twice as long each time, up to ``LONGEST_WAIT_S``. The
wait is in the evidence of the error, so that the plan that answers it says until when nothing is started or retried.
Pure: it follows from the log alone.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from services.detector.state.cause_history import is_from_outside
from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind

FIRST_WAIT_S = 1.0
"""The first wait. Chosen: about as long as a recovery takes. A bug that comes again at once is still found within
seconds."""

LONGEST_WAIT_S = 120.0
"""The longest wait. Chosen: a task is back two minutes after the end of an outage at the latest, and a try each two
minutes costs little. Its copies in memory stay meanwhile (``kept_copies.py``)."""

_MOST_DOUBLINGS = 16
"""Doublings after which the wait grows no more: far beyond ``LONGEST_WAIT_S``. A power of any number of failures would
overflow."""

CLASSES_FROM_OUTSIDE = frozenset({"disk-full", "gloo", "nccl-remote", "network", "ports", "rendezvous", "storage"})
"""Classes of errors (``error_classes.py``) whose text says that something failed that the task does not contain: its
storage, its network, a peer or a port. Errors of memory, descriptors and threads are left out: a task may need too many
of these."""


class Tries(NamedTuple):
    """How a task has failed since its newest step, in the generations before the present one.

    Attributes:
        same: how often in the same way.
        all: how often in any way.
        since: when the task failed at this step first; None: it has not.
    """

    same: int = 0
    all: int = 0
    since: datetime | None = None


def wait_s(same: int) -> float:
    """Return for how long the answer to a failure starts no process, and retries nothing, seconds.

    Args:
        same: how often the task has failed in the same way before, without a new step since.
    """
    if same <= 0:
        return 0.0
    doublings: int = min(same - 1, _MOST_DOUBLINGS)
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**doublings)


def waited_s(times: int) -> float:
    """Return the sum of the waits of so many failures in a row, seconds."""
    known = min(times, _MOST_DOUBLINGS)
    return sum(map(wait_s, range(known))) + (times - known) * LONGEST_WAIT_S


def way_of(evidence: Evidence, worker: str | None) -> str:
    """Return in which way a process has failed: by the class of its text, else by the kind and name of its error.

    An error with the same text one step later, or of another kind, is the same way. Processes that somebody ends are
    another matter on each worker.
    """
    kind, _, named = (evidence.failure or "").partition("/")
    name = evidence.error_class or f"{kind}/{named.rpartition('/step ')[0] or named}"
    return f"{name} of {worker}" if is_from_outside(evidence) else name


def reached_step(step: int, task_step: int, *, starting: bool) -> int:
    """Return the step at which a task fails.

    A process that has failed as it started may not know how far the others are. For any other process its own step
    counts, also where the task had come further before: those further steps were lost.

    Args:
        step: updates applied, as the failed process knows.
        task_step: the task's step, as the log has it.
        starting: whether the process was being started.
    """
    return max(step, task_step) if starting else step


def cause_outside(kind: ErrorKind, evidence: Evidence) -> str:
    """Return the sign that the cause of a failure lies outside of the task; empty: there is none.

    Such a failure does not count against ``max_restarts``, however often it comes.
    """
    if kind is ErrorKind.DEVICE:
        return "a device has failed"
    if is_from_outside(evidence):
        return "somebody has ended the process"
    if evidence.error_class in CLASSES_FROM_OUTSIDE:
        return f"the error says {evidence.error_class}"
    return ""


def repeated(tries: Tries, *, outside: str, max_restarts: int, progress_timeout_s: float, now: datetime) -> Evidence:
    """Return the evidence of a failure for how often it has come without progress; empty for a first one.

    A task that has failed more than ``max_restarts`` times in any way, for longer than ``progress_timeout_s`` and
    without a new step, is not tried any further by itself.

    Args:
        tries: the failures before.
        outside: the answer of ``cause_outside``.
        max_restarts: the task's.
        progress_timeout_s: the task's.
        now: when the failure was detected.
    """
    found = Evidence()
    if tries.same:
        found = Evidence(without_progress=tries.same + 1, wait_s=wait_s(tries.same))
    idle_s = (now - tries.since).total_seconds() if tries.since is not None else 0.0
    if idle_s >= progress_timeout_s and tries.all >= max(1, max_restarts):
        text = (
            f"it has failed {tries.all + 1} times without a new step, for {idle_s:.0f} s; progress_timeout_s is "
            f"{progress_timeout_s:g}{f'; {outside}' if outside else ''}"
        )
        return found.model_copy(update={"needs_operator": text})
    return found
