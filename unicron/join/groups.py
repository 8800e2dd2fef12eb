"""The process groups of one generation: made in a store of the generation's own, broken off when held, destroyed.

Communicators are made here, all of them, and not by the first collective of each: a member that is lost meanwhile is
then noticed in one place, where every socket that was opened can be shut.

Any reference to a group keeps its threads and sockets alive. ``leave`` therefore drops all of them: Megatron's globals
and torch's. References inside the model are replaced by ``unicron.megatron.group_references``. How the collectives of
the groups are broken off is given to ``unicron.link.breaker``: those inside the rank's replica apart from the others.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from unicron import backend
from unicron.link import issuing, lacks
from unicron.link.agent_link import AgentLink
from unicron.link.breaker import Breakable, BreakMethod
from unicron.megatron import own_groups, two_stages
from unicron.megatron.parallel import model_ranks
from unicron.process import sockets
from unicron.protocol import environment
from unicron.protocol.messages import Configure
from unicron.torch_names import FLIGHT_RECORDER_ENTRIES

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Time-out of the groups: torch's default. The detector finds a peer that does not come, by the progress of the ranks,
long before that."""

ABORT_LIMIT_S = 10.0
"""Longest time that an abort may take. After that the process ends, with ``EXIT_ABORT``, and is replaced: torch's own
abort may wait for as long as the time-out of the group."""

EXIT_ABORT = 77
"""Exit code of a process whose communicators could not be aborted in time; the detector says so in the incident."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses of a store on this machine that no other machine can reach."""

OTHER_FILES = 64
"""Descriptors of a generation beside the connections to peers: gloo has four or five for each group (measured)."""

COLLECTIVES = frozenset({*range(12), 15, 16})
"""Values of ``Work._get_op_type`` for collectives: c10d's ``OpType`` without sends and receives. Sends and receives end
with the time-out of gloo's connections and cannot be waited for in slices: gloo closes the connection after one
slice."""

_torch_wait = dist.Work.wait


def make(configure: Configure, link: AgentLink, *, interleave: int = 1) -> dist.Store:
    """Make the process groups of a generation; return the generation's store.

    While this function runs, a hold breaks every socket opened since it began, also the connection to the store: a
    member may be waiting in the store. Afterwards a hold breaks the sockets of the groups and no others.

    Args:
        configure: the generation.
        link: to the agent.
        interleave: model chunks of each rank, where there are several pipeline stages.

    Raises:
        RuntimeError: a member did not come, or the generation was held (torch's error types).
        Interrupted: the generation was held.
        OSError: this process may not open as many files as the groups need.
    """
    if backend.current().connects_at_once:
        what = f"process groups of {configure.world_size} ranks"
        lacks.need_open_files(_connections(configure) + OTHER_FILES, what)
    timeout = timedelta(seconds=environment.number(environment.JOIN_TIMEOUT_S))
    _set_backend_environment(configure.store_host)
    before = sockets.connected()
    # Not while this process connects to the store: torch would connect again and again until its time-out.
    link.set_break_method(BreakMethod())
    store = _store(configure, timeout)
    store_sockets = sockets.connected() - before
    link.set_break_method(_method_while_making(before, configure.world_size))
    link.check()
    small = _initialise(configure, store, timeout, interleave)
    replica = frozenset(model_ranks())
    own_sockets = frozenset[int]().union(*(inodes for ranks, inodes in small if ranks <= replica))
    shared_sockets = sockets.connected() - before - store_sockets - own_sockets
    link.set_break_method(_method(shared_sockets, own_sockets, replica), replica)
    if backend.current().waits_in_slices:
        _wait_in_slices(link)
    return store


def _set_backend_environment(store_host: str) -> None:
    """Set the backends' environment variables, except those that the operator has set."""
    if store_host in LOOPBACK:
        # Otherwise gloo resolves the machine's name, which need not be reachable from the machine itself.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, value in (*backend.current().settings.items(), FLIGHT_RECORDER_ENTRIES):
        os.environ.setdefault(name, value)


def _connections(configure: Configure) -> int:
    """Return how many connections a rank has to the peers in its groups, where groups of the same ranks are one.

    The two further connections of a pipeline with several stages are not counted.
    """
    world_size, tensor, pipeline = configure.world_size, configure.tensor, configure.pipeline
    replica = tensor * pipeline
    sizes = (world_size, world_size // pipeline, world_size // replica, replica, tensor, pipeline)
    return sum(size - 1 for size in sizes)


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
        backend.current().name, store=store, rank=configure.rank, world_size=configure.world_size, timeout=timeout
    )
    share = backend.current().connects_at_once
    with own_groups.only_own(share=share), _recorded_sockets(configure.tensor * configure.pipeline) as small:
        parallel_state.initialize_model_parallel(
            configure.tensor,
            configure.pipeline,
            virtual_pipeline_model_parallel_size=interleave if interleave > 1 and configure.pipeline > 1 else None,
            # Otherwise Megatron's groups have a time-out of 30 minutes, whatever the default group has.
            distributed_timeout_minutes=timeout.total_seconds() / 60,
            create_gloo_process_groups=False,
        )
        own_groups.make_group_of_all(timeout)
        two_stages.make(timeout)
    for group in _used():
        backend.current().connect(group)
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


def _used() -> list[dist.ProcessGroup]:
    """Return this rank's groups of several ranks that this library or Megatron uses, in the same order on all ranks."""
    from megatron.core import parallel_state

    candidates = [
        dist.group.WORLD,
        parallel_state.get_data_parallel_group(),
        parallel_state.get_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_embedding_group(check_initialized=False),
        two_stages.second_group(),
    ]
    used: dict[int, dist.ProcessGroup] = {}
    for group in candidates:
        if isinstance(group, dist.ProcessGroup) and group.size() > 1:
            used[id(group)] = group
    return list(used.values())


# Ways to break collectives off.


def _method_while_making(before: frozenset[int], world_size: int) -> BreakMethod:
    """Return the way in which the making of groups is broken off: communicators that are being made cannot be aborted.

    Args:
        before: inodes of the sockets that are not to be shut, since they were connected before.
        world_size: the generation's.
    """
    listening_before = sockets.listening()

    def is_new(inode: int) -> bool:
        return inode not in listening_before

    if backend.current().aborts:
        # A member that waits for a peer to connect then has no socket left to wait at.
        interrupt = partial(sockets.stop_listening, is_new)
    else:
        interrupt = partial(sockets.impersonate_peers, is_new, world_size)
    return BreakMethod(shared=Breakable(has_socket=lambda inode: inode not in before, interrupt=interrupt))


def _method(shared: frozenset[int], own: frozenset[int], replica: frozenset[int]) -> BreakMethod:
    """Return the way in which collectives are broken off once the groups are made.

    Args:
        shared: inodes of the sockets of groups with ranks of several replicas.
        own: those of groups inside this rank's replica.
        replica: its ranks.
    """
    chosen = backend.current()
    if not chosen.aborts:
        return BreakMethod(
            shared=Breakable(has_socket=shared.__contains__),
            replica=Breakable(has_socket=own.__contains__),
            backend=chosen,
        )
    issuing.guard(_all())
    inside = {group: frozenset(dist.get_process_group_ranks(group)) <= replica for group in _of_several()}
    return BreakMethod(
        shared=Breakable(groups=[group for group, is_inside in inside.items() if not is_inside]),
        replica=Breakable(groups=[group for group, is_inside in inside.items() if is_inside]),
        abort=_abort,
        backend=chosen,
    )


def _all() -> list[dist.ProcessGroup]:
    """Return this rank's groups."""
    return list(dist.distributed_c10d._world.pg_names)


def _of_several() -> list[dist.ProcessGroup]:
    """Return this rank's groups of several ranks: none waits for peers in the others."""
    return [group for group in _all() if group.size() > 1]


_aborted: list[dist.ProcessGroup] = []
"""The groups of this generation whose communicators are aborted."""


def _abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort the communicators of groups; the process ends if that takes too long."""
    _aborted.extend(groups)
    limit = threading.Timer(ABORT_LIMIT_S, _end_process)
    limit.daemon = True
    limit.start()
    try:
        with issuing.while_aborting(groups):
            backend.current().abort(groups)
    finally:
        limit.cancel()


def _end_process() -> None:
    print(
        f"unicron: communicators were not aborted within {ABORT_LIMIT_S} s; this process ends",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_ABORT)


def _wait_in_slices(link: AgentLink) -> None:
    """Make a hold end also the collectives that Megatron and torch wait for themselves: replace ``Work.wait``."""

    def wait(work: Any, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            return _torch_wait(work, timeout)
        if not link.waits_in_slices or work._get_op_type() not in COLLECTIVES:
            return _torch_wait(work)
        # Collectives that this library waits for by itself are those of all replicas, or come behind the passes.
        link.wait(work, of_replica=True)
        return True

    work_type: Any = dist.Work
    work_type.wait = wait


# Ways to leave a generation.

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

    chosen = backend.current()
    if chosen.aborts and dist.is_initialized():
        _abort([group for group in _of_several() if group not in _aborted])
        chosen.synchronize()  # buffers of kernels that have not ended may not be freed or overwritten
        # A script's collectives in groups of one rank have ended by now. Destroying a communicator takes long, and
        # aborting it does not.
        _abort([group for group in _all() if group not in _aborted])
    _aborted.clear()
    issuing.forget()
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
