"""The process groups of one generation: made in a store of the generation's own, broken off when held, destroyed.

Any reference to a group keeps its threads and sockets alive. ``leave`` therefore drops all of them: Megatron's globals
and torch's. References inside the model are replaced by ``unicron.megatron.group_references``. How the collectives of
the groups are broken off is given to ``unicron.link.breaker``: those inside the rank's replica apart from the others.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unicron import device, environment
from unicron.link import sockets
from unicron.link.agent_link import AgentLink
from unicron.link.breaker import Breakable, BreakMethod
from unicron.megatron import two_stages
from unicron.megatron.parallel import model_ranks
from unicron.protocol import Configure

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Torch's default. The detector finds a peer that does not come, by the progress of the ranks, long before that."""

NCCL_SETTINGS = {
    # Otherwise torch's watchdog ends the process when a peer is lost, before the agent can send anything.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Aborting communicators that use NVLink SHARP is not supported.
    "NCCL_NVLS_ENABLE": "0",
}
"""Environment variables for communicators that may be aborted. Sources: the note at torch's ``_abort_process_group``;
the known issues in the usage guide of NVIDIA's nvidia-resiliency-ext (in-process restart)."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses of a store on this machine that no other machine can reach."""

COLLECTIVES = frozenset({*range(12), 15, 16})
"""Values of ``Work._get_op_type`` for collectives: c10d's ``OpType`` without sends and receives. Those end with the
time-out of gloo's connections and cannot be waited for in slices: gloo closes the connection after one."""

_torch_wait = dist.Work.wait


def backend() -> str:
    """Return the name of the collective backend of this machine."""
    return "nccl" if device.is_cuda() else "gloo"


def make(configure: Configure, link: AgentLink, *, interleave: int = 1) -> bool:
    """Make the process groups of a generation; return whether all its members have been told its shares.

    While this function runs, a hold breaks every socket opened since it began, also the connection to the store: a
    member may be waiting in the store. Afterwards a hold breaks the sockets of the groups and no others.

    Args:
        configure: the generation.
        link: to the agent.
        interleave: model chunks of each rank, where there are several pipeline stages.

    Raises:
        RuntimeError: a member did not come, or the generation was held (torch's error types).
        Interrupted: the generation was held.
    """
    timeout = timedelta(seconds=environment.number(environment.JOIN_TIMEOUT_S))
    _set_backend_environment(configure.store_host)
    before = sockets.connected()
    # Not while this process connects to the store: torch would connect again and again until its time-out.
    link.set_break_method(BreakMethod())
    store = _store(configure, timeout)
    store_sockets = sockets.connected() - before
    link.set_break_method(_method_while_making(before, configure.world_size))
    link.check()
    if configure.shares:
        store.set(_shares_key(configure.rank), "1")
    small = _initialise(configure, store, timeout, interleave)
    # All members have been at the barriers of the groups. One of an older version, or of an agent of one, has set none.
    every = [_shares_key(rank) for rank in range(configure.world_size)]
    all_have_shares = bool(configure.shares) and store.check(every)
    replica = frozenset(model_ranks())
    own_sockets = frozenset[int]().union(*(inodes for ranks, inodes in small if ranks <= replica))
    shared_sockets = sockets.connected() - before - store_sockets - own_sockets
    link.set_break_method(_method(shared_sockets, own_sockets, replica), replica)
    if backend() == "gloo":
        _wait_in_slices(link)
    return all_have_shares


def _shares_key(rank: int) -> str:
    """Return the key in the generation's store by which a member says that it has been told the shares."""
    return f"shares/{rank}"


def _set_backend_environment(store_host: str) -> None:
    """Set the backends' environment variables, except those that the operator has set."""
    if store_host in LOOPBACK:
        # Otherwise gloo resolves the machine's name, which need not be reachable from the machine itself.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)


def _store(configure: Configure, timeout: timedelta) -> dist.Store:
    """Return the generation's part of the store in which its members meet."""
    if configure.world_size == 1 and not configure.store_port:
        store: dist.Store = dist.HashStore()
    else:
        store = dist.TCPStore(configure.store_host, configure.store_port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"gen{configure.generation}", store)


def _initialise(
    configure: Configure, store: dist.Store, timeout: timedelta, interleave: int
) -> list[tuple[frozenset[int], frozenset[int]]]:
    """Make torch's default group and Megatron's groups; ``timeout`` limits only how long this takes.

    Returns:
        Ranks, and inodes of sockets, of the groups that may be inside this rank's replica.
    """
    from megatron.core import parallel_state

    dist.init_process_group(
        backend(), store=store, rank=configure.rank, world_size=configure.world_size, timeout=timeout
    )
    with _recorded_sockets(configure.tensor * configure.pipeline) as small:
        parallel_state.initialize_model_parallel(
            configure.tensor,
            configure.pipeline,
            virtual_pipeline_model_parallel_size=interleave if interleave > 1 and configure.pipeline > 1 else None,
            # Otherwise Megatron's groups have a time-out of 30 minutes, whatever the default group has.
            distributed_timeout_minutes=timeout.total_seconds() / 60,
            create_gloo_process_groups=False,
        )
        two_stages.make(timeout)
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, group)
    return small


@contextlib.contextmanager
def _recorded_sockets(largest: int) -> Iterator[list[tuple[frozenset[int], frozenset[int]]]]:
    """Record the ranks and sockets of this rank's new groups of at most ``largest`` ranks; groups of one have none.

    A group's sockets are connected when the group is made: gloo connects each pair of its ranks at once.
    """
    made: list[tuple[frozenset[int], frozenset[int]]] = []
    torch_new_group = dist.new_group

    def new_group(ranks: Sequence[int], *arguments: Any, **options: Any) -> Any:
        if not (1 < len(ranks) <= largest and dist.get_rank() in ranks):
            return torch_new_group(ranks, *arguments, **options)
        before = sockets.connected()
        group = torch_new_group(ranks, *arguments, **options)
        made.append((frozenset(ranks), sockets.connected() - before))
        return group

    torch_distributed: Any = dist
    torch_distributed.new_group = new_group
    try:
        yield made
    finally:
        torch_distributed.new_group = torch_new_group


# Breaking collectives off.


class _AbortOnce:
    """Aborts NCCL's communicators at the first call at which there are any.

    Args:
        chosen: the groups' ranks -> whether to abort their communicator.
    """

    def __init__(self, chosen: Callable[[frozenset[int]], bool] = lambda ranks: True) -> None:
        self._chosen = chosen
        self._aborted = False

    def __call__(self) -> None:
        self._aborted = self._aborted or _abort_communicators(self._chosen)


def _abort_communicators(chosen: Callable[[frozenset[int]], bool]) -> bool:
    """Abort NCCL's communicators, all at once: an abort may wait for peers that wait in the abort of another.

    The communicators' kernels end; what they have received is garbage (``AgentLink.synchronize``).

    Args:
        chosen: the groups' ranks -> whether to abort their communicator.

    Returns:
        Whether there were any.
    """
    if not device.is_cuda() or not dist.is_initialized():
        return False
    cuda = torch.device("cuda")
    groups = [
        group
        for group in list(dist.distributed_c10d._world.pg_names)
        if chosen(frozenset(dist.get_process_group_ranks(group)))
    ]
    backends: list[Any] = [group._get_backend(cuda) for group in groups]
    if not backends:
        return True
    with ThreadPoolExecutor(max_workers=len(backends)) as threads:
        for aborting in [threads.submit(one.abort) for one in backends]:
            with contextlib.suppress(RuntimeError):
                aborting.result()
    return True


def _method_while_making(before: frozenset[int], world_size: int) -> BreakMethod:
    """Return how the making of groups is broken off.

    Args:
        before: inodes of the sockets that are not to be shut: they were connected before.
        world_size: of the generation.
    """
    listening_before = sockets.listening()
    abort_communicators = _AbortOnce()

    def abort() -> None:
        abort_communicators()
        sockets.impersonate_peers(lambda inode: inode not in listening_before, world_size)

    return BreakMethod(shared=Breakable(has_socket=lambda inode: inode not in before, abort=abort))


def _method(shared: frozenset[int], own: frozenset[int], replica: frozenset[int]) -> BreakMethod:
    """Return how collectives are broken off once the groups are made.

    Args:
        shared: inodes of the sockets of groups with ranks of several replicas.
        own: those of groups inside this rank's replica.
        replica: its ranks.
    """
    if backend() == "gloo":
        return BreakMethod(
            shared=Breakable(has_socket=shared.__contains__),
            replica=Breakable(has_socket=own.__contains__),
            waits_in_slices=True,
        )
    return BreakMethod(
        shared=Breakable(has_socket=shared.__contains__, abort=_AbortOnce(lambda ranks: not ranks <= replica)),
        replica=Breakable(has_socket=own.__contains__, abort=_AbortOnce(lambda ranks: ranks <= replica)),
        synchronize=device.synchronize,
        synchronize_stream=device.synchronize_stream,
    )


def _wait_in_slices(link: AgentLink) -> None:
    """Make a hold end also the collectives that Megatron and torch wait for themselves: replace ``Work.wait``."""

    def wait(work: Any, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            return _torch_wait(work, timeout)
        if not link.waits_in_slices or work._get_op_type() not in COLLECTIVES:
            return _torch_wait(work)
        # Those that this library waits for by itself are of all replicas, or come behind the passes.
        link.wait(work, of_replica=True)
        return True

    work_type: Any = dist.Work
    work_type.wait = wait


# Leaving a generation.

_abandoned: list[tuple[list[dist.ProcessGroup], list[Any]]] = []
"""Groups of past generations, each list with its collectives that have not ended. The destructor of a group waits for
its collectives, at worst until ``COLLECTIVE_TIMEOUT`` is over."""


def leave(unfinished: Sequence[Any] = ()) -> None:
    """Destroy the process groups of the generation that this process is in, if any.

    Args:
        unfinished: collectives (torch's ``Work``) that were given up. If one of them has not ended, the groups stay,
            with their threads and sockets, until a later call finds that all have ended.
    """
    from megatron.core import parallel_state

    if device.is_cuda() and dist.is_initialized():
        device.synchronize()  # buffers of kernels that have not ended may not be freed or overwritten
    _abandoned[:] = [(left, works) for left, works in _abandoned if not all(work.is_completed() for work in works)]
    running = [work for work in unfinished if not work.is_completed()]
    if running:
        _abandoned.append((list(dist.distributed_c10d._world.pg_map), running))
    two_stages.drop()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a broken group may fail to shut down
            dist.destroy_process_group()
    # The names of groups contain a count that torch resets only together with a default group. Members that were held
    # at different moments of a join would otherwise use different names for the same group from here on.
    dist.distributed_c10d._world.group_count = 0
    # Exceptions and autograd graphs refer to groups in cycles, which must be collected before the next generation.
    gc.collect()
