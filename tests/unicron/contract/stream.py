"""The stream of each thread: what it waits for although the host has gone on, and what makes the host wait, too.

On a device ``Work.wait`` has the stream wait. The host goes on and issues kernels that use what is not there yet; where
it looks at a result it learns that it never came. On a CPU the host computes by itself. So it goes on only where that
comes to the same in the end: behind a collective that nothing but an abort will end any more (``Settings.ahead``). Its
result is garbage now as it will be then, and so is all that the host computes from it meanwhile.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.unicron.contract.work import ContractWork

READS = ("__bool__", "__float__", "__index__", "__int__", "cpu", "item", "tolist")
"""The methods of tensors by which the host looks at what a device has computed: they wait for the stream. But not for
truths: each layer of Megatron compares states of random generators, which are in the host's memory on a device, too."""

changed = threading.Condition()
"""Guards the communicators of this process, and is notified of their changes. One for all: a collective of one of them
may have to wait for another's."""


class _Stream(threading.local):
    """Of the calling thread."""

    def __init__(self) -> None:
        self.works: list[ContractWork] = []
        """What it waits for while the host has gone on; some of it may have ended."""


_own = _Stream()


def add(work: ContractWork) -> None:
    """Have the calling thread's stream wait for a collective, and the thread not."""
    _own.works.append(work)


def waited_for() -> tuple[ContractWork, ...]:
    """Return what the calling thread's stream waits for: all that is issued on it now comes behind."""
    _own.works = [work for work in _own.works if not work.has_ended]
    return tuple(_own.works)


def synchronize() -> None:
    """Wait until the calling thread's stream waits for nothing."""
    with changed:
        changed.wait_for(lambda: not waited_for())


def install() -> None:
    """Have the host wait for the stream where it looks at a tensor."""
    tensor: Any = torch.Tensor
    for name in READS:
        setattr(tensor, name, _waiting(getattr(tensor, name)))


def _waiting(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def wait_and_read(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if _own.works and tensor.dtype is not torch.bool:
            synchronize()
        return read(tensor, *arguments, **options)

    return wait_and_read
