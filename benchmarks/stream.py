"""The stream of a long log, filled faster than relays do: without parsing events, with an answer now and then."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

from nats import connect
from nats.aio.client import Client
from nats.js import errors as nats_errors
from nats.js.api import Header

from shared.bus import credentials
from shared.bus.connection import Bus
from shared.log.log import EventLog
from shared.log.relay import HASH_HEADER, STREAM, SUBJECT, Relay
from shared.model import canonical_json
from shared.nats.nats_server import NatsServer

_UNANSWERED = 500
"""Messages to the stream without an answer from the server."""

_MOST_BEHIND = 2000
"""Messages that the server may have and not have stored yet; more mean that it has refused one."""

_FLUSH_S = 60
"""For an answer of the server: longer than it takes on a machine that does other things, too."""

_ROWS = (
    "SELECT position, type, previous_hash, hash, recorded_at, stream, stream_version, data FROM log "
    "WHERE position > ? ORDER BY position"
)


async def fill(nats: NatsServer, log: EventLog) -> None:
    """Give a server's stream what it lacks of a log in SQLite."""
    credential = credentials.read(nats.keys.credential_file("planner"))
    bus = await Bus.connect(nats.url, credential=credential, name="benchmark")
    position = 0
    try:
        with tempfile.TemporaryDirectory() as folder, closing(EventLog(f"sqlite:///{folder}/empty.db")) as empty:
            with contextlib.suppress(nats_errors.NotFoundError):
                position = (await bus.jetstream.stream_info(STREAM)).state.last_seq
            if not position:
                await Relay(empty, bus).run()  # makes the stream
        client = await connect(nats.url, nkeys_seed_str=credential.seed)
        try:
            with closing(sqlite3.connect(log.url.removeprefix("sqlite:///"))) as table:
                last = log.last_position()
                while position < last:
                    await _publish(client, bus, table.execute(_ROWS, (position,)))
                    # What the server had no room for is missing, and so is all behind it.
                    position = (await bus.jetstream.stream_info(STREAM)).state.last_seq
        finally:
            await client.close()
        await Relay(log, bus).run()
    finally:
        await bus.close()


async def _publish(client: Client, bus: Bus, rows: Iterable[Sequence[Any]]) -> None:
    """Publish rows until the server has not taken one, or all are sent."""
    for position, kind, *columns, event in rows:
        previous_hash, hash_, recorded_at, stream, stream_version = columns
        fields = canonical_json(
            {
                "hash": hash_,
                "position": position,
                "previous_hash": previous_hash,
                "recorded_at": recorded_at,
                "stream": stream,
                "stream_version": stream_version,
            }
        )
        data = f'{{"event":{event},{fields[1:]}'.encode()
        headers = {
            Header.MSG_ID: hash_,
            Header.EXPECTED_LAST_SEQUENCE: str(position - 1),
            Header.EXPECTED_STREAM: STREAM,
            HASH_HEADER: hash_,
        }
        await client.publish(f"{SUBJECT}.{kind}", data, headers=dict(headers))
        if position % _UNANSWERED == 0:
            await client.flush(timeout=_FLUSH_S)
            if (await bus.jetstream.stream_info(STREAM)).state.last_seq < position - _MOST_BEHIND:
                return
    await client.flush(timeout=_FLUSH_S)
