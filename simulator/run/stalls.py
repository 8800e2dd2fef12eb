"""Stalls: when tasks stand still for faults, found or not. The ledger knows only those whose fault is found.

A policy may find a fault late, together with another one, or not before the trace ends.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.costs.charges import Charge
from simulator.run.agenda import time_of


class Stall(NamedTuple):
    """A time in which a task stands still for a fault, seconds since the epoch, as in the ledger."""

    task: str
    start_s: float
    end_s: float

    def worker_s(self, charge: Charge) -> float:
        """Return the worker-seconds of a charge for the task that lie in this time."""
        if charge.claim.task != self.task:
            return 0.0
        within = (min(end_s, self.end_s) - max(start_s, self.start_s) for start_s, end_s in charge.intervals)
        return len(charge.workers) * sum(max(0.0, each_s) for each_s in within)


class Stalls:
    """The stalls of a run, which do not overlap for any task. Times are simulated seconds."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._ended: list[Stall] = []

    def begin(self, task: str, at_s: float) -> None:
        """Note that a fault stops a task; one that stands still already does so from before."""
        self._since_s.setdefault(task, at_s)

    def end(self, task: str, at_s: float) -> None:
        """Note that a task trains, or waits without workers, or has ended."""
        if task in self._since_s:
            self._ended.append(_stall(task, self._since_s.pop(task), at_s))

    def up_to(self, at_s: float) -> list[Stall]:
        """Return all stalls; those that go on, up to a time."""
        return [*self._ended, *(_stall(task, since_s, at_s) for task, since_s in self._since_s.items())]


def _stall(task: str, start_s: float, end_s: float) -> Stall:
    return Stall(task, time_of(start_s).timestamp(), time_of(end_s).timestamp())
