"""Notices to those who are on call: for each receiver a queue of its own, which follows the log and what holds.

The log is the queue. A receiver's queue follows it behind the projections, one notice at a time, and what is sent is
derived from both: a receiver that is away for days costs no memory here, and holds up no other. ``queues`` keeps what
was sent, and which of several apis sends. Nothing waits for a notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
import uuid
from collections.abc import Sequence

from services.api.gateway import Gateway
from services.api.notices.notice import Notice, Subject
from services.api.notices.occasions import TYPES, Looker, Present
from services.api.notices.queues import Queues, Sent
from services.api.notices.receivers import Receiver, read_receivers
from services.api.notices.sending import NoticeMetrics, Sender
from shared.bus.cancellation import cancelled
from shared.errors import Unavailable
from shared.service.log_lines import concerning
from shared.settings.model import Settings

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Pause between two looks at what holds: an incident that is stuck, or a part that is away, is no event."""

BEAT_S = 5.0
"""How often a sender shows that it lives."""

LEASE_S = 30.0
"""How long a sender's beat stands still before another api takes its turn: a database that fails over takes so long."""

_PAUSE_S = 0.5
"""Pause between two looks at the log, and after an error: records come in bursts, and nobody waits for a notice."""

_READ = 100
"""Records read at once."""


class _TurnLost(Exception):
    """Another api sends to the receiver now."""


class Notices:
    """Sends the notices of one api.

    Args:
        settings: ``notices_file``, ``server``.
        url: of the database of ``Queues``.
        metrics: of notices.

    Raises:
        InvalidInput: the file of the receivers, or one that it names, cannot be used.
    """

    def __init__(self, settings: Settings, url: str, metrics: NoticeMetrics) -> None:
        receivers = read_receivers(settings.notices_file)
        self._queues = Queues(url)
        self._each = [_ReceiverQueue(one, Looker(settings.server), self._queues, metrics) for one in receivers]

    async def keep_sending(self, api: Gateway) -> None:
        """Send what is due, until cancelled; return at once where there are no receivers."""
        if not self._each:
            return
        begins = api.feed.position
        try:
            async with asyncio.TaskGroup() as group:
                for queue in self._each:
                    group.create_task(queue.keep_sending(api, begins))
        finally:
            await asyncio.to_thread(self._queues.close)


class _ReceiverQueue:
    def __init__(self, receiver: Receiver, looker: Looker, queues: Queues, metrics: NoticeMetrics) -> None:
        self._receiver, self._looker, self._queues = receiver, looker, queues
        self._sender = Sender(receiver, metrics)
        self._id = str(uuid.uuid4())
        """Of this process, as a sender to this receiver."""
        self._sent = Sent(position=0)
        """While it is this process's turn."""

    async def keep_sending(self, api: Gateway, begins: int) -> None:
        """Send what is due while it is this process's turn, until cancelled.

        ``begins``: position of the log from which on a new receiver is told of what events begin.
        """
        trouble = ""
        while True:
            try:
                sent = await self._take_turn(api, begins)
                trouble = ""
                await self._send_while_ours(api, sent)
            except Exception as err:  # what goes wrong here must not end the api
                if str(err) != trouble and not isinstance(err, _TurnLost):
                    logger.warning("notices to %s: %s %s; again", self._receiver.name, type(err).__name__, err)
                trouble = str(err)
            await asyncio.sleep(_PAUSE_S)

    async def _take_turn(self, api: Gateway, begins: int) -> Sent:
        """Wait until this process sends; return what was sent before."""
        name, seen, seen_s = self._receiver.name, None, 0.0
        while True:
            turn = await asyncio.to_thread(self._queues.turn, name)
            if turn is None:
                sent = Sent(position=begins)
                if await asyncio.to_thread(self._queues.begin, name, self._id, sent):
                    return sent
            elif turn != seen:
                seen, seen_s = turn, time.monotonic()
            if turn is not None and (turn.sender in ("", self._id) or time.monotonic() - seen_s >= LEASE_S):
                if await asyncio.to_thread(self._queues.take, name, self._id, turn):
                    ahead = turn.sent.position > api.feed.position  # the log is another one
                    return turn.sent.at(api.feed.position) if ahead else turn.sent
            await asyncio.sleep(_PAUSE_S)

    async def _send_while_ours(self, api: Gateway, sent: Sent) -> None:
        self._sent = sent
        beating = asyncio.create_task(self._keep_beating())
        looking = asyncio.create_task(self._keep_looking(api))
        try:
            done, _ = await asyncio.wait({beating, looking}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancelled(beating, looking)
            with contextlib.suppress(Unavailable):
                await asyncio.to_thread(self._queues.leave, self._receiver.name, self._id)

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._beat()

    async def _beat(self) -> None:
        """Show that this process sends, and what it has sent.

        While the database is away nobody else can take the turn, so the process goes on, and tells of that too.
        """
        with contextlib.suppress(Unavailable):
            if not await asyncio.to_thread(self._queues.beat, self._receiver.name, self._id, self._sent):
                raise _TurnLost

    async def _keep_looking(self, api: Gateway) -> None:
        while True:
            until = api.feed.position
            try:
                await self._send_begun(api, until)
                now = await self._looker.present(api, self._sent.open)
                open_ = list(self._sent.open.values())
            except Unavailable:  # of the log or the projections, which somebody is to be told
                now = await self._looker.degraded(api, self._sent.open)
                open_ = [one for one in self._sent.open.values() if one.topic == "control-plane"]
            await self._send_present(api, now, open_)
            await asyncio.sleep(_PAUSE_S)
            await api.feed.wait_beyond(until, timeout_s=LOOK_S)

    async def _send_begun(self, api: Gateway, until: int) -> None:
        """Send what events up to a position begin that the projections have."""
        # Not by the journal, which waits for a log that is away: of that somebody is to be told.
        read = functools.partial(api.journal.log.read, limit=_READ, types=TYPES)
        while records := await asyncio.to_thread(read, after=self._sent.position):
            for record in records:
                if record.position > until:
                    return
                found = await self._looker.begun(api, record)
                if found is not None and not self._has_open(found.subject):
                    await self._deliver(found)
                    self._sent = self._sent.opened(found.subject)
                self._sent = self._sent.at(record.position)
                await self._beat()

    async def _send_present(self, api: Gateway, now: Present, open_: Sequence[Subject]) -> None:
        """Send what holds now and was not said, and the ends of what is over.

        Args:
            api: has the projections.
            now: what holds.
            open_: what was said and may be over.
        """
        for found in now.new:
            await self._deliver(found)
            self._sent = self._sent.opened(found.subject)
            await self._beat()
        for subject in open_:
            over = await self._looker.over(api, subject, now.keys)
            if over is not None:
                await self._deliver(over)
                self._sent = self._sent.closed(subject)
                await self._beat()

    def _has_open(self, subject: Subject) -> bool:
        """Return whether a trouble was announced and is not over, as this or an earlier occurrence."""
        return any((one.topic, one.name) == (subject.topic, subject.name) for one in self._sent.open.values())

    async def _deliver(self, found: Notice) -> None:
        if found.subject.topic not in self._receiver.about:
            return
        about = {name: value for name in ("incident", "task", "node") if isinstance(value := found.data.get(name), str)}
        with concerning(about):
            await self._sender.deliver(dataclasses.replace(found, earlier=self._sent.ended))
