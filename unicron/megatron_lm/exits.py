"""``--exit-interval`` and ``--exit-duration-in-mins``: the exits that a script of Megatron-LM's asks for by itself.

Stock's ``train()`` decides between two steps, and ends the process once it has saved. Here the ranks agree inside the
step (``Step.end_training``), so that the library knows the end, and a new process learns of it. Then ``train()`` is
told to exit behind that step; the process ends once the section behind it is done on all ranks.
"""

from __future__ import annotations

import time
from typing import Any


class Exits:
    """Behind which step a training exits, as this rank sees it."""

    def __init__(self, args: Any, steps: int) -> None:
        """Take the arguments from stock.

        Args:
            args: Megatron-LM's arguments.
            steps: of the whole training.
        """
        self._args, self._steps = args, steps
        self._interval, self._after_s = args.exit_interval, 60.0 * (args.exit_duration_in_mins or 0)
        args.exit_interval = args.exit_duration_in_mins = None
        self._began_s = time.monotonic()
        self._end: SystemExit | None = None

    def is_asked(self, number: int) -> bool:
        """Return whether the arguments ask for an exit behind a step; each rank has a clock of its own."""
        late = bool(self._after_s) and time.monotonic() - self._began_s > self._after_s
        return late or self._is_of_interval(number)

    def decide(self, number: int, last_step: int) -> None:
        """Have ``train()`` exit behind a step or not.

        Args:
            number: of the step.
            last_step: the step behind which the training ends, as the ranks have agreed.
        """
        exits = number == last_step < self._steps or self._is_of_interval(number)
        self._args.exit_interval = number if exits else None

    def __enter__(self) -> None:
        """Have ``train()`` called inside, which may exit."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Keep the exit of ``train()`` for later, if it is the one that was decided."""
        if not isinstance(error, SystemExit) or self._args.exit_interval is None:
            return False
        self._end = error
        return True

    def exit(self) -> None:
        """End the process as ``train()`` would have, if it has exited.

        Raises:
            SystemExit: it has.
        """
        if self._end is not None:
            raise self._end

    def _is_of_interval(self, number: int) -> bool:
        return bool(self._interval) and number % self._interval == 0
