"""What all models share: their base class, the canonical JSON of values, and the type of a clock.

Events, plans, commands, signals, states and views are ``Model``s.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from shared.clock import PROCESS_CLOCK

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)

Clock = Callable[[], datetime]
"""A function that returns the time in UTC. Shells get one; tests pass their own."""


class Model(BaseModel):
    """A pydantic model that is immutable and refuses unknown fields and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


M = TypeVar("M", bound=BaseModel)


def filled(kind: type[M], source: object, **others: Any) -> M:
    """Return a model whose fields are the others given, and what ``source`` has under the names of all further ones."""
    same = {name: getattr(source, name) for name in kind.model_fields.keys() - others.keys() if hasattr(source, name)}
    return kind(**same, **others)


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
