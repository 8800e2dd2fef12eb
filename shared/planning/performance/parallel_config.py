"""A parallelism configuration: how the workers of one task divide its model and its batch.

It is a layout (``shared.events.plans.Layout``) together with the choices that trade memory for time.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Recompute = Literal["none", "selective", "full"]
"""Activation recomputation: none, of the attention core, or of whole layers (Korthikanti et al.)."""

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


class Sizes(NamedTuple):
    """Tensor, pipeline and data parallel sizes."""

    tensor: int
    pipeline: int
    data: int


class ParallelConfig(NamedTuple):
    """Sizes of the parallel groups, and the choices that trade memory for time.

    It uses ``tensor`` x ``pipeline`` x ``data`` workers. ``micro_batch``: samples of one forward pass. ``interleave``:
    model chunks of a worker (virtual pipeline stages). ``overlap``: data-parallel workers communicate beside forward
    and backward passes, as far as the stack can, and a distributed optimizer gets its part of the gradients by a
    reduce-scatter, as in Megatron-LM. Without it they communicate between the last pass and the next update, and
    gradients are always all-reduced, as in a task of this project.
    """

    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    interleave: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap: bool = True

    @property
    def sizes(self) -> Sizes:
        """The three parallel sizes."""
        return Sizes(self.tensor, self.pipeline, self.data)

    @property
    def workers(self) -> int:
        """Number of workers of the configuration."""
        return self.tensor * self.pipeline * self.data

    def micro_batches(self, global_batch: int) -> int:
        """Return the micro-batches of the most loaded replica in one update. Replicas need not be equally loaded."""
        return -(-(global_batch // self.micro_batch) // self.data)
