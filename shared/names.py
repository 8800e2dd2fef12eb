"""Names of tasks and nodes, and of the workers of a node; the name that a node has by itself.

A name is a part of NATS subjects, of paths, of the log's streams and of worker names, so it is a DNS label (RFC 1123):
no dot, slash, space, wildcard or control character.
"""

from __future__ import annotations

import re
import socket
from typing import Annotated

from pydantic import Field

LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
"""A DNS label, as a part of patterns."""

NAME_PATTERN = rf"^{LABEL}$"
"""1 to 63 lower-case letters, digits and hyphens, with neither end a hyphen."""

NAME_RULE = "must be 1 to 63 lower-case letters, digits and hyphens, with neither end a hyphen"
"""What is wrong with a name that does not match the pattern, in words."""

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""The name of a task or a node."""

WORKER_PATTERN = rf"^{LABEL}/[0-9]{{1,6}}$"
"""``<node>/<slot>``."""

WorkerName = Annotated[str, Field(pattern=WORKER_PATTERN)]
"""The name of a worker."""

LABEL_CHARACTERS = 256
"""Longest label."""

Label = Annotated[str, Field(max_length=LABEL_CHARACTERS, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A short text for people or from a driver, on one line: a failure domain, a kind of hardware."""


Host = Annotated[str, Field(max_length=255, pattern=r"^[^\x00-\x20\x7f/]*$")]
"""A host name or an IP address; 255 bytes are the longest name of DNS (RFC 1035). Empty: none."""

SocketAddress = Annotated[str, Field(max_length=263, pattern=r"^[^\x00-\x20\x7f/]*$")]
"""``host:port``, with an IPv6 address in brackets. Empty: none."""

FilePath = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
"""A path, at most as long as Linux takes one (PATH_MAX)."""


def is_name(text: str) -> bool:
    """Return whether a text matches the pattern of names."""
    return re.fullmatch(NAME_PATTERN, text) is not None and not text.endswith("\n")


def is_worker_of(node: str, text: str) -> bool:
    """Return whether a text is the name of a worker of a node."""
    return re.fullmatch(WORKER_PATTERN, text) is not None and text.startswith(f"{node}/") and not text.endswith("\n")


def host_label() -> str:
    """Return this machine's host name up to the first dot, in lower case: host names ignore case (RFC 4343).

    The result need not match the pattern of names: an underscore is possible in a host name.
    """
    return socket.gethostname().partition(".")[0].lower()
