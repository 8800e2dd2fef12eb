"""A communicator of the contract backend: gloo, and a thread that does its collectives in the order of their issue."""

from __future__ import annotations

import contextlib
import enum
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.unicron.contract import stream
from tests.unicron.contract.guard import end_process
from tests.unicron.contract.settings import Settings
from tests.unicron.contract.work import ContractWork, Operation, Outcome, spoil
from unicron.process import sockets

POLL_S = 0.01
"""Between two looks at whether the device stands still: a file tells nobody."""


class State(enum.Enum):
    """Of a communicator."""

    OPEN = enum.auto()
    ABORTING = enum.auto()
    """What ends from here on is garbage."""
    ABORTED = enum.auto()
    CLOSED = enum.auto()


class Communicator:
    """The ranks of a group, or two of them, and the collectives that are under way between them."""

    def __init__(self, name: str, settings: Settings, gloo: Any, inodes: frozenset[int]) -> None:
        """Start the thread.

        Args:
            name: for reports.
            settings: of the process.
            gloo: torch's backend; used, and given back, by the thread alone: its destructor may wait for long.
            inodes: of gloo's sockets.
        """
        self.name = name
        self._settings = settings
        self._inodes = inodes
        self._has_peers = gloo.size() > 1
        self._changed = stream.changed
        self._queue: deque[ContractWork] = deque()
        self._pending: deque[ContractWork] = deque()
        """Those of the queue, and the one that is being done."""
        self._state = State.OPEN
        self._broken_at_s: float | None = None
        """When a connection was found broken: nothing that was issued ends any more, but by an abort."""
        self.on_broken: weakref.WeakMethod[Any] | None = None
        """Called, on the thread, when that is found."""
        everything.add(self)
        threading.Thread(target=self._run, args=(gloo,), name=f"contract {name}", daemon=True).start()

    def __repr__(self) -> str:
        return f"communicator {self.name}"

    # The thread.

    def _run(self, gloo: Any) -> None:
        with torch.no_grad(), contextlib.suppress(_Gone):
            while True:
                self._do(gloo, *self._next())

    def _next(self) -> tuple[ContractWork, Operation]:
        with self._changed:
            while self._state is State.OPEN and not (self._queue and self._queue[0].may_begin):
                self._changed.wait()
            if self._state is not State.OPEN:
                raise _Gone
            work = self._queue.popleft()
            assert work.operation is not None
            return work, work.operation

    def _do(self, gloo: Any, work: ContractWork, operation: Operation) -> None:
        # Not when it was issued: a stream reads what is there when it comes to it.
        read = [tensor.data.clone(memory_format=torch.contiguous_format) for tensor in operation.reads]
        with self._changed:
            if self._state is not State.OPEN:
                raise _Gone
            # What a collective writes is undefined from here until it is waited for.
            self._write(work, operation)
        try:
            results = operation.perform(gloo, read)
        except Exception as error:
            self._break(operation, error)
            raise _Gone from None
        with self._changed:
            while work.is_stuck and self._state is State.OPEN:
                self._changed.wait()
            if self._state is not State.OPEN:
                raise _Gone
            self._write(work, operation, results)
            work.settle(Outcome.ENDED)
            self._pending.remove(work)
            self._changed.notify_all()
        if operation.afterwards is not None:
            try:
                operation.afterwards(gloo)
            except Exception as error:
                self._break(operation, error)
                raise _Gone from None

    @staticmethod
    def _write(work: ContractWork, operation: Operation, results: Sequence[torch.Tensor] | None = None) -> None:
        """Write results, or garbage. Where the host has gone on it is garbage already, and may be written anew."""
        if work.is_left_behind:
            return
        if results is None:
            spoil(operation.writes)
            return
        for tensor, result in zip(operation.writes, results, strict=True):
            tensor.data.copy_(result.view(tensor.shape))

    def _break(self, operation: Operation, error: Exception) -> None:
        """Note that gloo has found a connection broken.

        NCCL's kernel waits on for what does not come. The error stays here; only who asks for it finds that there is
        one, and only where sockets are the transport (nccl: ``ncclCommGetAsyncError``).
        """
        with self._changed:
            if self._state is not State.OPEN:
                return
            if "gloo" not in str(error) and "onnection" not in str(error):
                end_process("a collective cannot be done", f"{operation.name} on {self!r}: {error!r}")
            self._broken_at_s = time.monotonic()
        print(f"contract: {operation.name} on {self!r} does not end: {error}", file=sys.stderr, flush=True)
        listener = self.on_broken() if self.on_broken is not None else None
        if listener is not None:
            listener()

    # The threads that use it.

    def issue(self, operation: Operation) -> ContractWork:
        """Have a collective done once all those before it are.

        Raises:
            DistBackendError: the communicator was aborted (NCCLUtils.cpp, ``NCCLComm::getNcclComm``), or its transport
                has found a peer dead (nccl: src/enqueue.cc, ``ncclEnqueueCheck``, which asks ``ncclCommEnsureReady``).
        """
        if self.has_error():
            raise dist.DistBackendError(f"NCCL error: remote process exited or there was a network error: {self!r}")
        with self._changed:
            if self._state is not State.OPEN:
                raise dist.DistBackendError(f"NCCL communicator was aborted: {self!r}")
            work = ContractWork(operation, self)
            self._queue.append(work)
            self._pending.append(work)
            self._changed.notify_all()
            return work

    def pending(self) -> list[ContractWork]:
        """Return what has not ended."""
        with self._changed:
            return list(self._pending)

    def wait_for(self, works: Sequence[ContractWork], *, or_abort: bool = False) -> None:
        """Wait until collectives have ended, or were aborted.

        Args:
            works: issued here.
            or_abort: whether the beginning of an abort does, too.
        """
        with self._changed:
            while not all(work.has_ended for work in works):
                if or_abort and self._state is not State.OPEN:
                    return
                self._changed.wait()

    def order(self, work: ContractWork) -> None:
        """Have the calling thread's stream wait for a collective; the thread does, too, unless the device stands still.

        Args:
            work: issued here.
        """
        with self._changed:
            while not work.has_ended:
                # A collective of one rank waits for no peer, only for what is before it on the device.
                if self._settings.stands_still() and not (work.is_due and not self._has_peers):
                    work.leave_behind()
                    return
                self._changed.wait(POLL_S if self._settings.ahead else None)

    @property
    def is_open(self) -> bool:
        """Whether it was neither aborted nor destroyed."""
        return self._state is State.OPEN

    def has_error(self) -> bool:
        """Return whether a peer's death shows by now."""
        with self._changed:
            broken_at_s = self._broken_at_s
            shows = self._settings.mode == "sockets" and broken_at_s is not None
            return shows and broken_at_s is not None and time.monotonic() >= broken_at_s + self._settings.notice_s

    def is_found_broken(self) -> bool:
        """Return whether there is an error, for someone who asks; wait for the end of an abort that is under way."""
        with self._changed:
            was_aborting = self._state is State.ABORTING
            while self._state is State.ABORTING:
                self._changed.wait()
        return was_aborting or (self.is_open and self.has_error())

    def begin_abort(self) -> None:
        """Distrust all that has not ended by now."""
        with self._changed:
            if self._state is State.OPEN:
                self._state = State.ABORTING
                self._changed.notify_all()

    def end_abort(self) -> None:
        """End everything that is under way, with garbage."""
        with self._changed:
            if self._state is not State.ABORTING:
                return
            self._state = State.ABORTED
            self._drop_pending()
        self._end_thread()

    def abort_at_once(self) -> None:
        """Abort, or wait for the abort that is under way."""
        with self._changed:
            if self._state is State.OPEN:
                self._state = State.ABORTING
            else:
                while self._state is State.ABORTING:
                    self._changed.wait()
                return
        self.end_abort()

    def close(self) -> None:
        """Give the thread up."""
        with self._changed:
            if self._state is State.CLOSED:
                return
            self._state = State.CLOSED
            self._drop_pending()
        self._end_thread()

    def _drop_pending(self) -> None:
        for work in self._pending:
            if work.operation is not None:
                self._write(work, work.operation)
            work.settle(Outcome.ABORTED)
        self._pending.clear()
        self._queue.clear()
        self._changed.notify_all()

    def _end_thread(self) -> None:
        """Have gloo return to the thread. That this ends collectives is gloo's; what ended them here is the abort."""
        sockets.shut(self._inodes.__contains__)


class _Gone(Exception):
    """The communicator is not open any more, or its thread can do nothing more."""


everything: weakref.WeakSet[Communicator] = weakref.WeakSet()
"""The communicators of this process."""
