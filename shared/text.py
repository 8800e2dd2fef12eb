"""Times and amounts as the interface writes them, with SI prefixes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import PlainSerializer

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")
"""The prefixes of the powers of 1000, from the zeroth on (BIPM, SI Brochure, 9th edition with the prefixes of 2022)."""


def prefix_of(value: float) -> tuple[float, str]:
    """Return the power of 1000 in which a value has one to three digits before the point, and its prefix.

    1 and no prefix below 1000; the largest prefix for all that is larger.
    """
    power = 0
    while abs(value) >= 1000 ** (power + 1) and power + 1 < len(_PREFIXES):
        power += 1
    return float(1000**power), _PREFIXES[power]


def iso(at: datetime) -> str:
    """Return a time as text, always in UTC and always with microseconds."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")


Time = Annotated[datetime, PlainSerializer(iso, return_type=str, when_used="json-unless-none")]


def flop(value: float) -> str:
    """Return FLOP with an SI prefix, three digits."""
    return amount(value, "FLOP")


def amount(value: float, unit: str) -> str:
    """Return a value with its unit and an SI prefix, three digits."""
    scale, prefix = prefix_of(value)
    return f"{value / scale:.3g} {prefix}{unit}"
