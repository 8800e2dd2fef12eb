"""One collective of the contract backend: what it reads and writes, and how it ends."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.unicron.contract import stream
from tests.unicron.contract.guard import end_process

if TYPE_CHECKING:
    from tests.unicron.contract.communicator import Communicator

GARBAGE_BYTE = 0x5A
"""Of what an aborted collective leaves in integer tensors."""

UNLIMITED = timedelta(0)
"""What torch's ``kNoTimeout`` is in Python."""

Perform = Callable[[Any, list[torch.Tensor]], list[torch.Tensor]]
"""Does a collective on gloo's backend with copies of what it reads; returns what it writes, tensor by tensor."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective, or a send or receive."""

    name: str
    number: int
    """Torch's ``OpType``."""
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    """Without what NCCL never touches where input and output are the same memory: the own part of a gather, and the
    root's tensor of a broadcast (nccl: src/device/all_gather.h and broadcast.h, ``directSend`` where they are equal,
    else ``directCopySend``)."""
    perform: Perform
    peer: int = -1
    """Of a send or receive: the other rank."""
    afterwards: Callable[[Any], None] | None = None
    """What gloo has to do behind its end on this rank, so that it ends on the others."""


class Outcome(enum.Enum):
    """How a collective stands."""

    PENDING = enum.auto()
    ENDED = enum.auto()
    """It has ended well."""
    ABORTED = enum.auto()
    """Its communicator was aborted; it has ended, with garbage."""


class ContractWork(dist.Work):
    """Torch's handle of a collective.

    Its communicator settles it. No reference leads from here to a group, so that none keeps a group alive.
    """

    def __init__(self, operation: Operation, communicator: Communicator) -> None:
        super().__init__()
        self.operation: Operation | None = operation
        """None once it has ended."""
        self._number, self._name = operation.number, operation.name
        self._communicator = communicator
        self.outcome = Outcome.PENDING
        self.is_left_behind = False
        """Whether a stream waits for it, and the host has gone on: its result will be garbage."""
        self.is_stuck = False
        """Whether it is the one that the device stands still at: nothing but an abort of its communicator ends it."""
        self._before: Sequence[ContractWork] = stream.waited_for()
        """What the stream waited for when it was issued, while the host had gone on: it begins behind that."""
        self._has_error = False
        """Whether somebody has asked for it and there was an error (ProcessGroupNCCL.cpp, ``checkAndSetException``)."""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.outcome is not Outcome.PENDING

    @property
    def is_due(self) -> bool:
        """Whether the device has come to it; with the lock."""
        return all(work.has_ended for work in self._before)

    @property
    def may_begin(self) -> bool:
        """Whether the device does it now; with the lock."""
        return self.is_due and not self.is_stuck

    def leave_behind(self) -> None:
        """Have the calling thread's stream wait for it, and leave what an abort will leave; with the lock."""
        assert self.operation is not None
        self.is_left_behind, self.is_stuck = True, self.is_due
        spoil(self.operation.writes)
        stream.add(self)

    def settle(self, outcome: Outcome) -> None:
        """Note how it has ended; for the communicator, with its lock."""
        self.outcome, self.operation, self._before = outcome, None, ()

    def wait(self, timeout: timedelta = UNLIMITED) -> bool:
        """Wait until the collective has ended or was aborted, or the device stands still.

        On a device the stream waits, and the host once it looks at a result (``tests.unicron.contract.stream``). There
        is no error after an abort, which ends kernels (ProcessGroupNCCL.cpp, ``WorkNCCL::wait``); but if
        ``is_completed`` has met an error before, it aborts the communicator in the calling thread and throws.

        Raises:
            DistBackendError: ``is_completed`` has met an error.
        """
        if timeout != UNLIMITED:
            end_process("a wait with a time-out aborts the communicator at its end", f"{self._name}, {timeout}")
        if self._has_error:
            self._communicator.abort_at_once()
            raise dist.DistBackendError(f"NCCL communicator encountered error set by ProcessGroupNCCL ({self._name})")
        self._communicator.order(self)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it has ended, or its communicator has an error.

        ProcessGroupNCCL.cpp, ``WorkNCCL::isCompleted``: it asks the communicator for errors unless that is aborted, and
        waits for its lock while it is being aborted; what it then finds is an error (``NCCLComm::abort`` sets one).
        """
        if not self.has_ended and self._communicator.is_found_broken():
            self._has_error = True
        return self._has_error or self.has_ended

    def is_success(self) -> bool:
        return self.is_completed() and not self._has_error

    def exception(self) -> Any:
        return dist.DistBackendError("NCCL communicator has an error") if self._has_error else None

    def get_future(self) -> Any:
        raise NotImplementedError("no future of a collective is used so far")

    def result(self) -> list[torch.Tensor]:
        raise NotImplementedError("no result of a collective is used so far")

    def _get_op_type(self) -> int:
        return self._number


def spoil(tensors: Sequence[torch.Tensor]) -> None:
    """Leave garbage in tensors: NaN where there is such a number."""
    with torch.no_grad():
        for tensor in tensors:
            # Another version counter: autograd does not know what a kernel writes.
            data = tensor.data
            if data.is_floating_point() or data.is_complex():
                data.fill_(float("nan"))
            elif data.dtype is torch.bool:
                data.fill_(True)
            else:
                data.fill_(int.from_bytes(bytes([GARBAGE_BYTE] * data.element_size()), "little"))
