"""Traces: what happens to the nodes and tasks of a cluster, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shared.errors import InvalidInput
from shared.events.severities import ErrorKind

Change = Literal["up", "down", "degraded", "error"]
"""What happens at a node. ``up``: it is there from now on, at full speed. ``down``: it is lost (SEV1). ``degraded``:
its workers are slower from now on. ``error``: a fault of a task's process on it, lighter than the loss of the node."""

WISHED = ("left", "drained")
"""Kinds of ``down`` that are no fault."""


@dataclass(frozen=True, slots=True, order=True)
class Occurrence:
    """Something that happens at a node.

    ``at_s``: seconds since the start of the trace. ``kind``: of an ``error``, its ``ErrorKind``; of other changes, a
    cause in words or nothing. ``slowdown``: of ``degraded``, by how much the node's workers are slower than healthy
    ones; above 1. ``task``: of an ``error``, whose process fails; empty: that of any task on the node.
    """

    at_s: float
    node: str
    change: Change
    kind: str = ""
    slowdown: float = 1.0
    task: str = ""

    @property
    def error(self) -> ErrorKind:
        """The kind of an ``error``; a process that ended where the trace says none."""
        return ErrorKind(self.kind) if self.kind else ErrorKind.PROCESS_EXIT


@dataclass(frozen=True)
class Trace:
    """What happens to a cluster.

    ``nodes``: all nodes of the trace, those first that are there at its start. ``present``: how many of them are.
    ``occurrences``: by time, then node. ``horizon_s``: length of the trace.
    """

    name: str
    nodes: tuple[str, ...]
    present: int
    occurrences: tuple[Occurrence, ...]
    horizon_s: float
    source: str = field(default="", compare=False)
    """Where the trace is from: a citation, the generator with its parameters, or a file."""

    def __post_init__(self) -> None:
        """Refuse what cannot have happened.

        Raises:
            InvalidInput: naming the field, the value and what is allowed.
        """
        if not 0 <= self.present <= len(self.nodes):
            raise InvalidInput(f"present: {self.present}; allowed are 0 to {len(self.nodes)}, the number of nodes")
        known = set(self.nodes)
        last_s = 0.0
        for each in self.occurrences:
            if each.node not in known:
                raise InvalidInput(f"node: {each.node!r} at {each.at_s:g} s is none of the trace's nodes")
            if not last_s <= each.at_s <= self.horizon_s:
                raise InvalidInput(
                    f"time_s: {each.at_s:g} for node {each.node!r}; allowed are times in order, up to the horizon, "
                    f"{self.horizon_s:g}"
                )
            if each.change == "degraded" and not each.slowdown > 1.0:
                raise InvalidInput(f"slowdown: {each.slowdown:g} of node {each.node!r}; allowed are values above 1")
            last_s = each.at_s
