"""Reading of the views, inside one transaction.

Lists are read by keyset: each query finds its first row by an index, and reads no more rows than it returns.

``Memo`` keeps what requests have found in the newest state of the projections, so that the next one need not look
again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, bindparam, func, select

from services.api.store.parsed_views import ParsedViews
from services.api.store.tables import KEYS, NODES, PLANS, TASKS, Kind, PlanRow, PositionRow, V, table_of
from shared.errors import NotFound
from shared.unknown_names import nearest

_MOST = 64
"""Things that are kept: a report of costs has eight, and clients ask for a few different ones by turns."""


class Memo:
    """Things found in one state, all of which are forgotten with the next; safe to use from threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # to find one thing may take another
        self._state: Hashable = None
        self._known: dict[Hashable, Any] = {}

    def get(self, state: Hashable, key: Hashable, find: Callable[[], T]) -> T:
        """Return what was found in a state, or what ``find`` returns, which no one may change.

        Args:
            state: of the projections: the log's position, and how far time is settled.
            key: what is asked for.
            find: looks for it.
        """
        with self._lock:
            if self._state != state or len(self._known) >= _MOST:
                self._state, self._known = state, {}
            if key not in self._known:
                self._known[key] = find()
            found: T = self._known[key]
            return found


T = TypeVar("T")

_NAMED_BY_PEOPLE = (TASKS, NODES)
"""Views whose keys are names; those of the others are ids, of which none is like another."""

_COMPARED = 1000
"""Names that one which there is not is compared with: the newest, in about 10 ms."""

_BEHIND_ALL = 2**63 - 1
"""A position behind that of every event: the largest integer of the column."""


_FOREVER_S = 1e12
"""Later than any time of the log, seconds since the epoch: the year 33658."""


# To make a statement takes SQLAlchemy as long as to run it: each is made once.
_STATE = select(table_of(PositionRow).c.head, table_of(PositionRow).c.settled_s)
_POSITION = select(table_of(PositionRow).c.position)
_PLANS = table_of(PlanRow)
_NEXT_SOLVED = (
    select(_PLANS.c.key, _PLANS.c.document)
    .where(_PLANS.c.solved, _PLANS.c.position > bindparam("position"))
    .order_by(_PLANS.c.position)
    .limit(1)
)


@functools.cache
def _by_keys(kind: Kind[Any], columns: tuple[str, ...]) -> Select[Any]:
    table = table_of(kind.row)
    wanted = [table.c[name] for name in ("key", "position", *columns)]
    return select(*wanted).where(table.c.key.in_(bindparam("keys", expanding=True)))


@functools.cache
def _newest_keys(kind: Kind[Any]) -> Select[Any]:
    table = table_of(kind.row)
    return select(table.c.key).order_by(table.c.position.desc()).limit(_COMPARED)


@functools.cache
def _newest(kind: Kind[Any]) -> Select[Any]:
    table = table_of(kind.row)
    query = select(table.c.key, table.c.document).where(table.c.position < bindparam("before"))
    return query.order_by(table.c.position.desc()).limit(bindparam("limit"))


@functools.cache
def _listed(
    kind: Kind[Any],
    columns: tuple[str, ...],
    by_task: bool,
    by_state: bool,
    limited: bool,
    newest: bool,
    timed: bool,
    without: str,
) -> Select[Any]:
    """Return the statement of ``ViewReader.rows``, with parameters for what it is called with."""
    table = table_of(kind.row)
    query = select(*(table.c[name] for name in ("key", "position", *columns)))
    listed = table
    if by_task:
        assert kind.link is not None
        listed = table_of(kind.link)
        query = query.join(listed, table.c.key == listed.c.key).where(listed.c.task == bindparam("task"))
    if by_state:
        query = query.where(listed.c.state == bindparam("state"))
    if without:
        query = query.where(listed.c.state != without)
    if timed:
        # The positions let the query end where the times do; times are not quite in the order of the log.
        query = query.where(table.c.time_s >= bindparam("since_s"), table.c.time_s < bindparam("until_s"))
        query = query.where(listed.c.position >= bindparam("first"), listed.c.position <= bindparam("last"))
    if newest:
        query = query.where(listed.c.position < bindparam("bound"))
        query = query.order_by(listed.c.position.desc(), listed.c.key.desc())
    else:
        query = query.where(listed.c.position > bindparam("bound")).order_by(listed.c.position, listed.c.key)
    return query.limit(bindparam("limit")) if limited else query


@functools.cache
def _positions(kind: Kind[Any]) -> Select[Any]:
    """Return the statement that finds the positions of the views of a time."""
    table = table_of(kind.row)
    within = (table.c.time_s >= bindparam("since_s")) & (table.c.time_s < bindparam("until_s"))
    return select(func.min(table.c.position), func.max(table.c.position)).where(within)


class ViewReader:
    """Reads views inside one transaction: all of them are of the same position of the log.

    Args:
        connection: of the transaction.
        memo: what the requests before have found.
        parsed: the views that they have read.
    """

    def __init__(self, connection: Connection, memo: Memo, parsed: ParsedViews) -> None:
        self.connection = connection
        self._memo, self._parsed = memo, parsed

    def known(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return what an earlier request has found in this state, or what ``find`` returns (``Memo.get``).

        Time is settled also where no record has come: of the open time that was found before, a part is then settled.
        """
        row = self.connection.execute(_STATE).first()
        return self._memo.get(None if row is None else tuple(row), key, find)

    def all(self, kind: Kind[V]) -> list[V]:
        """Return all views of a kind, which no one may change: as ``page``, once for each state of the projections."""
        return self.known(kind, lambda: self.page(kind))

    def get(self, kind: Kind[V], key: str) -> V | None:
        """Return a view by its key, or None."""
        return self.several(kind, [key]).get(key)

    def several(self, kind: Kind[V], keys: Iterable[str]) -> dict[str, V]:
        """Return views by their keys; those that there are."""
        wanted = sorted({*keys})
        found: dict[str, V] = {}
        for start in range(0, len(wanted), KEYS):
            part = {"keys": wanted[start : start + KEYS]}
            for row in self.connection.execute(_by_keys(kind, ("document",)), part):
                found[row.key] = self._parsed.view(kind, row.key, row.document)
        return found

    def find(self, kind: Kind[V], key: str) -> V:
        """Return a view by its key.

        Raises:
            NotFound: there is none.
        """
        view = self.get(kind, key)
        if view is None:
            raise self._not_found(kind, key)
        return view

    def row(self, kind: Kind[V], key: str, *columns: str) -> Any:
        """Return the row of a view; the arguments are those of ``rows``.

        Raises:
            NotFound: there is none.
        """
        row = self.connection.execute(_by_keys(kind, columns), {"keys": [key]}).first()
        if row is None:
            raise self._not_found(kind, key)
        return row

    def _not_found(self, kind: Kind[Any], key: str) -> NotFound:
        """Return the error of a view that there is not, with the nearest name where people give the names."""
        near = nearest(key, self.connection.scalars(_newest_keys(kind))) if kind in _NAMED_BY_PEOPLE else ""
        return NotFound(f"no {kind.noun} {key!r}{near}")

    def newest(self, kind: Kind[V], *, before: int, limit: int) -> list[V]:
        """Return the newest views before a position, the newest first."""
        found = self.connection.execute(_newest(kind), {"before": before, "limit": limit})
        return [self._parsed.view(kind, row.key, row.document) for row in found]

    def keys(self, kind: Kind[V], prefix: str, limit: int) -> list[str]:
        """Return the first keys that begin with a text, upper and lower case apart, in their order as text."""
        key = table_of(kind.row).c.key
        # By length, not by LIKE, which knows no case in SQLite. The order of code points is the same in both databases
        # only in Python; a key that is the prefix itself is the shortest.
        query = select(key).where(func.substr(key, 1, len(prefix)) == prefix)
        found = self.connection.scalars(query.order_by(func.length(key), key).limit(limit))
        return sorted(found)

    def position(self) -> int:
        """Return the position of the log up to which the views know it."""
        return int(self.connection.scalar(_POSITION) or 0)

    def next_solved(self, position: int) -> datetime | None:
        """Return when the first plan of the solver behind a position was decided; None: there is none."""
        row = self.connection.execute(_NEXT_SOLVED, {"position": position}).first()
        return None if row is None else self._parsed.view(PLANS, row.key, row.document).decided_at

    def page(self, kind: Kind[V], **part: Any) -> list[V]:
        """Return views in the order of their positions; ``part``: the arguments of ``rows`` by name."""
        rows = self.rows(kind, "document", **part)
        return [self._parsed.view(kind, row.key, row.document) for row in rows]

    def rows(
        self,
        kind: Kind[V],
        *columns: str,
        after: int = 0,
        limit: int | None = None,
        states: Sequence[str] = (),
        task: str = "",
        newest: bool = False,
        times: tuple[datetime | None, datetime | None] = (None, None),
        without: str = "",
    ) -> list[Any]:
        """Return rows of views in the order of their positions, or with ``newest`` in the reverse order.

        Args:
            kind: of the views.
            columns: of the rows, besides ``key`` and ``position``.
            after: only views behind this position; with ``newest`` those before it, 0: all.
            limit: most views to return; None: all.
            states: only views in one of these states; empty: in any.
            task: only views that concern this task, of a kind that is listed by task; empty: all.
            newest: the newest first.
            times: only views of a time from the first on and before the second, of a kind that has times; None: all.
            without: no views in this state.
        """
        given: dict[str, Any] = {"bound": (after or _BEHIND_ALL) if newest else after}
        if task:
            given["task"] = task
        if limit is not None:
            given["limit"] = limit
        timed = times != (None, None)
        if timed:
            since, until = times
            span = {
                "since_s": -_FOREVER_S if since is None else since.timestamp(),
                "until_s": _FOREVER_S if until is None else until.timestamp(),
            }
            first, last = self.connection.execute(_positions(kind), span).one()
            if first is None:
                return []
            given |= {**span, "first": first, "last": last}
        # One query for each state: the rows of several states are in order only within each. A list of all states by
        # task asks for each state too, so that one index serves both.
        each: Sequence[str | None] = sorted(states) or (kind.states if task else (None,))
        query = _listed(kind, columns, bool(task), each[0] is not None, limit is not None, newest, timed, without)
        rows: list[Any] = []
        for state in each:
            rows += self.connection.execute(query, given if state is None else {**given, "state": state}).all()
        rows.sort(key=lambda row: int(row.position), reverse=newest)
        return rows[:limit]
