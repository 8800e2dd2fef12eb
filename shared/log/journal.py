"""The journal: the log, its relay to JetStream, and the following of the log by a service.

    await journal.append([event])                  in the log when this returns; in the stream a moment later
    await journal.follow(handle, consumer="planner", after=position)

The stream reports new events quickly; the table is the truth. A follower handles a message only if the message
continues the hash chain exactly at the follower's position, and otherwise reads the table (``log``). Every service has
one journal.

No process that uses a journal is behind the log's time (``shared.clock``), whatever its machine's clock says.

A database that goes away is waited for (``shared.bus.outages``): an append whose outcome is unknown is repeated, which
appends nothing twice, and a follower goes on behind the record that it handled last.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from shared.bus import cancellation
from shared.bus.connection import Bus
from shared.bus.outages import LOG, LOG_ROOM, Outages
from shared.clock import PROCESS_CLOCK
from shared.errors import Corrupt, Unavailable, UnicronError
from shared.events.union import Event, Recorded
from shared.log.lease import Lease
from shared.log.log import EventLog, recorded
from shared.log.relay import STREAM, SUBJECT, Relay, decode
from shared.log.schema import StoredRow

logger = logging.getLogger(__name__)

RELAY_INTERVAL_S = 1.0
"""Longest pause between two looks for rows that the stream lacks: events of a service that died before its relay reach
the others."""

LAST_RELAY_S = 2.0
"""How long ``close`` waits for the last relay. Another service relays the rest within ``RELAY_INTERVAL_S``."""

FETCH_TIMEOUT_S = 1.0
"""Time-out of one pull, after which the table is read: a pull that is lost in a restart of the server costs this much.
While there is no connection the table is read every ``_RETRY_S``."""

ACK_WAIT_S = 5.0
"""Time after which the server delivers an unacknowledged message again. The follower skips it by its position."""

_RETRY_S = 0.1
"""Pause after an error of the bus while following. While the bus is away, the table is read at this interval."""

_READ = 500
"""Number of records that are read from the table at once."""

_MOST_AT_ONCE = 500
"""Most records at once that a follower of several gets: more would keep its reader waiting."""

Handle = Callable[[Recorded], Awaitable[None]]
HandleSeveral = Callable[[Sequence[Recorded]], Awaitable[None]]


class Journal:
    """The log and its relay; an async context manager that relays in the background from ``start`` to ``close``.

    ``close`` leaves log and bus open: the caller that opened them closes them.

    Args:
        log: the log, for calls that do not wait for a database that is away.
        bus: connected.
        outages: notes the waits of this journal.
        replicas: on how many NATS servers the log's stream is kept at least.
    """

    def __init__(self, log: EventLog, bus: Bus, outages: Outages | None = None, replicas: int = 1) -> None:
        self.log = log
        self.outages = outages if outages is not None else Outages()
        self._bus = bus
        self._relay = Relay(log, bus, replicas)
        self._appended = asyncio.Event()
        self._fresh: list[StoredRow] = []
        """Rows that this process has appended since the last relay began."""
        self._task: asyncio.Task[None] | None = None
        self.handled = 0
        """Position of the newest record that a follower has handled; 0: none since the start."""
        self.lease: Lease | None = None
        """What this process must still hold whenever it appends; None: it needs no lease."""
        self.relayed = 0
        """Position up to which the stream is known to have the log."""

    async def start(self) -> None:
        """Relay what was appended now and after each append, and what the stream lacks every ``RELAY_INTERVAL_S``."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_relaying(), name="relay")

    async def close(self) -> None:
        """Stop relaying, after a last attempt."""
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        if self._bus.connected:
            with contextlib.suppress(UnicronError, TimeoutError):
                async with asyncio.timeout(LAST_RELAY_S):
                    await self._relay.run()

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    async def append(
        self, events: Sequence[Event], *, expected: Mapping[str, int] | None = None, limit_s: float | None = None
    ) -> list[Recorded]:
        """Append to the log (``EventLog.append`` has meaning and errors) and start a relay.

        The relay is not waited for: an event counts from the commit on, with or without NATS.

        Args:
            events: to append.
            expected: stream -> version the stream must have now.
            limit_s: how long to wait for a database that is away; None: without limit.

        Raises:
            Unavailable: the limit has passed; whether the events were appended is not known.
            LeaseLost: another instance of this service has taken its lease.
        """
        lease = self.lease

        def append() -> list[tuple[StoredRow, Recorded]]:
            return [(row, recorded(row)) for row in self.log.append_rows(events, expected=expected, lease=lease)]

        appended = await self.outages.outlast(LOG_ROOM, append, limit_s=limit_s)
        self._fresh += (row for row, _ in appended)
        self._appended.set()
        _follow_time(records := [record for _, record in appended])
        return records

    async def last_position(self) -> int:
        """Return the position of the last event; 0 when the log is empty. A database that is away is waited for."""
        return await self.outages.outlast(LOG, self.log.last_position)

    async def position_now(self) -> int:
        """Return the position of the last event; 0 when the log is empty.

        Raises:
            Unavailable: the database does not answer. This call does not wait for it.
        """
        return await asyncio.to_thread(self.log.last_position)

    async def read(self, *, after: int, limit: int, types: Sequence[str] = ()) -> list[Recorded]:
        """Return records of the table, as ``EventLog.read``. A database that is away is waited for.

        Raises:
            Corrupt: a record cannot be read back.
            NewerVersion: a newer version of the program wrote a record.
        """
        read = functools.partial(self.log.read, after=after, limit=limit, types=types)
        records = await self.outages.outlast(LOG, read)
        _follow_time(records)
        return records

    async def follow_time(self, position: int) -> None:
        """Let this process's time not be behind that of the event at a position, which is read unless it is the base.

        Raises:
            Corrupt: the event cannot be read back.
            NewerVersion: a newer version of the program wrote it.
        """
        base = self.log.base
        if base.is_cut and position == base.position:
            PROCESS_CLOCK.not_before(datetime.fromisoformat(base.recorded_at))
        else:
            await self.read(after=position - 1, limit=1)

    async def sleep(self, seconds: float) -> None:
        """Sleep until the log has been there for so many seconds without a break, as far as this process knows.

        A process calls this while it waits for an event of another service, which cannot append without the log either.
        """
        while True:
            count = self.outages.count
            await asyncio.sleep(seconds)
            await self.last_position()
            if self.outages.count == count:
                return

    async def relay(self) -> int:
        """Relay now and return the stream's last sequence.

        Raises:
            Unavailable: NATS does not answer.
        """
        return await self._relay.run()

    async def follow(self, handle: Handle, *, consumer: str, after: int) -> None:
        """Call ``handle`` with every record after position ``after``, once each, in order, until cancelled.

        The records of the table come first, then those that a durable JetStream consumer delivers, one message at a
        time, acknowledged after ``handle`` has returned. Following goes on after restarts of the database and of the
        bus, and after rebuilds of the stream.

        Args:
            handle: called with each record; its exception ends the following and is raised here.
            consumer: name of the durable consumer: one for each follower.
            after: the position up to which the follower has every record; this position counts, not the consumer's.

        Raises:
            Unavailable: the bus was closed.
            Corrupt: the log has lost a record that ``handle`` got: it was restored from a backup, or the server that
                took over after a failure lacks it. The follower must start anew.
        """

        async def handle_one(records: Sequence[Recorded]) -> None:
            await handle(records[0])

        self.handled = after
        await _Follower(self, self._bus, handle_one, consumer, after, most=1).run()

    async def follow_several(self, handle: HandleSeveral, *, consumer: str, after: int) -> None:
        """Follow as ``follow`` does, but handle all records that are there at once in one call: a transaction."""
        self.handled = after
        await _Follower(self, self._bus, handle, consumer, after, most=_MOST_AT_ONCE).run()

    def reader(self, handle: Handle, *, after: int) -> Callable[[], Awaitable[bool]]:
        """Return a function that calls ``handle`` with each record that the table has got since its last call.

        The function returns whether there was any. It asks the table alone, whatever the bus does.

        Args:
            handle: called with each record.
            after: the position up to which the caller has every record.

        Raises:
            Corrupt: as ``follow``, by the function.
        """

        async def handle_one(records: Sequence[Recorded]) -> None:
            await handle(records[0])

        return _Follower(self, self._bus, handle_one, "", after, most=1).catch_up

    async def _keep_relaying(self) -> None:
        trouble = ""
        now_s = asyncio.get_running_loop().time
        looked_s, checkpointed = -RELAY_INTERVAL_S, -1
        while True:
            fresh, self._fresh = sorted(self._fresh, key=lambda row: row.position), []
            self._appended.clear()
            looks = now_s() >= looked_s + RELAY_INTERVAL_S
            looked_s = now_s() if looks else looked_s
            try:
                # Own rows are published at once, which shows whether the stream is the log's, too.
                looks = looks and not fresh and not trouble
                self.relayed = await (self._relay.keep_up() if looks else self._relay.run(fresh))
                trouble = ""
            except UnicronError as err:
                if err.detail != trouble:
                    logger.warning("%s; the relay tries again", err.detail)
                trouble = err.detail
            try:
                async with asyncio.timeout_at(looked_s + RELAY_INTERVAL_S):
                    await self._appended.wait()
            except TimeoutError:
                if self.relayed != checkpointed or trouble:
                    with contextlib.suppress(UnicronError):
                        await asyncio.to_thread(self.log.checkpoint)
                        checkpointed = self.relayed


def _follow_time(records: Sequence[Recorded]) -> None:
    """Let this process's time not be behind that of the newest of some records, which are in log order."""
    if records:
        PROCESS_CLOCK.not_before(records[-1].recorded_at)


class _Follower:
    """One run of ``follow``: its position in the log, and the consumer from which it pulls.

    ``most``: records that ``handle`` gets at most at once.
    """

    def __init__(
        self, journal: Journal, bus: Bus, handle: HandleSeveral, consumer: str, after: int, *, most: int
    ) -> None:
        self._journal = journal
        self._most = most
        self._bus = bus
        self._handle = handle
        # Names of consumers are parts of subjects: no dots, spaces, wildcards or slashes.
        self._consumer = re.sub(r"[^A-Za-z0-9_-]", "-", consumer)
        self._position = after
        self._hash = ""
        self._subscription: JetStreamContext.PullSubscription | None = None

    async def run(self) -> None:
        try:
            await self.catch_up()
            while True:
                messages = await self._next()
                if not messages:
                    if await self.catch_up():
                        # The stream did not deliver these: the relay is behind, or the consumer waits for a lost
                        # acknowledgement. A new consumer starts at this position.
                        await self._unsubscribe()
                    continue
                await self._take(messages)
                with contextlib.suppress(nats.errors.Error), cancellation.kept():
                    await messages[-1].ack()  # and with that message all before it
        finally:
            await self._unsubscribe()

    async def catch_up(self) -> bool:
        """Handle the records of the table; return whether there were any."""
        start = self._position
        while records := await self._read():
            await self._advance(records)
        return self._position > start

    async def _read(self) -> list[Recorded]:
        """Return the next records of the table.

        The record at this position is read with them: it shows that the log is still the one that was followed. The
        record of the base, whose segment may be elsewhere, does not need to be read.
        """
        log, position = self._journal.log, self._position
        known = int(position not in (0, log.base.position))
        reading = functools.partial(log.read, after=position - known, limit=_READ + known)
        records = await self._journal.outages.outlast(LOG, reading)
        if position == 0:
            return records
        found = log.base.hash if not known else records[0].hash if records else None
        if found is None or self._hash not in ("", found):
            raise Corrupt(
                f"the log no longer has the event at position {position} as it was read: it was restored from a "
                "backup, or the server that took over lacks it"
            )
        self._hash = found
        return records[known:]

    async def _take(self, messages: Sequence[Msg]) -> None:
        """Handle the messages that continue the log; if one does not, read the table."""
        fresh: list[Recorded] = []
        position, hash_ = self._position, self._hash
        for message in messages:
            record = decode(message.data)
            if record is not None and record.position <= position:
                continue  # handled before
            if record is not None and (record.position, record.previous_hash) == (position + 1, hash_):
                fresh.append(record)
            else:
                await self._advance(fresh)
                await self.catch_up()
                fresh = []
            position, hash_ = (fresh[-1].position, fresh[-1].hash) if fresh else (self._position, self._hash)
        await self._advance(fresh)

    async def _advance(self, records: Sequence[Recorded]) -> None:
        for first in range(0, len(records), self._most):
            part = records[first : first + self._most]
            _follow_time(part)
            await self._handle(part)
            self._position, self._hash = part[-1].position, part[-1].hash
            self._journal.handled = self._position

    async def _next(self) -> list[Msg]:
        """Return the next message and those that wait behind it; none if no message came in time or the bus failed."""
        try:
            if not self._bus.connected and not self._bus.closed:
                await asyncio.sleep(_RETRY_S)
                return []
            with cancellation.kept():
                if self._subscription is None:
                    self._subscription = await self._subscribe()
                messages = await self._subscription.fetch(1, timeout=FETCH_TIMEOUT_S)
                # Only as many as are there: a pull of more would wait for the rest.
                if waiting := min(messages[0].metadata.num_pending, self._most - 1):
                    messages += await self._subscription.fetch(waiting, timeout=FETCH_TIMEOUT_S)
                return messages
        except (TimeoutError, nats.errors.TimeoutError):
            return []
        except (nats.errors.Error, OSError) as err:
            if self._bus.closed:
                raise Unavailable(f"following {self._consumer}: the bus is closed") from err
            logger.info("following %s: %s %s; again", self._consumer, type(err).__name__, err)
            await self._unsubscribe()
            await asyncio.sleep(_RETRY_S)
            return []

    async def _subscribe(self) -> JetStreamContext.PullSubscription:
        """Replace the durable consumer by one that starts after this position."""
        jetstream = self._bus.jetstream
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await jetstream.delete_consumer(STREAM, self._consumer)
        config = ConsumerConfig(
            durable_name=self._consumer,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self._position + 1,
            ack_policy=AckPolicy.ALL,
            max_ack_pending=self._most,
            ack_wait=ACK_WAIT_S,
            filter_subject=f"{SUBJECT}.>",
        )
        await jetstream.add_consumer(STREAM, config)
        return await jetstream.pull_subscribe_bind(self._consumer, STREAM)

    async def _unsubscribe(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()
