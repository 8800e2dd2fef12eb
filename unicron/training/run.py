"""The training loop's side of the library: steps that survive the loss of peers.

    run = unicron.attach(steps=1000, micro_batches=16, build=build)
    for step in run.steps():
        with step:
            for k in step.micro_batches():
                ids = sample_ids(step.number, k)
                loss = forward_backward(run.model, batch(ids), scale=1 / 16)
                step.commit(k, loss, ids)
            step.reduce()
            run.optimizer.step()

A broken collective or a held generation leaves the ``with`` block without an exception. The next step that the loop
yields is then the same one again, in a new generation, with the micro-batches that are still missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from unicron.training.applied_step import AppliedOptimizer
from unicron.training.boundary import Section
from unicron.training.generations import Training
from unicron.training.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One membership of the task: who is in it, and in which layout."""

    number: int
    """Number of the generation, which only rises."""
    rank: int
    """This process's rank."""
    world_size: int
    tensor: int
    """Tensor-parallel size."""
    pipeline: int
    """Pipeline-parallel size."""


class Run:
    """A task's training in this process, over all its generations; made by ``unicron.attach``."""

    def __init__(self, training: Training) -> None:
        """Present a training to the loop."""
        self._training = training

    def steps(self) -> Iterator[Step]:
        """Yield the steps to do, through all generations, until the last one is applied everywhere."""
        return self._training.steps()

    @property
    def model(self) -> Any:
        """The model built for the present layout."""
        return self._training.rank_state.model

    @property
    def optimizer(self) -> Any:
        """The optimizer built for the present layout."""
        state = self._training.rank_state
        if self._training.in_applied_step:
            return AppliedOptimizer(state.optimizer, skipped=state.scaler.skipped)
        return state.optimizer

    @property
    def state(self) -> Mapping[str, Any]:
        """The objects of ``attach(state=...)`` by name, made for the present model; empty before the first step."""
        return MappingProxyType(self._training.user.objects)

    @property
    def generation(self) -> Generation:
        """The generation that this process is in."""
        configure = self._training.configure
        return Generation(
            number=configure.generation,
            rank=configure.rank,
            world_size=configure.world_size,
            tensor=configure.tensor,
            pipeline=configure.pipeline,
        )

    def log(self, values: Mapping[str, Any]) -> None:
        """Keep metrics of a step: a number for each name, beside the task's log.

        What is logged in a step's block, or before it, counts once the step is done; a step that comes again is logged
        again. Behind the block, if ``step.completed``, it counts at once, also in a boundary section and behind the
        last step. Each name has one value for each step: the last one; of several ranks, that of the lowest.

        Args:
            values: name -> number, or tensor of one element. A tensor on a device is not waited for: it is read as the
                ranks agree on this step or, if it is logged behind ``step.reduce()``, on the next.

        Raises:
            InvalidMetric: a name or a value cannot be kept.
            WrongLoop: there is no step yet.
        """
        self._training.log(values)

    def boundary(self, *, meets: bool = True) -> Section:
        """Return a section of the loop, for what ranks do together between two steps: an evaluation, a file.

        All ranks must enter it, behind a step's block. A fault inside leaves the block without an exception; the next
        step that the loop yields is then the same one again, with ``step.repeated`` and nothing to compute: so the loop
        comes to the section once more, in a new generation and with the random generators as they were.

        Args:
            meets: whether parameters that other ranks have updated are waited for at the section's beginning, and all
                ranks at its end. Without that, a rank that is lost in a section that the others have left does not
                bring the section back; use this only for work that ends with a collective of its own.
        """
        return Section(self._training, meets=meets)

    @property
    def last_step(self) -> int:
        """The step behind which the training ends: the last one, or an earlier one (``step.end_training()``)."""
        return self._training.last_step

    def heartbeat(self) -> None:
        """Report that this rank is at work on something else than a step: evaluation, a file of the script's own.

        Call this between steps, before work that takes minutes and then at least once in ``slow_region_timeout_s`` (120
        s); else the rank counts as hanging, one that is at work after ``busy_timeout_s`` (240 s). The report counts
        until the next step begins.
        """
        self._training.heartbeat()
