"""A lock between threads that issue collectives and one that aborts communicators.

Torch hands a communicator to the backend without a lock. A thread that issues a collective while another one aborts its
communicator uses what is being freed. Megatron, torch and scripts issue collectives in many places, and backward passes
do so on threads of their own; all of them go through methods of the process group. ``guard`` replaces these methods
by ones that wait while an abort runs, and refuse a group that was aborted. Groups of one rank need no communicator
(``unicron.link.one_rank``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from unicron.errors import CommunicationFailed
from unicron.link import one_rank

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

_issuing = threading.Lock()
_aborted: set[int] = set()
"""``id`` of the groups that were aborted and still exist."""


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
            done = one_rank.perform(name, arguments, options)
            if done is not None:
                return done
        with _issuing:
            if id(group) in _aborted:
                raise CommunicationFailed("the group's communicator was aborted: the generation is held")
            return method(group, *arguments, **options)

    return issue


@contextmanager
def while_aborting(aborted: Sequence[Any]) -> Iterator[None]:
    """Keep other threads from issuing meanwhile, and from then on from issuing anything to the aborted groups.

    After ``ISSUE_LIMIT_S`` it goes on even if a thread is still inside a call that issues.
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
