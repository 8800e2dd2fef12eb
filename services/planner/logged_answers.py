"""The answers that the log has when the planner's service starts: each is folded behind its cause, not decided again.

An answer comes a little behind its cause in the log, so the service looks ahead for it. The service keeps the answers'
places, and the few answers that it has read ahead, not the log.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.planner.decide import SERVICE
from services.planner.log_start import Read
from services.planner.replay.invariants import may_be_answered
from services.planner.replay.sources import ANSWER_TYPES
from shared.events.union import Recorded, derived_id

PAGE = 64
"""Answers that are read at once: a query costs as much as to parse a few of them."""


class LoggedAnswers:
    """The answers, each given to its cause once.

    Args:
        read: ``Journal.read``.
        positions: ``LogStart.answers``.
        older: ``LogStart.older``.
    """

    def __init__(self, read: Read, positions: dict[str, int], older: Iterable[str] = ()) -> None:
        self._read = read
        self._older = set(older)
        self._positions = positions
        self._ahead: dict[str, Recorded] = {}

    async def to(self, cause: Recorded) -> list[Recorded]:
        """Return the recorded answer to a cause, in the order of its events; empty if there is none.

        Raises:
            Corrupt: an answer cannot be read back.
            NewerVersion: a newer version of the program wrote it.
        """
        found: list[Recorded] = []
        while self._positions and may_be_answered(cause.event):
            event_id = derived_id(cause.event.event_id, SERVICE, len(found))
            position = self._positions.pop(event_id, None)
            if position is None:
                break
            self._older.discard(event_id)
            if event_id not in self._ahead:
                page = await self._read(after=position - 1, limit=PAGE, types=ANSWER_TYPES)
                ahead = {record.event.event_id: record for record in page}
                self._ahead |= {each: ahead[each] for each in ahead if each == event_id or each in self._positions}
            record = self._ahead.pop(event_id, None)
            if record is None:
                break  # the log has lost the answer since the start; the follower reports that there
            found.append(record)
        return found

    @property
    def has_older(self) -> bool:
        """Whether an older decider's plans for later causes are in the log.

        A planner answers in order, so the older decider has passed over an earlier cause that has no answer.
        """
        return bool(self._older)

    def forget(self) -> None:
        """Drop the answers that no cause has called for: the log that was there at the start has been folded."""
        self._positions, self._ahead = {}, {}
        self._older.clear()
