"""Process groups of one generation: made in a store of its own, replaced in the model in place, and left behind.

A stale reference to a group keeps its threads and sockets, so leaving a generation drops every one: megatron's
globals, torch's, and those inside the modules, which ``regroup`` points to the new groups.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unicron import device, sockets
from unicron.protocol import Configure
from unicron.runtime import Runtime

JOIN_TIMEOUT_VARIABLE = "UNICRON_JOIN_TIMEOUT_S"
"""Environment variable: how long the members of a generation wait for one another when it begins."""

DEFAULT_JOIN_TIMEOUT_S = 20.0
"""Members are told at the same moment, when all of them wait, and meet in well under a second."""

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Torch's default. A peer that does not come is the detector's to find, from the rank's progress, long before."""

NCCL_SETTINGS = {
    # Else torch's watchdog ends the process when a peer is gone, before the agent can say what to do.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Aborting communicators that use NVLink SHARP is not supported.
    "NCCL_NVLS_ENABLE": "0",
}
"""Environment of communicators that are to be aborted: the note at torch's ``_abort_process_group``, and the known
issues in the usage guide of NVIDIA's nvidia-resiliency-ext (in-process restart)."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def backend() -> str:
    """Return the collective backend of this machine."""
    return "nccl" if device.is_cuda() else "gloo"


COLLECTIVES = frozenset({*range(12), 15, 16})
"""What ``Work._get_op_type`` says of collectives: c10d's ``OpType`` but for sends and receives, which end with the
time-out that gloo's connections have and cannot be waited for in slices (gloo closes the connection after one)."""

_wait = dist.Work.wait


def _wait_in_slices(runtime: Runtime) -> None:
    """Let also those collectives that Megatron and torch themselves wait for end when the generation is held."""

    def wait(work: Any, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            return _wait(work, timeout)
        if not runtime.slices or work._get_op_type() not in COLLECTIVES:
            return _wait(work)
        runtime.wait(work)
        return True

    work: Any = dist.Work
    work.wait = wait


def join(configure: Configure, runtime: Runtime) -> None:
    """Make the process groups of a generation.

    The sockets this opens, and no others of the process, are what the runtime may break afterwards; while it runs,
    every socket opened since it began is (the store's connection too: a member may be waiting in the store).

    Raises:
        RuntimeError: a member did not come, or the generation was held (torch's error types).
        Interrupted: the generation was held.
    """
    from megatron.core import parallel_state

    timeout = timedelta(seconds=float(os.environ.get(JOIN_TIMEOUT_VARIABLE, DEFAULT_JOIN_TIMEOUT_S)))
    before = sockets.connected()
    # Not while it connects to the store: torch would try again and again until its time-out.
    runtime.breaks(lambda inode: False, lambda: None)
    if configure.store_host in LOOPBACK:
        # gloo otherwise resolves the machine's name, which need not be reachable from itself.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if configure.world_size == 1 and not configure.store_port:
        store: dist.Store = dist.HashStore()
    else:
        store = dist.TCPStore(configure.store_host, configure.store_port, is_master=False, timeout=timeout)
    store_sockets = sockets.connected() - before
    listening = sockets.listening()
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    aborted: list[bool] = []

    def abort_once() -> None:
        if not aborted and _abort():
            aborted.append(True)

    def abort() -> None:
        abort_once()
        sockets.answer(lambda inode: inode not in listening, configure.world_size)

    runtime.breaks(lambda inode: inode not in before, abort)
    runtime.check()
    dist.init_process_group(
        backend(),
        store=dist.PrefixStore(f"gen{configure.generation}", store),
        rank=configure.rank,
        world_size=configure.world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        configure.tensor,
        configure.pipeline,
        # Megatron's groups otherwise have a time-out of 30 minutes whatever was given above.
        distributed_timeout_minutes=timeout.total_seconds() / 60,
        create_gloo_process_groups=False,
    )
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, group)
    mine = sockets.connected() - before - store_sockets
    if backend() == "gloo":
        runtime.breaks(lambda inode: inode in mine, lambda: None, sliced=True)
        _wait_in_slices(runtime)
    else:
        runtime.breaks(lambda inode: inode in mine, abort_once, synchronize=device.synchronize)


@contextlib.contextmanager
def building_alone() -> Iterator[None]:
    """Answer the collectives of a model's construction locally: members that already have a model take no part.

    Megatron's optimizer gathers the keys of the parameter groups (the same on every rank of a GPT), and its tied
    embeddings are summed over a pipeline's ends (the state that follows the construction overwrites them).
    """
    distributed: Any = dist
    replaced = {name: getattr(dist, name) for name in ("all_gather_object", "all_reduce", "barrier")}

    def all_gather_object(into: list[Any], value: Any, group: Any = None) -> None:
        into[:] = [value] * len(into)

    distributed.all_gather_object = all_gather_object
    distributed.all_reduce = distributed.barrier = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(distributed, name, function)


def _abort() -> bool:
    """Abort NCCL's communicators, all side by side: one may wait for peers that wait in the abort of another.

    Their kernels end; what they had received is garbage (``Runtime.synchronize``).

    Returns:
        Whether there were any.
    """
    if not device.is_cuda() or not dist.is_initialized():
        return False
    cuda = torch.device("cuda")
    backends: list[Any] = [group._get_backend(cuda) for group in list(dist.distributed_c10d._world.pg_names)]
    with ThreadPoolExecutor(max_workers=len(backends)) as threads:
        for aborting in [threads.submit(one.abort) for one in backends]:
            with contextlib.suppress(RuntimeError):
                aborting.result()
    return True


_abandoned: list[tuple[list[dist.ProcessGroup], list[Any]]] = []
"""Groups of generations left behind, and the collectives of each that had not ended: a group's destructor waits for
them, at worst until ``COLLECTIVE_TIMEOUT`` is over."""


def leave(unfinished: Sequence[Any] = ()) -> None:
    """Destroy the process groups of the generation this process is in, if any.

    Args:
        unfinished: collectives (torch's Work) that were broken off. Where one has not ended the groups are left behind,
            with their threads and sockets, and destroyed by a later call, when it has.
    """
    from megatron.core import parallel_state

    if device.is_cuda() and dist.is_initialized():
        device.synchronize()  # buffers of kernels that have not ended may not be touched
    _abandoned[:] = [(left, works) for left, works in _abandoned if not all(work.is_completed() for work in works)]
    endless = [work for work in unfinished if not work.is_completed()]
    if endless:
        _abandoned.append((list(dist.distributed_c10d._world.pg_map), endless))
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a broken group may refuse to say goodbye
            dist.destroy_process_group()
    # Names of groups hold a count that torch resets only with a default group; members that were held at different
    # moments of a join would look for one another under different names ever after.
    dist.distributed_c10d._world.group_count = 0
    # Exceptions and autograd graphs hold groups in cycles; they must be gone before the next generation.
    gc.collect()


def roles() -> dict[str, Any]:
    """Return megatron's process groups by the name of the global that holds them."""
    from megatron.core import parallel_state

    found: dict[str, Any] = {}
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            found[name] = value
    return found


def regroup(roots: Iterable[Any], old: dict[str, Any], new: dict[str, Any]) -> int:
    """Point every reference to an old group, in the objects reachable from ``roots``, to its successor.

    Returns:
        The number of references replaced.
    """
    successors = {id(group): new[name] for name, group in old.items() if name in new}
    seen: set[int] = set()
    pending: list[Any] = list(roots)
    count = 0
    while pending:
        container = pending.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        target: Any
        items: Iterable[tuple[Any, Any]]
        if isinstance(container, dict):
            target, items = container, list(container.items())
        elif isinstance(container, list):
            target, items = container, list(enumerate(container))
        elif isinstance(container, tuple | set):
            target, items = None, list(enumerate(container))
        else:
            target = getattr(container, "__dict__", None)
            items = list(target.items()) if target is not None else []
        for key, value in items:
            if id(value) in successors and target is not None:
                target[key] = successors[id(value)]
                count += 1
            elif isinstance(value, dict | list | tuple | set) or _may_hold_groups(value):
                pending.append(value)
    return count


def _may_hold_groups(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, torch.nn.Module) or (
        kind.__module__.startswith("megatron.") and not isinstance(value, type) and hasattr(value, "__dict__")
    )
