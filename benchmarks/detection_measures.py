"""The measured values of one class of faults, and their bound."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import Report

PERCENTILE = 0.99


@dataclass
class Measures:
    """Values of a class, one for each injection.

    Attributes:
        name: of the class, in words.
        injections: how many there are to be.
        bound: on the p99 of the values.
        unit: of the values and the bound.
        paper: the paper's figure, in words.
    """

    name: str
    injections: int
    bound: float
    unit: str
    paper: str
    values: list[float] = field(default_factory=list)
    wrong: int = 0
    details: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""

    def scale(self, factor: float) -> None:
        """Multiply the number of injections; there is at least one."""
        self.injections = max(1, round(self.injections * factor))

    def numbers(self) -> Iterator[int]:
        """Yield the number of each injection."""
        yield from range(self.injections)

    def add(self, value: float, *, right: bool = True, **details: Any) -> None:
        """Note what came of an injection.

        Args:
            value: measured.
            right: whether the event names what was struck.
            **details: further numbers, of which the last ones are printed where something is wrong.
        """
        self.values.append(value)
        self.wrong += not right
        self.details.append({"value": round(value, 4), "right": right, **details})

    def give_up(self, reason: str) -> None:
        """Note that a fault was not found: the class ends here."""
        self.reason = reason

    def judge(self, report: Report) -> None:
        """Print the class's line and its bounds."""
        percentiles = {"p50": percentile(self.values, 0.5), "p99": percentile(self.values, PERCENTILE)}
        report.line(
            "class",
            name=self.name,
            unit=self.unit,
            n=len(self.values),
            **percentiles,
            mean=round(statistics.fmean(self.values), 4) if self.values else None,
            worst=round(max(self.values), 4) if self.values else None,
            bound=self.bound,
            paper=self.paper,
        )
        seconds = [found["seconds"] for found in self.details if "seconds" in found]
        if seconds:
            both = {"p50": percentile(seconds, 0.5), "p99": percentile(seconds, PERCENTILE)}
            report.line("seconds", name=self.name, **both)
        late = [found for found in self.details if found["value"] > self.bound]
        if late:
            worst = sorted(late, key=lambda found: -found["value"])
            report.line("late", name=self.name, n=len(late), found=worst[:5])
        if self.wrong or self.reason:
            wrong = [found for found in self.details if not found["right"]]
            report.line("wrong", name=self.name, reason=self.reason, found=wrong[:5])
        report.at_most(f"{self.name}: p99 ({self.unit})", percentiles["p99"], self.bound)
        report.equal(f"{self.name}: found", len(self.values), self.injections)
        report.equal(f"{self.name}: of another cause or rank", self.wrong, 0)


def percentile(values: list[float], part: float) -> float | None:
    """Return the nearest-rank percentile: the least value that this part of the values does not exceed."""
    if not values:
        return None
    return round(sorted(values)[math.ceil(part * len(values)) - 1], 4)
