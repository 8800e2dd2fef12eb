"""Injected faults. Two ways lead to one engine: the environment, in tests, and requests of users (``unicron inject``).

The environment has ``UNICRON_FAIL_AT=rank:step:at:kind[:always][,...]``.

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

A request comes as an ``Inject`` of the agent (``unicron.protocol.messages``) and is for this process. Its fault happens
once, at its step, or at the next one that the rank begins, and is announced in the process's output right before. The
points:

    kill, exception, oom, hang=stop|sleep|deadlock|spin   before the step's first micro-batch; in a step in which the
                                                          rank has none left, where it would begin to reduce
    hang=collective    all micro-batches are computed, and the rank does not enter the reduction: it sleeps
    nan[=PARAMETER]    in the backward pass of the rank's first micro-batch of the step, in the gradient of the
                       parameter (the first one of the rank's model)
    spike=FACTOR       the rank reports FACTOR times the loss of its micro-batches of the step; gradients and parameters
                       stay as they are
    slow=FACTOR        from the step on the rank's passes take FACTOR times as long, until ``slow=1``
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unicron.errors import CommunicationFailed
from unicron.process.run_queue import run_queue_wait_s
from unicron.protocol import environment
from unicron.protocol.messages import Inject

FOREVER_S = 86_400.0
"""A time longer than any test or demo."""


BEGIN, REDUCTION = "0", "reduce"
"""The fault points of requests: before the first micro-batch of a step, and before its reduction."""

WORK = 1000
"""Numbers that a rank which is slow by computing adds up between two looks at its clock: some 10 microseconds."""

CHUNK_BYTES = 64 << 20
"""Bytes that an injected ``oom`` allocates at once: a control group's limit is reached within some dozens of such
steps."""

FIRST_TO_GO = "1000"
"""``oom_score_adj`` of the process that the kernel is to end before all others (proc(5))."""


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
    # The call is one of a C function, which looks at no signal and lets no other thread run, for days.
    "spin": lambda: sum(range(10**14)),
}
"""The action of each kind that raises nothing."""

HANGS = {"": "hang", "stop": "hang", "sleep": "sleep", "deadlock": "deadlock", "spin": "spin", "collective": "sleep"}
"""Argument of an injected ``hang`` -> one of ``KINDS``."""

INJECTED = ("kill", "exception", "hang", "slow", "nan", "spike", "oom")
"""Kinds that an ``Inject`` may have."""

RAISED: dict[str, type[Exception]] = {"exception": InjectedFault, "communication": CommunicationFailed}
"""The exceptions that the other kinds raise."""


@dataclass(slots=True)
class RequestedFault:
    """One fault that a user asks for. ``after``: the newest step that had begun when the request came."""

    request: Inject
    after: int

    @property
    def in_reduction(self) -> bool:
        """Whether the fault is to keep the rank from the reduction."""
        return (self.request.kind, self.request.argument) == ("hang", "collective")

    @property
    def text(self) -> str:
        """The fault as users write it."""
        return "=".join(part for part in (self.request.kind, self.request.argument) if part)

    def is_due(self, step: int) -> bool:
        """Return whether the fault belongs to a step; a slowness begins with its step or a later one."""
        wanted = self.request.step
        if wanted and self.request.kind != "slow":
            return step == wanted
        return step > self.after and step >= wanted


@dataclass(slots=True)
class ScheduledFault:
    """One fault that will happen in this process."""

    rank: int | None
    """The rank that the fault is for; None: every rank."""
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
            rank: the rank in the process's first generation.
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
    """The faults of this process: those of the environment, those of requests, and those that SIGUSR1 asks for."""

    def __init__(self) -> None:
        """Read the environment; to be called from the main thread.

        Raises:
            ValueError: a scheduled fault is not of the documented form.
        """
        self._scheduled = [ScheduledFault.parse(one) for one in environment.text(environment.FAIL_AT).split(",") if one]
        self._requested: list[RequestedFault] = []
        self._known: set[str] = set()
        """Ids of the requests that have come."""
        self._slowness = Slowness()
        self._spike: tuple[int, float] | None = None
        """The step whose losses are multiplied, and the factor."""
        self._step = 0
        """The newest step that has begun."""
        self._signalled = False
        if environment.text(environment.FAULT_SIGNALS) == "1":
            signal.signal(signal.SIGUSR1, self._signal)

    def _signal(self, number: int, frame: object) -> None:
        self._signalled = True

    def begin_life(self, rank: int, *, replaces: bool) -> None:
        """Keep the scheduled faults that are this process's.

        Args:
            rank: the rank in the process's first generation.
            replaces: whether the process replaces one that failed.
        """
        self._scheduled = [fault for fault in self._scheduled if fault.belongs_to(rank, replaces=replaces)]

    def request(self, message: Inject) -> None:
        """Take a request, on any thread; one that has come before, or whose step has begun, changes nothing."""
        if message.id in self._known:
            return
        self._known.add(message.id)
        if message.kind not in INJECTED or 0 < message.step <= self._step:
            why = "it is not known here" if message.kind not in INJECTED else f"step {self._step} has begun"
            announce(message.id, f"{message.kind} does not happen: {why}")
            return
        self._requested.append(RequestedFault(message, self._step))

    def _happens(self, fault: RequestedFault, step: int) -> None:
        """Have a requested fault happen once, and say so."""
        self._requested.remove(fault)
        announce(fault.request.id, f"{fault.text} at step {step}")

    def _reach_requested(self, step: int, at: str) -> None:
        """Let requested faults happen that end or stop the process, and take in those that change later steps."""
        if at not in (BEGIN, REDUCTION):
            return
        for fault in [fault for fault in self._requested if fault.is_due(step)]:
            kind, argument = fault.request.kind, fault.request.argument
            if kind == "nan" or (fault.in_reduction and at != REDUCTION):
                continue
            self._happens(fault, step)
            if kind == "slow":
                self._slowness.factor = float(argument)
            elif kind == "spike":
                self._spike = step, float(argument)
            elif kind == "oom":
                use_up_memory(int(argument))
            elif kind == "exception":
                raise InjectedFault(f"injected at step {step}, as a user has asked for (request {fault.request.id})")
            else:
                KINDS[HANGS[argument] if kind == "hang" else kind]()

    def reached(self, step: int, at: str) -> None:
        """Let a fault happen whose fault point this is.

        Raises:
            InjectedFault, CommunicationFailed: as ``ScheduledFault.reached``.
            MemoryError, OSError: as ``use_up_memory``.
        """
        if self._requested:
            self._reach_requested(step, at)
        if at == REDUCTION:
            self._step = max(self._step, step)
        if self._signalled:
            self._signalled = False
            raise InjectedFault(f"injected by SIGUSR1 at step {step}, {at}")
        for fault in self._scheduled:
            fault.reached(step, at)

    def reached_micro_batch(self, step: int, finished: int, chunks: Sequence[Any], *, computes: bool = False) -> None:
        """Let a fault happen before the next micro-batch, or place it into the micro-batch's passes.

        Args:
            step: which step.
            finished: how many of its micro-batches the rank has finished.
            chunks: the modules of the rank's model.
            computes: whether a rank that is to be slow computes for that, and does not sleep.
        """
        self.reached(step, str(finished))
        self._step = max(self._step, step)
        if self._requested:
            self._place_requested(step, finished, chunks)
        for fault in self._scheduled:
            fault.place_in_passes(step, finished, chunks)
        self._slowness.begin(computes=computes)

    def _place_requested(self, step: int, finished: int, chunks: Sequence[Any]) -> None:
        for fault in [fault for fault in self._requested if fault.request.kind == "nan" and fault.is_due(step)]:
            if finished:
                continue
            name = fault.request.argument
            if put_non_finite(chunks, name):
                self._happens(fault, step)
            else:
                self._requested.remove(fault)
                announce(fault.request.id, f"nan does not happen: this rank has no parameter {name!r}")

    def finished_passes(self, step: int, losses: list[Any]) -> list[Any]:
        """Return the losses that the rank reports for micro-batches whose passes have just ended; be slow, if asked."""
        self._slowness.end()
        if self._spike is None or self._spike[0] != step:
            return losses
        return [self._spike[1] * loss for loss in losses]

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


def put_non_finite(chunks: Sequence[Any], name: str) -> bool:
    """Make one element of a parameter's gradient NaN in the next backward pass; return whether there is one.

    The hook of the parameter sees the gradient before it is added to the sums, as a kernel that overflows would leave
    it. Parameters stay as they are: a gradient that is not finite ends the step before its update.

    Args:
        chunks: the modules of the rank's model.
        name: the parameter's, as ``named_parameters`` has it, or its end; empty: the first one.
    """
    named = [(n, p) for chunk in chunks for n, p in chunk.named_parameters() if p.requires_grad]
    found = next((p for n, p in named if not name or n == name or n.endswith(f".{name}")), None)
    if found is None:
        return False
    hook: Any = None

    def spoil(gradient: Any) -> Any:
        hook.remove()
        spoiled = gradient.clone()
        spoiled.view(-1)[0] = float("nan")
        return spoiled

    hook = found.register_hook(spoil)
    return True


def use_up_memory(limit_bytes: int) -> None:
    """Allocate memory until the kernel ends this process for it, before all others in its control group.

    Args:
        limit_bytes: the control group's limit; no more than that is allocated.

    Raises:
        MemoryError: the kernel has not ended the process, and lets nothing more be allocated.
        OSError: the kernel does not let this process be the first to go; nothing was allocated.
    """
    Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    # Memory is written, not only asked for: the kernel counts pages when they are touched.
    taken = [b"\x01" * CHUNK_BYTES for _ in range(limit_bytes // CHUNK_BYTES + 1)]
    raise MemoryError(f"{len(taken)} x {CHUNK_BYTES} bytes were allocated, and the kernel ended nothing")


class Slowness:
    """A rank that takes ``factor`` times as long for its passes.

    The time that is missing is spent after each micro-batch, before that counts as done. As a rule the rank sleeps: a
    slower device keeps its process waiting, too, and the machine's other processes do not get slower with it. On a CPU
    a rank of a replica of several computes, by the clock of its thread: its passes have waits for peers in them, and a
    sleep would look like one.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._computes = False
        self._began_s: float | None = None

    def begin(self, *, computes: bool) -> None:
        """Note that the passes of a micro-batch begin. ``computes``: whether to compute and not to sleep."""
        self._computes = computes
        self._began_s = self._now_s() if self.factor > 1.0 else None

    def end(self) -> None:
        """Be slow for what the passes were too fast by; several may end between two calls of ``begin``."""
        if self._began_s is None:
            return
        missing_s = (self.factor - 1.0) * (self._now_s() - self._began_s)
        if self._computes:
            until_s = self._now_s() + missing_s
            while self._now_s() < until_s:
                sum(range(WORK))
        else:
            time.sleep(missing_s)
        self._began_s = self._now_s() if self.factor > 1.0 else None

    def _now_s(self) -> float:
        """Return the rank's own time so far, without waits for a CPU: a busy machine would make the sleep longer."""
        return time.thread_time() if self._computes else time.monotonic() - run_queue_wait_s()


def announce(fault_id: str, text: str) -> None:
    """Print that a fault happens now, with the time on the machine's clock: measurements begin there."""
    print(f"unicron: injected fault {fault_id}: {text}; unix time {time.time():.6f}", file=sys.stderr, flush=True)
