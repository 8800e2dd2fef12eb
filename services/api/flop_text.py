"""FLOP as text."""

from __future__ import annotations

from shared.si_prefixes import prefix_of


def flop(value: float) -> str:
    """Return FLOP with an SI prefix, three digits."""
    scale, prefix = prefix_of(value)
    return f"{value / scale:.3g} {prefix}FLOP"
