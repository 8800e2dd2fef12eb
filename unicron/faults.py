"""Injected faults, for tests and the demo: ``UNICRON_FAIL_AT=rank:step:at:kind[:always][,...]``.

``at`` is the fault point, where n counts the micro-batches of that step that the rank has finished, from 0:

    n              before the next micro-batch (of a pipeline: before its backward pass)
    n.forward      inside its forward pass
    n.backward     inside its backward pass: some gradients are added, some are not
    launch:b       in the last backward pass, b bucket groups (without the distributed optimizer: buckets) are sent to
                   be reduced and the next one is not (those that no pass sends, as in the first step after a build, are
                   sent after ``reduce``)
    reduce         all micro-batches are computed, gradients are not yet reduced
    reduce:b       b buckets of gradients are reduced, and no more on any rank
    update         all buckets are reduced, the update is not yet applied
    apply          inside the optimizer's step: one parameter is changed, the others are not
    gather         the update is applied, this rank's part of the parameters is not yet sent (overlapped gather)
    gather:b       in the first forward pass of the step, b bucket groups of parameters have come, and the next has not
    move:r         r rounds of state have moved into a new generation, which is to go on with that step
    checkpoint     as the first checkpoint of that step or a later one begins (one at a time is written)

``kind`` is ``exception``; ``communication`` (as if a collective broke: the process goes on); ``kill`` (SIGKILL); or one
of the hangs: ``hang`` (SIGSTOP), ``sleep`` (as in a data loader that waits), ``deadlock`` (a lock that nobody releases)
and ``spin`` (native code that computes on and keeps the interpreter lock). ``rank`` is the rank that the process has in
its first generation, whatever it becomes; ``*`` means every rank. A fault happens once in a process, and only in a
process that started the task: a process that replaces a failed one does not repeat the fault unless ``always`` is
appended.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unicron import environment
from unicron.errors import CommunicationFailed

FOREVER_S = 86_400.0
"""Longer than any test or demo."""


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
class ScheduledFault:
    """One fault that will happen in this process."""

    rank: int | None
    """None: every rank."""
    step: int
    at: str
    kind: str
    always: bool

    @classmethod
    def parse(cls, text: str) -> ScheduledFault:
        """Return the fault that a text describes.

        Raises:
            ValueError: the text is not of the documented form.
        """
        parts = text.split(":")
        always = parts[-1] == "always"
        parts = parts[: len(parts) - always]
        if len(parts) < 4 or parts[-1] not in (*RAISED, *KINDS):
            kinds = ", ".join((*RAISED, *KINDS))
            raise ValueError(f"{environment.FAIL_AT}={text}: rank:step:at:kind[:always] is needed, kind one of {kinds}")
        return cls(
            rank=None if parts[0] == "*" else int(parts[0]),
            step=int(parts[1]),
            at=":".join(parts[2:-1]),
            kind=parts[-1],
            always=always,
        )

    def belongs_to(self, rank: int, *, replaces: bool) -> bool:
        """Return whether the fault is for the process that begins its life as ``rank``.

        Args:
            rank: in the process's first generation.
            replaces: whether the process replaces one that failed.
        """
        return self.rank in (None, rank) and (self.always or not replaces)

    def reached(self, step: int, at: str) -> None:
        """Fail if this is the fault point.

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

    def place_in_passes(self, step: int, finished: int, chunks: Sequence[Any]) -> None:
        """Place the fault into the passes of the next micro-batch if it belongs there."""
        forward, backward = f"{finished}.forward", f"{finished}.backward"
        if self.step != step or self.at not in (forward, backward):
            return
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
        modules = [m for chunk in chunks for m in chunk.modules() if not list(m.children()) and list(m.parameters())]
        hook: Any = None

        def fail(*_: Any) -> None:
            hook.remove()
            self.reached(step, self.at)

        if self.at == forward:
            hook = modules[len(modules) // 2].register_forward_pre_hook(fail)
        else:
            hook = parameters[len(parameters) // 2].register_hook(fail)

    def place_in_update(self, step: int, optimizer: Any) -> None:
        """Place the fault into a torch optimizer's step if it belongs there.

        Args:
            step: the step that is to be applied.
            optimizer: torch's.
        """
        if (self.step, self.at) != (step, "apply"):
            return

        hook: Any = None

        def fail(*_: Any) -> None:
            hook.remove()
            optimizer.param_groups[0]["params"][0].data.add_(1.0)
            self.reached(step, "apply")

        hook = optimizer.register_step_pre_hook(fail)


class FaultInjector:
    """The faults of this process: those that the environment schedules, and those that SIGUSR1 asks for."""

    def __init__(self) -> None:
        """Read the environment; to be called from the main thread.

        Raises:
            ValueError: a scheduled fault is not of the documented form.
        """
        self._scheduled = [ScheduledFault.parse(one) for one in environment.text(environment.FAIL_AT).split(",") if one]
        self._signalled = False
        if environment.text(environment.FAULT_SIGNALS) == "1":
            signal.signal(signal.SIGUSR1, self._signal)

    def _signal(self, number: int, frame: object) -> None:
        self._signalled = True

    def begin_life(self, rank: int, *, replaces: bool) -> None:
        """Keep the scheduled faults that are this process's.

        Args:
            rank: in the process's first generation.
            replaces: whether the process replaces one that failed.
        """
        self._scheduled = [fault for fault in self._scheduled if fault.belongs_to(rank, replaces=replaces)]

    def reached(self, step: int, at: str) -> None:
        """Let a fault happen whose fault point this is.

        Raises:
            InjectedFault, CommunicationFailed: as ``ScheduledFault.reached``.
        """
        if self._signalled:
            self._signalled = False
            raise InjectedFault(f"injected by SIGUSR1 at step {step}, {at}")
        for fault in self._scheduled:
            fault.reached(step, at)

    def reached_micro_batch(self, step: int, finished: int, chunks: Sequence[Any]) -> None:
        """Let a fault happen before the next micro-batch, or place it into the micro-batch's passes.

        Args:
            step: which step.
            finished: how many of its micro-batches the rank has finished.
            chunks: the modules of the rank's model.
        """
        self.reached(step, str(finished))
        for fault in self._scheduled:
            fault.place_in_passes(step, finished, chunks)

    def reached_update(self, step: int, optimizer: Any) -> None:
        """Let a fault happen before the update of a step, or place it into the update.

        Args:
            step: which step.
            optimizer: torch's.
        """
        self.reached(step, "update")
        for fault in self._scheduled:
            fault.place_in_update(step, optimizer)

    def reached_checkpoint(self, step: int) -> None:
        """Let a fault happen that is scheduled for the first checkpoint of its step or a later one."""
        for fault in self._scheduled:
            if 0 < fault.step <= step:
                fault.reached(fault.step, "checkpoint")

    def fails_between_buckets(self, step: int) -> bool:
        """Return whether a fault will come in the middle of this step's reduction."""
        return any(fault.step == step and fault.at.startswith("reduce:") for fault in self._scheduled)
