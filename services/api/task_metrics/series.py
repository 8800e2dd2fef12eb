"""Metrics of a task: one value for each name, step and submission, thinned out beyond a limit. Pure.

Several ranks may log the same name, and a step that a task goes back behind is computed again in a later generation.
So a value has a *source*, generation and rank: of two values of one step that of the newer generation counts, and
within a generation that of the lower rank. Steps behind the first one that a newer generation has logged are undone:
their older values go, until they are logged again.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_NAMES = 100
"""Most names of one submission; others are counted, and left out."""

MOST_BYTES = 10 << 20
"""Most bytes that the metrics of all submissions of a task's name take."""

NAME_CHARACTERS = 100
"""Longest name (``unicron.training.metrics``)."""

POINT_BYTES, SERIES_BYTES = 32, 200
"""Bytes of a point, and about as many of a series without points: its row, with its name."""

MOST_INTEGER = 1 << 53
"""Steps, generations and ranks are below: a script may write anything to the files."""


class Line(NamedTuple):
    """The metrics that a rank has logged of one step."""

    step: int
    rank: int
    values: Mapping[str, float]


def read_lines(data: bytes) -> Iterator[Line]:
    """Yield the lines of a rank's file that can be read; the script may have written others there."""
    for text in data.splitlines():
        try:
            said = json.loads(text)
            line = Line(said["step"], said["rank"], said["values"])
            whole = all(type(number) is int and 0 <= number < MOST_INTEGER for number in line[:2])
            if whole and all(_is_metric(name, value) for name, value in line.values.items()):
                yield line
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue


def _is_metric(name: str, value: Any) -> bool:
    return 0 < len(name) <= NAME_CHARACTERS and name.isprintable() and isinstance(value, float)


@dataclass(slots=True)
class Series:
    """The values of one name in one submission, by rising step."""

    every: int = 1
    """Of each so many steps the newest value is kept."""
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    generations: array[int] = field(default_factory=lambda: array("q"))
    ranks: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def size_bytes(self) -> int:
        """How much it takes."""
        return SERIES_BYTES + POINT_BYTES * len(self)

    @property
    def _columns(self) -> tuple[array[Any], ...]:
        return self.steps, self.values, self.generations, self.ranks

    def put(self, step: int, value: float, generation: int, rank: int) -> None:
        """Take a value, unless one of the same steps counts more."""
        at = bisect_left(self.steps, step - step % self.every)  # the first of the same steps, if there is any
        if at < len(self) and self.steps[at] // self.every == step // self.every:
            there = self.steps[at], self.generations[at], -self.ranks[at]
            if (step, generation, -rank) < there:
                return
            self._delete(at, at + 1)
        for column, number in zip(self._columns, (step, value, generation, rank), strict=True):
            column.insert(at, number)

    def undo(self, generation: int, step: int) -> None:
        """Drop the values of generations before this one of the steps behind a step."""
        begin = bisect_left(self.steps, step + 1)
        kept = [i for i in range(begin, len(self)) if self.generations[i] >= generation]
        if len(kept) < len(self) - begin:
            for column in self._columns:
                column[begin:] = array(column.typecode, [column[i] for i in kept])

    def thin_out(self) -> None:
        """Keep about half of the values, the newest among them, and from here on as many of those that come."""
        before = len(self)
        while len(self) == before > 1:
            self.every *= 2
            kept = [i for i in range(before) if i + 1 == before or self._group(i) != self._group(i + 1)]
            for column in self._columns:
                column[:] = array(column.typecode, [column[i] for i in kept])

    def _group(self, index: int) -> int:
        return self.steps[index] // self.every

    def _delete(self, begin: int, end: int) -> None:
        for column in self._columns:
            del column[begin:end]

    def points(self, most: int) -> list[tuple[int, float | None]]:
        """Return up to so many values with their steps, evenly spread, the newest among them; None: not finite."""
        every = max(1, math.ceil(len(self) / most))
        chosen = range(len(self) - 1, -1, -every)[::-1]
        return [(self.steps[i], self.values[i] if math.isfinite(self.values[i]) else None) for i in chosen]

    def to_bytes(self) -> bytes:
        """Return it as ``from_bytes`` reads it, in the byte order of this machine."""
        head = array("q", (self.every, len(self)))
        return b"".join(column.tobytes() for column in (head, *self._columns))

    @classmethod
    def from_bytes(cls, data: bytes) -> Series:
        """Return what ``to_bytes`` has written."""
        head = array("q", data[:16])
        series = cls(head[0])
        for number, column in enumerate(series._columns):
            begin = 16 + 8 * head[1] * number
            column.frombytes(data[begin : begin + 8 * head[1]])
        return series


@dataclass(slots=True)
class Submission:
    """The metrics of one submission of a task's name."""

    series: dict[str, Series] = field(default_factory=dict)
    firsts: dict[int, int] = field(default_factory=dict)
    """Generation -> the first step that any rank has logged in it."""
    left_out: int = 0
    """How many lines had a name too many."""

    def take(self, generation: int, lines: Sequence[Line]) -> None:
        """Take what a rank has logged in a generation."""
        if not lines:
            return
        first = min(line.step for line in lines)
        if first < self.firsts.get(generation, MOST_INTEGER):
            self.firsts[generation] = first
            for series in self.series.values():
                series.undo(generation, first)
        undone = min((step for newer, step in self.firsts.items() if newer > generation), default=MOST_INTEGER)
        for line in lines:
            if line.step <= undone:
                self._put(generation, line)

    def _put(self, generation: int, line: Line) -> None:
        for name, value in line.values.items():
            if name not in self.series:
                if len(self.series) == MOST_NAMES:
                    self.left_out += 1
                    continue
                self.series[name] = Series()
            self.series[name].put(line.step, value, generation, line.rank)


def thin_out(submissions: Mapping[int, Submission], most_bytes: int) -> None:
    """Thin out the longest series until all together take no more than a number of bytes.

    If that is not enough, the oldest submission goes, and so on; never the newest.
    """
    while sum(series.size_bytes for series in _all(submissions.values())) > most_bytes:
        longest = max(_all(submissions.values()), key=len)
        if len(longest) > 1:
            longest.thin_out()
            continue
        oldest = min((number for number, one in submissions.items() if one.series), default=0)
        if oldest == max(submissions):
            return
        submissions[oldest].series.clear()


def _all(submissions: Iterable[Submission]) -> Iterator[Series]:
    for submission in submissions:
        yield from submission.series.values()
