"""What the product asks of the contract backend, and its installation in a process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.unicron.contract import communicator, hiding, stream
from tests.unicron.contract.group import NAME, ContractGroup, Process
from tests.unicron.contract.settings import Settings
from unicron import backend
from unicron.snapshot.taker import SnapshotTaker

_CPU = torch.device("cpu")


class ContractMark(backend.Mark):
    """What the calling thread's stream has come to: what it waits for while the host has gone on, and the lag."""

    def __init__(self, lag_s: float) -> None:
        self._reached_s = time.monotonic() + lag_s
        self._waited_for = stream.waited_for()

    @property
    def left_s(self) -> float:
        """For how long it is not reached yet."""
        return max(0.0, self._reached_s - time.monotonic())

    def is_reached(self) -> bool:
        return not self.left_s and all(work.has_ended for work in self._waited_for)


class Contract(backend.Backend):
    """Collectives that behave as NCCL's do at a fault, on a CPU."""

    name = NAME
    aborts = True
    waits_in_slices = False
    connects_at_once = False
    scatters = True
    settings = backend.Nccl.settings

    def __init__(self, process: Process) -> None:
        self._process = process
        self._newest = ContractMark(0.0)

    def connect(self, group: dist.ProcessGroup) -> None:
        _of(group).eager_connect_single_device(_CPU)

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._process.abort([_of(group) for group in groups])

    def mark(self) -> backend.Mark:
        self._newest = ContractMark(self._process.settings.lag_s)
        return self._newest

    def synchronize(self) -> None:
        for one in list(communicator.everything):
            one.wait_for(one.pending())
        self.synchronize_stream()

    def synchronize_stream(self) -> None:
        stream.synchronize()
        time.sleep(self._newest.left_s)


def _of(group: Any) -> ContractGroup:
    found: ContractGroup = group._get_backend(_CPU)
    return found


def _create(process: Process, store: dist.Store, rank: int, size: int, timeout: timedelta) -> ContractGroup:
    return ContractGroup(process, store, rank, size)


def install(settings: Settings) -> Contract:
    """Have this process use the contract backend."""
    hiding.install()
    stream.install()
    process = Process(settings)
    dist.Backend.register_backend(NAME, partial(_create, process), devices=["cpu"])
    distributed: Any = dist
    distributed.batch_isend_irecv = partial(_batch_isend_irecv, dist.batch_isend_irecv)
    it = Contract(process)
    backend.use(it)
    _release_behind_the_device(it)
    return it


def _release_behind_the_device(contract: Contract) -> None:
    """Have the release of copies' memory wait for the device: where that is pinned, ``cudaHostUnregister`` does."""
    taker: Any = SnapshotTaker
    release = taker.release

    def wait_and_release(self: SnapshotTaker) -> None:
        contract.synchronize()
        release(self)

    taker.release = wait_and_release


def install_if_asked() -> None:
    """Do so if the environment says that this process does."""
    settings = Settings.of_environment()
    if settings is not None:
        install(settings)


def _batch_isend_irecv(torchs_own: Any, operations: list[Any]) -> list[Any]:
    """Issue a batch as one: torch asks the backend for that only where the group's type is torch's."""
    group: Any = operations[0].group or dist.group.WORLD
    if not isinstance(group, ContractGroup):
        works: list[Any] = torchs_own(operations)
        return works
    group._start_coalescing(_CPU)
    torchs_own(operations)
    return [group._end_coalescing(_CPU)]
