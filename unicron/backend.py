"""What the collective backend of this process can do: gloo on CPUs, NCCL on CUDA devices.

The library branches on what this object says, and on no backend's name. Two things differ most. Gloo's collectives are
done on the host, which blocks in them; a socket that is shut ends them, with an error. NCCL's are done on the device,
behind the host's back; only an abort of their communicator ends them, and they then end without an error and leave
garbage. A ``Mark`` tells the work that has used such a result from the rest.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from unicron import device
from unicron.process import sockets

WAKE_S = 0.01
"""Pause between two knocks at the threads that an abort waits for. Chosen: short beside a recovery; a knock takes
less."""


class Mark(ABC):
    """A place in the work of this process's device: behind all that was issued before the mark was made."""

    before_shared: bool | None = None
    """Whether all of it ended before collectives of several replicas were aborted; None: not known yet
    (``unicron.link.collectives``)."""
    before_replica: bool | None = None
    """Whether all of it ended before collectives inside the replica were aborted; None: not known yet."""

    @abstractmethod
    def is_reached(self) -> bool:
        """Return, without waiting, whether all work before it has ended."""


class Backend:
    """What a collective backend can do; by default what one on the host does, which leaves nothing under way."""

    name: ClassVar[str]
    """Torch's name of the backend."""
    aborts: ClassVar[bool]
    """Whether the collectives of a communicator are ended by ``abort``. They then end without an error and with garbage
    for a result. Otherwise a socket that is shut ends them, with an error."""
    waits_in_slices: ClassVar[bool]
    """Whether ``Work.wait`` with a time-out may be called again and again."""
    connects_at_once: ClassVar[bool]
    """Whether a group is connected to its ranks, with sockets and threads of its own, when it is made."""
    scatters: ClassVar[bool]
    """Whether the backend has a reduce-scatter that sends no more than it has to."""
    settings: ClassVar[Mapping[str, str]] = {}
    """Environment variables that the backend needs, unless the operator has set them."""

    def connect(self, group: dist.ProcessGroup) -> None:
        """Make the communicator of a group, which otherwise its first collective makes. All its ranks call this.

        Raises:
            RuntimeError: a rank did not come.
        """

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """End all collectives of some groups, and return once that is done.

        This is called once for each group, by one thread. Meanwhile no other thread may issue, make, destroy or abort
        anything.
        """

    def mark(self) -> Mark | None:
        """Return a mark behind all that was issued so far; None: what was issued has ended."""
        return None

    def synchronize(self) -> None:
        """Wait until everything that was issued has ended.

        Raises:
            RuntimeError: something failed on the device.
        """

    def synchronize_stream(self) -> None:
        """Wait until what was issued on the present stream has ended.

        Raises:
            RuntimeError: something failed on the device.
        """


class Gloo(Backend):
    """Collectives on the host, over sockets."""

    name = "gloo"
    aborts = False
    waits_in_slices = True
    connects_at_once = True
    scatters = False
    settings: ClassVar[Mapping[str, str]] = {
        # A rank then reads the addresses of all its peers in one request to the store, and not in two for each peer
        # (gloo's ``rendezvous/context.cc``). Ranks with and without this meet.
        "GLOO_ENABLE_STORE_V2_API": "1",
    }


class _Event(Mark):
    """A CUDA event in the present stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class Nccl(Backend):
    """Collectives on a CUDA device."""

    name = "nccl"
    aborts = True
    waits_in_slices = False
    connects_at_once = False
    scatters = True
    settings: ClassVar[Mapping[str, str]] = {
        # The watchdog neither aborts nor ends the process by itself: this library aborts, and the agent decides.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        # For each broken collective that it finds, the watchdog would sleep four times this long, and whoever destroys
        # the group waits.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        # The process's first group would write a dump, sleep for eight minutes and end the process.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
        # Groups are connected before they are used, so sends share their group's communicator, as is meant here.
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
        # Aborting communicators that use NVLink SHARP is not supported.
        "NCCL_NVLS_ENABLE": "0",
    }
    """Sources: torch's ``ProcessGroupNCCL.cpp`` (``Watchdog::runLoop``, ``HeartbeatMonitor::runLoop``), 2.9 to 2.13, as
    docs/recovery.md has it; the usage guide of NVIDIA's nvidia-resiliency-ext (known issues of in-process restart)."""

    def connect(self, group: dist.ProcessGroup) -> None:
        """Make the communicator of a group."""
        group._get_backend(device.current()).eager_connect_single_device(device.current())

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Abort communicators, all at once: an abort may wait for peers that wait in the abort of another."""
        backends: list[Any] = [group._get_backend(device.current()) for group in groups]
        if not backends:
            return
        with ThreadPoolExecutor(max_workers=len(backends)) as threads:
            running: set[Future[None]] = {threads.submit(one.abort) for one in backends}
            while running:
                ended, running = futures.wait(running, WAKE_S)
                for aborting in ended:
                    with contextlib.suppress(RuntimeError):
                        aborting.result()
                sockets.knock()

    def mark(self) -> Mark:
        """Return a mark behind all that was issued on the present stream so far."""
        return _Event()

    def synchronize(self) -> None:
        """Wait for the device; other threads run meanwhile."""
        device.synchronize()

    def synchronize_stream(self) -> None:
        """Wait for the present stream of the device; other threads run meanwhile."""
        device.synchronize_stream()


_chosen: Backend | None = None


def current() -> Backend:
    """Return the backend of this process."""
    global _chosen
    if _chosen is None:
        _chosen = Nccl() if device.is_cuda() else Gloo()
    return _chosen


def use(backend: Backend) -> None:
    """Use another backend from here on, for tests of what a backend does at a fault."""
    global _chosen
    _chosen = backend
