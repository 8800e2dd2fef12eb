"""What to say about an unknown name: the nearest of the known names, and all that are allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel

_LONGEST_NAME = 100
"""Longest name for which a similar one is looked for: a longer one is no slip of the pen, and comparing takes time that
grows with it."""

_MOST_LIKE = 1
"""Most names that are proposed: a second one is seldom meant, and the allowed ones follow."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` with the known name that is most like ``name``; empty if none is like it."""
    found = difflib.get_close_matches(name, [*known], n=_MOST_LIKE) if len(name) <= _LONGEST_NAME else []
    return f"; did you mean {found[0]!r}?" if found else ""


def unknown_field(name: str, allowed: Sequence[str]) -> str:
    """Return what is wrong with a field that a mapping may not have.

    Args:
        name: the field's.
        allowed: the fields that the mapping may have.
    """
    near = nearest(name, allowed)
    return f"unknown field{near}{'' if near else ';'} allowed: {', '.join(allowed)}"


def unknown_field_of(model: type[BaseModel], location: Sequence[int | str]) -> str:
    """Return what is wrong with a field that a model refuses (``extra_forbidden``).

    Args:
        model: the model that was validated.
        location: the field's place, as pydantic gives it: fields, indices, keys of maps and names of a union's
            branches.
    """
    return unknown_field(str(location[-1]), _fields_at(model, location[:-1]))


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Return the names of the fields that are allowed at a place inside a model."""
    for part in location:
        names = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        # An index, a key of a map and the name of a union's branch are no field: the model stays.
        model = _model_in(names.get(str(part))) or model
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the first model in a type, such as the model of a list's items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(part) for part in get_args(annotation))
    return next((model for model in found if model is not None), None)
