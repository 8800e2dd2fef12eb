"""The recorder: gives each event its place in the log, and passes it on to the log and to the accounting of costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime

from shared.events.union import Event, Recorded, derived_id
from shared.log.base import FIRST_HASH
from shared.log.log import EventLog

_BATCH = 512
"""Events that are appended in one transaction: its cost is spread over as many, and a plan of a large cluster, the
longest event, has about a hundred kilobytes."""


class Recorder:
    """The records of a run.

    Args:
        run: name of the run, from which ids of events are derived.
        log: gets all events; None: they are kept nowhere.
        observe: called with each record.
    """

    def __init__(self, run: str, log: EventLog | None, observe: Callable[[Recorded], None] | None) -> None:
        self._run = run
        self._log = log
        self._observe = observe
        self._waiting: list[tuple[datetime, list[Event]]] = []
        self._number = 0
        self._versions: Counter[str] = Counter()
        self._ids = 0
        self._pending = 0

    @property
    def events(self) -> int:
        """Number of events up to now."""
        return self._number

    def new_id(self) -> str:
        """Return the id of the next event that is no answer to another."""
        self._ids += 1
        return derived_id(self._run, "simulator", self._ids)

    def record(self, event: Event, at: datetime) -> Recorded:
        """Return the record of an event. ``at``: when it is recorded. Its hashes are the log's, and not known here."""
        self._number += 1
        stream = event.stream
        self._versions[stream] += 1
        record = Recorded(
            position=self._number,
            stream=stream,
            stream_version=self._versions[stream],
            recorded_at=at,
            event=event,
            previous_hash=FIRST_HASH,
            hash=FIRST_HASH,
        )
        if self._log is not None:
            self._keep(event, at)
        if self._observe is not None:
            self._observe(record)
        return record

    def _keep(self, event: Event, at: datetime) -> None:
        if self._waiting and self._waiting[-1][0] == at:
            self._waiting[-1][1].append(event)
        else:
            self._waiting.append((at, [event]))
        self._pending += 1
        if self._pending >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Have the log append what waits."""
        if self._log is not None and self._waiting:
            self._log.append_history(self._waiting)
            self._waiting, self._pending = [], 0
