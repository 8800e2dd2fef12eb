"""A step whose update is applied already, yielded once more for what a script does behind the update.

It comes again for two reasons. A fault may meet every rank between the update and the code behind it: with a
distributed optimizer, when the parameters are gathered. The members then complete the update when they join, and no
rank's scheduler has been stepped. So the loop gets that step again: without micro-batches, with a ``reduce`` that does
nothing, and with an optimizer that is not stepped a second time (``AppliedOptimizer``, while the step lasts). Or a
fault comes in a boundary section behind the step (``unicron.training.boundary``): then the user's state stands behind
the update too, and the step is ``repeated``; what the loop changes of that state in its block is put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from unicron.errors import WrongLoop
from unicron.losses import Loss
from unicron.training.step import Step, StepHost


class AppliedStep(Step):
    """A step that is left with ``completed`` true, and in which there is nothing to compute."""

    def __init__(self, host: StepHost, number: int, left: Step | None, *, repeated: bool = False) -> None:
        """Prepare the step.

        Args:
            host: the training.
            number: the step's.
            left: the step that a failure ended last in this process. It knows the loss, if it is the same step.
            repeated: whether only the code behind the step's block comes again.
        """
        super().__init__(host, number, [])
        self.repeated = repeated
        if left is not None and left.number == number:
            self.loss = left.loss
        self.completed = True

    def remaining(self) -> list[int]:
        """Return no micro-batches."""
        return []

    def micro_batches(self) -> Iterator[int]:
        """Yield no micro-batch."""
        return iter(())

    def all_micro_batches(self) -> list[int]:
        """Return no micro-batches."""
        return []

    def commit_all(
        self, micro_batches: list[int], losses: Sequence[Loss], ids: list[list[int]], chunk: int | None = None
    ) -> None:
        """Refuse: there are no micro-batches.

        Raises:
            WrongLoop: always.
        """
        raise WrongLoop(f"step {self.number} has no micro-batches left: commit those of step.micro_batches() only")

    def reduce(self) -> None:
        """Do nothing: the update is applied."""

    def end_training(self) -> None:
        """Do nothing: the ranks have agreed whether the training ends here."""

    def clip_gradients(self, limit: float) -> float:
        """Do nothing; the norm is not known any more.

        Returns:
            nan.
        """
        return float("nan")

    def __enter__(self) -> AppliedStep:
        """Enter the part of the loop in which peers may be lost."""
        self._host.link.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Leave the step; swallow an error that a new generation answers, report every other error."""
        self._host.link.leave()
        self._host.end_metrics(self.number, done=True)
        if error is None:
            if self.repeated:
                self._host.put_back()
            return False
        self.left = True
        return self._host.survives(error)


class AppliedOptimizer:
    """An optimizer whose ``step`` does nothing; everything else is the optimizer's own."""

    def __init__(self, optimizer: Any, *, skipped: bool = False) -> None:
        """Stand for an optimizer. ``skipped``: whether it has skipped the update, its gradients being too large."""
        self._optimizer, self._skipped = optimizer, skipped

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimizer."""
        return getattr(self._optimizer, name)

    def step(self, *arguments: Any, **named: Any) -> Any:
        """Do nothing.

        Returns:
            What an optimizer returns that has no more to say: None, or for Megatron's: success, norm, number of zeros.
        """
        return None if isinstance(self._optimizer, torch.optim.Optimizer) else (not self._skipped, None, None)
