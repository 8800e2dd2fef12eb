"""The injected fault that led to what a post-mortem is about, if there was one. Reads the log."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from services.api.postmortem.model import Injection
from shared.errors import Archived, InvalidInput
from shared.events.severities import ErrorKind
from shared.events.union import ErrorDetected, FaultInjected
from shared.log.log import EventLog
from shared.messages.injection import RequestedFault, parse

INJECTION_RECORDS = 200
"""Records before the fault among which a request to inject it is looked for: it strikes at the rank's next step."""


def injected(
    log: EventLog,
    before: int,
    at: datetime,
    *,
    task: str | None,
    rank: int | None,
    node: str | None,
    of: Callable[[FaultInjected], bool],
    within: int = INJECTION_RECORDS,
) -> Injection | None:
    """Return the newest fault that a user had asked for at a place, if no other incident was found there since.

    Args:
        log: is read.
        before: position before which it is looked for.
        at: time of what it led to.
        task: of the place; with it only requests for this rank count.
        rank: of the task.
        node: of the place.
        of: whether a fault can have led to it.
        within: so many positions of the log are looked through.
    """
    try:
        page = log.read(
            after=max(before - 1 - within, 0),
            limit=within,
            types=("fault.injected", "error.detected"),
        )
    except Archived:
        return None
    newest: Injection | None = None
    for record in page:
        event = record.event
        if record.position >= before:
            break
        if isinstance(event, FaultInjected) and (
            of(event) and ((event.task, event.rank) == (task, rank) if event.task else event.node == node)
        ):
            before_s = max((at - event.occurred_at).total_seconds(), 0.0)
            newest = Injection(fault=event.fault, actor=event.actor, before_s=before_s, position=record.position)
        elif isinstance(event, ErrorDetected) and (event.task, event.rank, event.node) == (task, rank, node):
            newest = None
    return newest


def slows_down(asked: FaultInjected) -> bool:
    """Return whether an injected fault is a slowdown; ``slow=1`` is the end of one."""
    fault = _read(asked)
    return fault is not None and fault.kind == "slow" and float(fault.argument) > 1.0


def can_have_caused(asked: FaultInjected, kind: ErrorKind, at: datetime) -> bool:
    """Return whether an injected fault can have led to an incident.

    Args:
        asked: the fault.
        kind: of the incident.
        at: when the incident occurred.
    """
    fault = _read(asked)
    if fault is None:
        return False
    if fault.kind == "disconnect" and (at - asked.occurred_at).total_seconds() > fault.away_s:
        return False
    return kind in _LEADS_TO.get(fault.kind, ())


_LEADS_TO = {
    "kill": (ErrorKind.PROCESS_EXIT, ErrorKind.CONNECTION),
    "exception": (ErrorKind.EXCEPTION, ErrorKind.PROCESS_EXIT),
    "hang": (ErrorKind.HANG, ErrorKind.COLLECTIVE_TIMEOUT),
    "nan": (ErrorKind.NON_FINITE,),
    "oom": (ErrorKind.PROCESS_EXIT, ErrorKind.EXCEPTION),
    "disconnect": (ErrorKind.NODE_LOST, ErrorKind.BROKEN_LINK),
    "xid": (ErrorKind.DEVICE,),
}
"""Kind of an injected fault -> kinds of the incidents that it leads to. ``slow`` and ``spike`` lead to none: the task
trains on."""


def _read(asked: FaultInjected) -> RequestedFault | None:
    """Return the fault that an event names; None: this version does not know its kind."""
    try:
        return parse(asked.fault)
    except InvalidInput:
        return None
