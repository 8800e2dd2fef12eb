"""How long a task will still train, from its measured step time, and times as people read them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

_TRAINS = frozenset({"running", "degraded"})
"""States in which a task does steps. In the others its last step time says nothing of when it goes on."""

_UNITS_S = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


def remaining_s(task: dict[str, Any]) -> float | None:
    """Return the seconds that a task still trains if its steps take as long as of late; None while nobody can say."""
    if task["state"] not in _TRAINS or not task["step_s"]:
        return None
    return float((task["steps"] - task["step"]) * task["step_s"])


def eta(task: dict[str, Any]) -> str | None:
    """Return the remaining time of a task as text; None while nobody can say."""
    seconds = remaining_s(task)
    return None if seconds is None else duration(seconds)


def duration(seconds: float) -> str:
    """Return a time in its two largest units, such as ``3d04h``; below a minute in seconds."""
    whole = max(round(seconds), 0)
    for (unit, unit_s), (smaller, smaller_s) in pairwise(_UNITS_S):
        if whole >= unit_s:
            return f"{whole // unit_s}{unit}{whole % unit_s // smaller_s:02d}{smaller}"
    return f"{whole}s"
