"""Claims of spans: time of workers whose node is away, that an incident leaves unused, or that no task uses. Pure.

Spans are folded from the log (``shared/projections/spans.py``). Spans of nodes also say when each worker was allocated
at all: no time outside of these is charged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain

from shared.costs.claims import Claim, Part
from shared.costs.intervals import Interval, overlapping, union
from shared.views.documents import SpanKind, SpanView

NODE_SPANS = frozenset({SpanKind.OPEN, SpanKind.CLOSED, SpanKind.AWAY})


@dataclass(frozen=True, slots=True)
class Window:
    """The time that is accounted for, in seconds since the epoch."""

    start_s: float
    end_s: float

    @classmethod
    def of(cls, start: datetime | None, end: datetime) -> Window:
        """Return the window between two times; ``start``: None for all time before."""
        return cls(-math.inf if start is None else start.timestamp(), end.timestamp())

    def has(self, start_s: float, end_s: float) -> bool:
        """Return whether some of a time is inside the window."""
        return end_s > self.start_s and start_s < self.end_s

    def clip(self, start_s: float, end_s: float) -> Interval:
        """Return the part of a time inside the window; its end is before its start if there is none."""
        return max(start_s, self.start_s), min(end_s, self.end_s)


def interval(span: SpanView) -> Interval:
    """Return the span's time; its end is infinite while it lasts."""
    return span.start.timestamp(), math.inf if span.end is None else span.end.timestamp()


def allocated_intervals(spans: Iterable[SpanView], window: Window) -> dict[str, Sequence[Interval]]:
    """Return when each worker was allocated in the window: disjoint intervals in order.

    Workers of the same times have one list of them, which tells that they are of one kind without a look at each.
    """
    by_workers: dict[tuple[str, ...], list[Interval]] = {}
    for span in spans:
        if span.kind in NODE_SPANS:
            start, end = window.clip(*interval(span))
            if end > start:
                by_workers.setdefault(tuple(span.workers), []).append((start, end))
    unions: dict[tuple[Interval, ...], list[Interval]] = {}

    def joined(intervals: Iterable[Interval]) -> list[Interval]:
        times = tuple(union(intervals))
        return unions.setdefault(times, list(times))

    found: dict[str, Sequence[Interval]] = {}
    for workers, intervals in by_workers.items():
        times = joined(intervals)
        for worker in workers:
            found[worker] = joined([*found[worker], *times]) if worker in found else times
    return found


def allocated_worker_s(allocated: Mapping[str, Sequence[Interval]]) -> float:
    """Return the worker-seconds of times of workers, of whom many have one list."""
    lists = {id(intervals): intervals for intervals in allocated.values()}
    counts = Counter(map(id, allocated.values()))
    return sum(counts[key] * sum(high - low for low, high in intervals) for key, intervals in lists.items())


def held_worker_s(claims: Iterable[Claim], allocated: Mapping[str, Sequence[Interval]] | None = None) -> float:
    """Return the worker-seconds that claims cover: for each worker the length of their union (by a sweep).

    ``allocated``: times of each worker, outside of which nothing counts; None: all time.
    """
    by_workers: dict[tuple[str, ...], list[Interval]] = {}
    for claim in claims:
        if claim.end_s > claim.start_s:
            by_workers.setdefault(claim.workers, []).append((claim.start_s, claim.end_s))
    covered = {workers: union(intervals) for workers, intervals in by_workers.items()}
    held = 0.0
    for alike in _alike(covered, allocated):
        joined = union(piece for workers in alike.claimed for piece in covered[workers])
        held += alike.count * sum(
            high - low for start, end in alike.within for low, high in overlapping(joined, start, end)
        )
    return held


@dataclass
class _Alike:
    """Workers of the same allocated times ``within`` that the same claims have. ``count``: how many workers."""

    within: Sequence[Interval]
    claimed: list[tuple[str, ...]]
    """The workers of each of these claims."""
    count: int = 0


def _alike(claimed: Iterable[tuple[str, ...]], allocated: Mapping[str, Sequence[Interval]] | None) -> Sequence[_Alike]:
    """Return the workers of claims in groups, each of those that may be swept together.

    A claim mostly has all workers of a group or none. Only where it has a part of a group, which becomes one of its
    own, are its workers looked at one by one.

    Args:
        claimed: the workers of each claim, each worker once.
        allocated: as ``held_worker_s``.
    """
    everything: Sequence[Interval] = ((-math.inf, math.inf),)
    groups: list[_Alike] = []
    number_of: dict[str, int] = {}
    by_times: dict[int, int] = {}
    for worker in dict.fromkeys(chain.from_iterable(claimed)):
        within = everything if allocated is None else allocated.get(worker, ())
        if id(within) not in by_times:
            by_times[id(within)] = len(groups)
            groups.append(_Alike(within, []))
        number = number_of[worker] = by_times[id(within)]
        groups[number].count += 1
    for workers in claimed:
        for number, count in Counter(map(number_of.__getitem__, workers)).items():
            group = groups[number]
            if count == group.count:
                group.claimed.append(workers)
                continue
            group.count -= count
            number_of.update({worker: len(groups) for worker in workers if number_of[worker] == number})
            groups.append(_Alike(group.within, [*group.claimed, workers], count))
    return groups


def undetected_claims(spans: Iterable[SpanView], detected: Mapping[str, datetime], window: Window) -> Iterator[Claim]:
    """Yield the claims on workers whose node had failed before that was known.

    ``detected``: times of detection by incident.
    """
    for span in spans:
        if span.kind is SpanKind.AWAY and span.incident in detected:
            start, end = window.clip(span.start.timestamp(), detected[span.incident].timestamp())
            if end > start:
                yield Claim(tuple(span.workers), start, end, Part.DETECTION, "", span.incident)


def lost_claims(spans: Sequence[SpanView], window: Window) -> Iterator[Claim]:
    """Yield the claims on workers whose node is away: first those of tasks that had them and have fewer since."""
    lacking: dict[str, list[int]] = {}
    for index, span in enumerate(spans):
        for worker in span.workers if span.kind is SpanKind.SHORTFALL else ():
            lacking.setdefault(worker, []).append(index)
    for away in spans:
        if away.kind is not SpanKind.AWAY:
            continue
        start, end = window.clip(*interval(away))
        if end <= start:
            continue
        workers_of: dict[int, list[str]] = {}
        for worker in away.workers:
            for index in lacking.get(worker, ()):
                workers_of.setdefault(index, []).append(worker)
        for index, workers in sorted(workers_of.items()):
            span = spans[index]
            low, high = interval(span)
            low, high, rate = max(low, start), min(high, end), span.flop_per_worker_s
            if high > low:
                yield Claim(tuple(workers), low, high, Part.LOST, span.task, away.incident, rate)
        yield Claim(tuple(away.workers), start, end, Part.LOST, "", away.incident)


def shortfall_claims(spans: Iterable[SpanView], window: Window) -> Iterator[tuple[float, Claim]]:
    """Yield the claims on workers that a task had before an incident, each with the weight of the task."""
    for span in spans:
        if span.kind is SpanKind.SHORTFALL:
            start, end = window.clip(*interval(span))
            if end > start:
                workers, rate = tuple(span.workers), span.flop_per_worker_s
                yield span.weight, Claim(workers, start, end, Part.SUB_HEALTHY, span.task, span.incident, rate)


def unused_claims(spans: Sequence[SpanView], window: Window) -> Iterator[Claim]:
    """Yield the claims on time that no other claim covers, unscheduled or idle: all of the time of each worker.

    A worker is idle while some task could use more workers of its kind, or of any kind if it has none.
    """
    wanted: dict[str, list[Interval]] = {}
    for span in spans:
        if span.kind is SpanKind.DEMAND:
            wanted.setdefault(span.hardware, []).append(interval(span))
    anything = wanted.pop("", [])
    wanted = {hardware: union([*intervals, *anything]) for hardware, intervals in wanted.items()}
    anything = union(anything)
    # Nodes of the same times and of the same kind are claimed together: one that is idle has no claim of its own.
    alike: dict[tuple[float, float, str | None], dict[str, None]] = {}
    for span in spans:
        if span.kind in NODE_SPANS:
            start, end = window.clip(*interval(span))
            if end > start:
                key = start, end, span.hardware if span.kind is SpanKind.OPEN else None
                alike.setdefault(key, {}).update(dict.fromkeys(span.workers))
    for (start, end, hardware), found in alike.items():
        workers = tuple(found)
        for low, high in overlapping(wanted.get(hardware, anything), start, end) if hardware is not None else ():
            yield Claim(workers, low, high, Part.IDLE, "")
        yield Claim(workers, start, end, Part.UNSCHEDULED, "")
