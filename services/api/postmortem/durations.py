"""Durations as people read them."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """Return a duration in milliseconds, seconds, minutes or hours; ``-`` for None."""
    if value is None:
        return "-"
    if abs(value) < 1.0:
        return f"{value * 1e3:.0f} ms"
    if abs(value) < 120.0:
        return f"{value:.2f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
