"""Parts of whole events: ids, evidence and tracebacks."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, derived_id

TRACEBACK = "Traceback ...\n{}: it broke\n"


def event_id(cause: str, what: str) -> str:
    return derived_id(cause, "detector", what)


def failure(key: str, occurrences: int = 1) -> dict[str, Any]:
    """The evidence by which folds know a repeated failure."""
    return {"failure": key, "occurrences": occurrences}


def without_ranks(error: ErrorDetected) -> ErrorDetected:
    """The event without the status of each rank, which ``test_faults`` and ``test_stalls`` compare."""
    evidence = {name: value for name, value in error.evidence.items() if name != "ranks"}
    return error.model_copy(update={"evidence": evidence})


def incident(
    name: str, kind: ErrorKind, severity: Severity, method: Method, times: tuple[datetime, datetime], **rest: Any
) -> ErrorDetected:
    """The first error of an incident. ``times``: when the fault occurred, and when it was detected."""
    return ErrorDetected(
        event_id=name,
        occurred_at=times[0],
        incident=name,
        kind=kind,
        severity=severity,
        method=method,
        detected_at=times[1],
        **rest,
    )
