"""``/v1/events``: the log itself, as pages or as server-sent events.

The text of an event in the log is what the interface shows of it, but for two differences: an event of an older version
may lack fields that have a default today, and plans are shorter there (``PlanDecided.canonical``). An event whose text
can have neither is not parsed into its model and written again: its text is taken as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from services.api.gateway import Api, Gateway, as_json
from services.api.route_parts.parameters import NAMED, PROBLEMS, Limit, Since, Until, check_order, page_json
from shared.errors import InvalidInput, Unavailable, UnicronError
from shared.events.union import EVENT_CLASSES, Recorded
from shared.interface.models import EventRecord, Page
from shared.log.log import EventLog, recorded
from shared.log.schema import StoredRow
from shared.text import iso
from shared.unknown_names import nearest

router = APIRouter(prefix="/v1/events", tags=["events"], responses=PROBLEMS)

KEEP_ALIVE_S = 15.0
"""A comment is sent after this time without an event: proxies drop silent connections, usually after 60 s."""

RETRY_S = 1.0
"""Pause before a stream reads a log again that is away. Its client stays connected."""

GATHER_S = 0.1
"""Pause of a stream behind what it has sent: what comes meanwhile is read at once. While many events come, each of
those who follow would otherwise read each of them by itself."""

MOST_EVENTS = 1000
"""Events that a stream reads, and sends, at once."""

After = Annotated[int | None, Query(ge=0, lt=2**63, description="only events behind this position")]


_LISTED: dict[int | str, dict[str, Any]] = {
    200: {"model": Page[EventRecord], "content": {"text/event-stream": {"schema": {"type": "string"}}}},
    **NAMED,
}

_TYPES = sorted(kind.model_fields["type"].default for kind in EVENT_CLASSES)

_POSITION_DIGITS = 18
"""A position of more digits is none: what a client sends is not read as a number of any size."""


def _kinds() -> Iterator[tuple[str, tuple[int, frozenset[str]]]]:
    """Yield the event types without an inner model, each with its schema version and its fields."""
    for kind in EVENT_CLASSES:
        fields = kind.model_fields
        if not any(_has_model(field.annotation) for field in fields.values()):
            yield fields["type"].default, (fields["schema_version"].default, frozenset(fields))


def _has_model(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(_has_model(part) for part in get_args(annotation))


_FLAT = dict(_kinds())

_PLACE = ("position", "stream", "stream_version", "type", "previous_hash", "hash")


def event_json(row: StoredRow) -> str:
    """Return the JSON of ``EventRecord`` for a row of the log.

    Raises:
        Corrupt: the event cannot be read.
        NewerVersion: a newer version of the program wrote it.
    """
    try:
        plain = _is_plain(row)
        at = iso(datetime.fromisoformat(row.recorded_at))
    except (ValueError, TypeError):
        plain = False  # the record says what is wrong with it
    if not plain:
        return show(recorded(row)).model_dump_json()
    place = {name: getattr(row, name) for name in _PLACE}
    return f'{to_json({**place, "recorded_at": at})[:-1].decode()},"event":{row.data}}}'


def _is_plain(row: StoredRow) -> bool:
    """Return whether the interface shows the event as it is stored: all of its fields, and no others, are there."""
    known = _FLAT.get(row.type)
    if known is None:
        return False
    event = from_json(row.data)
    # A code that is not known here is shown as another one (``shared.events.codes``).
    return (event["schema_version"], event.keys()) == known and event["type"] == row.type and not event.get("code")


def show(record: Recorded) -> EventRecord:
    """Return a record as the interface shows it."""
    event: dict[str, Any] = record.event.model_dump(mode="json", by_alias=True)
    return EventRecord(
        position=record.position,
        stream=record.stream,
        stream_version=record.stream_version,
        recorded_at=record.recorded_at,
        type=event["type"],
        event=event,
        previous_hash=record.previous_hash,
        hash=record.hash,
    )


@router.get("", response_model=None, responses=_LISTED)
async def events(
    api: Api,
    limit: Limit = 100,
    after: After = None,
    cursor: After = None,
    last: Annotated[int | None, Query(ge=0, le=1_000_000, description="only the last so many events")] = None,
    kinds: Annotated[list[str] | None, Query(alias="type", description="only events of these types")] = None,
    since: Since = None,
    until: Until = None,
    follow: Annotated[bool, Query(description="server-sent events, without end")] = False,
    brief: Annotated[bool, Query(description="with `follow`: `{}` in place of each event's data")] = False,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """List events in log order; with ``follow=true`` stream them as they are appended.

    ``since`` and ``until`` are of the time at which they were recorded; ``last`` counts events of ``type`` only.

    Events that were archived come from their segments; where these are not at hand the answer is 404, ``archived``.
    """
    check_order(since, until, ("since", "until"))
    types = _known(kinds or [])
    if follow and until is not None:
        problem = "not together with follow: a stream has no end"
        raise InvalidInput.of("until", until.isoformat(), problem, f"until: {problem}")
    start = cursor if cursor is not None else after or 0
    if cursor is None and (last is not None or since is not None):
        start = max(start, await asyncio.to_thread(_start, api.journal.log, last, since, types))
    if follow:
        if last_event_id is not None and last_event_id.isdecimal() and len(last_event_id) <= _POSITION_DIGITS:
            start = max(start, int(last_event_id))
        if start < api.journal.log.base.position:  # a stream that has begun cannot say that the segments are away
            await asyncio.to_thread(api.journal.log.page, after=start, limit=1)
        return StreamingResponse(_stream(api, start, brief, types), media_type="text/event-stream")
    return await asyncio.to_thread(_page, api, start, limit, until, types)


def _known(types: Sequence[str]) -> Sequence[str]:
    """Return types of events that are asked for.

    Raises:
        InvalidInput: no events of one of them exist.
    """
    unknown = sorted({name for name in types if name not in _TYPES})
    if not unknown:
        return types
    errors = []
    for name in unknown:
        near = nearest(name, _TYPES)
        problem = f"{name!r} is no type of events{near}{'' if near else ';'} allowed: {', '.join(_TYPES)}"
        errors.append({"field": "type", "value": name, "problem": problem})
    raise InvalidInput("; ".join(f"type: {error['problem']}" for error in errors), errors)


def _start(log: EventLog, last: int | None, since: datetime | None, types: Sequence[str]) -> int:
    """Return the position behind which the events asked for begin."""
    behind = [0]
    if last is not None:
        behind.append(log.last_of_types(types, last) if types else log.last_position() - last)
    if since is not None:
        behind.append(log.last_before(since))
    return max(behind)


def _page(api: Gateway, after: int, limit: int, until: datetime | None, types: Sequence[str]) -> Response:
    rows = api.journal.log.page(after=after, limit=limit + 1, types=types)
    if until is not None:
        rows = [row for row in rows if datetime.fromisoformat(row.recorded_at) < until]
    items = [event_json(row) for row in rows[:limit]]
    return as_json(page_json(items, [row.position for row in rows], limit))


async def _stream(api: Gateway, position: int, brief: bool, types: Sequence[str]) -> AsyncIterator[str]:
    """Yield events behind ``position``. ``id`` is the position, from which a client that reconnects continues.

    A stream sends what has been folded: a client that asks on an event sees what the event has changed.
    """
    yield ": unicron events\n\n"
    silent_since = time.monotonic()
    while not api.feed.closed:
        until = min(api.feed.position, position + MOST_EVENTS)
        if until > position:
            try:
                found, position = await asyncio.to_thread(_encoded, api.journal.log, position, until, brief, types)
            except Unavailable:
                yield ": waiting for the log\n\n"
                await asyncio.sleep(RETRY_S)
                continue
            if found:
                yield found
                silent_since = time.monotonic()
                await asyncio.sleep(GATHER_S)
        waits = position < api.feed.position or await api.feed.wait_beyond(position, timeout_s=KEEP_ALIVE_S)
        if not waits or time.monotonic() - silent_since >= KEEP_ALIVE_S:
            yield ": keep-alive\n\n"
            silent_since = time.monotonic()


def _encoded(log: EventLog, after: int, until: int, brief: bool, types: Sequence[str]) -> tuple[str, int]:
    """Return the events of a part of the log as server-sent events, and the position up to which they are.

    ``brief``: without their data. An event that cannot be read is an error once those before it have been sent.
    """
    parts: list[str] = []
    position = after
    for row in log.page(after=after, limit=until - after):
        if not types or row.type in types:
            try:
                data = "{}" if brief else event_json(row)
            except UnicronError:
                if position == after:
                    raise
                break
            parts.append(f"id: {row.position}\nevent: {row.type}\ndata: {data}\n\n")
        position = int(row.position)
    return "".join(parts), position
