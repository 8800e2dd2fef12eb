"""Messages on the bus: their base class, their protocol version, and how they are decoded.

Programs of several versions talk to one another while a cluster is upgraded. Three rules make that possible:

* A reader ignores fields that it does not know (``decode``). A new field therefore has a default, and a message means
  the same to a reader that ignores the field.
* A program reads its own version, the one before and the next one, so that a cluster can be upgraded part by part, and
  each part taken back. A version that is not in ``READABLE`` is refused; a message without one has version 1.
* What cannot be decoded raises ``Undecodable``: the receiver counts it, logs the first one of each source and kind
  (``shared.bus.dropped``), drops it, and answers a sender that waits for an answer.

Events of the log are stricter (``shared.log.unreadable``), and so are settings and REST input.
``unicron.protocol.messages`` has the messages between ranks and agents.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, AwareDatetime, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from shared.errors import Undecodable
from shared.model import Model

PROTOCOL = 1
"""Version of the messages that this program sends: one higher in a release with new fields, two higher with a change
that an older reader would misread. Programs across such a change refuse one another, and are upgraded together."""

READABLE = frozenset({max(1, PROTOCOL - 1), PROTOCOL, PROTOCOL + 1})
"""Versions that this program reads."""

MAX_INTEGER = 1 << 53
"""Largest magnitude of an integer in a message: readers of JSON agree up to here (RFC 8259, section 6). Larger ones
would overflow where a fold computes with floats."""

MAX_SECONDS = 1e9
"""Longest duration in a message: 30 years. Sums and squares of such durations stay finite."""

REASON_CHARACTERS = 500
"""Longest reason in words: a line of a log."""

_SHOWN_CHARACTERS = 60
"""Most characters of a value from an undecodable message that are shown."""

_ERRORS_SHOWN = 3
"""Most defects of one message that its reason names."""

_EARLIEST, _LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
"""Earliest and latest time in a message. A machine without a clock of its own starts in 1970. Near the year 9999 a
conversion to UTC overflows."""

T = TypeVar("T")


def _readable(version: int) -> int:
    if version not in READABLE:
        raise ValueError(version_problem(version))
    return version


def _in_range(at: datetime) -> datetime:
    if not _EARLIEST <= at <= _LATEST:
        raise ValueError(f"a time between {_EARLIEST:%Y} and {_LATEST:%Y} is allowed")
    return at


Integer = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
"""An integer of a message."""

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
"""A duration in a message."""

Time = Annotated[AwareDatetime, AfterValidator(_in_range)]
"""A time in a message, with its time zone."""

ID_PATTERN = r"^[^\x00-\x1f\x7f]*$"
"""One line of text."""

MessageId = Annotated[str, Field(min_length=1, max_length=256, pattern=ID_PATTERN)]
"""An id that a sender has chosen: a UUID, as a rule."""


class Message(Model):
    """Base of the messages on the bus. ``protocol``: the version by which the message is to be read."""

    protocol: Annotated[int, AfterValidator(_readable)] = PROTOCOL


def version_problem(version: object) -> str:
    """Return in words why a protocol version cannot be read."""
    known = ", ".join(str(number) for number in sorted(READABLE))
    return f"protocol version {shown(version)} is not readable here: this program reads version {known}"


def decode(adapter: TypeAdapter[T], data: bytes) -> T:
    """Return the message in ``data``. Fields that the message's class does not have are ignored.

    Args:
        adapter: pydantic's adapter of the message's class, or of a union of such classes.
        data: the message as JSON.

    Raises:
        Undecodable: the data is not JSON, not such a message, or has a version that is not readable.
    """
    try:
        return adapter.validate_json(data, extra="ignore")
    except ValidationError as err:
        raise _undecodable(err, data) from err


def shown(value: object) -> str:
    """Return a value of a message as a log may show it: short, on one line, without control characters."""
    if not isinstance(value, str | int | float | bool | None):
        return f"({type(value).__name__})"
    try:
        text = repr(value)
    except ValueError:  # the integer has more digits than Python converts
        return "(int)"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _undecodable(err: ValidationError, data: bytes) -> Undecodable:
    """Return the error of a message, with what the message says about itself."""
    try:
        fields = from_json(data)
    except ValueError as not_json:
        return Undecodable(f"not JSON: {not_json}"[:REASON_CHARACTERS])
    if not isinstance(fields, dict):
        return Undecodable(f"not a JSON object but {shown(fields)}")
    about = {name: _text(fields.get(name)) for name in ("kind", "node", "command_id")}
    version = fields.get("protocol", PROTOCOL)
    if not isinstance(version, int) or version not in READABLE:
        return Undecodable(version_problem(version), **about)
    return Undecodable(problems_of(err), **about)


def problems_of(err: ValidationError) -> str:
    """Return the first defects that pydantic found, in words."""
    found = err.errors(include_url=False, include_context=False)
    texts = [_problem(item) for item in found[:_ERRORS_SHOWN]]
    if len(found) > _ERRORS_SHOWN:
        texts.append(f"{len(found) - _ERRORS_SHOWN} more")
    return "; ".join(texts)[:REASON_CHARACTERS]


def _problem(item: Any) -> str:
    # A part may be the key of a mapping, which the sender has chosen.
    field = ".".join(_text(part) or shown(part) for part in item["loc"])
    given = "" if isinstance(item["input"], dict | list) else f" (given: {shown(item['input'])})"
    # pydantic quotes the unknown kind of a message as it is.
    return f"{field + ': ' if field else ''}{_one_line(item['msg'])}{given}"


def _one_line(text: str) -> str:
    """Return a text with an escape sequence for each character that cannot be printed."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _text(value: object) -> str:
    """Return a field that names something if it is a short line of text, else empty text."""
    short = isinstance(value, str) and len(value) <= _SHOWN_CHARACTERS and value.isprintable()
    return str(value) if short else ""
