"""Schedule of ``benchmarks.checkpoints``: which steps have a snapshot or a checkpoint beside them, and which count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

NONE, MEMORY, PERSISTENT = "none", "memory", "persistent"
WARM_UP_STEPS = 20
"""Steps that do not count: compiling, first snapshots, first pages."""

BLOCK_STEPS = 10
"""Steps of one block with, or without, persistent checkpoints."""

SETTLING_STEPS = 2
"""Steps at the beginning of each block that do not count: what the block before began may still be under way."""

PERSISTENT_EVERY = 5
"""Steps between two persistent checkpoints, in a block with them."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What runs beside each step, from 1: warm-up, ``pairs`` of steps (snapshot or none), ``cycles`` of blocks."""

    pairs: int
    cycles: int

    @property
    def steps(self) -> int:
        """All steps; the last three let the work of the last block end."""
        return WARM_UP_STEPS + 2 * self.pairs + 2 * BLOCK_STEPS * self.cycles + 3

    def kind(self, step: int) -> str:
        """Return what runs beside a step."""
        return self._place(step)[1]

    def counted(self, step: int) -> tuple[str, int] | None:
        """Return the comparison in which a step counts, and its pair or cycle there; None if it does not count."""
        return self._place(step)[0]

    def _place(self, step: int) -> tuple[tuple[str, int] | None, str]:
        at = step - 1 - WARM_UP_STEPS
        if at < 0:
            return None, MEMORY
        if at < 2 * self.pairs:
            pair, second = divmod(at, 2)
            return (MEMORY, pair), NONE if second != pair % 2 else MEMORY
        cycle, at = divmod(at - 2 * self.pairs, 2 * BLOCK_STEPS)
        if cycle >= self.cycles:
            return None, NONE
        block, at = divmod(at, BLOCK_STEPS)
        counts = (PERSISTENT, cycle) if at >= SETTLING_STEPS else None
        return counts, NONE if block != cycle % 2 else PERSISTENT
