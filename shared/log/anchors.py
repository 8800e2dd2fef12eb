"""Anchors: hashes of a log that were noted elsewhere, by which a log is shown to be the one that was there.

A hash chain shows that a log is consistent. It cannot show that nobody has computed it anew, or cut off its end. The
hash of one event that is kept where the log's forger cannot reach it does: it covers that event and all before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from typing import NamedTuple

from shared.errors import InvalidInput

_DAY_LENGTH = len("2024-01-01")

_TEXT = re.compile(r"(?:(\d{1,18}):)?([0-9a-f]{64})")


class Defect(NamedTuple):
    """Something wrong in a log: where (0: nowhere in particular), and what, in words."""

    position: int
    what: str


@dataclass(frozen=True, slots=True)
class Anchor:
    """A hash that the log must have: at ``position``, or anywhere if that is None. ``name``: in words, for messages.

    ``day``: the day whose last event it is, in UTC. Heads are noted for each day that has events.
    """

    hash: str
    position: int | None = None
    name: str = "the expected head"
    day: date | None = None


def parse_anchor(text: str) -> Anchor:
    """Return the anchor in a text: ``HASH`` or ``POSITION:HASH``.

    Raises:
        InvalidInput: it is neither.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(f"expected head: {text!r} is neither HASH nor POSITION:HASH, with 64 hexadecimal digits")
    position = found.group(1)
    return Anchor(found.group(2), int(position) if position is not None else None)


class AnchorCheck:
    """The check of a log against anchors, row by row."""

    def __init__(self, anchors: Iterable[Anchor]) -> None:
        found = list(anchors)
        self._placed: dict[int, list[Anchor]] = {}
        for anchor in found:
            if anchor.position is not None:
                self._placed.setdefault(anchor.position, []).append(anchor)
        self._anywhere = {anchor.hash: anchor for anchor in found if anchor.position is None}
        self._days = {anchor.day.isoformat() for anchor in found if anchor.day is not None}
        self._last_day = max(self._days, default="")
        self._unnoted: dict[str, int] = {}
        """The last position of each day before the last noted one that has events and no head."""
        self._begins = 0
        self._held = 0
        """Position of the last anchor that the log has."""
        self._failed: list[tuple[int, str]] = []

    def begin(self, position: int, row_hash: str) -> None:
        """Begin behind a position, about anchors before which nothing can be said; 0: at the start of the log."""
        if position == 0:
            return
        self.next(position, row_hash)
        self._begins = position
        self._placed = {at: anchors for at, anchors in self._placed.items() if at > position}

    def next(self, position: int, row_hash: str, recorded_at: object = "") -> None:
        """Take the next row. ``recorded_at``: ISO 8601 in UTC; a damaged row may have anything there."""
        day = recorded_at[:_DAY_LENGTH] if isinstance(recorded_at, str) else ""
        if day and day < self._last_day and day not in self._days:
            self._unnoted[day] = position
        for anchor in self._placed.pop(position, ()):
            if anchor.hash == row_hash:
                self._held = position
            else:
                what = f"position {position}: the hash is {row_hash}, not {anchor.name}, {anchor.hash}"
                self._failed.append((position, what))
        if self._anywhere.pop(row_hash, None) is not None:
            self._held = position

    def defects(self, last: int) -> list[Defect]:
        """Return what contradicts the anchors, once all rows were taken; ``last``: position of the last one."""
        since = f"behind position {self._held}" if self._held else "up to there"
        found = [Defect(position, f"{what}: an event {since} was changed") for position, what in self._failed]
        for position, anchors in sorted(self._placed.items()):
            for anchor in anchors:
                what = f"the log ends at position {last}, before {anchor.name} at {position}: its tail was cut off"
                found.append(Defect(last + 1, what))
        for anchor in self._anywhere.values():
            begins = f"from position {self._begins + 1} " if self._begins else ""
            what = (
                f"no event {begins}up to the end at position {last} has {anchor.name}, {anchor.hash}: "
                "the tail was cut off, or an event was changed and the chain computed anew"
            )
            found.append(Defect(last + 1, what))
        for day, position in self._unnoted.items():
            what = (
                f"position {position}: no genuine signed head of {day}, which ends there, but one of {self._last_day}: "
                "it was removed from the heads, or forged"
            )
            found.append(Defect(position, what))
        return found
