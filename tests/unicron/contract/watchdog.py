"""Torch's watchdog and heartbeat monitor of one group: what they do where a communicator has an error.

They do nothing else, so their threads begin only then. All of it is in ProcessGroupNCCL.cpp, between 2.9 and 2.13:
``Watchdog::runLoop`` and ``HeartbeatMonitor::runLoop``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tests.unicron.contract.communicator import Communicator
from tests.unicron.contract.guard import end_process
from tests.unicron.contract.settings import Settings

POLL_S = 0.02
"""Between two looks. Torch's is 100 ms."""

DUMP_SLEEPS = 4
"""How often the watchdog sleeps the time of a dump for each collective that it finds an error of."""

WATCHDOG_SAW = "failure detected by watchdog"
"""Torch's words."""

WAITS_FOR_WATCHDOG = "a destruction waits for the watchdog, which sleeps"
"""Said of what takes a minute on a device, and less here."""

DESYNC = "TORCH_NCCL_DESYNC_DEBUG"
DEBUG = "TORCH_DISTRIBUTED_DEBUG"


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """What torch reads from the environment when it makes a group (ProcessGroupNCCL.cpp, the constructors)."""

    dumps: bool
    """Whether the first group's monitor writes the flight recorder's contents, and then ends the process."""
    monitors: bool
    """Whether a monitor ends the process."""
    handling: int
    """Of errors: 0 none; 1 aborts and throws; 2 aborts; 3 throws (``ErrorHandlingMode``)."""
    rethrows: bool
    """Whether what the watchdog throws ends the process."""
    heartbeat_s: float
    dump_s: float
    """For how long the watchdog sleeps for each collective with an error, uninterruptibly, whether there is a dump or
    not."""

    @classmethod
    def of_environment(cls, variables: Mapping[str, str] = os.environ) -> TorchSettings:
        def flag(name: str, default: str) -> bool:
            return variables.get(name, default).lower() in ("1", "true", "y", "yes", "on")

        handling = int(variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"))
        if handling == 0 and (flag(DESYNC, "0") or variables.get(DEBUG) == "DETAIL"):
            handling = 3
        return cls(
            dumps=flag("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
            monitors=flag("TORCH_NCCL_ENABLE_MONITORING", "1"),
            handling=handling,
            rethrows=flag("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1"),
            heartbeat_s=float(variables.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "480")),
            dump_s=DUMP_SLEEPS * float(variables.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000")) / 1000,
        )


class Watchdog:
    """The two threads of a group."""

    def __init__(self, name: Callable[[], str], settings: Settings, communicators: Iterable[Communicator]) -> None:
        """Read the environment.

        Args:
            name: returns the group's name, which it gets later.
            settings: of the process.
            communicators: of the group, now and later.
        """
        self._name, self._settings, self._communicators = name, settings, communicators
        self._torch = TorchSettings.of_environment()
        self._changed = threading.Condition()
        self.is_stopped = False
        self._threads: list[threading.Thread] = []
        self._monitor: threading.Thread | None = None
        self._retired = False
        self.works = threading.Lock()
        """Of the list of works, which each launch adds to and the watchdog sleeps with (``workMetaListMutex_``)."""
        self.on_dump: Callable[[], None] = lambda: None
        """Called when the whole process is to dump."""

    def found_broken(self) -> None:
        """Note that a collective will not end; it may show or not."""
        if self._settings.mode == "sockets":
            self._start(self._look)

    def meet_abort(self) -> None:
        """Have the watchdog be in the middle of asking for an error when an abort begins.

        It then finds the error that the abort sets, and takes its own process's abort for a peer's death.
        """
        self._start(lambda: self._handle("a collective that this process aborts"))

    def _start(self, look: Callable[[], None]) -> None:
        with self._changed:
            if self.is_stopped or self._threads:
                return
            self._threads.append(threading.Thread(target=look, name="contract watchdog", daemon=True))
            self._threads[0].start()

    def _look(self) -> None:
        """Look for errors, until the group is aborted or destroyed."""
        seen: set[int] = set()
        while not self._wait(POLL_S):
            for one in list(self._communicators):
                for work in one.pending() if one.has_error() else ():
                    if id(work) not in seen and not self.is_stopped:
                        seen.add(id(work))
                        self._handle(f"collective {work.operation.name if work.operation else ''} on {one!r}")

    def _handle(self, what: str) -> None:
        """Do what the watchdog does for each collective with an error."""
        with self.works:
            self._say(f"{WATCHDOG_SAW}: {what}")
            self.on_dump()
            duration_s = self._torch.dump_s * self._settings.time_scale
            if self._torch.heartbeat_s < self._torch.dump_s:
                # The heartbeat stands still meanwhile; and behind a dump's signal it is waited for once more.
                self.start_monitor("the watchdog's heartbeat has not moved", 2)
            time.sleep(duration_s)
        if self._torch.handling in (1, 2):
            end_process("the watchdog aborts communicators beside everyone", self._name())
        if self._torch.handling == 3 and self._torch.rethrows:
            end_process("the watchdog throws, which ends the process", self._name())

    def dump(self) -> None:
        """Have this group's monitor dump: it is the first group of the process, and somewhere is an error."""
        if self._torch.dumps:
            self.start_monitor("received a dump signal", 1)

    def start_monitor(self, reason: str, heartbeats: int) -> None:
        """Have the monitor end the process some heartbeats later, unless the group is aborted or destroyed by then."""
        with self._changed:
            if self._monitor is None and not self._retired:
                self._monitor = threading.Thread(
                    target=self._end, args=(reason, heartbeats), name="contract monitor", daemon=True
                )
                self._monitor.start()

    def _end(self, reason: str, heartbeats: int) -> None:
        self._say(f"monitor: {reason}")
        # In one piece: until 2.11 nothing ends this sleep, and the group's destructor waits for it.
        time.sleep(heartbeats * self._torch.heartbeat_s * self._settings.time_scale)
        if not self._retired and self._torch.monitors:
            end_process("the heartbeat monitor ends the process", f"{self._name()}: {reason}")

    def _wait(self, duration_s: float) -> bool:
        """Wait; return, early if need be, whether the group is aborted or destroyed."""
        limit_s = time.monotonic() + duration_s
        with self._changed:
            while not self.is_stopped and time.monotonic() < limit_s:
                self._changed.wait(limit_s - time.monotonic())
            return self.is_stopped

    def stop(self) -> None:
        """Look for no more errors (``terminateProcessGroup_``)."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the watchdog's thread."""
        if self.works.locked() and self._torch.dump_s:
            self._say(WAITS_FOR_WATCHDOG)
        for thread in self._threads:
            thread.join()

    def retire_monitor(self, *, join: bool = False) -> None:
        """Stop the monitor (``HeartbeatMonitor::stop``), and wait for its thread, as the destructor does."""
        with self._changed:
            self._retired = True
        if join and self._monitor is not None:
            self._monitor.join()

    def _say(self, text: str) -> None:
        print(f"contract: {self._name()}: {text}", file=sys.stderr, flush=True)
