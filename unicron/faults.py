"""Deterministic faults, for tests and the demo: ``UNICRON_FAIL_AT=rank:step:at:kind[:always][,...]``.

``at``, where n counts the micro-batches of that step that the rank has finished, from 0:

    n              before the next micro-batch (of a pipeline: before its backward pass)
    n.forward      inside its forward pass
    n.backward     inside its backward pass: some gradients are added, some are not
    reduce         all are computed, gradients not yet reduced
    reduce:b       b buckets of gradients are reduced, and no more on any rank
    update         all are reduced, the update is not yet applied
    apply          inside the optimizer's step: a parameter is changed, the others are not
    move:r         r rounds of state have moved into a new generation, which is to go on with that step
    checkpoint     as the first checkpoint of that step or a later one begins (one at a time is written)

``kind``: ``exception``; ``communication`` (as if a collective broke: the process goes on); ``kill`` (SIGKILL); or one
of the hangs: ``hang`` (SIGSTOP), ``sleep`` (as in a data loader that waits), ``deadlock`` (a lock that nobody
releases) and ``spin`` (native code that computes on and holds the interpreter lock). ``rank`` is the one the process
has in its first generation, whatever it becomes. A fault happens once in a process, and only in a process that
started the task: one that replaces a failed process does not repeat it unless ``always`` is appended. Several are
separated by commas.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unicron.errors import CommunicationFailed

VARIABLE = "UNICRON_FAIL_AT"

SIGNALS_VARIABLE = "UNICRON_FAULT_SIGNALS"
"""Set to 1, a process that gets SIGUSR1 raises ``InjectedFault`` at the next place in a step that can fail."""

FOREVER_S = 86_400.0


class InjectedFault(RuntimeError):
    """The exception of an injected fault: as foreign to the library as a user's own."""


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


KINDS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(FOREVER_S),
    "deadlock": _deadlock,
    # One call of a C function, which looks at no signal and lets no other thread run: days of it.
    "spin": lambda: sum(range(10**14)),
}
"""What each kind does that raises nothing."""

RAISED: dict[str, type[Exception]] = {"exception": InjectedFault, "communication": CommunicationFailed}
"""What the other kinds raise."""


@dataclass(slots=True)
class Fault:
    """One fault that will happen in this process."""

    rank: int | None
    step: int
    at: str
    kind: str
    always: bool

    @classmethod
    def from_environment(cls) -> list[Fault]:
        """Return the faults that the environment asks for.

        Raises:
            ValueError: one is not of the documented form.
        """
        text = os.environ.get(VARIABLE, "")
        return [cls.parse(one) for one in text.split(",") if one]

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Return the fault that a text describes.

        Raises:
            ValueError: they are not of the documented form.
        """
        parts = text.split(":")
        always = parts[-1] == "always"
        parts = parts[: len(parts) - always]
        if len(parts) < 4 or parts[-1] not in (*RAISED, *KINDS):
            kinds = ", ".join((*RAISED, *KINDS))
            raise ValueError(f"{VARIABLE}={text}: rank:step:at:kind[:always] is needed, kind one of {kinds}")
        return cls(
            rank=None if parts[0] == "*" else int(parts[0]),
            step=int(parts[1]),
            at=":".join(parts[2:-1]),
            kind=parts[-1],
            always=always,
        )

    def belongs_to(self, rank: int, *, replaces: bool) -> bool:
        """Whether it is for the process that begins its life as ``rank``; ``replaces``: in place of one that failed."""
        return self.rank in (None, rank) and (self.always or not replaces)

    def reached(self, step: int, at: str) -> None:
        """Fail if this is the place.

        Raises:
            InjectedFault: for kind ``exception``.
            CommunicationFailed: for kind ``communication``.
        """
        if (self.step, self.at) != (step, at):
            return
        self.step = -1  # once
        if self.kind in RAISED:
            raise RAISED[self.kind](f"injected at step {step}, {at}")
        KINDS[self.kind]()

    def reached_after(self, step: int, at: str) -> None:
        """Fail if this is the place, in the fault's step or a later one.

        Raises:
            InjectedFault, CommunicationFailed: as ``reached``.
        """
        if 0 < self.step <= step:
            self.reached(self.step, at)

    def lay(self, step: int, finished: int, model: Any) -> None:
        """Lay the fault into the passes of the next micro-batch if it belongs there."""
        forward, backward = f"{finished}.forward", f"{finished}.backward"
        if self.step != step or self.at not in (forward, backward):
            return
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        modules = [module for module in model.modules() if not list(module.children()) and list(module.parameters())]
        hook: Any = None

        def spring(*_: Any) -> None:
            hook.remove()
            self.reached(step, self.at)

        if self.at == forward:
            hook = modules[len(modules) // 2].register_forward_pre_hook(spring)
        else:
            hook = parameters[len(parameters) // 2].register_hook(spring)

    def lay_in_update(self, step: int, optimizer: Any) -> None:
        """Lay the fault into the optimizer's step if it belongs there.

        Args:
            step: the step that is to be applied.
            optimizer: torch's.
        """
        if (self.step, self.at) != (step, "apply"):
            return

        hook: Any = None

        def spring(*_: Any) -> None:
            hook.remove()
            optimizer.param_groups[0]["params"][0].data.add_(1.0)
            self.reached(step, "apply")

        hook = optimizer.register_step_pre_hook(spring)


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
