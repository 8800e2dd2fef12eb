"""Secrets of tasks: variables whose values stand in files on the nodes, and in no specification.

What a specification contains is in the log, in the API's answers and on the bus, for everybody who may read there. So a
value that its name shows to be secret is refused, with a pointer to the field for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import Field

_SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET)$|PASSWORD|PASSWD", re.IGNORECASE)
"""Names that show a secret: ``*_KEY``, ``*_TOKEN``, ``*_SECRET``, ``*PASSWORD*``."""

PREFIX = "file:"
"""The kind of place where a secret is: other kinds may come."""

Place = Annotated[str, Field(max_length=4096, pattern=r"^file:/[^\x00]*$")]
"""Where the value of a secret is: ``file:`` and an absolute path on the node."""


WHY = "looks like a secret, which everybody who may read tasks would see"
INSTEAD = "a file on the nodes, with secrets: {NAME: file:/path}, and a script that reads the variable NAME"


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable shows that its value is secret."""
    return _SECRET_NAME.search(name) is not None


def problems(env: Mapping[str, str], secrets: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    """Yield what is wrong with the variables of a new specification: field, value and problem, without any secret."""
    for name in env:
        if is_secret_name(name):
            instead = f"put the value into a file on the nodes and write secrets: {{{name}: file:/path}}"
            yield "env", name, f"{WHY}: {instead}"
    for name in secrets:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name.startswith("UNICRON_"):
            yield "secrets", name, "not the name of a variable: letters, digits and _, and not UNICRON_*"
        elif name in env:
            yield "secrets", name, "is in env, too"


_SECRET_OPTION = re.compile(
    r"(api|access|private|secret)_?(key|token)|password|passwd|secret$|auth_?token", re.IGNORECASE
)
"""Options whose value is secret, whatever it looks like. ``--input-key`` and ``--eod-token`` are none of them."""

_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,})"
    r"|[a-z][a-z0-9+.-]*://[^/\s:@]+:[^/\s@]+@"
)
"""Values that show what they are: tokens of well-known services, and URLs with a password."""


def looks_secret(value: str) -> bool:
    """Return whether a value shows by its form that it is secret."""
    return _SECRET_VALUE.search(value) is not None


def secret_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of a script that show a secret, without it: the option, or which argument it is."""
    for at, argument in enumerate(arguments):
        option, has_value, value = argument.partition("=")
        before = arguments[at - 1] if at else ""
        if not option.startswith("-"):
            option, value = (before, argument) if before.startswith("-") and "=" not in before else ("", argument)
        elif not has_value:
            continue
        by_name = _SECRET_OPTION.search(option.lstrip("-").replace("-", "_")) is not None
        if (by_name and value) or looks_secret(value):
            yield option or f"argument {at + 1}"
