"""How many steps lie between two snapshots, where the specification says ``auto``. Pure: no torch, no clock.

A snapshot costs the step in which it is taken some time, and a loss of the live state costs what was done since the
newest one. The sum is least at Young's interval, the square root of 2 x cost x mean time between losses
(Communications of the ACM 17, 1974). Where another data-parallel rank in another failure domain has the same part of
the state, that rank's memory is a copy already, and a snapshot is needed only if both are lost at once (two levels, as
in Moody et al., SC 2010). Two bounds hold beside that: snapshots take at most ``COST_SHARE`` of the time, and what a
loss can cost stays below a limit.

Each rank measures the cost in its own steps (``StepTimes``), and reports which way the interval should go with the
statuses at the end of a step (``unicron.training.end_of_step``), of which the largest counts. So intervals are powers
of two, all ranks have the same one (``Interval``), and to agree on it takes no collective.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Literal

Every = int | Literal["auto"]
"""Steps between two snapshots; 0: none. ``auto``: as often as they are worth (this module)."""

COST_SHARE = 0.01
"""Largest part of the time that snapshots may take. Chosen: below what a step varies by itself."""

LONGEST_S = 60.0
"""Longest time between two snapshots where no rank has the same state. Chosen: losses of nodes, whose rate is what is
known, are a part of all faults; at this interval a snapshot of 50 ms takes less than a thousandth of the time."""

LONGEST_REPLICATED_S = 600.0
"""Longest time between two snapshots where another rank has the same state: only a fault of all replicas at once goes
back so far."""

WINDOW_S = 60.0
"""Time from the loss of a replica until another one has the state again. Chosen: several times what a transition takes
(docs/recovery.md)."""

FLOOR_BYTES_PER_S = 1e12
"""Rate at which a copy is taken to disturb a step at least, where noise hides its cost: half the memory bandwidth of an
A100, since a copy that reads from there takes that much from the step."""

LEAST_EXPONENT = 1
"""The shortest interval, as a power of two: a step with a snapshot is compared with the steps between two snapshots."""

MOST_EXPONENT = 19
"""The longest interval, as a power of two. It stays below the largest interval that a specification may name, a
million."""

OFTENER, KEEP, RARER = 0, 1, 2
"""What a rank wants the interval to become: half of it, the same, twice. The largest wish of all ranks counts, so the
rank that pays most decides that snapshots become rarer, and they become more frequent where all ranks want that."""


def loss_mtbf_s(node_mtbf_s: float, nodes: int, *, replicated: bool) -> float:
    """Return the mean time between losses of a part of the live state, seconds.

    One of the task's nodes is lost ``nodes`` times as often as a single one. The node of a second rank that has the
    same part is lost within ``WINDOW_S`` with probability ``WINDOW_S / node_mtbf_s`` (small, and independent).

    Args:
        node_mtbf_s: mean time between losses of one node.
        nodes: the number of the task's nodes.
        replicated: whether another rank, in another failure domain, has each part.
    """
    mtbf_s = node_mtbf_s / max(1, nodes)
    return mtbf_s * max(1.0, node_mtbf_s / WINDOW_S) if replicated else mtbf_s


def best_exponent(*, cost_s: float, step_s: float, mtbf_s: float, checkpoint_every: int, replicated: bool) -> int:
    """Return the best interval as a power of two; it never falls as cost or mean time between losses rises.

    Args:
        cost_s: what a snapshot adds to the time of the steps in which it is taken and stored.
        step_s: the time of a step without a snapshot.
        mtbf_s: mean time between losses (``loss_mtbf_s``).
        checkpoint_every: steps between two persistent checkpoints, behind which older snapshots are worth nothing; 0:
            there are none.
        replicated: whether another rank, in another failure domain, has each part of the state.
    """
    longest = (LONGEST_REPLICATED_S if replicated else LONGEST_S) / step_s
    if checkpoint_every:
        longest = min(longest, checkpoint_every)
    wanted = min(math.sqrt(2.0 * cost_s * mtbf_s) / step_s, longest)
    # Rounded so that both bounds hold; where they contradict each other, the bound of the cost does.
    found = max(math.ceil(_log2(cost_s / (COST_SHARE * step_s))), math.floor(_log2(wanted)))
    return min(max(found, LEAST_EXPONENT), MOST_EXPONENT)


def _log2(value: float) -> float:
    return math.log2(max(value, 1.0))


class StepTimes:
    """The durations of one generation's steps on one rank, with snapshots and without."""

    PLAIN = 32
    """Number of steps without a snapshot whose median is compared with: enough to be steady, few enough to follow a
    change."""

    COPIES = 5
    """Number of snapshots of whose costs the median counts: two outliers change little."""

    def __init__(self) -> None:
        """Begin a generation."""
        self._plain: deque[float] = deque(maxlen=self.PLAIN)
        self._copied: deque[tuple[float, int]] = deque(maxlen=self.COPIES)
        """Duration and number of the steps in which each snapshot was taken and stored."""
        self._under_way: tuple[float, int] | None = None
        self._counts = False
        """Whether the snapshot under way counts: not the first one, for which memory is made, nor one beside which
        something else was done."""
        self._is_first = True

    def begin_copy(self) -> None:
        """Note that a snapshot is begun; none is under way."""
        self._counts, self._is_first = not self._is_first, False
        self._under_way = (0.0, 0)

    def add(self, duration_s: float, *, disturbed: bool) -> None:
        """Add a step; a snapshot is under way from the call of ``begin_copy`` to that of ``end_copy``.

        Args:
            duration_s: its duration, what is done at the boundary before it included.
            disturbed: whether something else was done that costs time, such as writing a checkpoint.
        """
        if self._under_way is not None:
            total_s, steps = self._under_way
            self._under_way = (total_s + duration_s, steps + 1)
            self._counts = self._counts and not disturbed
        elif not disturbed:
            self._plain.append(duration_s)

    def end_copy(self) -> None:
        """Note that the snapshot under way, if any, is stored."""
        if self._under_way is not None and self._counts:
            self._copied.append(self._under_way)
        self._under_way = None

    def step_s(self) -> float | None:
        """Return the median step without a snapshot, seconds; None if there was none."""
        return statistics.median(self._plain) if self._plain else None

    def cost_s(self, size_bytes: int) -> float | None:
        """Return what a snapshot costs, seconds: the additional time of the steps in which it is taken and stored.

        Args:
            size_bytes: the size of the snapshot, from which its least cost follows.

        Returns:
            The median of the newest ones, or None if none was measured, or no step without one.
        """
        step_s = self.step_s()
        if step_s is None or not self._copied:
            return None
        found = statistics.median(total_s - steps * step_s for total_s, steps in self._copied)
        return max(found, size_bytes / FLOOR_BYTES_PER_S)


class Interval:
    """The interval in force under ``auto``: the same on all ranks, which apply the same wishes at the same steps."""

    def __init__(self) -> None:
        """Begin with the shortest interval: the first snapshots, at growing distances, tell what they cost."""
        self.exponent = LEAST_EXPONENT
        self._due = 0
        """How many snapshots have become due since the newest one was begun."""

    def enter(self, exponents: Iterable[int]) -> None:
        """Enter a generation, of which a snapshot is due at once: it has none of its own yet.

        Args:
            exponents: those of all members. The largest goes on, since others may belong to new processes.
        """
        self.exponent, self._due = max(exponents), 1

    def is_due(self, applied: int, *, checkpointing: bool) -> bool:
        """Return whether a snapshot is due at a boundary; called at each, in order.

        A snapshot that is due waits for a checkpoint that is being written, which has a state about as new and costs
        time too; but not until a further one is due.

        Args:
            applied: updates applied.
            checkpointing: whether a checkpoint is being written.
        """
        if applied % self.steps == 0:
            self._due += 1
        return self._due > (1 if checkpointing else 0)

    def begin_copy(self) -> None:
        """Note that a snapshot is begun."""
        self._due = 0

    @property
    def steps(self) -> int:
        """Steps between two snapshots."""
        return int(2**self.exponent)

    def wish(self, *, best: int | None, checkpoint_every: int) -> int:
        """Return what this rank wants the interval to become.

        Args:
            best: the best interval as a power of two; None: the cost of a snapshot is not known yet, because there has
                been no snapshot that counts or no step without one.
            checkpoint_every: steps between two persistent checkpoints; 0: there are none.
        """
        if best is None:
            return RARER if not checkpoint_every or 2 * self.steps <= checkpoint_every else KEEP
        return KEEP if best == self.exponent else RARER if best > self.exponent else OFTENER

    def apply(self, wish: int) -> None:
        """Change the interval to what the ranks agreed on, the largest of their wishes."""
        self.exponent = min(max(self.exponent + wish - KEEP, LEAST_EXPONENT), MOST_EXPONENT)
