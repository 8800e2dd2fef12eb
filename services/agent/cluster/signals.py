"""The queue of signals from the agent to the detector (``messages/signals.py``): in order, repeated until answered."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from shared.bus.connection import Bus
from shared.bus.dropped import SIGNALS_REFUSED
from shared.errors import Unavailable, Undecodable
from shared.messages.signals import SIGNALS, Signal
from shared.model import utc_now
from shared.service.changes import Changes

RETRY_PAUSE_S = 0.1
"""Pause before a failed request is repeated, for example while the detector restarts."""

MAX_WAITING_SIGNALS = 4096
"""Signals kept for a detector that does not answer. Beyond this number the oldest are dropped."""


class SignalQueue:
    """Sends signals one after the other; the next one is sent when the detector has answered the one before.

    Args:
        bus: the connection to send on. Its ``dropped`` counts the signals that the detector refuses.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
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
            sent = signal.model_copy(update={"sent_at": utc_now()})
            size_bytes, most_bytes = len(SIGNALS.request.encode(sent)), self._bus.max_payload_bytes
            refusal: str | None = f"{size_bytes} bytes, {most_bytes} are allowed"
            try:
                if size_bytes <= most_bytes:
                    refusal = await self._bus.call(SIGNALS, sent, signal.node)
            except Unavailable:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            if refusal is not None:
                source, error = SIGNALS.at(signal.node), Undecodable(refusal, kind=signal.kind)
                self._bus.dropped.note(source, error, counter=SIGNALS_REFUSED)
            # A full queue may have dropped the signal meanwhile.
            if self._waiting and self._waiting[0] is signal:
                self._waiting.popleft()
                self._changes.notify()
