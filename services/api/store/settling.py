"""Settling: what the fold does so that requests need not settle all history.

The transaction of a batch gives up settled times from the earliest time on at which the batch has changed a claim
(``services/api/costs/claim_times.py``). Once enough has changed since, the time up to shortly before the present is
settled and stored, in a transaction of its own: nobody who waits for the batch waits for that. A change that reaches
further back than usual costs time, and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sqlalchemy import Connection, select

from services.api.costs.claim_times import plan_changed_from_s, span_changed_from_s, task_changed_from_s
from services.api.costs.service_levels import progress_flop
from services.api.costs.settlement import cut_at_days, first_allocated_s, settle_window
from services.api.costs.span_claims import Window
from services.api.store.batches import Batch
from services.api.store.settled_rows import SettledRows
from services.api.store.slices import history_of
from services.api.store.tables import TASKS, PositionRow, table_of

_POSITION = table_of(PositionRow)
_SETTLED = select(_POSITION.c.settled_s, _POSITION.c.latest_s, _POSITION.c.achieved_flop)

_LEAST_CHANGES = 64
"""Changed plans and spans after which time is settled: so many a request can settle in some milliseconds."""

_BEHIND_S = 30.0
"""How far settled time stays behind the present: most faults are found, and most transitions end, within it. What comes
later has settled times given up."""


@dataclass(frozen=True)
class SettledTime:
    """How far time is settled, with what is known of all history (``PositionRow`` has the meaning)."""

    settled_s: float = -math.inf
    latest_s: float = -math.inf
    achieved_flop: float = 0.0


def settled_time(connection: Connection) -> SettledTime:
    """Return how far time is settled at the position of the projections."""
    row = connection.execute(_SETTLED).first()
    return SettledTime(*row) if row is not None else SettledTime()


class Settling:
    """Settles time behind the batches of one store."""

    def __init__(self) -> None:
        self._changes = 0
        """Since time was settled last."""
        self._recorded_s = -math.inf
        """When the newest record was appended."""

    def note(self, connection: Connection, batch: Batch, settled: SettledTime, recorded_s: float) -> SettledTime:
        """Take note of a batch, which has been written: give up the settled times that it has changed.

        Args:
            connection: of the batch's transaction.
            batch: of the fold.
            settled: how far time was settled before.
            recorded_s: when the last record was appended.
        """
        plans, spans, tasks = batch.plans.changes(), batch.spans.changes(), batch.tasks.changes()
        times = [
            *(plan_changed_from_s(before, plan) for before, plan in plans),
            *(span_changed_from_s(before, span) for before, span in spans),
            *(task_changed_from_s(before, task) for before, task in tasks),
        ]
        from_s = min(times, default=math.inf)
        # In the order of time, so that the sum is the same to the last bit whatever the batches are.
        for before, span in sorted(spans, key=lambda change: (change[1].end or change[1].start, change[1].start)):
            ends = span.end or span.start
            settled = replace(
                settled,
                latest_s=max(settled.latest_s, ends.timestamp()),
                achieved_flop=settled.achieved_flop + progress_flop(span) - (progress_flop(before) if before else 0.0),
            )
        if from_s < settled.settled_s:
            settled = replace(settled, settled_s=SettledRows(connection).give_up(from_s))
        self._changes += len(plans) + len(spans)
        self._recorded_s = recorded_s
        return settled

    @property
    def due(self) -> bool:
        """Whether enough has changed since time was settled last."""
        return self._changes >= _LEAST_CHANGES

    def settle(self, connection: Connection, batch: Batch, settled: SettledTime) -> SettledTime:
        """Settle the time up to shortly before the newest record.

        Args:
            connection: of a transaction.
            batch: one without records, of the same transaction.
            settled: how far time was settled before.
        """
        until_s = float(math.floor(self._recorded_s - _BEHIND_S))
        if until_s <= settled.settled_s:
            return settled
        _settle(connection, batch, Window(settled.settled_s, until_s))
        self._changes = 0
        return replace(settled, settled_s=until_s)


def _settle(connection: Connection, batch: Batch, window: Window) -> None:
    history = history_of(connection, batch, window)
    tasks = batch.several(TASKS, {name for plan in history.plans for name in plan.impacts})
    as_of, rows = datetime.fromtimestamp(window.end_s, UTC), SettledRows(connection)
    for part in cut_at_days(window.start_s, window.end_s, first_allocated_s(history)):
        rows.store(part, settle_window(history, tasks, part, as_of))
