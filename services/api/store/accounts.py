"""Accounts: what a cost report is made of, from the rows that are settled and the open time, which is settled anew.

Only the edges of a window that cut a settled time, and the time since the last one, are settled for a request. So its
cost does not grow with the history; that of a window grows with the settled times in it.

The open time is what is not settled yet; requests settle it once for each state of the projections. Behind the latest
time that the log says anything of, each second of each worker goes to the same claim as the second before, until the
log has a further event. So amounts grow evenly from then on: it takes one settlement, up to a second or so behind that
time, to know the amounts up to any later present.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, select

from services.api.store.readers import ViewReader
from services.api.store.settled_rows import SettledRows
from services.api.store.settling import settled_time
from services.api.store.slices import history_of, reaching
from services.api.store.tables import INCIDENTS, NODES, SPANS, TASKS, Kind, SpanRow, TaskRow, V, table_of
from shared.costs.claim_times import last_bound_s
from shared.costs.ledger import History, Ledger, ledger
from shared.costs.report import Account, Day
from shared.costs.service_levels import achieved_flop
from shared.costs.settlement import (
    ALL,
    CAUSE,
    COLUMNS,
    DAY_S,
    DIMENSIONS,
    INCIDENT,
    NODE,
    SUBMISSION,
    TASK,
    Amounts,
    Sums,
    add,
    costliest,
    cut_at_days,
    day_of,
    incident_sums,
    no_amounts,
    settle_window,
    submission_key,
    sums_of,
)
from shared.costs.span_claims import Window
from shared.costs.unanswered import is_unanswered, unanswered_amounts
from shared.projections.rates import rate_flop_per_s
from shared.views.documents import TaskView

_SPANS = table_of(SpanRow)


_GRID = 64.0
"""Parts of a second. The growth of amounts is that of a second that begins at a multiple of a 64th of a second, which a
float64 and a ``datetime`` have exactly: it is then a second, and what is extrapolated over months is not off by
rounding."""


@dataclass(frozen=True)
class OpenTime:
    """The open time in one state of the projections.

    ``until_s``: up to when ``sums`` are. ``each_s``: what every later second adds.
    """

    until_s: float
    sums: Sums
    each_s: Sums

    @classmethod
    def of(cls, history: History, tasks: Mapping[str, TaskView], settled_s: float) -> OpenTime:
        """Settle the time from ``settled_s`` on, seconds since the epoch; the others are as for ``settle_window``."""
        until_s = _last_s(history, tasks, settled_s)
        return cls._of(history, settled_s, until_s, lambda book, part: sums_of(book.within(part), history, tasks, part))

    @classmethod
    def of_incidents(cls, history: History, tasks: Mapping[str, TaskView], settled_s: float) -> OpenTime:
        """Settle what incidents have of the time, as ``of`` does: lists of incidents need no more, and ask often."""
        until_s = _last_s(history, tasks, settled_s)
        return cls._of(history, settled_s, until_s, incident_sums, unused=False)

    @classmethod
    def _of(
        cls,
        history: History,
        settled_s: float,
        until_s: float,
        add_up: Callable[[Ledger, Window], Sums],
        *,
        unused: bool = True,
    ) -> OpenTime:
        grid_s = math.ceil(until_s * _GRID) / _GRID
        passed, behind = Window(settled_s, until_s), Window(grid_s, grid_s + 1.0)
        whole = Window(settled_s, behind.end_s)
        book = ledger(history, datetime.fromtimestamp(behind.end_s, UTC), whole, unused=unused)
        sums, each_s = (add_up(book, part) for part in (passed, behind))
        return cls(until_s, sums, each_s)

    def up_to(self, end_s: float, dimension: str, keys: Iterable[str] | None = None) -> dict[str, Amounts]:
        """Return the amounts up to a time that is not before ``until_s``, by key; ``keys``: only these; None: all."""
        sums, each_s = self.sums[dimension], self.each_s[dimension]
        passed_s = end_s - self.until_s
        found = {}
        for key in self.keys(dimension) if keys is None else keys:
            amounts, growth = sums.get(key), each_s.get(key)
            if growth is not None:
                start = amounts or dict.fromkeys(COLUMNS, 0.0)
                amounts = {name: start[name] + passed_s * growth[name] for name in COLUMNS}
            if amounts is not None:
                found[key] = amounts
        return found

    def keys(self, dimension: str) -> set[str]:
        """Return the keys that have amounts in the open time, or will have."""
        return self.sums[dimension].keys() | self.each_s[dimension].keys()


def _last_s(history: History, tasks: Mapping[str, TaskView], settled_s: float) -> float:
    """Return the time from which amounts grow evenly."""
    return max(last_bound_s(history.plans, history.incidents, history.spans, tasks.values()), settled_s, 0.0)


class Accounts:
    """Accounts at one moment, read inside one transaction.

    Args:
        views: the reader.
        now: the present time.
    """

    def __init__(self, views: ViewReader, now: datetime) -> None:
        self._views = views
        self._connection = views.connection
        self._rows = SettledRows(views.connection)
        self._settled = settled_time(views.connection)
        latest = self._settled.latest_s
        self.as_of = now if latest <= now.timestamp() else datetime.fromtimestamp(latest, UTC)
        """A present time that is not before what the log records: its clock may be a little ahead of ours."""

    def incidents(self, names: Iterable[str]) -> dict[str, Amounts]:
        """Return the amounts of incidents up to now; those that have any. What no plan has answered yet is in them."""
        wanted = {*names}
        if not wanted:
            return {}  # as a rule no incident is open
        until_s = self.as_of.timestamp()
        if until_s < self._settled.settled_s:
            sums = self._window(Window(-math.inf, until_s))
        else:
            sums = self._rows.totals(INCIDENT, wanted)
            add(sums, self._open(until_s, (INCIDENT,), wanted, self._open_time(OpenTime.of_incidents)))
        add(sums, {INCIDENT: self._unanswered()[0]})
        return {name: amounts for name, amounts in sums[INCIDENT].items() if name in wanted}

    def growth(self, names: Iterable[str]) -> dict[str, Amounts]:
        """Return what each second adds to the amounts of incidents, as things are now; those to which it adds any."""
        wanted = {*names}
        if not wanted:
            return {}
        each_s = {INCIDENT: dict(self._open_time(OpenTime.of_incidents).each_s[INCIDENT])}
        add(each_s, {INCIDENT: self._unanswered()[1]})
        return {name: amounts for name, amounts in each_s[INCIDENT].items() if name in wanted}

    def _unanswered(self) -> tuple[dict[str, Amounts], dict[str, Amounts]]:
        """Return the amounts of incidents that no plan has answered, and what each second adds to them."""
        found = [view for view in self._views.page(INCIDENTS, states=["open"]) if is_unanswered(view)]
        tasks = self._views.several(TASKS, {name for view in found for name in view.tasks})
        return unanswered_amounts(found, tasks, rate_flop_per_s, self.as_of)

    def account(
        self,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        days: bool = False,
        limit: int | None = None,
    ) -> Account:
        """Return the account of a window.

        Args:
            start: of the window; None: all time before ``end``.
            end: of the window, at most the present; None: the present.
            days: whether to account for each day apart, too.
            limit: most tasks and most incidents, the costliest first; None: all, in the order of the log.
        """
        window = Window.of(start, self.as_of if end is None else min(end, self.as_of))
        if start is None and window.end_s >= self._settled.settled_s:
            sums = self._all_time(window, limit)
        else:
            sums = self._window(window)
        if limit is None:
            tasks, incidents = self._views.page(TASKS), self._views.page(INCIDENTS)
        else:
            tasks = self._known(TASKS, costliest(sums[TASK], limit))
            incidents = self._known(INCIDENTS, costliest(sums[INCIDENT], limit))
        if start is None and window.end_s >= self._settled.settled_s:
            keys = tuple(submission_key(task) for task in tasks)
            add(sums, self._views.known(keys, lambda: self._rows.totals(SUBMISSION, keys)))
        flop, weighted_flop = self._views.known("flop", self._flop)
        return Account(
            as_of=self.as_of,
            start=start,
            end=end,
            window=window,
            sums=sums,
            tasks={task.name: task for task in tasks},
            incidents=incidents,
            nodes=self._views.all(NODES),
            flop=flop,
            weighted_flop=weighted_flop,
            achieved_flop=self._achieved_flop(window),
            days=self._days(window) if days else (),
            limit=limit,
        )

    def _all_time(self, window: Window, limit: int | None) -> Sums:
        """Return the amounts of all time up to the window's end; of tasks and incidents those that may be costliest.

        The costliest of all are among those of the settled time, and those that have any of the open time.
        """
        open_time = self._open_time()

        def find() -> Sums:
            settled: Sums = {}
            for dimension in (ALL, NODE, CAUSE):
                settled |= self._rows.totals(dimension)
            for dimension in (TASK, INCIDENT):
                settled |= self._rows.totals(dimension, costliest=limit)
                if limit is not None:
                    settled[dimension] |= self._rows.totals(dimension, open_time.keys(dimension))[dimension]
            return settled

        sums = self._open(window.end_s, DIMENSIONS, None, open_time)
        add(sums, find() if limit is None else self._views.known(("totals", limit), find))
        return sums

    def _known(self, kind: Kind[V], names: Sequence[str]) -> list[V]:
        """Return the views of these keys that there are, in this order."""
        keys = tuple(sorted(names))
        views = self._views.known((kind, keys), lambda: self._views.several(kind, keys))
        return [views[name] for name in names if name in views]

    def _window(self, window: Window) -> Sums:
        """Return the amounts of a window."""
        whole = self._rows.whole_times(window)
        sums = self._rows.between(whole) if whole is not None else {}
        for dimension in DIMENSIONS:
            sums.setdefault(dimension, {})
        for edge in _edges(window, whole):
            add(sums, self._settle(edge))
        return sums

    def _open(self, until_s: float, dimensions: Iterable[str], keys: Iterable[str] | None, open_time: OpenTime) -> Sums:
        """Return amounts of the time behind the settled one. ``keys``: only these; None: all."""
        if until_s >= open_time.until_s:
            return {dimension: open_time.up_to(until_s, dimension, keys) for dimension in dimensions}
        return self._settle(Window(self._settled.settled_s, until_s))

    def _open_time(self, of: Callable[[History, Mapping[str, TaskView], float], OpenTime] = OpenTime.of) -> OpenTime:
        """Return the time behind the settled one, which the first request at a position settles."""

        def settle() -> OpenTime:
            history, tasks = self._views.known(History, self._open_history)
            return of(history, tasks, self._settled.settled_s)

        return self._views.known(of, settle)

    def _open_history(self) -> tuple[History, Mapping[str, TaskView]]:
        history = history_of(self._connection, self._views, Window(self._settled.settled_s, math.inf))
        return history, self._tasks(history)

    def _settle(self, window: Window) -> Sums:
        """Settle a time for this request."""
        history = history_of(self._connection, self._views, window)
        return settle_window(history, self._tasks(history), window, self.as_of)

    def _tasks(self, history: History) -> Mapping[str, TaskView]:
        return self._views.several(TASKS, {name for plan in history.plans for name in plan.impacts})

    def _days(self, window: Window) -> list[Day]:
        """Return every day from the first to the last on which a worker was allocated in the window."""
        table = _SPANS
        lasting = table.c.allocated & (table.c.end_s > table.c.start_s)
        within = reaching(table, window.start_s, window.end_s) & (table.c.end_s > window.start_s)
        query = select(func.min(table.c.start_s), func.max(table.c.end_s)).where(lasting, within)
        first_s, last_s = self._connection.execute(query).one()
        if first_s is None or window.end_s <= window.start_s:
            return []
        first_s, last_s = max(first_s, window.start_s), min(last_s, window.end_s)
        whole = self._rows.whole_times(window)
        amounts = self._rows.days(whole) if whole is not None else {}
        for edge in _edges(window, whole):
            history = history_of(self._connection, self._views, edge)
            tasks = self._tasks(history)
            for part in cut_at_days(edge.start_s, edge.end_s, first_s):
                known = {ALL: {"": amounts.get(day_of(part.end_s), no_amounts())}}
                add(known, {ALL: settle_window(history, tasks, part, self.as_of)[ALL]})
                amounts[day_of(part.end_s)] = known[ALL][""]
        days = []
        start_s = math.floor(first_s / DAY_S) * DAY_S
        while start_s < last_s:
            start = datetime.fromtimestamp(start_s, UTC)
            part = Window(*window.clip(start_s, start_s + DAY_S))
            days.append(Day(start, amounts.get(start, no_amounts()), self._achieved_flop(part)))
            start_s += DAY_S
        return days

    def _flop(self) -> tuple[float, float]:
        table = table_of(TaskRow)
        query = select(func.coalesce(func.sum(table.c.flop), 0.0), func.coalesce(func.sum(table.c.weighted_flop), 0.0))
        flop, weighted_flop = self._connection.execute(query).one()
        return flop, weighted_flop

    def _achieved_flop(self, window: Window) -> float:
        """Return the weighted FLOP of the steps done in a window: of the spans inside, and of those that it cuts."""
        table, now_s = _SPANS, self.as_of.timestamp()
        # A span ends no later than its claims reach, by which an index finds it.
        cut = reaching(table, window.end_s, window.end_s) & (table.c.end_s > window.end_s)
        if window.start_s == -math.inf and window.end_s >= now_s:
            within = float(self._settled.achieved_flop)
        else:
            inside = table.c.start_s.between(window.start_s, window.end_s) & (table.c.end_s <= window.end_s)
            within = float(self._connection.scalar(select(func.sum(table.c.achieved_flop)).where(inside)) or 0.0)
            cut |= reaching(table, window.start_s, window.start_s) & (table.c.end_s > window.start_s)
        achieving = (table.c.achieved_flop > 0.0) | (table.c.state == "open")
        keys = self._connection.scalars(select(table.c.key).where(cut, achieving))
        spans = self._views.several(SPANS, keys).values()
        tasks = self._views.several(TASKS, {span.task for span in spans if span.task})
        return within + achieved_flop(spans, tasks, window, now_s)


def _edges(window: Window, whole: Window | None) -> list[Window]:
    """Return what of a window lies outside of whole settled times."""
    if whole is None:
        return [window]
    edges = [Window(window.start_s, whole.start_s), Window(whole.end_s, window.end_s)]
    return [edge for edge in edges if edge.end_s > edge.start_s]
