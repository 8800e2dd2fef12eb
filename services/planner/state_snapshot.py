"""What state snapshots have of the planner's state, and the program that writes one.

It is started with the position up to which the service has handled the log (``shared.service.state_keeper``).
"""

from __future__ import annotations

import sys

from services.planner.decide import DECIDER
from services.planner.log_start import rows_of
from services.planner.replay.log_fold import Fold
from services.planner.replay.sources import ANSWER_TYPES, Answer, AnsweredRows
from services.planner.state.cluster import State
from shared.log.log import EventLog
from shared.service import state_keeper
from shared.service.state_snapshots import KeptState


def _fold(log: EventLog, state: State, after: int, until: int) -> tuple[int, State]:
    """Fold as a start does: the recorded answer behind its cause.

    An answer to a cause up to ``until`` may lie behind it. So the returned state is the last one of which the log had
    delivered every answer.
    """
    fold = Fold(state=state)
    answers = (Answer(position, event_id, None) for position, event_id in log.ids(*ANSWER_TYPES, after=after))
    rows = AnsweredRows(rows_of(log, after), answers)
    for row in rows:
        if row.position > until or row.record is None:
            break
        if fold.take(row.record):
            fold.answer(row.record, [answer.event for answer in rows.answers_to(row.record)])
        if fold.is_delivered:
            after, state = row.position, fold.state
    return after, state


KEPT = KeptState("planner", State, _fold, DECIDER)

if __name__ == "__main__":
    sys.exit(state_keeper.main(KEPT, sys.argv[1:]))
