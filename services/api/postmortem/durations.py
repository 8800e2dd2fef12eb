"""Durations and times as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def seconds(value: float | None) -> str:
    """Return a duration in milliseconds, seconds, minutes or hours; ``-`` for None and for what is no number."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) < 1.0:
        return f"{value * 1e3:.0f} ms"
    if abs(value) < 120.0:
        return f"{value:.2f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def clock(at: datetime | None) -> str:
    """Return a time as date and time of day to the millisecond, in UTC."""
    return "-" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d}"
