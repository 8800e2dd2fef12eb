"""The update of one step: how far this rank's optimizer is with it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from unicron.megatron.optimizer import torch_optimizers


class Stage(Enum):
    """How far an optimizer is with an update."""

    NOT_BEGUN = "not begun"
    UNDER_WAY = "under way"
    APPLIED = "applied"


class Update:
    """The update of the step in progress, as the hooks of torch's optimizers see it.

    The hooks keep this object alive, so it must not refer to the rank's state.
    """

    def __init__(self, optimizer: Any) -> None:
        """Watch an optimizer: torch's, or Megatron's around it."""
        self.stage = Stage.NOT_BEGUN
        self.check: Callable[[], None] = lambda: None
        """Called before an update begins; an error keeps it from beginning."""
        self.check_once: Callable[[], None] | None = None
        """Called behind that, before one update alone; an error keeps it from beginning."""
        for one in torch_optimizers(optimizer):
            one.register_step_pre_hook(lambda *_: self._begin())
            one.register_step_post_hook(lambda *_: self._reach(Stage.APPLIED))

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
        self.stage = Stage.NOT_BEGUN
