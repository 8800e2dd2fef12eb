"""An accounting of allocated time, written from its definition (docs/costs.md). It shares no code with the fold.

It goes through the events node by node, with a few booleans for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from shared.events.severities import ErrorKind, Severity
from shared.events.union import (
    ErrorDetected,
    NodeAdopted,
    NodeCordoned,
    NodeDrained,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeMeasured,
    NodeReturned,
    Recorded,
)


@dataclass
class _Account:
    """One node. ``times``: of each of its workers, from and to."""

    incarnation: str = ""
    workers: tuple[str, ...] = ()
    allocated: bool = False
    away: bool = False
    agent_ended: bool = False
    draining: bool = False
    refused: bool = False
    since: datetime | None = None
    times: dict[str, list[tuple[datetime, datetime]]] = field(default_factory=dict)

    def settle(self, at: datetime) -> None:
        for worker in self.workers if self.allocated and self.since is not None else ():
            assert self.since is not None
            self.times.setdefault(worker, []).append((self.since, at))
        self.since = at


def _apply(account: _Account, event: object) -> None:
    match event:
        case NodeMeasured() if event.verdict == "refused":
            if not account.incarnation:
                account.workers = tuple(event.workers)
            if not account.incarnation or account.agent_ended or (account.away and account.refused):
                account.incarnation, account.away, account.agent_ended = event.incarnation, True, False
            account.refused = True
        case NodeMeasured():
            account.refused = False
        case NodeJoined():
            account.refused = False
            account.incarnation, account.workers = event.incarnation, tuple(event.workers)
            account.allocated, account.away, account.agent_ended, account.draining = True, False, False, False
        case NodeAdopted() if event.predecessor == account.incarnation:
            account.incarnation = event.incarnation
        case NodeLeft() if event.incarnation == account.incarnation:
            account.allocated, account.agent_ended, account.draining = False, True, False
        case NodeDraining():
            account.draining = account.draining or not (account.away or account.agent_ended)
        case NodeDrained() if account.draining:
            account.allocated, account.draining = False, False
        case NodeReturned() if event.incarnation == account.incarnation and not account.agent_ended:
            account.allocated, account.away, account.draining, account.refused = True, False, False, False
        case NodeReturned() if event.incarnation == account.incarnation:
            account.refused = False
        case ErrorDetected() if event.severity is Severity.SEV1:
            account.away, account.draining = True, False
            account.agent_ended = event.kind is ErrorKind.NODE_LOST and event.escalates is None


def allocated_times(records: Iterable[Recorded], until: datetime) -> Iterator[tuple[str, datetime, datetime]]:
    """Yield when each worker was allocated: worker, from, to. Times come from the log's own clock."""
    accounts: dict[str, _Account] = {}
    for record in records:
        event = record.event
        node = getattr(event, "node", None)
        if not isinstance(
            event,
            NodeJoined
            | NodeAdopted
            | NodeLeft
            | NodeDraining
            | NodeDrained
            | NodeReturned
            | ErrorDetected
            | NodeCordoned
            | NodeMeasured,
        ):
            continue
        begins = isinstance(event, NodeJoined) or (isinstance(event, NodeMeasured) and event.verdict == "refused")
        if node is None or (node not in accounts and not begins):
            continue
        account = accounts.setdefault(node, _Account())
        account.settle(record.recorded_at)
        _apply(account, event)
    for account in accounts.values():
        account.settle(until)
        for worker, times in account.times.items():
            yield from ((worker, start, end) for start, end in times)


def allocated_worker_s(records: Iterable[Recorded], until: datetime) -> float:
    """Return the worker-seconds that nodes were allocated."""
    return sum((end - start).total_seconds() for _, start, end in allocated_times(records, until))
