"""Times and amounts of FLOP as the interface writes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import PlainSerializer

from shared.si_prefixes import prefix_of


def iso(at: datetime) -> str:
    """Return a time as text, always in UTC and always with microseconds."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")


Time = Annotated[datetime, PlainSerializer(iso, return_type=str, when_used="json-unless-none")]


def flop(value: float) -> str:
    """Return FLOP with an SI prefix, three digits."""
    scale, prefix = prefix_of(value)
    return f"{value / scale:.3g} {prefix}FLOP"
