"""Megatron-LM's arguments, read by a table: for where its own parser cannot be imported.

``megatron_arguments.json`` has them as the parsers of four releases do (its head names the commits), a newer release's
before an older one's: option -> ``dest``, and ``value`` for a flag; else ``nargs`` (none: one), ``type`` (none: text)
and ``choices`` where it has them. ``versions``: the releases that have it, where not all of them do.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any


@dataclass
class Arguments:
    """Arguments that were read.

    ``values``: destination -> value, of those that were given. ``options``: destination -> the option that gave it.
    ``unknown``: options that no release has. ``wrong``: option -> what is wrong with its value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)


@functools.cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """Return Megatron-LM's options: option -> what its parser knows of it."""
    text = resources.files("shared.launch").joinpath("megatron_arguments.json").read_text(encoding="utf-8")
    options: dict[str, Mapping[str, Any]] = json.loads(text)["arguments"]
    return options


def read_arguments(tokens: Sequence[str]) -> Arguments:
    """Return what the arguments of a script of Megatron-LM say."""
    found, rest = Arguments(), [*tokens]
    while rest:
        option, has_value, value = rest.pop(0).partition("=")
        if not option.startswith("--"):
            continue  # what follows an unknown option
        given = _values(rest)
        known = table().get(option)
        if known is None:
            found.unknown.append(option)
            continue
        found.options[known["dest"]] = option
        if "value" in known:
            found.values[known["dest"]] = known["value"]
            continue
        many = known.get("nargs")
        if has_value:
            given = [value]
        elif many is None or isinstance(many, int):
            given = given[: 1 if many is None else many]
        try:
            read = [_read(known, text) for text in given]
        except ValueError as err:
            found.wrong[option] = str(err)
            continue
        if len(read) < (many if isinstance(many, int) else many != "*"):
            found.wrong[option] = "needs a value"
        elif many is None:
            found.values[known["dest"]] = read[0]
        else:
            found.values[known["dest"]] = read
    return found


def _values(tokens: Sequence[str]) -> list[str]:
    """Return what stands before the next option; a negative number is none."""
    values = []
    for token in tokens:
        if token.startswith("-") and not _is_number(token) and len(token) > 1:
            break
        values.append(token)
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read(known: Mapping[str, Any], text: str) -> Any:
    """Return a value as an option has it.

    Raises:
        ValueError: it cannot have it; the message says what it can.
    """
    kind = known.get("type", "str")
    try:
        value: Any = int(text) if kind == "int" else float(text) if kind == "float" else text
    except ValueError:
        raise ValueError(f"{text!r} is no {'whole number' if kind == 'int' else 'number'}") from None
    if "choices" in known and value not in known["choices"]:
        raise ValueError(f"{text!r} is none of {', '.join(map(str, known['choices']))}")
    return value
