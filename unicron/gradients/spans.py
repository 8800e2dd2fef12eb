"""Spans: ranges of memory that several tensors fill one after the other, and that one operation can go through.

Megatron's DistributedDataParallel keeps the gradients of all parameters in one buffer, from the last parameter to the
first. A bucket of them is then one span, so a reduction copies it at the speed of memory, however many parameters are
in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def memory_order(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the indices of tensors in the order of their memory: storage by storage, each from its beginning.

    Storages come in the order in which ``tensors`` name them, so the order is the same on all ranks that have the same
    model, wherever their memory lies.
    """
    storages: dict[int, int] = {}
    for tensor in tensors:
        storages.setdefault(tensor.untyped_storage().data_ptr(), len(storages))

    def place(index: int) -> tuple[int, int]:
        tensor = tensors[index]
        return storages[tensor.untyped_storage().data_ptr()], int(tensor.storage_offset())

    return sorted(range(len(tensors)), key=place)


def spans(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return flat views of the same elements in the same order, as few as possible.

    Args:
        views: flat tensors, each contiguous.
    """
    found: list[torch.Tensor] = []
    for view in views:
        if found and _follows(found[-1], view):
            before = found[-1]
            found[-1] = before.as_strided((before.numel() + view.numel(),), (1,), before.storage_offset())
        else:
            found.append(view)
    return found


def _follows(before: torch.Tensor, view: torch.Tensor) -> bool:
    """Return whether ``view`` begins in memory where ``before`` ends."""
    return (
        before.dtype == view.dtype
        and before.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        and before.storage_offset() + before.numel() == view.storage_offset()
    )
