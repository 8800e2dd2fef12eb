"""Durations and times as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

SHORTEST_S = 5e-4
"""What is shorter would be shown as 0 ms."""


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


def clock(at: datetime | None, after: datetime | None = None) -> str:
    """Return a time to the millisecond, in UTC, with its date, or without it where ``after`` is of the same day."""
    if at is None:
        return "-"
    of_day = f"{at.astimezone(UTC):%H:%M:%S}.{at.microsecond // 1000:03d}"
    same_day = after is not None and after.astimezone(UTC).date() == at.astimezone(UTC).date()
    return of_day if same_day else f"{at.astimezone(UTC):%Y-%m-%d} {of_day}"


def taken(durations_s: dict[str, float]) -> str:
    """Return durations by name as one text, without those that are too short to be shown."""
    return ", ".join(f"{name} {seconds(value)}" for name, value in durations_s.items() if value >= SHORTEST_S)
