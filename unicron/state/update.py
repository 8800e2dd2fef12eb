"""The update of one step: how far this rank's optimizer has come with it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from unicron.megatron.grad_scaler import GradScaler
from unicron.megatron.optimizer import torch_optimizers


class Stage(Enum):
    """The stage of an update that an optimizer has reached."""

    NOT_BEGUN = "not begun"
    UNDER_WAY = "under way"
    APPLIED = "applied"
    SKIPPED = "skipped"
    """A gradient was too large for its scale: parameters are as they were, and the update counts as one."""


class Update:
    """The update of the step in progress, as the hooks of torch's optimizers see it.

    The hooks keep this object alive, so it must not refer to the rank's state.
    """

    def __init__(self, optimizer: Any, scaler: GradScaler) -> None:
        """Watch an optimizer: torch's, or Megatron's around it; ``scaler``: its loss scale."""
        self.stage = Stage.NOT_BEGUN
        self._scaler = scaler
        self.is_entered = False
        """Whether an optimizer with a loss scale has been called: it may have divided gradients by the scale."""
        self.check: Callable[[], None] = lambda: None
        """Called before an update begins; an error keeps it from beginning."""
        self.check_once: Callable[[], None] | None = None
        """Called after that, before a single update; an error keeps it from beginning."""
        for one in torch_optimizers(optimizer):
            one.register_step_pre_hook(lambda *_: self._begin())
            one.register_step_post_hook(lambda *_: self._end(Stage.APPLIED))
        if scaler.applies:
            optimizer.step = partial(self._step, optimizer.step)

    def _step(self, step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call Megatron's ``step``, which does not call torch's if it skips the update."""
        self.is_entered = True
        found = step(*arguments, **named)
        if self.stage is Stage.NOT_BEGUN:
            self._end(Stage.SKIPPED)
        return found

    def _end(self, stage: Stage) -> None:
        self._scaler.keep(skipped=stage is Stage.SKIPPED)
        self._reach(stage)

    def _begin(self) -> None:
        if self.stage is Stage.NOT_BEGUN:
            self.check()
            if self.check_once is not None:
                check, self.check_once = self.check_once, None
                check()
        self._reach(Stage.UNDER_WAY)

    def _reach(self, stage: Stage) -> None:
        self.stage = stage

    def reset(self) -> None:
        """Note that no update has begun: a new step."""
        self.stage, self.is_entered = Stage.NOT_BEGUN, False
