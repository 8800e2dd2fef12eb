"""Settling: what the fold does so that requests need not settle all history.

The transaction of a batch gives up settled times from the earliest time on at which the batch has changed a claim
(``costs/claim_times.py``). At every ``SETTLE_EVERY`` records the time up to shortly before the present is settled and
stored, if there is enough of it, and now and then the stored times of a day become one. Where that happens follows from
the log alone, so projections that are folded again, in whatever batches, have the same amounts to the last bit. A
change that reaches further back than usual costs time, and nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sqlalchemy import Connection, select

from services.api.store.batches import Batch
from services.api.store.settled_rows import SettledRows
from services.api.store.slices import history_of
from services.api.store.tables import TASKS, PositionRow, table_of
from shared.costs.claim_times import plan_changed_from_s, span_changed_from_s, task_changed_from_s
from shared.costs.service_levels import progress_flop
from shared.costs.settlement import DAY_S, cut_at_days, first_allocated_s, settle_window
from shared.costs.span_claims import Window
from shared.events.union import Recorded
from shared.views.documents import SpanView

_POSITION = table_of(PositionRow)
_SETTLED = select(_POSITION.c.settled_s, _POSITION.c.merged_s, _POSITION.c.latest_s, _POSITION.c.achieved_flop)

SETTLE_EVERY = 128
"""Records between two settlements: a request can settle what so many change in some milliseconds."""

_MERGE_EVERY = 16
"""Settlements between two at which the stored times since then become one, and those of a day that is over. Each stores
a row for every node, so without that the rows would grow by all nodes every ``SETTLE_EVERY`` records."""

_BEHIND_S = 30.0
"""How far settled time stays behind the present: most faults are found, and most transitions end, within it. What comes
later has settled times given up."""

_LEAST_S = 10.0
"""Time that is settled at once, at least. Each settlement costs the same for every node of the cluster, and in a burst
so many records come within a second: with the time that is open anyway, requests settle at most a third more."""


@dataclass(frozen=True)
class SettledTime:
    """How far time is settled, with what is known of all history (``PositionRow`` has the meaning)."""

    settled_s: float = -math.inf
    merged_s: float = -math.inf
    latest_s: float = -math.inf
    achieved_flop: int = 0

    def row(self) -> dict[str, object]:
        """Return the columns of ``PositionRow``: databases have no integer as large as the FLOP of a training."""
        return {**vars(self), "achieved_flop": str(self.achieved_flop)}


def settled_time(connection: Connection) -> SettledTime:
    """Return how far time is settled at the position of the projections."""
    row = connection.execute(_SETTLED).first()
    if row is None:
        return SettledTime()
    return SettledTime(row.settled_s, row.merged_s, row.latest_s, int(row.achieved_flop))


def parts(records: Sequence[Recorded]) -> Iterator[list[Recorded]]:
    """Return the records in parts, none of which goes beyond a position at which time is settled."""
    for _, part in itertools.groupby(records, lambda record: (record.position - 1) // SETTLE_EVERY):
        yield list(part)


def give_up(connection: Connection, batch: Batch, settled: SettledTime) -> SettledTime:
    """Give up the settled times that a batch, which has been written, has changed.

    Args:
        connection: of the batch's transaction.
        batch: of the fold.
        settled: how far time was settled before.
    """
    plans, spans, tasks = batch.plans.changes(), batch.spans.changes(), batch.tasks.changes()
    times = [
        *(plan_changed_from_s(before, plan) for before, plan in plans),
        *(span_changed_from_s(before, span) for before, span in spans),
        *(task_changed_from_s(before, task) for before, task in tasks),
    ]
    from_s = min(times, default=math.inf)
    ends_s = [(span.end or span.start).timestamp() for _, span in spans]
    # Integers, so that the sum is the same in whatever order spans change.
    achieved = sum(_flop(span) - (_flop(before) if before else 0) for before, span in spans)
    settled = replace(
        settled,
        latest_s=max([settled.latest_s, *ends_s]),
        achieved_flop=settled.achieved_flop + achieved,
    )
    if from_s < settled.settled_s:
        settled_s = SettledRows(connection).give_up(from_s)
        settled = replace(settled, settled_s=settled_s, merged_s=min(settled.merged_s, settled_s))
    return settled


def settle(connection: Connection, batch: Batch, settled: SettledTime, last: Recorded) -> SettledTime:
    """Settle the time up to shortly before a record, if its position is one at which that is done.

    Args:
        connection: of the batch's transaction.
        batch: of the fold; it ends with the record, and has been written.
        settled: how far time was settled before.
        last: the record.
    """
    number, rest = divmod(last.position, SETTLE_EVERY)
    if rest:
        return settled
    until_s = float(math.floor(last.recorded_at.timestamp() - _BEHIND_S))
    if until_s >= settled.settled_s + _LEAST_S:
        _settle(connection, batch, Window(settled.settled_s, until_s))
        settled = replace(settled, settled_s=until_s)
    if number % _MERGE_EVERY == 0:
        SettledRows(connection).merge(_merge_from_s(settled))
        settled = replace(settled, merged_s=settled.settled_s)
    return settled


def _merge_from_s(settled: SettledTime) -> float:
    """Return from when on settled times are merged: what is new; once a day is over, the day."""
    if settled.merged_s == -math.inf:
        return -math.inf
    day_s, last_s = (math.floor(at_s / DAY_S) * DAY_S for at_s in (settled.settled_s, settled.merged_s))
    return last_s if day_s > last_s else settled.merged_s


def _flop(span: SpanView) -> int:
    return round(progress_flop(span))


def _settle(connection: Connection, batch: Batch, window: Window) -> None:
    history = history_of(connection, batch, window)
    tasks = batch.several(TASKS, {name for plan in history.plans for name in plan.impacts})
    as_of, rows = datetime.fromtimestamp(window.end_s, UTC), SettledRows(connection)
    for part in cut_at_days(window.start_s, window.end_s, first_allocated_s(history)):
        rows.store(part, settle_window(history, tasks, part, as_of))
