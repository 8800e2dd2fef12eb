"""Parameters of a verb whose value needs no conversion are not converted.

Typer converts values by pydantic, which takes as long to import as Typer and the HTTP client together. A parameter that
was not given, a text, and a default that has its type already stay what they are without it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

ABSENT = object()
"""In place of a value that has to be converted or refused."""


def without_conversion(command: Any) -> Any:
    """Return a command, or a group of commands, whose plain values are not converted."""
    parameters = command.get_params

    def plain_first(context: Any) -> Any:
        found = parameters(context)
        for parameter in found:
            if not isinstance(parameter.process_value, PlainFirst):
                parameter.process_value = PlainFirst(parameter)
        return found

    command.get_params = plain_first
    for verb in getattr(command, "commands", {}).values():
        without_conversion(verb)
    return command


class PlainFirst:
    """``process_value`` of a parameter: a plain value at once, any other by the parameter's own conversion."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self._convert = parameter.process_value

    def __call__(self, context: Any, value: Any) -> Any:
        """Return the value that the verb gets."""
        plain = self.plain(value)
        if plain is ABSENT:
            return self._convert(context, value)
        callback = self._parameter.callback
        return plain if callback is None else callback(context, self._parameter, plain)

    def plain(self, value: Any) -> Any:
        """Return what a plain value stands for; ``ABSENT`` for one that has to be converted or refused."""
        parameter = self._parameter
        several = parameter.multiple or parameter.nargs == -1
        if value is None:
            return ABSENT if parameter.required else () if several else None
        if several or parameter.nargs != 1:
            return ABSENT
        if isinstance(value, Enum):
            return value if value is parameter.default else ABSENT
        kind = getattr(parameter, "type_descriptor", None)  # other versions of Typer convert without pydantic
        return ABSENT if kind is None or not isinstance(value, str) else _of_type(kind, value)


def _of_type(kind: Any, text: str) -> Any:
    """Return what a text stands for where that is the text itself, or one of a few values."""
    if kind.annotation is str:
        return ABSENT if kind.is_path else text
    if isinstance(kind.annotation, type) and issubclass(kind.annotation, Enum):
        return next((member for member in kind.annotation if member.value == text), ABSENT)
    return ABSENT
