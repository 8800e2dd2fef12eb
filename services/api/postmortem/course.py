"""The records of a page's course, and the injected fault that came before it. Reads the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from services.api.postmortem.model import Injection
from shared.errors import Archived, InvalidInput
from shared.events import ErrorDetected, FaultInjected, Recorded
from shared.injection import RequestedFault, parse
from shared.log.log import EventLog
from shared.severities import ErrorKind

MOST_RECORDS = 20_000
"""Records that are looked through behind the fault: on a busy cluster, hours. A course that lasts longer is cut, and
the page says so."""

PAGE = 1000
"""Records that are read at a time."""

INJECTION_RECORDS = 200
"""Records before the fault among which a request to inject it is looked for: it strikes at the rank's next step."""

_LATE = timedelta(seconds=30)
"""How much later than the end of its last phase a record of an incident may come: a report that waited for the bus."""


def course(
    log: EventLog,
    first: int,
    ends: datetime | None,
    types: Sequence[str],
    belongs: Callable[[Recorded], bool],
    left_out: list[str],
) -> list[Recorded]:
    """Return the records of a course, in the order of the log.

    Args:
        log: is read.
        first: position of the first record.
        ends: when the last phase ended; None: it goes on.
        types: of the records.
        belongs: whether a record of these types is part of the course.
        left_out: gets what the log does not have any more, in words.
    """
    after, read, records = first - 1, 0, list[Recorded]()
    while read < MOST_RECORDS:
        try:
            page = log.read(after=after, limit=PAGE, types=types)
        except Archived as err:
            left_out.append(f"the time line: {err.detail}")
            return records
        records += [record for record in page if belongs(record)]
        read += len(page)
        if len(page) < PAGE or (ends is not None and page[-1].recorded_at > ends + _LATE):
            return records
        after = page[-1].position
    left_out.append(f"what happened more than {MOST_RECORDS} records behind the fault")
    return records


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
