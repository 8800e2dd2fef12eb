"""One step of a training loop: its micro-batches, the reduction of their gradients, and its end if a peer is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from unicron import generation
from unicron.errors import Interrupted, WrongLoop
from unicron.gradients import IN_FLIGHT

if TYPE_CHECKING:
    from unicron.loop import Run


class Step:
    """One update of the parameters, from its first micro-batch to the optimizer's step."""

    def __init__(self, run: Run, number: int, assigned: list[int]) -> None:
        """Use ``Run.steps``."""
        self._run = run
        self.number = number
        """Counts from 1."""
        self.assigned = assigned
        """The micro-batches that this rank's replica computes; of an interrupted step, those that are missing."""
        self.completed = False
        """Whether the update has been applied."""
        self.loss = float("nan")
        """Mean loss over the global batch, once reduced."""
        self.left = False
        """Whether a failure ended it here: the same step comes again, or the next one if the update was applied."""
        self._reduced = False
        self._scheduled = False
        """Whether the micro-batches are computed in one schedule."""
        self._computing = True
        """Whether the loop is at work, rather than this library: an error then leaves a micro-batch half done."""
        self.began = time.monotonic()
        """On this process's clock."""
        self.computed_s = 0.0
        """Seconds from the beginning until the gradients were reduced."""

    def remaining(self) -> list[int]:
        """Return the rank's micro-batches that are not yet committed."""
        partial = self._run.replica.partial
        assert partial is not None
        return partial.remaining()

    def micro_batches(self) -> Iterator[int]:
        """Yield the micro-batches to compute, leaving the step between them if the generation is held."""
        for k in self.remaining():
            self._enter_micro_batch()
            yield k

    def all_micro_batches(self) -> list[int]:
        """Return the micro-batches to compute, for a schedule that takes all of them at once: a pipeline's."""
        remaining = self.remaining()
        if remaining:
            self._enter_micro_batch()
            self._scheduled = True
        return remaining

    def _enter_micro_batch(self) -> None:
        partial = self._run.replica.partial
        assert partial is not None
        self._computing = False
        self._run.runtime.check()
        self._run.fault(self.number, str(len(partial.samples)))
        self._run.lay_fault(self.number, len(partial.samples))
        self._computing = True

    def commit(self, micro_batch: int, loss: float | None, ids: list[int]) -> None:
        """Count a micro-batch as done: its gradients (scaled by 1/M) are in the buffers. See ``commit_all``."""
        self.commit_all([micro_batch], [] if loss is None else [loss], [ids])

    def commit_all(self, micro_batches: list[int], losses: list[float], ids: list[list[int]]) -> None:
        """Count micro-batches as done whose gradients are in the buffers together.

        Args:
            micro_batches: which.
            losses: the loss of each; empty on ranks that do not compute it (pipeline stages before the last).
            ids: the samples of each.

        Raises:
            NonFiniteValue: a loss is not finite or, in exact mode, a gradient.
            UnicronError: several at once in exact mode, which must tell their gradients apart.
        """
        self._run.runtime.synchronize()
        self._run.replica.commit(dict(zip(micro_batches, losses)), dict(zip(micro_batches, ids)))  # noqa: B905
        for k in micro_batches:
            self._run.runtime.progress(self.number, "compute", micro_batch=k)
        if self._scheduled and self.remaining():
            partial = self._run.replica.partial
            assert partial is not None
            self._run.fault(self.number, str(len(partial.samples)))
            self._run.lay_fault(self.number, len(partial.samples))

    def reduce(self) -> None:
        """Replace the gradients by those of the global batch, and agree on loss, samples and what comes next.

        Raises:
            NonFiniteValue: this rank's gradients are not finite.
            SampleAccountingError: the micro-batches were not computed exactly once.
        """
        run, number = self._run, self.number
        self._computing = False
        run.runtime.check()
        run.fault(number, "reduce")
        run.runtime.progress(number, "reduce")
        run.request, told = generation.account(run.replica, run.micro_batches, run.runtime, run.statuses())
        assert run.replica.partial is not None
        assert run.replica.partial.account is not None
        self.loss = run.replica.partial.account.loss
        run.replica.reduce(
            generation.data_group(),
            run.runtime.wait,
            before=lambda bucket: run.fault(number, f"reduce:{bucket}"),
            done=lambda count: run.runtime.progress(number, "reduce", buckets=count),
            broken=run.runtime.abandoned.extend,
            # One after the other where the fault is to come after so many, and no more.
            in_flight=1 if run.fails_between_buckets(number) else IN_FLIGHT,
        )
        run.agreed(told)
        self._reduced = True
        self.computed_s = time.monotonic() - self.began
        run.fault(number, "update")
        run.lay_fault_in_update(number)
        run.runtime.progress(number, "update")
        self._computing = True

    def __enter__(self) -> Step:
        """Enter the part of the loop in which peers may be lost."""
        self._run.runtime.enter()
        self._run.runtime.progress(self.number, "begun")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Complete the step; swallow what a new generation answers, report everything else."""
        if error is None:
            if not self._reduced:
                self._run.runtime.leave()
                raise WrongLoop(f"step {self.number} ended without step.reduce()")
            try:
                self._run.runtime.synchronize()
            except (Interrupted, RuntimeError) as err:
                error = err
        self._run.runtime.leave()
        if error is None:
            self._run.replica.check_applied()
            self._run.replica.applied_update()
            self.completed = True
            duration = time.monotonic() - self.began
            self._run.runtime.progress(self.number, "ended", loss=self.loss, duration_s=duration)
            return False
        self.left = True
        self._run.replica.interrupted(computing=self._computing)
        self.completed = self._run.replica.applied == self.number
        return self._run.survives(error)
