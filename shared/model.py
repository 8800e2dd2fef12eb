"""Base of the pydantic models, canonical JSON, time."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

Clock = Callable[[], datetime]


class Model(BaseModel):
    """Immutable, refuses unknown fields and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def utc_now() -> datetime:
    """Return the time in UTC; only shells call this."""
    return datetime.now(UTC)


def canonical_json(value: Any) -> str:
    """Return one spelling for equal values: sorted keys, no spaces, no NaN or infinity.

    Floats are written by ``repr``, the shortest text that reads back as the same float64.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
