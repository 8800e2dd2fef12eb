"""How far a log may be cut over (``shared.archive.cutover``).

An append looks for its event's id in the table alone, so every event that may be appended again has to stay there
with its cause. What a service decides follows from its state, folded from segments and table: it appends nothing
again that it has folded. What may be appended again is therefore what is still open, and what is repeated from outside:
by a client whose request was interrupted, by an agent whose signal has had no answer.
"""

from __future__ import annotations

from collections import deque
from datetime import datetime, timedelta
from typing import NamedTuple

from services.planner.replay.invariants import may_be_answered
from services.planner.replay.log_fold import Fold
from services.planner.replay.sources import AnsweredRows, Source
from shared.errors import Corrupt
from shared.events.union import PlanDecided
from shared.log.scan import Scan

REPEATED_FOR = timedelta(days=1)
"""How long after it was recorded an event may be appended again by a client or an agent. A client tries again for
minutes (``Idempotency-Key``), an agent for as long as its signal has no answer; services usually keep such keys for a
day. The time is counted back from the newest event: while nothing is recorded, nothing is answered."""


class CutLimit(NamedTuple):
    """The furthest position behind which a log may begin, and why not further."""

    position: int
    reason: str


def cut_limit(source: Source) -> CutLimit:
    """Return how far a log may be cut. The log is folded for that.

    Args:
        source: the whole log, from position 1 on; nothing is appended to it meanwhile.

    Raises:
        Corrupt: the log has a defect.
    """
    fold, last = Fold(), 0
    rows = AnsweredRows(source.rows(Scan()), source.answers())
    unanswered: int | None = None
    plans: dict[str, int] = {}
    day: deque[tuple[datetime, int]] = deque()
    """Time and position of the events of the last day."""
    for row in rows:
        if row.problem or row.record is None:
            raise Corrupt(row.problem or f"position {row.position} cannot be read: the log is not cut")
        last, record = row.position, row.record
        day.append((record.recorded_at, last))
        while day[0][0] <= record.recorded_at - REPEATED_FOR:
            day.popleft()
        if not fold.take(record):
            continue
        recorded = [each.event for each in rows.answers_to(record)]
        plans |= {event.plan: last for event in recorded if isinstance(event, PlanDecided)}
        if recorded:
            unanswered = None  # the planner answers in order: it passed over an earlier cause
        elif unanswered is None and may_be_answered(record.event) and fold.decide(record):
            unanswered = last
        fold.answer(record, recorded)
    limits = [CutLimit(last, "the log ends there")]
    if day:
        limits.append(CutLimit(day[0][1] - 1, "an event of the last day may be appended again by a client or an agent"))
    if unanswered is not None:
        limits.append(CutLimit(unanswered - 1, f"the planner has not answered the event at position {unanswered}"))
    for task in fold.state.every_task():
        if task.change is not None and task.plan in plans:
            why = f"plan {task.plan} of task {task.name}, which follows from position {plans[task.plan]}, is under way"
            limits.append(CutLimit(plans[task.plan] - 1, why))
    return min(limits, key=lambda limit: limit.position)
