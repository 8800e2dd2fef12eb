"""Collectives of a group of one rank: done at once, without a communicator.

Megatron calls them in every step, of the tensor-parallel group for the loss and of the model-parallel group for the
norm of gradients, where a model is not divided. NCCL makes a communicator for them, which each new generation would
make again; and to destroy one takes half a second, since a thread of NCCL polls that long (docs/measured-gpu.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unicron import device

IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce"})
"""Methods of torch's ``ProcessGroup`` whose tensors are input and output; with one rank they stay as they are."""

COPYING = frozenset(
    {
        "_allgather_base",
        "_reduce_scatter_base",
        "all_gather_single",
        "all_gather_single_coalesced",
        "all_to_all_single",
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "alltoall",
        "alltoall_base",
        "gather",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "scatter",
    }
)
"""Methods whose first argument is the output and whose second is the input; with one rank both are equal afterwards."""


_SUM_OF_MULTIPLES: Any = dist.ReduceOp.PREMUL_SUM


class DoneWork(dist.Work):
    """Torch's handle of a collective that has nothing to wait for but what was issued before it."""

    def __init__(self, where: torch.device) -> None:
        super().__init__()
        self._event: Any = torch.cuda.current_stream(where).record_event() if where.type == "cuda" else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the present stream behind the one on which the collective was issued."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True

    def synchronize(self) -> None:
        """Do as ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None: there was no error."""


def perform(method: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> dist.Work | None:
    """Do a collective of a group of one rank.

    Args:
        method: a method of torch's ``ProcessGroup``.
        arguments: the arguments of the call, without the group.
        options: keyword arguments of the call.

    Returns: The handle of the collective; None if nothing was done, since the method is another one, or is called in
        another way.
    """
    if method == "barrier":
        if device.is_cuda():
            device.synchronize_stream()  # NCCL's barrier does so too
        return DoneWork(torch.device("cpu"))
    if any(_scales(value) for value in (*arguments, *options.values())):
        return None
    written = list(_tensors(arguments[0])) if arguments else []
    if method in COPYING and len(arguments) > 1:
        for output, given in zip(written, _tensors(arguments[1]), strict=True):
            if output.data_ptr() != given.data_ptr():
                output.view(-1).copy_(given.reshape(-1))
    elif method not in IN_PLACE:
        return None
    return DoneWork(written[0].device) if written else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Sequence):
        for one in value:
            yield from _tensors(one)


def _scales(value: Any) -> bool:
    """Return whether an argument asks for NCCL's sum of multiples, which changes also the tensor of one rank."""
    op: Any = getattr(value, "reduceOp", value)
    return isinstance(op, dist.ReduceOp) and bool(op == _SUM_OF_MULTIPLES)
