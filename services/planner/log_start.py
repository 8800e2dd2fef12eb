"""The start of the planner's service: it folds the log as replay does, and decides on what has no answer there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.planner.decide import DECIDER
from services.planner.replay.log_fold import Fold
from services.planner.replay.sources import ANSWER_TYPES, Answer, AnsweredRows, answer_of
from shared.errors import Conflict
from shared.events.union import Event, Recorded
from shared.log.log import EventLog
from shared.log.scan import Row
from shared.service.state_snapshots import records


class LogStart:
    """Folds each recorded answer behind its cause. A cause without an answer is decided on.

    A planner answers in order. So where a plan of another decider for a later cause is in the log, that decider has
    passed over a cause without an answer, which stays without one. The plans of the next version's decider are folded,
    so that a planner can take over again from the one that was to replace it; ``cluster.configured`` then says so.

    Attributes:
        position: up to which the log has been folded.
        last: position of the last event that counts as one of the start.
        decided: what is to be appended.
        stopped: set by another thread: ``fold`` returns before the next record.

    Args:
        fold: the planner's.
        position: at which the fold is.
        decide: returns the answer to the record that the fold has taken last.
    """

    def __init__(self, fold: Fold, position: int, decide: Callable[[Recorded], list[Event]]) -> None:
        self.position, self.last = position, 0
        self.decided: list[Event] = []
        self.stopped = False
        self._fold, self._decide = fold, decide
        self._answers: list[Answer] | None = None
        self._others: set[str] = set()
        """Ids of plans of other deciders that no cause has called for yet."""

    def fold(self, log: EventLog, until: int | None = None) -> None:
        """Fold the log, up to a position if one is given.

        A call after one that an outage has interrupted goes on where that one was.

        Raises:
            Conflict: a planner newer than the next version's has decided in the log.
            Corrupt: a record cannot be read back.
            NewerVersion: a newer version of the program wrote a record.
            Unavailable: the database does not answer.
        """
        if self._answers is None:
            self._answers = self._look_through(log)
            self.last = self.last if until is None else min(self.last, until)
        rows = AnsweredRows(rows_of(log, self.position), self._answers)
        for row in rows:
            if self.stopped or row.record is None or row.position > self.last:
                break
            answer: list[Event] = [record.event for record in rows.answers_to(row.record)]
            if self._fold.take(row.record):
                self._others -= {event.event_id for event in answer}
                if not answer and not self._others:
                    answer = self._decide(row.record)
                    self.decided += answer
                self._fold.answer(row.record, answer)
            self.position = row.position

    def _look_through(self, log: EventLog) -> list[Answer]:
        """Return the answers in the log; take note of its end and of the deciders."""
        self.last = log.last_position()
        # The fold comes to a damaged row, and says so.
        found = [answer_of(*row) or Answer(row[0], row[1], None) for row in log.raw(*ANSWER_TYPES, after=self.position)]
        newest = max((answer.decider or 0 for answer in found), default=0)
        if newest > DECIDER + 1:
            text = f"the log has plans of decider {newest}, this program is decider {DECIDER}: use a newer version"
            raise Conflict(text)
        self._others = {answer.event_id for answer in found if answer.decider not in (None, DECIDER)}
        self._others -= self._fold.undelivered
        return found


def rows_of(log: EventLog, after: int) -> Iterator[Row]:
    """Yield the records behind a position as rows.

    Raises:
        Corrupt: a record cannot be read back.
        NewerVersion: a newer version of the program wrote a record.
        Unavailable: the database does not answer.
    """
    for record in records(log, after):
        yield Row(record.position, record.hash, "", record, "", None)
