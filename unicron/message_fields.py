"""What messages are made of: their base, and their fields as JSON has them, checked against the types of the class.

``unicron.protocol`` has the messages.
"""

from __future__ import annotations

import json
import math
import types
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

MAX_INTEGER = 1 << 53
"""Largest integer in a message: readers of JSON agree up to here (RFC 8259, section 6)."""

UNREADABLE = object()
"""In place of a value of another type than its field's."""


class ProtocolError(Exception):
    """A line that is not a message of this protocol. ``name``: of the message, where the line has one."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages; ``name`` is the tag on the wire."""

    name: ClassVar[str] = ""


_ENCODER = json.JSONEncoder(separators=(",", ":"))
"""One for all lines: ``json.dumps`` would make one for each."""


def encode(message: Message) -> bytes:
    """Return a message as one line, with its line feed; fields that are None are left out where None is the default."""
    content: dict[str, Any] = {"message": message.name}
    kind: Any = type(message)
    for name, has_default in _names(kind):
        value = getattr(message, name)
        if value is not None or not has_default:
            content[name] = value
    return _ENCODER.encode(content).encode() + b"\n"


@cache
def _names(kind: Any) -> list[tuple[str, bool]]:
    """Return the fields of a message's class, each with whether None is its default."""
    return [(item.name, item.default is None) for item in fields(kind)]


def field_types(kind: type) -> dict[str, Any]:
    """Return the type of each field of a message's class."""
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def read_field(value: Any, of: Any, *, free_text: bool) -> Any:
    """Return a value as a field of type ``of`` has it, or ``UNREADABLE``."""
    origin, arguments = _parts(of)
    if origin in (Union, types.UnionType):
        return _read_optional(value, arguments, free_text=free_text)
    if origin in (list, dict):
        return _read_all(value, origin, arguments[-1], free_text=free_text)
    if of is Any:
        return value
    if of is str:
        return value if isinstance(value, str) and (free_text or _encodable(value)) else UNREADABLE
    if of is bool or isinstance(value, bool):
        return value if of is bool and isinstance(value, bool) else UNREADABLE
    if of is int:
        return value if isinstance(value, int) and 0 <= value <= MAX_INTEGER else UNREADABLE
    small = isinstance(value, int) and abs(value) <= MAX_INTEGER
    return value if small or _finite(value) else UNREADABLE


@cache
def _parts(of: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what a generic type is made of; a rank's agent reads fields of the same types many times a second."""
    return get_origin(of), get_args(of)


def _read_optional(value: Any, arguments: tuple[Any, ...], *, free_text: bool) -> Any:
    if value is None or (float in arguments and isinstance(value, float) and not math.isfinite(value)):
        return None
    return read_field(value, next(a for a in arguments if a is not type(None)), free_text=free_text)


def _read_all(value: Any, container: Any, of: Any, *, free_text: bool) -> Any:
    """Return a list, or a mapping with text for keys, whose values are all of type ``of``; or ``UNREADABLE``."""
    if not isinstance(value, container):
        return UNREADABLE
    keys, values = (list(value), list(value.values())) if isinstance(value, dict) else ([], value)
    read = [read_field(item, of, free_text=free_text) for item in values]
    if any(item is UNREADABLE for item in read) or not all(isinstance(k, str) and _encodable(k) for k in keys):
        return UNREADABLE
    return dict(zip(keys, read, strict=True)) if isinstance(value, dict) else read


def _finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def printable(name: object) -> str:
    """Return a message's name if it is a short line of text, else empty text."""
    return name if isinstance(name, str) and name.isprintable() and len(name) <= 60 else ""
