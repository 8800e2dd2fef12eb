"""Amounts and times for people."""

from __future__ import annotations

from shared.si_prefixes import prefix_of


def si(value: float, unit: str) -> str:
    """Return an amount with four significant digits, such as ``62.15 ZFLOP``."""
    scale, prefix = prefix_of(value)
    return f"{value / scale:.4g} {prefix}{unit}"


def seconds(value: float | None) -> str:
    """Return a time with three significant digits, in the unit that a person would use; ``-`` for none."""
    if value is None:
        return "-"
    for unit, length_s in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * length_s:
            return f"{value / length_s:.3g} {unit}"
    return f"{value:.3g} s"
