"""The log lines of a program: on standard error, as text for people or as JSON for a collector of logs.

    logger.info("...", extra=ids(event))
    with concerning(ids(command)):
        ...                                  every line in here, also those of libraries

``UNICRON_LOG_FORMAT`` selects the format (``shared.settings.model.Settings.log_format``). A line of JSON has the time
in UTC, the level, the service and its pid, the logger and the message; and the ids of what it is about, as far as they
are known: ``node``, ``task``, ``worker``, ``plan``, ``incident``. ``error`` has the traceback of an exception.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Final

FORMAT: Final = "UNICRON_LOG_FORMAT"
"""Variable of the setting ``log_format``: it is needed before the settings are read, whose errors are logged."""

JSON: Final = "json"

IDS = ("node", "task", "worker", "plan", "incident")
"""Kinds of things that a line can be about."""

_TIME = "%Y-%m-%dT%H:%M:%S"

_concerned: ContextVar[Mapping[str, str]] = ContextVar("_concerned", default={})  # noqa: B039 - never changed


def ids(*things: object, **more: str | None) -> dict[str, str]:
    """Return the ids of what a line is about, for ``extra``.

    Args:
        things: events, commands, signals, ...: their attributes of these names.
        more: ids by name; they count more than those of things.
    """
    found = {name: value for thing in things for name in IDS if (value := getattr(thing, name, None))}
    return {**found, **{name: value for name, value in more.items() if value}}


@contextlib.contextmanager
def concerning(about: Mapping[str, str]) -> Iterator[None]:
    """Have every line of this block be about these ids: of this task, and of those that are made in it."""
    token = _concerned.set({**_concerned.get(), **about})
    try:
        yield
    finally:
        _concerned.reset(token)


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON, in ASCII: whatever a message contains, it ends no line.

    Args:
        service: the program's name.
        always: ids of all its lines.
    """

    def __init__(self, service: str, always: Mapping[str, str]) -> None:
        super().__init__()
        self._service, self._always = service, dict(always)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        at = time.strftime(_TIME, time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {**self._always, **_concerned.get(), **ids(record)}
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def formatter(name: str, log_format: str, always: Mapping[str, str]) -> logging.Formatter:
    """Return what makes lines: JSON if asked for, else text that begins with time, level, ``name`` and pid."""
    if log_format == JSON:
        return JsonLines(name, always)
    text = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)s {name}[{os.getpid()}] %(name)s: %(message)s")
    text.converter = time.gmtime
    text.datefmt = _TIME
    return text


def log_to_stderr(name: str, *, node: str = "") -> None:
    """Have everything logged from INFO on.

    Args:
        name: the program's.
        node: the node for which it runs; empty: none.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(name, os.environ.get(FORMAT, ""), ids(node=node)))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
