"""What all models share: their base class, the canonical JSON of values, and the type of a clock.

Events, plans, commands and signals are ``Model``s; states and views, which folds change, are ``Value``s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from shared.clock import PROCESS_CLOCK

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)

Clock = Callable[[], datetime]
"""Returns the time in UTC. Shells get one; tests pass their own."""


class Model(BaseModel):
    """A pydantic model that is immutable and refuses unknown fields and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


M = TypeVar("M", bound=BaseModel)

_new, _set = object.__new__, object.__setattr__


def made(kind: type[M], values: dict[str, Any], given: set[str]) -> M:
    """Return a model with these values, which are not checked: ``model_construct`` in a third of its time.

    The attributes are those that ``pydantic.BaseModel`` documents.

    Args:
        kind: the class; without private attributes.
        values: of all fields. The model keeps the dictionary.
        given: names of the fields that count as given. Models may share the set: nothing changes it.
    """
    model = _new(kind)
    _set(model, "__dict__", values)
    _set(model, "__pydantic_fields_set__", given)
    _set(model, "__pydantic_extra__", None)
    _set(model, "__pydantic_private__", None)
    return model


class Value(Model):
    """A model of which many changed copies are made."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed; unlike pydantic's, without a copy of the set of given fields."""
        if deep:
            return super().model_copy(update=update, deep=True)
        values = {**self.__dict__, **update} if update else self.__dict__.copy()
        return made(type(self), values, self.__pydantic_fields_set__)


def utc_now() -> datetime:
    """Return the time in UTC, by the clock of this process. Only shells call this function."""
    return PROCESS_CLOCK.now()


def canonical_json(value: Any) -> str:
    """Return a value as JSON, the same text for equal values: sorted keys and no spaces.

    Floats are written by ``repr``: the shortest text that reads back as the same float64.

    Raises:
        ValueError: the value contains NaN or an infinity.
    """
    return _ENCODER.encode(value)
