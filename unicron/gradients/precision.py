"""The precision with which a step's gradients are added up over micro-batches and ranks, which a task chooses."""

from __future__ import annotations

from enum import Enum


class Precision(Enum):
    """The precision of sums, by what another order of additions changes. docs/recovery.md has the cost of each."""

    FLOAT32 = "float32"
    """Megatron's own precision. Another order of additions (another number of replicas, another rank that computes a
    micro-batch) changes the rounding of many sums."""
    FLOAT64 = "float64"
    """float64 sums. Another order changes about one bit in 2**29 of the float32 totals: in practice none."""
    EXACT = "exact"
    """Sums of integers, which another order does not change."""

    @classmethod
    def of_task(cls, *, exact: bool, deterministic_sums: bool) -> Precision:
        """Return what the two fields of a task's specification ask for; ``exact`` is the stronger one."""
        if exact:
            return cls.EXACT
        return cls.FLOAT64 if deterministic_sums else cls.FLOAT32
