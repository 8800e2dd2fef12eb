"""``/v1/waf``: WAF over time, beside the healthy line, from the spans of both.

The spans of a time that lie inside one point are added up by the database; only those that an edge between two points
cuts are read. At an edge there is one span of the healthy line and at most one of progress for each task, so the work
does not grow with the history, and what is read not with the window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Response
from sqlalchemy import and_, func, or_, select

from services.api.gateway import Api
from services.api.live import LiveState
from services.api.route_parts.parameters import PROBLEMS, check_order
from services.api.store.readers import ViewReader
from services.api.store.slices import reaching
from services.api.store.tables import CLUSTER, SPANS, TASKS, SpanRow, table_of
from shared.bus.messages import Time
from shared.costs.service_levels import achieved_flop, healthy_flop
from shared.costs.span_claims import Window
from shared.interface.costs import WafHistory
from shared.model import utc_now
from shared.tasks.specification import GOING_ON
from shared.views.documents import SpanKind, TaskView

router = APIRouter(prefix="/v1/waf", tags=["costs"], responses=PROBLEMS)

MOST_POINTS = 1000
"""More than a screen has columns for; bounds an answer's size."""

_USUAL = timedelta(hours=1)

_EARLIEST = datetime.fromtimestamp(0.0, UTC)
"""No log is older; an hour before the first of all times would be none."""


_SPANS = table_of(SpanRow)


@dataclass
class _Points:
    """Weighted FLOP in each of the equal times of a window."""

    window: Window
    count: int
    flop: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.flop = [0.0] * self.count

    @property
    def point_s(self) -> float:
        """Length of one of the times."""
        return (self.window.end_s - self.window.start_s) / self.count

    def spread(self, start_s: float, end_s: float, flop: float) -> None:
        """Add what was done evenly between two times; what is outside of the window is left out."""
        low, high = self.window.clip(start_s, end_s)
        if not flop or high <= low:
            return
        rate = flop / (end_s - start_s)
        for index in range(self._index(low), self._index(high) + 1):
            begin = self.window.start_s + index * self.point_s
            self.flop[index] += rate * max(min(high, begin + self.point_s) - max(low, begin), 0.0)

    def _index(self, at_s: float) -> int:
        return min(int((at_s - self.window.start_s) / self.point_s), self.count - 1)


def waf_history(
    views: ViewReader, start: datetime, end: datetime, points: int, as_of: datetime, live: LiveState
) -> WafHistory:
    """Return WAF over a window.

    Args:
        views: the reader.
        start: of the window.
        end: of the window, at most the present.
        points: into how many times the window is cut.
        as_of: the present.
        live: what heartbeats report: tasks may be ahead of the log.
    """
    window = Window(start.timestamp(), min(end, as_of).timestamp())
    if window.end_s <= window.start_s:
        return WafHistory(window_start=start, window_end=start, point_s=0.0, waf_flop_per_s=[], healthy_flop_per_s=[])
    achieved, healthy = _Points(window, points), _Points(window, points)
    _add_ended(views, achieved, healthy)
    _add_lasting(views, achieved, healthy, as_of.timestamp(), live)
    return WafHistory(
        window_start=start,
        window_end=datetime.fromtimestamp(window.end_s, UTC),
        point_s=achieved.point_s,
        waf_flop_per_s=[flop / achieved.point_s for flop in achieved.flop],
        healthy_flop_per_s=[flop / healthy.point_s for flop in healthy.flop],
    )


def _add_ended(views: ViewReader, achieved: _Points, healthy: _Points) -> None:
    """Add the spans that have ended, whose FLOP are columns of their rows."""
    table, window, point_s = _SPANS, achieved.window, achieved.point_s
    first = func.floor((table.c.start_s - window.start_s) / point_s)
    last = func.floor((table.c.end_s - window.start_s) / point_s)
    counted = or_(table.c.achieved_flop > 0.0, table.c.healthy_flop > 0.0)
    ended = and_(reaching(table, window.start_s, window.end_s), table.c.end_s > window.start_s, counted)
    inside = and_(first == last, table.c.start_s >= window.start_s, table.c.end_s < window.end_s)
    place = first.label("place")
    sums = select(place, func.sum(table.c.achieved_flop), func.sum(table.c.healthy_flop)).where(ended, inside)
    for index, done, possible in views.connection.execute(sums.group_by(place)):
        number = min(int(index), achieved.count - 1)
        achieved.flop[number] += done
        healthy.flop[number] += possible
    columns = (table.c.start_s, table.c.end_s, table.c.achieved_flop, table.c.healthy_flop)
    for start_s, end_s, done, possible in views.connection.execute(select(*columns).where(ended, ~inside)):
        achieved.spread(start_s, end_s, done)
        healthy.spread(start_s, end_s, possible)


def _add_lasting(views: ViewReader, achieved: _Points, healthy: _Points, now_s: float, live: LiveState) -> None:
    """Add the spans that last: the healthy line's, and one of each task that trains."""
    tasks = {task.name: _at_step(task, live) for task in views.page(TASKS, states=GOING_ON)}
    cluster = views.get(CLUSTER, "cluster")
    keys = [task.progress for task in tasks.values()] + ([cluster.healthy] if cluster is not None else [])
    for span in views.several(SPANS, [key for key in keys if key]).values():
        lasts = Window(-math.inf, now_s)
        if span.kind is SpanKind.HEALTHY:
            healthy.spread(span.start.timestamp(), now_s, healthy_flop([span], lasts))
        elif span.kind is SpanKind.PROGRESS:
            achieved.spread(span.start.timestamp(), now_s, achieved_flop([span], tasks, lasts, now_s))


def _at_step(task: TaskView, live: LiveState) -> TaskView:
    now = live.task(task.name, task.generation)
    return task.model_copy(update={"step": now.step}) if now is not None and now.step > task.step else task


@router.get("", response_model=WafHistory)
async def waf(
    api: Api,
    start: Annotated[Time | None, Query(alias="from", description="default: an hour before `to`")] = None,
    end: Annotated[Time | None, Query(alias="to", description="default, and at most: now")] = None,
    points: Annotated[int, Query(ge=1, le=MOST_POINTS, description="into how many times it is cut")] = 240,
) -> Response:
    """Show WAF over time: achieved, and that of the best plan on all allocated workers (the healthy line)."""
    as_of, live = utc_now(), api.live.state()
    until = end or as_of
    begin = start or max(until, _EARLIEST) - _USUAL
    check_order(begin, until)

    def answer(views: ViewReader) -> WafHistory:
        return waf_history(views, begin, until, points, as_of, live)

    return await api.answer(answer)
