"""Who gets notices: the receivers of ``UNICRON_NOTICES_FILE``. Addresses and keys are secrets in files of their own.

Only the name of a receiver is ever shown or logged: who knows the address of a Slack webhook can post there.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import ValidationError, model_validator

from services.api.notices.notice import TOPICS, URGENT, Topic
from shared.errors import InvalidInput
from shared.field_problems import problem_of
from shared.model import Model
from shared.names import Name

Shape = Literal["generic", "slack", "pagerduty"]

PAGERDUTY = "https://events.pagerduty.com/v2/enqueue"
"""Where PagerDuty takes events (its Events API v2); accounts of its European region have another address."""

PREFIX = "whsec_"
"""What a secret of Standard Webhooks begins with; the base64 of the key follows."""

LEAST_KEY_BYTES = 24
"""Least length of such a key: what Standard Webhooks asks for (192 bits)."""

_NEEDED = {"generic": ("url_file", "secret_file"), "slack": ("url_file",), "pagerduty": ("key_file",)}
_TAKEN = {"generic": {"url_file", "secret_file"}, "slack": {"url_file"}, "pagerduty": {"url_file", "key_file"}}


class ReceiverEntry(Model):
    """A receiver, as the file has it. Relative paths begin at the folder of that file.

    Attributes:
        shape: what its requests look like.
        url_file: file with its address; PagerDuty has a usual one.
        secret_file: of ``generic``: file with the secret by which requests are signed.
        key_file: of ``pagerduty``: file with the routing key of the service.
        about: what it is told of; none: of all (``generic``), or of what people are called for.
        allow_private: whether its address may be one of a private network, and without TLS.
    """

    shape: Shape
    url_file: Path | None = None
    secret_file: Path | None = None
    key_file: Path | None = None
    about: tuple[Topic, ...] | None = None
    allow_private: bool = False

    @model_validator(mode="after")
    def _files(self) -> Self:
        given = {name for name in ("url_file", "secret_file", "key_file") if getattr(self, name) is not None}
        if missing := [name for name in _NEEDED[self.shape] if name not in given]:
            raise ValueError(f"the shape {self.shape} needs {' and '.join(missing)}")
        if extra := sorted(given - _TAKEN[self.shape]):
            raise ValueError(f"the shape {self.shape} takes no {' and no '.join(extra)}")
        return self


class _File(Model):
    receivers: dict[Name, ReceiverEntry]


class Receiver(Model):
    """A receiver with what its files have. ``key``: signs requests (``generic``), or routes them (``pagerduty``)."""

    name: str
    shape: Shape
    url: str
    key: bytes = b""
    about: frozenset[Topic]
    allow_private: bool = False


def read_receivers(path: Path | None) -> list[Receiver]:
    """Return the receivers of a file; none without a file.

    Raises:
        InvalidInput: the file or one that it names cannot be read, or says what is not allowed.
    """
    if path is None:
        return []
    try:
        found = _File.model_validate({"receivers": yaml.safe_load(_text(path, "")) or {}})
    except yaml.YAMLError as err:
        raise _refused(path, "", f"is not YAML: {err}") from err
    except ValidationError as err:
        first = err.errors()[0]
        raise _refused(path, ".".join(map(str, first["loc"][1:])), problem_of(first)) from err
    return [_receiver(path, name, entry) for name, entry in found.receivers.items()]


def _receiver(path: Path, name: str, entry: ReceiverEntry) -> Receiver:
    def line(field: str) -> str:
        file: Path | None = getattr(entry, field)
        return "" if file is None else _text(path.parent / file, f"{name}.{field}").strip()

    url = line("url_file") or PAGERDUTY
    if problem := _address_problem(url, entry.allow_private):
        raise _refused(path, f"{name}.url_file", problem)
    key = line("key_file").encode()
    if entry.shape == "pagerduty" and not key:
        raise _refused(path, f"{name}.key_file", "has no routing key")
    if entry.shape == "generic" and not (key := _signing_key(line("secret_file"))):
        problem = f"must have {PREFIX} and the base64 of {LEAST_KEY_BYTES} bytes or more"
        raise _refused(path, f"{name}.secret_file", problem)
    about = frozenset((TOPICS if entry.shape == "generic" else URGENT) if entry.about is None else entry.about)
    return Receiver(name=name, shape=entry.shape, url=url, key=key, about=about, allow_private=entry.allow_private)


def _address_problem(url: str, allow_private: bool) -> str:
    """Return what is wrong with an address, without the address; empty: nothing."""
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and (parts.port is None or parts.port > 0) and parts.username is None
    except ValueError:
        usable = False
    schemes = ("http", "https") if allow_private else ("https",)
    if not usable or any(character.isspace() for character in url) or parts.scheme not in schemes:
        other = "" if allow_private else "; http only with allow_private: true"
        return f"must have an address {' or '.join(f'{scheme}://HOST/...' for scheme in schemes)}{other}"
    return ""


def _signing_key(text: str) -> bytes:
    """Return the key of a secret; empty: it is none."""
    try:
        key = base64.b64decode(text.removeprefix(PREFIX), validate=True) if text.startswith(PREFIX) else b""
    except binascii.Error:
        return b""
    return key if len(key) >= LEAST_KEY_BYTES else b""


def _text(path: Path, field: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as err:
        raise _refused(path, field, f"cannot be read: {err}") from err


def _refused(path: Path, field: str, problem: str) -> InvalidInput:
    said = f"{field}: {problem}".lstrip(": ")
    return InvalidInput.of("notices_file", str(path), said, f"settings refused: notices_file: {path}: {said}")
