"""The relay: it publishes the rows of the log's table, in order, to a JetStream stream whose sequence is the position.

The stream begins where the table does: at 1, or behind the base of a log that was cut over.

The table is its own outbox. Every service relays. Concurrent relays do no harm, because each message names the sequence
that it must follow. A stream that lacks rows gets them, a lost stream is rebuilt, and a stream that contradicts the
table, or that stores nothing any more, is deleted and rebuilt. ``journal`` runs a relay in the background and reads the
messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import nats.errors
import nats.js.errors
from nats.js.api import Header, RawStreamMsg, StorageType, StreamConfig, StreamInfo

from shared.bus import cancellation
from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.events.union import Recorded
from shared.log.log import EventLog
from shared.log.schema import StoredRow
from shared.model import canonical_json

logger = logging.getLogger(__name__)

STREAM = "UNICRON_LOG"
SUBJECT = "unicron.log"
"""Prefix of the messages' subjects; the event's type follows."""

HASH_HEADER = "Unicron-Hash"
"""Header with the record's hash. Equal hashes at one position mean equal logs up to it, since a hash covers all before
it."""

_NOT_THE_NEXT = (10070, 10071, 10164)
"""JetStream's error codes for an expected last message id, or last sequence, that is not the stream's."""

_NO_STORE = 10049
"""JetStream's error code for a stream whose store cannot be made."""

DELETED_WITHIN_S = 2.0
"""nats-server answers the deletion of a stream before all of its files are gone, and makes none of that name until
then: milliseconds later. A disk on which nothing can be made costs an attempt this much longer."""

DELETION_LOOK_S = 0.05
"""Pause between two attempts to make a stream."""

STUCK_S = 20.0
"""A stream that has not taken the same row for this time, while the server answers, is rebuilt. nats-server (2.12 to
2.15) stores nothing in a stream of which one write has failed, also once the disk has room again: it does not answer
the publication of the next message, and refuses all behind it for the one that it lacks. A slow server has several
tries (``shared.bus.connection.JETSTREAM_TIMEOUT_S`` each)."""

COMPARE_INTERVAL_S = 10.0
"""How long the stream counts as equal to the table, once compared, while neither the table nor the connection has
changed. A stream that is deleted or altered meanwhile is found by the next append, or after this time."""

_BATCH = 256
"""Number of rows that are read from the table at once."""

_IN_FLIGHT = 32
"""Number of rows that are published at once, of which only the last is acknowledged: the way to the server and back is
then little beside the time of sending them. The event loop is held for some milliseconds, and rows that are not
acknowledged yet are some megabytes at most."""

_ENVELOPE_BYTES = 4096
"""Bytes of a message left for subject and headers."""


_PLACE = ("position", "stream", "stream_version", "recorded_at", "previous_hash", "hash")


def encode(row: StoredRow) -> bytes:
    """Return a row's record as JSON, with the event's text as it is stored: to parse it would take longer than to send.

    Raises:
        ValueError: the text is not Unicode.
    """
    place = canonical_json({name: getattr(row, name) for name in _PLACE})
    return f'{{"event":{row.data},{place[1:]}'.encode()


def decode(payload: bytes) -> Recorded | None:
    """Return the record in a message; None if there is none: it was too large, or another program sent the message."""
    try:
        return Recorded.model_validate_json(payload)
    except ValueError:
        return None


class _Unusable(Exception):
    """The stream has a message that the table does not have, or takes none."""


class _Older(_Unusable):
    """The stream begins before the table: the log was cut over since the stream was made."""


class _Contradiction(_Unusable):
    """The stream has a message that the table does not have."""


class _Stuck(_Unusable):
    """The stream, made at ``created``, has not taken a row for too long."""

    def __init__(self, position: int, created: datetime | None) -> None:
        super().__init__(f"it has not taken position {position} for {STUCK_S:g} s")
        self.created = created


class _Equal(NamedTuple):
    """Says that the stream was equal to the table up to a position, on the connection before the next reconnection."""

    position: int
    reconnects: int
    until_s: float
    """The time at which that ends, on the monotonic clock."""

    def counts(self, reconnects: int, now_s: float) -> bool:
        """Return whether the stream still counts as equal."""
        return reconnects == self.reconnects and now_s < self.until_s


class Relay:
    """Publishes the rows that the stream lacks. Each process has one; its runs are serialised.

    Args:
        log: the log whose rows are published.
        bus: connected to the server of the stream.
        replicas: on how many NATS servers the stream is kept at least.
    """

    def __init__(self, log: EventLog, bus: Bus, replicas: int = 1) -> None:
        self._log = log
        self._bus = bus
        self._replicas = replicas
        self._running = asyncio.Lock()
        self._not_taken: tuple[int, float] | None = None
        """The position that the stream did not take at the last attempt, and the time of the first one."""
        self._created: datetime | None = None
        """The time at which the stream that was compared last was made."""
        self._equal: _Equal | None = None

    async def keep_up(self) -> int:
        """Do as ``run`` where the stream may differ from the table; return the stream's last sequence.

        A comparison costs server and process milliseconds each time, and most of the time nothing happens. While the
        stream grows, the process that has appended the rows relays them: two that publish the same rows would take each
        other's places, and both would compare then.

        Raises:
            Unavailable: the server does not answer.
        """
        equal = self._equal
        if equal is not None and self._bus.connected and equal.counts(self._bus.reconnects, time.monotonic()):
            if await asyncio.to_thread(self._log.last_position) == equal.position:
                return equal.position
        return await self.run(unless_beyond=equal.position if equal is not None else None)

    async def run(self, fresh: Sequence[StoredRow] = (), *, unless_beyond: int | None = None) -> int:
        """Publish every row that the stream lacks; return the stream's last sequence.

        Args:
            fresh: rows that were just appended, in log order. The stream usually has all rows before them, and then one
                publication each is enough: the stream takes none of them at another place, nor behind another message.
                Otherwise, or without any, the stream is compared with the table first.
            unless_beyond: publish nothing if the stream, once compared, is beyond this sequence.

        Raises:
            Unavailable: the server does not answer. Nothing is lost: the next run goes on.
        """
        if not self._bus.connected:
            raise Unavailable("relay: not connected to NATS")
        async with self._running:
            try:
                while True:
                    try:
                        with cancellation.kept():
                            return await self._compare_and_send(fresh, unless_beyond)
                    except _Unusable as err:
                        if isinstance(err, _Stuck) and err.created != (await self._stream()).created:
                            continue  # another relay has rebuilt it while this one waited for an answer
                        _log_unusable(err)
                        with contextlib.suppress(nats.js.errors.NotFoundError):
                            await self._bus.jetstream.delete_stream(STREAM)
            except (TimeoutError, nats.errors.Error, OSError) as err:
                raise Unavailable(f"relay: {type(err).__name__} {err}") from err

    async def _compare_and_send(self, fresh: Sequence[StoredRow], unless_beyond: int | None) -> int:
        """Publish what the stream lacks; return the stream's last sequence, at which it is equal to the table."""
        connection, began_s = self._bus.reconnects, time.monotonic()
        if fresh and await self._publish_fresh(fresh):
            position = int(fresh[-1].position)
        else:
            position = await self._sequence()
            if unless_beyond is None or position <= unless_beyond:
                position = await self._send(position)
        self._equal = _Equal(position, connection, began_s + COMPARE_INTERVAL_S)
        return position

    async def _sequence(self) -> int:
        """Return the stream's last sequence.

        Raises:
            _Contradiction: the stream is no prefix of the table.
        """
        info = await self._stream()
        self._created = info.created
        base = self._log.base.position
        first, last = info.state.first_seq, info.state.last_seq
        if (last, info.state.messages) == (base, 0):
            return base
        if first <= base:
            raise _Older(f"it begins at sequence {first}, the log behind position {base}")
        if info.state.messages != last - base:
            raise _Contradiction(f"{info.state.messages} messages up to sequence {last}, behind {base}")
        rows = await asyncio.to_thread(self._log.page, after=last - 1, limit=1)
        if not rows:
            raise _Contradiction(f"it has {info.state.messages} messages, the log fewer")
        message = await self._bus.jetstream.get_msg(STREAM, last)
        if _header(message, HASH_HEADER) != rows[0].hash:
            raise _Contradiction(f"sequence {last} is not the event at that position")
        return last

    async def _stream(self) -> StreamInfo:
        config = StreamConfig(
            name=STREAM,
            subjects=[f"{SUBJECT}.>"],
            storage=StorageType.FILE,
            num_replicas=self._replicas,
            deny_delete=True,
            deny_purge=True,
            first_seq=self._log.base.position + 1 if self._log.base.is_cut else None,
        )
        try:
            info = await self._bus.jetstream.stream_info(STREAM)
        except nats.js.errors.NotFoundError:
            logger.info("stream %s does not exist: building it from the log", STREAM)
            return await self._built(config)
        present = info.config.num_replicas or 1
        if present >= self._replicas:
            # A stream never gets fewer replicas: a service with another setting would only add them again.
            return info
        logger.info("stream %s is kept on %d servers, and on %d from now on", STREAM, present, self._replicas)
        return await self._bus.jetstream.update_stream(info.config.evolve(num_replicas=self._replicas))

    async def _built(self, config: StreamConfig) -> StreamInfo:
        """Make the stream."""
        until_s = time.monotonic() + DELETED_WITHIN_S
        while True:
            try:
                return await self._bus.jetstream.add_stream(config)
            except nats.js.errors.ServerError as err:
                if err.err_code != _NO_STORE or time.monotonic() > until_s:
                    raise
            await asyncio.sleep(DELETION_LOOK_S)

    async def _send(self, sequence: int) -> int:
        """Publish every row after ``sequence``; return the stream's last sequence.

        Raises:
            Unavailable: the stream takes no row behind its last one, though the server answers.
        """
        while rows := await asyncio.to_thread(self._log.page, after=sequence, limit=_BATCH):
            if await self._publish(rows):
                sequence = int(rows[-1].position)
                continue
            # Another relay was faster, or an acknowledgement was lost: go on at the stream's end.
            reached = await self._sequence()
            if reached == sequence:
                # A stream that stores nothing refuses the rows behind the next one at once, time and again. Of the next
                # one it says nothing, which counts (``STUCK_S``) once it is published alone.
                await self._publish(rows[:1])
                reached = await self._sequence()
                if reached == sequence:
                    raise Unavailable(f"relay: stream {STREAM} takes no message behind sequence {sequence}")
            sequence = reached
        return sequence

    async def _publish_fresh(self, rows: Sequence[StoredRow]) -> bool:
        """Publish rows on the chance that the stream has all before them; return whether the stream has taken all."""
        try:
            return await self._publish(rows, follows=True)
        except (TimeoutError, nats.js.errors.NoStreamResponseError):
            return False  # the stream is stuck or slow, or does not exist

    async def _publish(self, rows: Sequence[StoredRow], *, follows: bool = False) -> bool:
        """Publish rows; return whether the stream has taken all.

        Several are on their way at a time, and the last of them alone is acknowledged. The server takes them in the
        order in which they are sent, and none behind one that it has not taken: each names the sequence that it must
        follow. So the stream has all rows if it has the last.

        Args:
            rows: in log order.
            follows: whether each row also names the message that it must follow, if that is not the row before it.
        """
        before = ""
        for first in range(0, len(rows), _IN_FLIGHT):
            part = rows[first : first + _IN_FLIGHT]
            for row in part[:-1]:
                await self._bus.send(_subject(row), self._payload(row), self._headers(row, follows, before))
                before = row.hash
            last = part[-1]
            try:
                if not await self._publish_last(last, self._headers(last, follows, before)):
                    return False
            except TimeoutError:
                if not follows:
                    self._note_not_taken(part[0].position)
                raise
            before = last.hash
        return True

    async def _publish_last(self, row: StoredRow, headers: dict[str, str]) -> bool:
        """Publish a row; return whether it was the next of the stream, which has it then."""
        try:
            with cancellation.kept():
                ack = await self._bus.jetstream.publish(_subject(row), self._payload(row), headers=headers)
        except nats.js.errors.APIError as err:
            if err.err_code in _NOT_THE_NEXT:
                return False
            raise
        if ack.seq != row.position:
            raise _Contradiction(f"position {row.position} is at sequence {ack.seq}")
        return True

    def _headers(self, row: StoredRow, follows: bool, before: str) -> dict[str, str]:
        """Return the headers of a row's message; ``before``: hash of the row that was published before it."""
        headers: dict[str, str] = {
            Header.MSG_ID: row.hash,
            Header.EXPECTED_LAST_SEQUENCE: str(row.position - 1),
            Header.EXPECTED_STREAM: STREAM,
            HASH_HEADER: row.hash,
        }
        if follows and row.previous_hash != before and row.position > self._log.base.position + 1:
            headers[Header.EXPECTED_LAST_MSG_ID] = row.previous_hash
        return headers

    def _note_not_taken(self, position: int) -> None:
        """Note that the stream, of which the server has answered a question before, has not taken a row in time.

        Raises:
            _Stuck: that has gone on for too long.
        """
        now_s = time.monotonic()
        if self._not_taken is None or self._not_taken[0] != position:
            self._not_taken = position, now_s
        elif now_s - self._not_taken[1] > STUCK_S:
            self._not_taken = None
            raise _Stuck(position, self._created)

    def _payload(self, row: StoredRow) -> bytes:
        """Return the row's message; an empty one takes the sequence, and followers read the table."""
        try:
            payload = encode(row)
        except ValueError:
            return b""
        return payload if len(payload) + _ENVELOPE_BYTES <= self._bus.max_payload_bytes else b""


def _subject(row: StoredRow) -> str:
    return f"{SUBJECT}.{row.type}"


def _log_unusable(err: _Unusable) -> None:
    """Say why the stream is built anew."""
    if isinstance(err, _Older):
        logger.info("stream %s is built anew: %s", STREAM, err)
        return
    what = "contradicts the log" if isinstance(err, _Contradiction) else "stores nothing"
    logger.error("stream %s %s (%s): deleted and rebuilt", STREAM, what, err)


def _header(message: RawStreamMsg, name: str) -> str:
    headers: dict[str, str] = message.headers or {}
    return headers.get(name, "")
