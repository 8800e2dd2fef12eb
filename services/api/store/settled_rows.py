"""The rows of what is settled: amounts of times that meet, and of all of them together.

A time that is settled is never split. It is given up (``give_up``) where a later event changes what happened in it, and
becomes one with its neighbours (``merge``). The
fold writes them (``services/api/store/settling.py``), requests add them up (``services/api/store/accounts.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, bindparam, delete, func, insert, select, tuple_

from services.api.store.tables import KEYS, SettledRow, TotalRow, insert_into, table_of
from shared.costs.settlement import ALL, COLUMNS, Amounts, Sums, day_of
from shared.costs.span_claims import Window

_ROWS = table_of(SettledRow)
_TOTALS = table_of(TotalRow)
_AMOUNTS = (_TOTALS.c.dimension, _TOTALS.c.key, *(_TOTALS.c[name] for name in COLUMNS))
_TOTALS_BY_KEY = select(*_AMOUNTS).where(
    _TOTALS.c.dimension == bindparam("dimension"), _TOTALS.c.key.in_(bindparam("keys", expanding=True))
)
_SUMS = [func.sum(_ROWS.c[name]).label(name) for name in COLUMNS]


class SettledRows:
    """The rows, inside one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def store(self, window: Window, sums: Sums) -> None:
        """Store the amounts of a time that begins where the settled time ends."""
        rows = [
            {"dimension": dimension, "key": key, **amounts}
            for dimension, part in sums.items()
            for key, amounts in part.items()
        ]
        times = {"start_s": window.start_s, "end_s": window.end_s}
        self._connection.execute(insert(_ROWS), [{**times, **row} for row in rows])
        names = ["dimension", "key", *COLUMNS]
        stored = select(*(_ROWS.c[name] for name in names)).where(_ROWS.c.start_s == window.start_s)
        adding = insert_into(self._connection.dialect.name, _TOTALS).from_select(names, stored)
        changes = {name: _TOTALS.c[name] + adding.excluded[name] for name in COLUMNS}
        self._connection.execute(adding.on_conflict_do_update(index_elements=["dimension", "key"], set_=changes))

    def give_up(self, from_s: float) -> float:
        """Drop the settled times that reach beyond ``from_s``; return up to when the rest goes."""
        first = self._connection.scalar(
            select(func.max(_ROWS.c.start_s)).where(_ROWS.c.dimension == ALL, _ROWS.c.start_s <= from_s)
        )
        if first is None:
            return -math.inf
        place = tuple_(_ROWS.c.dimension, _ROWS.c.key)
        dropped = select(_ROWS.c.dimension, _ROWS.c.key).where(_ROWS.c.start_s >= first)
        left = (
            select(_ROWS.c.dimension, _ROWS.c.key, *_SUMS)
            .where(_ROWS.c.start_s < first, place.in_(dropped))
            .group_by(_ROWS.c.dimension, _ROWS.c.key)
        )
        self._connection.execute(delete(_TOTALS).where(tuple_(_TOTALS.c.dimension, _TOTALS.c.key).in_(dropped)))
        self._connection.execute(insert(_TOTALS).from_select(["dimension", "key", *COLUMNS], left))
        self._connection.execute(delete(_ROWS).where(_ROWS.c.start_s >= first))
        return float(first)

    def merge(self, from_s: float) -> None:
        """Have the times that end after ``from_s`` become one for each day of UTC."""
        times: dict[datetime, tuple[float, float]] = {}
        merged: dict[tuple[datetime, str, str], Amounts] = {}
        late = _ROWS.c.end_s > from_s
        # The database's own sum has no order, on which its last bit depends.
        for row in self._connection.execute(select(_ROWS).where(late).order_by(_ROWS.c.start_s)).mappings():
            day = day_of(row["end_s"])
            times[day] = times.get(day, (row["start_s"], 0.0))[0], row["end_s"]
            amounts = merged.setdefault((day, row["dimension"], row["key"]), dict.fromkeys(COLUMNS, 0.0))
            for name in COLUMNS:
                amounts[name] += row[name]
        if merged:
            self._connection.execute(delete(_ROWS).where(late))
            rows = [
                {"start_s": times[day][0], "end_s": times[day][1], "dimension": dimension, "key": key, **amounts}
                for (day, dimension, key), amounts in merged.items()
            ]
            self._connection.execute(insert(_ROWS), rows)

    def whole_times(self, window: Window) -> Window | None:
        """Return what of a window consists of whole settled times; None if nothing does."""
        query = select(func.min(_ROWS.c.start_s), func.max(_ROWS.c.end_s)).where(
            _ROWS.c.dimension == ALL, _ROWS.c.start_s >= window.start_s, _ROWS.c.end_s <= window.end_s
        )
        start_s, end_s = self._connection.execute(query).one()
        return None if start_s is None else Window(start_s, end_s)

    def between(self, window: Window) -> Sums:
        """Return the amounts of whole settled times."""
        query = select(_ROWS.c.dimension, _ROWS.c.key, *_SUMS).where(*_within(window))
        return self._sums(query.group_by(_ROWS.c.dimension, _ROWS.c.key))

    def days(self, window: Window) -> dict[datetime, Amounts]:
        """Return the amounts of everything in whole settled times, by day."""
        days: dict[datetime, Amounts] = {}
        for row in self._connection.execute(select(_ROWS).where(_ROWS.c.dimension == ALL, *_within(window))).mappings():
            day = days.setdefault(day_of(row["end_s"]), dict.fromkeys(COLUMNS, 0.0))
            for name in COLUMNS:
                day[name] += row[name]
        return days

    def totals(self, dimension: str, keys: Iterable[str] | None = None, *, costliest: int | None = None) -> Sums:
        """Return the amounts of all settled time.

        Args:
            dimension: of the keys.
            keys: only these; None: all.
            costliest: in place of all keys only so many, those of the most worker-seconds, and the empty one.
        """
        if keys is not None:
            wanted = sorted({*keys})
            sums: Sums = {dimension: {}}
            for start in range(0, len(wanted), KEYS):
                part = {"dimension": dimension, "keys": wanted[start : start + KEYS]}
                sums[dimension] |= self._sums(_TOTALS_BY_KEY, part).get(dimension, {})
            return sums
        query = select(*_AMOUNTS).where(_TOTALS.c.dimension == dimension)
        if costliest is not None:
            found = query.where(_TOTALS.c.key != "").order_by(_TOTALS.c.worker_s.desc()).limit(costliest)
            sums = self._sums(found)
            return {dimension: {**sums.get(dimension, {}), **self.totals(dimension, [""])[dimension]}}
        return {dimension: {}, **self._sums(query)}

    def _sums(self, query: Select[Any], given: Mapping[str, Any] | None = None) -> Sums:
        """Return the rows of a query that selects ``dimension``, ``key`` and the amounts, in this order."""
        sums: Sums = {}
        for dimension, key, *amounts in self._connection.execute(query, given):
            sums.setdefault(dimension, {})[key] = dict(zip(COLUMNS, amounts, strict=True))
        return sums


def _within(window: Window) -> tuple[Any, ...]:
    return _ROWS.c.start_s >= window.start_s, _ROWS.c.start_s < window.end_s
