"""The rank's own compute time of a step: its forward and backward passes, without the time it waited for peers.

All ranks of a task share the duration of a step, since each waits for the slowest. The own compute time tells which one
that is. It is counted from the beginning of the step's block until ``Step.reduce``.

* A rank that is a replica (data parallel), on the CPU: the wall time without that in which the thread was ready and had
  no CPU, and without waits for gathered parameters; at least the thread's CPU time. Everything that the rank itself
  does counts, also a wait for its own data.
* The same on a CUDA device: the time between two events in the stream. A wait of the stream for gathered parameters
  counts as the rank's own.
* A rank of a replica of several (tensor or pipeline parallel), on the CPU: the thread's CPU time. Peers wait for one
  another inside the passes; this leaves such waits out, and with them the rank's other sleep, such as a wait for data.
* The same on a CUDA device: not measured. No clock of the host tells waits in the replica's collectives from computing.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch

from unicron import device

NS_PER_S = 1e9
"""``schedstat`` counts nanoseconds (proc(5))."""

_LINE_BYTES = 96
"""Longest text of ``schedstat``: three numbers of at most 20 digits."""

_own = threading.local()
"""The open ``schedstat`` of each thread, with the process that has opened it: a fork leaves its parent's."""


def run_queue_wait_s() -> float:
    """Return for how long the calling thread has been ready to run without a CPU; 0 if the kernel does not count.

    This is a read of an open file, which takes 4 microseconds (measured).
    """
    if getattr(_own, "pid", None) != os.getpid():
        _own.pid, _own.file = os.getpid(), None
        try:
            _own.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0.0
    if _own.file is None:
        return 0.0
    try:
        return int(os.pread(_own.file, _LINE_BYTES, 0).split()[1]) / NS_PER_S
    except (OSError, IndexError, ValueError):
        return 0.0


class ComputeTimer:
    """Measures the own compute time of one step at a time."""

    def __init__(self) -> None:
        """Prepare to measure."""
        self._alone = True
        self._began: tuple[float, float, float] | None = None
        self._events: tuple[Any, Any] | None = None
        self._spent_s: float | None = None

    def begin(self, *, alone: bool) -> None:
        """Note that a step begins. ``alone``: the rank is a whole replica."""
        self._alone, self._began, self._events, self._spent_s = alone, None, None, None
        if device.is_cuda():
            if alone:
                self._events = _event(), _event()
                self._events[0].record()
            return
        self._began = time.thread_time(), time.perf_counter(), run_queue_wait_s() if alone else 0.0

    def end(self, waited_s: float = 0.0) -> None:
        """Note that the passes are done. ``waited_s``: how long this step's passes have waited for gathered parameters.

        On a device this only puts an event into the stream.
        """
        if self._events is not None:
            self._events[1].record()
        elif self._began is not None:
            ran_s, at_s, starved_s = self._began
            self._spent_s = time.thread_time() - ran_s
            if self._alone:
                # The kernel sometimes counts more waits than there was time (measured on busy cores).
                own_s = time.perf_counter() - at_s - (run_queue_wait_s() - starved_s) - waited_s
                self._spent_s = max(self._spent_s, own_s)

    def result_s(self) -> float | None:
        """Return the own compute time; None if it is not known, or not yet. This waits for nothing.

        The agreement at a step's end reads its result from the device, so at the end of a step the events are over.
        """
        if self._events is not None and self._events[1].query() and self._spent_s is None:
            self._spent_s = self._events[0].elapsed_time(self._events[1]) / 1e3  # milliseconds
        return self._spent_s


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
