"""What a node's newest heartbeat says of a task as a whole, so that ticks need not look at every rank (``calm.py``)."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """A task's workers on one node. ``expected``: those that must have a process; ``others``: what a plan concerns."""

    expected: list[str]
    others: list[str]


class Summary(NamedTuple):
    """What a node's newest heartbeat says of a task's ranks there.

    Attributes:
        place: the workers of which it was made.
        generation: of the task then.
        is_usual: whether every rank that must be there is, none was stopped, and no script goes on behind the last
            step.
        youngest_s: the shortest time without progress, seconds.
        oldest_s: the longest, without ranks that wait for the control plane; seconds.
    """

    place: Place
    generation: int
    is_usual: bool
    youngest_s: float
    oldest_s: float
