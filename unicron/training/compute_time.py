"""The rank's own compute time of a step: its forward and backward passes, without the time it waited for peers.

All ranks of a task share the duration of a step, since each waits for the slowest. The own compute time tells which one
that is. It is counted from the beginning of the step's block until ``Step.reduce``.

* On a CUDA device: the time between two events in the stream, less the times between an event right before and one
  right after each place where the stream waits for peers, which is at a collective (``unicron.link.issuing``). Whatever
  keeps the stream idle between two collectives counts as the rank's own, also its host.
* A rank that is a replica (data parallel), on the CPU: the wall time without that in which the thread was ready and had
  no CPU, and without waits for gathered parameters; at least the thread's CPU time. Everything that the rank itself
  does counts, also a wait for its own data.
* A rank of a replica of several (tensor or pipeline parallel), on the CPU: the thread's CPU time. Peers wait for one
  another inside the passes; this leaves such waits out, and with them the rank's other sleep, such as a wait for data.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from unicron import device
from unicron.link import issuing
from unicron.process.run_queue import run_queue_wait_s

MS_PER_S = 1e3
"""CUDA's events count milliseconds."""

COST = 0.002
"""Largest part of a rank's time that the measuring on a device may take (the requirement on the library)."""


class Stream(Protocol):
    """The clock of a device, which is behind the host: what it has passed is known later."""

    def moment(self) -> Any:
        """Return the moment at which the calling thread's stream comes to what is issued next. This waits for nothing.

        A moment is void once ``reuse`` is called.
        """

    def passed(self, moment: Any) -> bool:
        """Return, without waiting, whether the stream has come to a moment."""

    def between_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two moments that the stream has passed.

        Raises:
            RuntimeError: it has not passed one of them.
        """

    def reuse(self) -> None:
        """Give up all moments."""


class CudaStream:
    """The clock of the CUDA device: events in the calling thread's stream, made once and recorded again and again."""

    def __init__(self) -> None:
        """Make no event yet."""
        self._events: list[Any] = []
        self._used = 0

    def moment(self) -> Any:
        """Record an event."""
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def passed(self, moment: Any) -> bool:
        """Return whether an event has happened."""
        return bool(moment.query())

    def between_s(self, begin: Any, end: Any) -> float:
        """Return the time between two events."""
        return float(begin.elapsed_time(end)) / MS_PER_S

    def reuse(self) -> None:
        """Record the events again from the first one on."""
        self._used = 0


class _Segments:
    """The rank's time between its collectives, on the clock of a device.

    Each moment costs time. The cost of a step is the number of its moments times what a moment has cost on average in
    the cheapest step so far, of noting and of reading it. Where the cost is above ``COST`` of the step, only each n-th
    step is measured: all ranks of a pipeline stage take part in as many collectives and have steps of the same length,
    so they come to the same n, which is a power of two and never falls again.
    """

    def __init__(self, stream: Stream, now_s: Callable[[], float]) -> None:
        self._stream, self._now_s = stream, now_s
        self.every = 1
        """Each so many steps one is measured."""
        self._begin: Any = None
        self._end: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._began_s = self._noting_s = 0.0
        self._moment_s: float | None = None
        """What a moment costs; None before the second measured step: in the first one events are made."""
        self._is_first = True

    def begin(self, step: int) -> None:
        """Measure a step, if it is one that is to be measured."""
        self.stop()
        self._begin = self._end = None
        if step % self.every:
            return
        self._stream.reuse()
        self._waits, self._began_s, self._noting_s = [], self._now_s(), 0.0
        self._begin = self._moment()
        issuing.watch(self)

    def stop(self) -> None:
        """Look at no more collectives."""
        issuing.watch(None)

    def end(self) -> None:
        """Note that the passes are done."""
        self.stop()
        if self._begin is not None and self._end is None:
            self._end = self._moment()

    def wait_begins(self) -> Any:
        """Note that the calling thread's stream comes to a place where it waits for peers, which may be none."""
        return self._moment()

    def wait_ends(self, begun: Any) -> None:
        """Note that the stream goes on. The backward passes call this on threads of their own."""
        self._waits.append((begun, self._moment()))

    def own_s(self) -> float | None:
        """Return the rank's own time; None if the step is not measured or the stream has not come to its end."""
        if self._end is None or not self._stream.passed(self._end):
            return None
        began_s = self._now_s()
        try:
            waited_s = sum(self._stream.between_s(*wait) for wait in self._waits)
            found_s = self._stream.between_s(self._begin, self._end) - waited_s
        except RuntimeError:  # another stream has not come to the end of a wait
            return None
        now_s = self._now_s()
        self._weigh(2 * len(self._waits) + 2, self._noting_s + now_s - began_s, now_s - self._began_s)
        return found_s

    def _moment(self) -> Any:
        began_s = self._now_s()
        moment = self._stream.moment()
        self._noting_s += self._now_s() - began_s
        return moment

    def _weigh(self, moments: int, cost_s: float, step_s: float) -> None:
        """Measure more rarely if it costs too much."""
        if self._is_first:
            self._is_first = False
            return
        each_s = cost_s / moments
        self._moment_s = each_s if self._moment_s is None else min(self._moment_s, each_s)
        while moments * self._moment_s > COST * self.every * step_s > 0.0:
            self.every *= 2


class ComputeTimer:
    """Measures the own compute time of one step of a process at a time."""

    def __init__(self, stream: Stream | None = None, now_s: Callable[[], float] = time.perf_counter) -> None:
        """Prepare to measure.

        Args:
            stream: the clock of the device; None: that of the CUDA device, if the process trains on one.
            now_s: the host's clock, by which the cost of measuring on a device is measured.
        """
        self._stream, self._now_s = stream, now_s
        self._segments: _Segments | None = None
        self._alone = True
        self._began: tuple[float, float, float] | None = None
        self._spent_s: float | None = None

    @property
    def counts_running_only(self) -> bool:
        """Whether the time counts in which the thread runs, and no sleep."""
        return self._segments is None and not self._alone

    def begin(self, step: int, *, alone: bool) -> None:
        """Note that a step begins. ``alone``: the rank is a whole replica."""
        self._alone, self._began, self._spent_s = alone, None, None
        if self._segments is None and (self._stream is not None or device.is_cuda()):
            self._segments = _Segments(self._stream or CudaStream(), self._now_s)
        if self._segments is not None:
            self._segments.begin(step)
        else:
            self._began = time.thread_time(), time.perf_counter(), run_queue_wait_s() if alone else 0.0

    def end(self, waited_s: float = 0.0) -> None:
        """Note that the passes are done.

        On a device this only puts an event into the stream.

        Args:
            waited_s: how long this step's passes have waited on the host for gathered parameters.
        """
        if self._segments is not None:
            self._segments.end()
        elif self._began is not None:
            ran_s, at_s, starved_s = self._began
            self._spent_s = time.thread_time() - ran_s
            if self._alone:
                # The kernel sometimes counts more waits than there was time (measured on busy cores).
                own_s = time.perf_counter() - at_s - (run_queue_wait_s() - starved_s) - waited_s
                self._spent_s = max(self._spent_s, own_s)

    def stop(self) -> None:
        """Note that the step is over, or left."""
        if self._segments is not None:
            self._segments.stop()

    def result_s(self) -> float | None:
        """Return the own compute time; None if it is not known, or not yet. This waits for nothing.

        The agreement at a step's end reads its result from the device, so at the end of a step the stream has come to
        the end of the passes.
        """
        if self._segments is not None and self._spent_s is None:
            self._spent_s = self._segments.own_s()
        return self._spent_s
