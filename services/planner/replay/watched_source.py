"""A log that tells how far a pass over its rows has come, for programs that show progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.planner.replay.sources import Answer, Source
from shared.log.anchors import Defect
from shared.log.base import Base
from shared.log.scan import Row, Scan

_EVERY = 64
"""Rows between two reports: a report takes microseconds, to verify as many rows milliseconds."""


class WatchedSource:
    """A log whose passes are watched; not those of other processes, which read ``as_it_is``.

    Args:
        source: the log.
        seen: called now and then with the number of rows that the present pass has yielded.
    """

    def __init__(self, source: Source, seen: Callable[[int], None]) -> None:
        self._source, self._seen = source, seen

    def base(self) -> Base:
        """Return the place behind which the rows begin."""
        return self._source.base()

    def answers(self) -> Iterator[Answer]:
        """Yield the events of the types with which the planner answers, in order."""
        return self._source.answers()

    def rows(self, scan: Scan) -> Iterator[Row]:
        """Yield every row, checked by ``scan``."""
        for number, row in enumerate(self._source.rows(scan), 1):
            if number % _EVERY == 0:
                self._seen(number)
            yield row

    def defects(self) -> list[Defect]:
        """Return what is wrong with the table and not with one of its rows."""
        return self._source.defects()

    def as_it_is(self) -> Source:
        """Return the log without what is appended to it from now on."""
        return self._source.as_it_is()
