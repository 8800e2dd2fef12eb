"""A layout: how the workers of one task share its model and its batch."""

from __future__ import annotations

from typing import Literal, NamedTuple

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


class Layout(NamedTuple):
    """Sizes of the parallel groups and the choices that trade memory for time.

    ``tensor`` x ``pipeline`` x ``data`` workers. ``interleave``: model chunks a worker holds (virtual stages).
    """

    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    interleave: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    @property
    def workers(self) -> int:
        """Workers the layout uses."""
        return self.tensor * self.pipeline * self.data

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of the most loaded replica in one update; replicas need not be equally loaded."""
        return -(-(global_batch // self.micro_batch) // self.data)
