"""The exits of a script of Megatron-LM's: ``--exit-interval``, ``--exit-signal-handler`` and others.

With an interval, a duration, a signal handler or phases (``--phase-transition-iterations``) it exits before its end.

Stock's ``train()`` decides between two steps, and ends the process once it has saved. Here the ranks agree inside the
step (``Step.end_training``), so that the library knows the end, and a new process learns of it. Then ``train()`` is
told to exit behind that step; the process ends once the section behind it is done on all ranks.

With ``--exit-signal-handler`` a signal that any rank gets is such an exit, as with stock. A stop that the task's
services ask for also has ``train()`` save behind the last step; the library then stops.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from unicron.process.processes import leaves_sigterm


class Exits:
    """Behind which step a training exits, as this rank sees it.

    To be made in the main thread, which alone may handle signals.
    """

    def __init__(self, args: Any, steps: int) -> None:
        """Take the arguments from stock.

        Args:
            args: Megatron-LM's arguments, or megatron-bridge's settings of a training: these have the same names there.
            steps: the number of steps of the whole training.
        """
        self._args, self._steps = args, steps
        self._phases = getattr(args, "phase_transition_iterations", None) or ()
        self._interval, self._after_s = args.exit_interval, 60.0 * (args.exit_duration_in_mins or 0)
        args.exit_interval = args.exit_duration_in_mins = None
        self._began_s = time.monotonic()
        self._end: SystemExit | None = None
        self._signalled = False
        self._handles_signal, args.exit_signal_handler = args.exit_signal_handler, False
        left = args.exit_signal == signal.SIGTERM and leaves_sigterm()  # the task will be stopped, which also saves
        if self._handles_signal and not left:  # behind Megatron-LM's own handler, which asks all ranks in every step
            signal.signal(args.exit_signal, self._note_signal)

    def _note_signal(self, *_: object) -> None:
        self._signalled = True

    def is_asked(self, number: int) -> bool:
        """Return whether the training is to end behind a step; each rank has a clock, and gets signals, of its own."""
        late = bool(self._after_s) and time.monotonic() - self._began_s > self._after_s
        return self._signalled or late or self._is_of_settings(number)

    def decide(self, number: int, last_step: int, *, stops: bool) -> None:
        """Have ``train()`` exit behind a step or not.

        Args:
            number: the step's.
            last_step: the step behind which the training ends, as the ranks have agreed.
            stops: whether the ranks stop behind the step, as they have agreed.
        """
        ends = number == last_step < self._steps or self._is_of_settings(number)
        self._end = None  # a stop may have been refused, or the section behind the step comes again
        self._args.exit_interval = number if ends or (stops and self._handles_signal) else None

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
            SystemExit: ``train()`` has exited.
        """
        if self._end is not None:
            raise self._end

    def _is_of_settings(self, number: int) -> bool:
        return number in self._phases or (bool(self._interval) and number % self._interval == 0)
