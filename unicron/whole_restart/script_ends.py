"""How a script has ended, read from its exit status and the end of its output. Pure."""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

from unicron.protocol.messages import REFUSED

DETAIL_CHARACTERS = 1000
"""Longest error message, as ``unicron.link.reporting`` sends them."""

TRACEBACK_CHARACTERS = 16 * 1024
"""Longest traceback; a longer one loses its beginning."""

USAGE_STATUS = 2
"""Exit status of ``argparse`` for arguments that a script does not take."""

_TRACEBACK = "Traceback (most recent call last):"
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?", re.MULTILINE)
"""Text that torch puts in front of each line of a traceback that ends a process."""

_ERROR_LINE = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<detail>.*))?$")

_LOST_PEER = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|Socket Timeout|ncclRemoteError|ncclSystemError|"
    r"NCCL communicator was aborted|[Ww]atchdog|gloo/transport|collective operation timeout|Timed out waiting"
)
"""Texts of gloo, NCCL and torch's stores about a lost peer, and of NCCL's watchdog about a collective that does not
end."""

_OF_COLLECTIVES = frozenset({"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
"""Names of the errors with these texts; other errors with such a text are about connections of the script's own."""

_CANNOT_RUN = frozenset({"ModuleNotFoundError", "ImportError", "SyntaxError", "IndentationError"})
"""Errors at its first start that show that a script cannot run as it is; a restart would not help."""


class ScriptEnd(NamedTuple):
    """An end that is an error, with the fields of ``unicron.protocol.messages.Raised``."""

    kind: str
    error: str
    detail: str
    traceback: str


def read_end(code: int, output: str, *, first: bool) -> ScriptEnd | None:
    """Return the error that has ended a script; None: a signal did, which says nothing about the script.

    Args:
        code: its exit status, not 0, or the negative number of a signal.
        output: the end of what it has printed.
        first: whether it is the first start of the script, which shows whether it can run at all.
    """
    lines = _RANK_PREFIX.sub("", output)
    if code < 0:
        if code == -signal.SIGABRT and _LOST_PEER.search(lines):
            return ScriptEnd("communication", "SIGABRT", _last_line(lines), _last(lines))
        return None
    found = _raised(lines)
    if found is None:
        usage = code == USAGE_STATUS and ": error: " in _last_line(lines)
        kind = REFUSED if usage and first else "exception"
        return ScriptEnd(
            kind, "SystemExit", f"exited with {code}: {_last_line(lines)}"[:DETAIL_CHARACTERS], _last(lines)
        )
    name, detail, text = found
    if name in _OF_COLLECTIVES and _LOST_PEER.search(detail):
        kind = "communication"
    else:
        kind = REFUSED if name in _CANNOT_RUN and first else "exception"
    return ScriptEnd(kind, name, detail[:DETAIL_CHARACTERS], text[-TRACEBACK_CHARACTERS:])


def _raised(lines: str) -> tuple[str, str, str] | None:
    """Return name, message and traceback of the last error that was printed; None: there is none."""
    begin = lines.rfind(_TRACEBACK)
    if begin < 0:
        return None
    text = lines[begin:]
    rows = text.split("\n")
    for at, row in enumerate(rows[1:], start=1):
        if row and not row[0].isspace() and (match := _ERROR_LINE.match(row)) is not None:
            detail = "\n".join([match["detail"] or "", *rows[at + 1 :]]).strip()
            return match["name"].rpartition(".")[2], detail, text
    return None


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2].strip()[:DETAIL_CHARACTERS]


def _last(text: str) -> str:
    return text[-TRACEBACK_CHARACTERS:]
