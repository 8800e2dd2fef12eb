"""What the product asks of the contract backend, and its installation in a process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.unicron.contract import communicator
from tests.unicron.contract.group import NAME, ContractGroup, Process
from tests.unicron.contract.settings import Settings
from tests.unicron.contract.work import ContractWork, Outcome
from unicron import backend

_CPU = torch.device("cpu")


class ContractMark(backend.Mark):
    """What was issued before the mark was made."""

    def __init__(self, works: Sequence[ContractWork], *, told: bool) -> None:
        self._works, self._told = works, told

    def is_reached(self) -> bool:
        """Return whether all of it has ended; told from garbage where ``Settings.marks`` says so."""
        if self._told:
            return all(work.outcome is Outcome.ENDED for work in self._works)
        return all(work.outcome is not Outcome.PENDING for work in self._works)


class Contract(backend.Backend):
    """Collectives that behave as NCCL's do at a fault, on a CPU."""

    name = NAME
    aborts = True
    waits_in_slices = False
    scatters = True
    settings = backend.Nccl.settings

    def __init__(self, process: Process) -> None:
        self._process = process

    def connect(self, group: dist.ProcessGroup) -> None:
        _of(group).eager_connect_single_device(_CPU)

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._process.abort([_of(group) for group in groups])

    def mark(self) -> backend.Mark:
        works = [work for one in list(communicator.everything) for work in one.pending()]
        return ContractMark(works, told=self._process.settings.marks == "told")

    def synchronize(self) -> None:
        for one in list(communicator.everything):
            one.wait_for(one.pending())

    def synchronize_stream(self) -> None:
        """Nothing is left to wait for: what the stream waits for, ``Work.wait`` has waited for."""


def _of(group: Any) -> ContractGroup:
    found: ContractGroup = group._get_backend(_CPU)
    return found


def _create(process: Process, store: dist.Store, rank: int, size: int, timeout: timedelta) -> ContractGroup:
    return ContractGroup(process, store, rank, size)


def install(settings: Settings) -> Contract:
    """Have this process use the contract backend."""
    process = Process(settings)
    dist.Backend.register_backend(NAME, partial(_create, process), devices=["cpu"])
    distributed: Any = dist
    distributed.batch_isend_irecv = partial(_batch_isend_irecv, dist.batch_isend_irecv)
    it = Contract(process)
    backend.use(it)
    return it


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
