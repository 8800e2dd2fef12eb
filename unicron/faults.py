"""Deterministic faults, for tests and the demo: ``UNICRON_FAIL_AT=rank:step:at:kind[:always]``.

``at`` counts the rank's own micro-batches of that step from 0 (the fault comes before it), or is ``reduce`` (all
computed, gradients not yet reduced) or ``update`` (reduced, not yet applied). ``kind``: ``exception``, ``kill``
(SIGKILL) or ``hang`` (SIGSTOP). ``rank`` is the one the process has in its first generation, whatever it becomes. A
fault happens once in a process, and only in a process that started the task: one that replaces a failed process does
not repeat it unless ``always`` is appended.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

VARIABLE = "UNICRON_FAIL_AT"

SIGNALS_VARIABLE = "UNICRON_FAULT_SIGNALS"
"""Set to 1, a process that gets SIGUSR1 raises ``InjectedFault`` at the next place in a step that can fail."""

KINDS = ("exception", "kill", "hang")


class InjectedFault(RuntimeError):
    """The exception of an injected fault: as foreign to the library as a user's own."""


@dataclass(slots=True)
class Fault:
    """One fault that will happen in this process."""

    rank: int | None
    step: int
    at: str
    kind: str
    always: bool

    @classmethod
    def from_environment(cls) -> Fault | None:
        """Return the fault that the environment asks for.

        Raises:
            ValueError: it is not of the documented form.
        """
        text = os.environ.get(VARIABLE, "")
        if not text:
            return None
        parts = text.split(":")
        if len(parts) not in (4, 5) or parts[3] not in KINDS or (len(parts) == 5 and parts[4] != "always"):
            raise ValueError(f"{VARIABLE}={text}: rank:step:at:kind[:always] is needed, kind one of {', '.join(KINDS)}")
        return cls(
            rank=None if parts[0] == "*" else int(parts[0]),
            step=int(parts[1]),
            at=parts[2],
            kind=parts[3],
            always=len(parts) == 5,
        )

    def reached(self, step: int, at: str) -> None:
        """Fail if this is the place.

        Raises:
            InjectedFault: for kind ``exception``.
        """
        if (self.step, self.at) != (step, at):
            return
        self.step = -1  # once
        if self.kind == "exception":
            raise InjectedFault(f"injected at step {step}, {at}")
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


class SignalledFault:
    """A fault that is asked for from outside, by SIGUSR1, where the environment allows it."""

    def __init__(self) -> None:
        """Listen; to be called from the main thread."""
        self._asked = False
        if os.environ.get(SIGNALS_VARIABLE) == "1":
            signal.signal(signal.SIGUSR1, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self._asked = True

    def reached(self, step: int, at: str) -> None:
        """Fail if it was asked for.

        Raises:
            InjectedFault: once for each time it was asked for.
        """
        if self._asked:
            self._asked = False
            raise InjectedFault(f"injected by SIGUSR1 at step {step}, {at}")
