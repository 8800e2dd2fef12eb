"""The events that a service folded when it decided them, and that the log has not delivered to it yet.

A service folds its decision at once, right after the event that caused it (docs/architecture.md, "Folding and
deciding"). The log delivers the same events later, in log order, and each must be skipped then. The planner's fold (in
the service and in replay), the cluster monitor and the transition service each have one ``OwnEvents``.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.events.union import EventBase


class OwnEvents:
    """Ids of events that were folded when they were decided. Pure: no clock, no log, no bus."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def __len__(self) -> int:
        """Return the number of events that were folded and not delivered yet."""
        return len(self._ids)

    def add(self, events: Iterable[EventBase]) -> None:
        """Note events that have just been folded, before they are appended to the log."""
        self._ids.update(event.event_id for event in events)

    def skip(self, event: EventBase) -> bool:
        """Return whether a delivered event was folded already and must be skipped; True once for each event added."""
        if event.event_id not in self._ids:
            return False
        self._ids.remove(event.event_id)
        return True
