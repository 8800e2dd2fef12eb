"""SI prefixes of amounts for people."""

from __future__ import annotations

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
