"""The loss scale of Megatron's optimizer: numbers that every update changes, and that belong to the state.

With fp16 Megatron multiplies each loss by a scale, so that gradients do not vanish, and divides the gradients by it
before the update. If a gradient is not finite Megatron skips the update, and a dynamic scale shrinks; after some
updates it grows again. The numbers are kept in a tensor, which moves, and is copied and checkpointed, like a buffer of
the model.
"""

from __future__ import annotations

from typing import Any

import torch

from unicron import device

NAME = "unicron.loss_scale"
"""Name of the tensor, among those of parameters and buffers."""

_SKIPPED, _REPLICAS, _SKIPS, _SCALE = range(4)
"""The place of each number: whether the last update was skipped, the number of replicas, how many updates were skipped
since the training began; from ``_SCALE`` on come the numbers of each of Megatron's scalers."""

_TRACKERS = ("_growth_tracker", "_hysteresis_tracker")
"""Attributes of a scaler: for how many updates it has not shrunk, and how often it may be found too large before it
shrinks."""


class GradScaler:
    """The loss scale of one rank's optimizer, if it has one."""

    def __init__(self, optimizer: Any) -> None:
        """Look at Megatron's optimizer, or torch's, which has no scale."""
        self._optimizer = optimizer
        parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
        self._scalers = [one.grad_scaler for one in parts if getattr(one, "grad_scaler", None) is not None]
        self.applies = bool(self._scalers)
        """Whether the optimizer has a scale."""
        self._kept = [0.0, 1.0, 0.0, *self._present()]
        """The numbers behind the update behind which the state stands; the host reads them without the device."""
        self._first = list(self._kept)
        self.numbers = torch.tensor(self._kept, dtype=torch.float64, device=device.current() if self.applies else "cpu")
        """The same numbers as a tensor, to which others may be written: then ``load`` comes next."""

    def spread(self, replicas: int) -> None:
        """Multiply losses by a number of replicas, and divide each rank's sums by it before ranks add them up.

        Megatron adds up sums of this size, and sums in float16 are rounded, and overflow, according to their size. The
        number is that of the task's first generation, and stays when replicas are lost or added.
        """
        self._first[_REPLICAS] = replicas
        self.reset()

    @property
    def replicas(self) -> float:
        """The factor by which losses are multiplied, and sums divided before they are added up; 1: no scale."""
        return self._kept[_REPLICAS]

    @property
    def skipped(self) -> bool:
        """Whether the update behind which the state stands was skipped."""
        return bool(self._kept[_SKIPPED])

    @property
    def skips(self) -> int:
        """How many of the updates behind which the state stands were skipped."""
        return int(self._kept[_SKIPS])

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss, multiplied by the scale."""
        scaled: torch.Tensor = self._optimizer.scale_loss(loss)
        return scaled

    def keep(self, *, skipped: bool) -> None:
        """Keep the numbers as they are behind an update. ``skipped``: whether the update was skipped."""
        self._set([float(skipped), self.replicas, float(self.skips + skipped), *self._present()])

    def take(self, skips: int) -> None:
        """Keep the numbers that Megatron's scalers have loaded with a state of which so many updates were skipped."""
        self._set([0.0, self.replicas, float(skips), *self._present()])

    def reset(self) -> None:
        """Keep the numbers with which a task begins."""
        self._set(list(self._first))

    def _set(self, kept: list[float]) -> None:
        self._kept = kept
        if self.applies:
            self.numbers.copy_(torch.tensor(kept, dtype=torch.float64))

    def load(self) -> None:
        """Take the numbers that another rank's state, a copy or a checkpoint has put into the tensor."""
        if self.applies:
            self._kept = self.numbers.tolist()
        self.restore()

    def restore(self) -> None:
        """Give Megatron's scalers the numbers that are kept: undo what an update has done that was broken off."""
        for i, scaler in enumerate(self._scalers):
            scale, *trackers = self._kept[_SCALE + 3 * i : _SCALE + 3 * i + 3]
            scaler._scale = torch.full_like(scaler._scale, scale)
            for name, value in zip(_TRACKERS, trackers, strict=True):
                if hasattr(scaler, name):
                    setattr(scaler, name, int(value))

    def _present(self) -> list[float]:
        return [
            float(value)
            for scaler in self._scalers
            for value in (scaler.scale, *(getattr(scaler, name, 0) for name in _TRACKERS))
        ]
