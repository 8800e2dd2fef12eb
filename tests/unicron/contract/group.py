"""The process group of the contract backend: what torch and Megatron call."""

from __future__ import annotations

import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.unicron.contract.bootstrap import meet
from tests.unicron.contract.communicator import Communicator, everything
from tests.unicron.contract.guard import Guard, end_process
from tests.unicron.contract.hiding import hidden
from tests.unicron.contract.operations import (
    NEVER,
    all_gather,
    all_gather_single,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    coalesced,
    gather,
    meeting,
    receive,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    scatter,
    send,
)
from tests.unicron.contract.settings import Settings
from tests.unicron.contract.watchdog import Watchdog
from tests.unicron.contract.work import Operation
from unicron.process import sockets

NAME = "contract"

WHOLE = "collectives"
"""The key of the communicator of all ranks of a group."""

LOOPBACK = "lo"
"""The interface of all ranks of a test."""

CONNECT_LIMIT = timedelta(seconds=5)
"""Of gloo, to connect ranks that are all there. It takes milliseconds."""

Options = Any
"""Torch's, of each collective: pybind classes without types."""


@dataclass(slots=True)
class Names:
    """Of a group: torch sets them after it has made the group."""

    name: str = ""
    description: str = ""

    def text(self) -> str:
        return f"group {self.name} ({self.description})"


class Process:
    """What the groups of a process have in common."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.guard = Guard()
        # One for all communicators, made before any, and so before any generation: gloo ends the process if somebody
        # shuts its listening socket.
        self._device = dist.ProcessGroupGloo.create_device(interface=LOOPBACK)
        self._random = settings.random()
        self._lock = threading.Lock()
        self._first: Watchdog | None = None
        """That of the first group that the process has made, ever: only its monitor dumps (``checkDumpSignal``)."""

    def connect(self, number: int, rank: int, size: int) -> Any:
        """Return gloo's backend for ranks that are all there.

        Args:
            number: that no other ranks have.
            rank: this one.
            size: how many there are.

        Raises:
            RuntimeError: one of them is not there, after all.
        """
        # A file: the connection to the store may be shut, and to make another one takes torch a reverse look-up of the
        # address in the domain name system, at times seconds.
        path = Path(tempfile.gettempdir()) / f"unicron-test-contract-{number:x}"
        store = dist.FileStore(str(path), size)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout, options._threads = [self._device], CONNECT_LIMIT, 1
        made = gloo(store, rank, size, options)
        if size > 1:
            made.barrier(dist.BarrierOptions()).wait(CONNECT_LIMIT)
        if rank == 0:
            path.unlink(missing_ok=True)  # ranks end without destructors, which would do it
        made._set_default_timeout(NEVER)
        return made

    def about(self, duration_s: float) -> float:
        """Return a duration, give or take a half."""
        with self._lock:
            return duration_s * self._random.uniform(0.5, 1.5)

    def chance(self) -> bool:
        """Return whether something happens that happens half of the times."""
        with self._lock:
            return self._random.random() < 0.5

    def add(self, watchdog: Watchdog) -> None:
        """Take a new group's watchdog in."""
        self._first = self._first or watchdog
        watchdog.on_dump = self._dump

    def _dump(self) -> None:
        if self._first is not None:
            self._first.dump()

    def abort(self, groups: Sequence[ContractGroup]) -> None:
        """End all that is under way on the communicators of some groups, all at once; it takes a while.

        Once: on a communicator that is aborted it does nothing (NCCLUtils.cpp, ``NCCLComm::abort``). It frees pinned
        memory (nccl: src/init.cc, ``commFree``: ``cudaFreeHost``), which waits for all that is under way on the device,
        on other communicators, too. What hangs there must be aborted together with this, or the abort waits for ever
        (nccl#1013, pytorch#119797).
        """
        with self.guard.during("abort", groups):
            communicators = [one for group in groups for one in group.begin_abort()]
            takes_s = self.about(self.settings.abort_s) if communicators else 0.0
            time.sleep(takes_s / 2)
            for one in communicators:
                one.end_abort()
            for one in set(everything) - set(communicators):
                one.wait_for(one.pending(), or_abort=True)
            time.sleep(takes_s / 2)
            for group in groups:
                group.watchdog.retire_monitor()


OF_ONE_RANK = "a communicator of one rank is made"

# Torch's stubs have other signatures than its own Python classes of the kind (torch.testing).
_ProcessGroup: Any = dist.ProcessGroup


class ContractGroup(_ProcessGroup):  # type: ignore[misc]
    """A group whose communicators are made when they are first needed (ProcessGroupNCCL.cpp, ``initNCCLComm``)."""

    supports_splitting = False

    def __init__(self, process: Process, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._process, self._store, self._rank, self._size = process, store, rank, size
        self._communicators: dict[str, Communicator] = {}
        self._names = Names()
        self._is_eager = False
        self._sequence = 0
        self._coalescing: list[tuple[Operation, int | None]] | None = None
        self.watchdog = Watchdog(self._names.text, process.settings, self._communicators.values())
        process.add(self.watchdog)
        weakref.finalize(self, _destruct, self._communicators, self.watchdog).atexit = False

    # What torch asks of a group.

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def name(self) -> str:
        return NAME

    def getBackendName(self) -> str:
        return NAME

    def _get_backend_name(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._names.name

    @property
    def group_desc(self) -> str:
        return self._names.description

    def _set_group_name(self, name: str) -> None:
        self._names.name = name

    def _set_group_desc(self, description: str) -> None:
        self._names.description = description

    def _get_backend(self, device: torch.device) -> ContractGroup:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def __repr__(self) -> str:
        return f"{self._names.text()}, rank {self._rank} of {self._size}"

    # Communicators.

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Make the communicator of the whole group now. Sends and receives use it too from here on (``eagerInit_``)."""
        self._is_eager = True
        self._communicator(WHOLE, self._rank, self._size)

    def _communicator(self, key: str, rank: int, size: int) -> Communicator:
        """Return a communicator, made now if there is none: that takes long, and the thread is blocked meanwhile.

        It waits for the store, then for the peers, without a limit. No abort ends it (ProcessGroupNCCL.cpp,
        ``NCCLComm::create`` has no handle yet), only an error of its sockets.

        Raises:
            DistStoreError: nobody has told the root's address in time.
            DistBackendError: one of the sockets was shut.
        """
        found = self._communicators.get(key)
        if found is not None:
            return found
        process = self._process
        if size == 1:
            print(OF_ONE_RANK, flush=True)
        with process.guard.during("make", [self], key):
            if self.watchdog.is_stopped:
                end_process("a communicator is made in a group that is aborted or destroyed", repr(self))
            before = sockets.connected()
            store = dist.PrefixStore(f"{key}/", self._store)
            try:
                number = meet(store, rank, size)
                time.sleep(process.about(process.settings.make_s))
                with hidden():
                    gloo = process.connect(number, rank, size)
            except dist.DistStoreError:
                raise
            except (RuntimeError, OSError) as error:
                raise dist.DistBackendError(f"NCCL error: {key} of {self!r} cannot be made: {error}") from None
            inodes = sockets.connected() - before
            made = Communicator(f"{self._names.name}/{key}", process.settings, gloo, inodes)
            made.on_broken = weakref.WeakMethod(self.watchdog.found_broken)
            self._communicators[key] = made
            return made

    def abort(self) -> None:
        """Abort this group alone."""
        self._process.abort([self])

    def begin_abort(self) -> list[Communicator]:
        """Begin to abort all communicators (ProcessGroupNCCL.cpp, ``abort``); return them."""
        communicators = list(self._communicators.values())
        if self._process.chance() and any(one.pending() for one in communicators):
            self.watchdog.meet_abort()
        self.watchdog.stop()
        for one in communicators:
            one.begin_abort()
        return communicators

    def shutdown(self) -> None:
        """Wait for what is under way, then for the watchdog, and destroy (ProcessGroupNCCL.cpp, ``shutdown``)."""
        with self._process.guard.during("destroy", [self]):
            for one in self._communicators.values():
                if one.is_open:
                    works = one.pending()
                    works += [one.issue(meeting())] if self._process.settings.destroy_meets else []
                    one.wait_for(works)
            self.watchdog.stop()
            self.watchdog.join()
            self.watchdog.retire_monitor()
            for one in self._communicators.values():
                one.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the watchdog's time-out, which is far longer than any test."""

    # Collectives.

    def _issue(self, operation: Operation, peer: int | None = None) -> Any:
        """Issue a collective, or, where ``peer`` is given, a send or receive between two ranks."""
        if self._coalescing is not None:
            self._coalescing.append((operation, peer))
            return None
        with self._process.guard.during("issue", [self], operation.name):
            if peer is None or self._is_eager:
                self._sequence += peer is None
                communicator = self._communicator(WHOLE, self._rank, self._size)
            else:
                pair = self._pair(peer)
                communicator = self._communicator(":".join(map(str, pair)), pair.index(self._rank), len(pair))
            work = communicator.issue(operation)
        with self.watchdog.works:
            return work

    def _pair(self, peer: int) -> list[int]:
        """Return the two ranks that have a communicator of their own (ProcessGroupNCCL.cpp, ``getKeySendRecv``)."""
        return sorted((self._rank, peer))

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        collected, self._coalescing = self._coalescing or [], None
        if not collected:
            return None
        return self._issue(coalesced([operation for operation, _ in collected]))

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Options = None) -> Any:
        return self._issue(all_reduce(tensors, _reduce_op(opts)))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Options = None) -> Any:
        return self._issue(all_reduce(tensors, _reduce_op(opts)))

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Options) -> Any:
        return self._issue(broadcast(_one(tensors), opts.rootRank, self._rank))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Options) -> Any:
        return self._issue(reduce(_one(tensors), opts.rootRank, self._rank, _reduce_op(opts)))

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Options = None
    ) -> Any:
        return self._issue(all_gather(_one(outputs), _one(inputs)))

    def all_gather_single(self, output: torch.Tensor, input_: torch.Tensor, opts: Options = None) -> Any:
        return self._issue(all_gather_single(output, input_, self._size))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Options = None
    ) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return self._issue(coalesced([all_gather_single(out, own, self._size) for out, own in pairs]))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Options = None
    ) -> Any:
        return self._issue(reduce_scatter(_one(outputs), _one(inputs), _reduce_op(opts)))

    def reduce_scatter_single(self, output: torch.Tensor, input_: torch.Tensor, opts: Options = None) -> Any:
        return self._issue(reduce_scatter_single(output, input_, self._size, _reduce_op(opts)))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Options = None
    ) -> Any:
        op, pairs = _reduce_op(opts), zip(outputs, inputs, strict=True)
        return self._issue(coalesced([reduce_scatter_single(out, whole, self._size, op) for out, whole in pairs]))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        opts: Options = None,
    ) -> Any:
        return self._issue(all_to_all_single(output, input_, output_sizes or [], input_sizes or [], self._size))

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Options = None) -> Any:
        return self._issue(all_to_all(outputs, inputs))

    def gather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Options) -> Any:
        return self._issue(gather(outputs[0] if outputs else [], _one(inputs), opts.rootRank, self._rank))

    def scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Options) -> Any:
        return self._issue(scatter(_one(outputs), inputs[0] if inputs else [], opts.rootRank, self._rank))

    def barrier(self, opts: Options = None) -> Any:
        return self._issue(barrier(self._process.settings.leaves_s))

    def monitored_barrier(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("ProcessGroupNCCL has no monitored_barrier")

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> Any:
        return self._point_to_point(send, _one(tensors), peer)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> Any:
        return self._point_to_point(receive, _one(tensors), peer)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Any:
        raise RuntimeError("ProcessGroupNCCL has no recv_anysource")

    def _point_to_point(
        self, operation: Callable[[torch.Tensor, int], Operation], tensor: torch.Tensor, peer: int
    ) -> Any:
        alone = self._coalescing is None and not self._is_eager
        return self._issue(operation(tensor, int(self._rank < peer) if alone else peer), peer)


def _destruct(communicators: dict[str, Communicator], watchdog: Watchdog) -> None:
    """Do what torch's destructor does (~ProcessGroupNCCL): abort, if nobody has; then wait for both threads."""
    watchdog.stop()
    for one in communicators.values():
        one.abort_at_once()
        one.close()
    watchdog.join()
    watchdog.retire_monitor(join=True)


def _one(values: Sequence[Any]) -> Any:
    """Return the only one: a backend of one device has lists of one."""
    (value,) = values
    return value


def _reduce_op(opts: Options) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp.op
