"""The queue of signals from the agent to the detector (``messages/signals.py``): in order, repeated until answered."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from shared.bus.connection import Bus
from shared.bus.dropped import SIGNALS_REFUSED, DroppedMessages
from shared.bus.messages import REASON_CHARACTERS
from shared.errors import Unavailable, Undecodable
from shared.messages.signals import REFUSED, SIGNALS, Signal
from shared.model import utc_now
from shared.service.changes import Changes

ANSWER_TIMEOUT_S = 1.0
"""The detector answers after one append to the log, in about 5 ms. A request without an answer is repeated after this
time."""

RETRY_PAUSE_S = 0.1
"""Pause before a failed request is repeated, for example while the detector restarts."""

MAX_WAITING_SIGNALS = 4096
"""Signals kept for a detector that does not answer. Beyond this number the oldest are dropped."""


class SignalQueue:
    """Sends signals one after the other; the next one is sent when the detector has answered the one before.

    Args:
        bus: the connection to send on.
        dropped: counts the signals that the detector refuses.
    """

    def __init__(self, bus: Bus, dropped: DroppedMessages) -> None:
        self._bus, self._dropped = bus, dropped
        self._waiting: deque[Signal] = deque(maxlen=MAX_WAITING_SIGNALS)
        self._changes = Changes()

    @property
    def waiting(self) -> list[Signal]:
        """The signals without an answer, in order."""
        return list(self._waiting)

    def put(self, signals: Sequence[Signal]) -> None:
        """Append signals to the queue."""
        self._waiting.extend(signals)
        self._changes.notify()

    async def answered(self) -> None:
        """Wait until every signal has been answered."""
        await self._changes.until(lambda: not self._waiting)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._changes.until(lambda: bool(self._waiting))
            signal = self._waiting[0]
            data = signal.model_copy(update={"sent_at": utc_now()}).model_dump_json().encode()
            try:
                if len(data) > self._bus.max_payload_bytes:
                    answer = REFUSED + f" {len(data)} bytes, {self._bus.max_payload_bytes} are allowed".encode()
                else:
                    answer = await self._bus.request(f"{SIGNALS}.{signal.node}", data, timeout_s=ANSWER_TIMEOUT_S)
            except Unavailable:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            if answer.startswith(REFUSED):
                reason = answer.removeprefix(REFUSED).decode(errors="replace").strip()[:REASON_CHARACTERS]
                self._dropped.note(SIGNALS, Undecodable(reason, kind=signal.kind), counter=SIGNALS_REFUSED)
            # A full queue may have dropped the signal meanwhile.
            if self._waiting and self._waiting[0] is signal:
                self._waiting.popleft()
                self._changes.notify()
