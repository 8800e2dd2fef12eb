"""A lock between threads that issue collectives and one that aborts communicators.

Torch hands a communicator to the backend without a lock. A thread that issues a collective while another one aborts its
communicator uses what is being freed. Megatron, torch and scripts issue collectives in many places, and backward passes
do so on threads of their own; all of them go through methods of the process group. ``guard`` replaces these methods
by ones that wait while an abort runs, and refuse a group that was aborted. Groups of one rank need no communicator.

All that a device waits for goes through the same methods, and through ``Work.wait`` where a collective is asynchronous.
``watch`` has somebody told of each such wait: a rank's own compute time is what lies between two of them.

Collectives of a group of one rank are done at once, without a communicator. Megatron calls them in every step, of the
tensor-parallel group for the loss and of the model-parallel group for the norm of gradients, where a model is not
divided. NCCL makes a communicator for them, which each new generation would make again; and to destroy one takes half a
second, since a thread of NCCL polls that long (docs/measured-gpu.md).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from unicron import device
from unicron.errors import CommunicationFailed

METHODS = (
    "_allgather_base",
    "_end_coalescing",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""The methods of torch's ``ProcessGroup`` that issue something, in any of the versions that are supported."""

ISSUE_LIMIT_S = 0.1
"""How long an abort waits for a thread that issues a collective. Issuing takes microseconds; a thread that takes longer
is blocked in it, and only the abort will let it go on."""


class Watch(Protocol):
    """Whoever is told of a stream's waits for peers, on the thread that issues them."""

    def wait_begins(self) -> Any:
        """Note that the thread's stream comes to a place where it may wait; return what ``wait_ends`` gets."""

    def wait_ends(self, begun: Any) -> None:
        """Note that the stream goes on."""


_watch: Watch | None = None

_issuing = threading.Lock()
_aborted: set[int] = set()
"""``id`` of the groups that were aborted and still exist."""


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


def watch(it: Watch | None) -> None:
    """Have waits for peers be told, those of collectives of guarded groups; None: to nobody."""
    global _watch
    _watch = it


def guard(groups: Iterable[Any]) -> None:
    """Replace the methods of the groups' types, once each."""
    for kind in {type(group) for group in groups}:
        for name in METHODS:
            method = getattr(kind, name, None)
            if method is not None and not hasattr(method, "__wrapped__"):
                setattr(kind, name, _guarded(name, method))


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def issue(group: Any, *arguments: Any, **options: Any) -> Any:
        if group.size() == 1:
            done = perform(name, arguments, options)
            if done is not None:
                return done
        with _issuing:
            if id(group) in _aborted:
                raise CommunicationFailed("the group's communicator was aborted: the generation is held")
            if arguments and getattr(arguments[-1], "asyncOp", False):  # torch's options come last
                work = method(group, *arguments, **options)  # the stream waits in ``Work.wait``
            else:
                work = _watched(method, group, *arguments, **options)
        if isinstance(work, dist.Work):
            _guard_wait(type(work))
        return work

    return issue


def _watched(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a method in which the stream of the calling thread may wait for peers."""
    watching = _watch
    if watching is None:
        return method(*arguments, **options)
    begun = watching.wait_begins()
    try:
        return method(*arguments, **options)
    finally:
        watching.wait_ends(begun)


def _guard_wait(kind: Any) -> None:
    """Have the waits for works of a type be told."""
    if hasattr(kind.wait, "__wrapped__"):
        return
    waits = kind.wait

    @functools.wraps(waits)
    def wait(work: Any, *arguments: Any, **options: Any) -> Any:
        return _watched(waits, work, *arguments, **options)

    kind.wait = wait


@contextmanager
def while_aborting(aborted: Sequence[Any]) -> Iterator[None]:
    """Keep other threads from issuing meanwhile, and from then on from issuing anything to the aborted groups.

    After ``ISSUE_LIMIT_S`` the abort goes on even if a thread is still inside a call that issues.
    """
    is_exclusive = _issuing.acquire(timeout=ISSUE_LIMIT_S)
    try:
        _aborted.update(id(group) for group in aborted)
        yield
    finally:
        if is_exclusive:
            _issuing.release()


def forget() -> None:
    """Forget the groups that were aborted: they are going to be freed."""
    _aborted.clear()
