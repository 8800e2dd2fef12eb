"""Messages that a process has dropped: their number by reason, and a line of its log for each source and kind.

A newer program may send the same unreadable message several times a second. The counter is part of the health of a
service (``shared.service.frame.Context.counters``, ``GET /readyz``) and of the heartbeats of an agent.
"""

from __future__ import annotations

import logging

from shared.errors import Undecodable

logger = logging.getLogger(__name__)

COUNTER = "undecodable"
"""Name of the counter."""

WRONG_SENDER = "wrong_sender"
"""Name of the counter of messages that name another node than their subject (``WrongSender``)."""

SIGNALS_REFUSED = "signals_refused"
"""Name of an agent's counter of signals that the detector could not read, or that are too large for the bus."""

REASONS = (COUNTER, WRONG_SENDER, SIGNALS_REFUSED)
"""All of these counters, which say why messages were dropped."""

MAX_LINES = 256
"""Most sources and kinds that are told apart, so that a sender with random names fills neither memory nor log."""


class WrongSender(Undecodable):
    """A message that names another node than the one that sent it."""

    code = Undecodable.code


class DroppedMessages:
    """Counts and logs the undecodable messages of one process.

    Args:
        counters: the process's counters; ``undecodable`` is among them from the first such message on.
    """

    def __init__(self, counters: dict[str, int]) -> None:
        self.counters = counters
        self._logged: set[tuple[str, str]] = set()

    def note(self, source: str, error: Undecodable, *, counter: str = "") -> None:
        """Count a message, and log it if it is the first of its source and kind.

        Args:
            source: where it came from: a node, a subject, a process.
            error: why it cannot be decoded.
            counter: the counter that is raised; empty: that of the error.
        """
        counter = counter or (WRONG_SENDER if isinstance(error, WrongSender) else COUNTER)
        self.counters[counter] = self.counters.get(counter, 0) + 1
        key = (source, error.kind)
        if key in self._logged or len(self._logged) > MAX_LINES:
            return
        self._logged.add(key)
        if len(self._logged) > MAX_LINES:
            logger.warning("messages of more than %d sources and kinds were dropped; no more are logged", MAX_LINES)
            return
        kind = f" of kind {error.kind}" if error.kind else ""
        logger.warning("a message%s from %s was dropped, and others like it will be: %s", kind, source, error.detail)
