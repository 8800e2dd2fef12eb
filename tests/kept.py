"""State snapshots of records in memory, without a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from shared.events.union import Recorded
from shared.log.log import EventLog
from shared.service.state_snapshots import KeptState

S = TypeVar("S")


class _Log:
    """What the fold of a kept state calls of a log."""

    def __init__(self, records: Sequence[Recorded]) -> None:
        self._records = records

    def read(self, *, after: int, limit: int) -> Sequence[Recorded]:
        return self._records[after : after + limit]

    def ids(self, *types: str, after: int) -> list[tuple[int, str]]:
        return [(r.position, r.event.event_id) for r in self._records[after:] if r.event.type in types]


def folded(
    kept: KeptState[S], records: Sequence[Recorded], until: int, *, after: int = 0, state: S | None = None
) -> tuple[int, S]:
    """Return position and state that a snapshot has which is written up to ``until``, from an earlier one or from 0."""
    log = cast("EventLog", _Log(records))
    return kept.fold(log, kept.kind() if state is None else state, after, until)


def restored(kept: KeptState[S], state: S) -> S:
    """Return the state as it comes back from a snapshot."""
    return kept.codec.load(kept.codec.dump(state))
