"""In-memory copies of the state: every rank's part, on its own node and on a peer's, taken beside training.

After a step each rank copies its part of the state to shared memory (``unicron.copies``) while the next step's forward
and backward passes run; the copy is complete before the optimizer may touch the state again (``wait_copied``). The
end-of-step agreement tells whether all ranks have stored theirs; only then is the next one taken, into the other slot,
so one whole state is always there.

Every part is copied in two failure domains. Data-parallel ranks hold the same pieces: each copies its share of them and
the share of another one whose partner it is, and nothing goes over the network. Where the optimizer is divided, where
there is one replica, and where replicas share a failure domain, copies are sent to a partner (``unicron.peers``).
Where the members of a generation lack a part of the state, they take it from the copies that their nodes hold, in any
layout (``settle``).
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron import copies, device, movement, pieces, spec
from unicron.copies import Layout, Slot
from unicron.movement import Holding, Settled
from unicron.peers import Receiver, Sender
from unicron.pieces import Piece
from unicron.protocol import DOMAIN_VARIABLE, HOST_VARIABLE, MEMORY_VARIABLE, NODE_VARIABLE
from unicron.replica import Replica
from unicron.runtime import Wait
from unicron.shares import Place, kept_shares, parts

PORTION_BYTES = 1 << 19
"""What is copied and hashed in one go: as much as stays in a core's second-level cache, or one tensor."""

STORED, STORING, FAILED = 0, 1, 2
"""A rank's copy in hand (``STORED`` also if there is none); the worst of all ranks counts."""


def portions(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Yield the first piece of each portion, the one after its last, and where the payload goes on behind it."""
    first, began = 0, 0
    stops = [*layout.offsets()[1:], layout.payload_bytes] if layout.pieces else []
    for index, stop in enumerate(stops):
        if stop - began >= PORTION_BYTES or index + 1 == len(stops):
            yield first, index + 1, stop
            first, began = index + 1, stop


def _addresses(replica: Replica) -> list[int]:
    """Return where the optimizer's state is in memory: an optimizer may put a new tensor in the place of one."""
    states = (state for one in pieces.torch_optimizers(replica.optimizer) for state in one.state.values())
    return [value.data_ptr() for state in states for value in state.values() if isinstance(value, torch.Tensor)]


class _Taker:
    """This generation's two slots, and how the state gets into them."""

    def __init__(self, folder: Path, layout: Layout, part: dict[Piece, torch.Tensor], sender: Sender | None) -> None:
        self._layout, self._sources = layout, list(part.values())
        self._slots = [Slot(folder / copies.name(layout.generation, layout.rank, n), layout) for n in (0, 1)]
        self._sender = sender
        self._next = 0
        cuda = any(source.is_cuda for source in self._sources)
        self._stream: Any = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
        memories = [torch.frombuffer(slot.payload, dtype=torch.uint8) for slot in self._slots]
        self._pinned = [memory for memory in memories if cuda and device.pin(memory)]
        self._into = [self._views(memory, layout) for memory in memories]
        self._portions = list(portions(layout))

    def _views(self, memory: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        return [
            memory[at : at + size].view(source.dtype)
            for at, (_, size), source in zip(layout.offsets(), layout.pieces, self._sources, strict=True)
        ]

    def stored(self) -> None:
        """Turn to the other slot."""
        self._next ^= 1

    def turn_to(self, part: dict[Piece, torch.Tensor]) -> None:
        """Copy from other tensors from now on, which hold the same pieces.

        Raises:
            RuntimeError: they do not.
        """
        if tuple((tuple(piece), piece.bytes) for piece in part) != self._layout.pieces:
            raise RuntimeError("the optimizer's state has changed its form")
        self._sources = list(part.values())

    def ready(self) -> Any:
        """Return what the copying has to wait for on the device, if anything."""
        return torch.cuda.current_stream().record_event() if self._stream is not None else None

    def copy(self, ready: Any) -> None:
        """Copy the state; nothing may change it meanwhile."""
        slot, into = self._slots[self._next], self._into[self._next]
        slot.begin()
        # Few calls, of many tensors each: the interpreter's lock changes hands with every one.
        if self._stream is None:
            for first, last, stop in self._portions:
                torch._foreach_copy_(into[first:last], self._sources[first:last])
                slot.written(stop)
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                torch._foreach_copy_(into, self._sources, non_blocking=True)
            self._stream.synchronize()

    def store(self, copied: Future[None], step: int, digest: bytes) -> None:
        """Seal the copy and send it to the partner; fails if it was not copied."""
        copied.result()
        slot = self._slots[self._next]
        slot.seal(step, digest)
        if self._sender is not None:
            self._sender.send(slot.path.name, slot.content)

    def close(self) -> None:
        """Fail a ``store`` under way."""
        if self._sender is not None:
            self._sender.close()

    def release(self) -> None:
        """Let go of the memory, once nothing is under way; files that hold nothing whole go, too."""
        for memory in self._pinned:
            device.unpin(memory)
        self._pinned = []
        for slot in self._slots:
            if not slot.is_whole:
                slot.path.unlink(missing_ok=True)


class Memory:
    """This rank's in-memory copies, over all generations."""

    def __init__(self, every: int, wait: Wait) -> None:
        """Prepare; does nothing without ``UNICRON_MEMORY`` or with ``every`` 0.

        Args:
            every: steps between copies.
            wait: waits for a collective.
        """
        folder = os.environ.get(MEMORY_VARIABLE, "")
        self.every = every if folder else 0
        self.stored = -1
        """The step of the newest copy that all ranks have stored, in this life of the process; -1: none."""
        self._folder = Path(folder)
        self._wait = wait
        self._identity = _identity()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unicron-memory")
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._taker: _Taker | None = None
        self._copied: Future[None] | None = None
        self._stored: Future[None] | None = None
        self._generation = self._taken = 0
        self._where: list[int] = []
        self._kept: list[int] = []
        self._replicas = 1
        self._cleaned = self._given_up = False

    @property
    def enabled(self) -> bool:
        """Whether copies are taken and used."""
        return self.every > 0

    # Taking.

    def leave(self) -> None:
        """Before a new generation: end what is under way; the state may be overwritten then."""
        if self._taker is not None:
            self._taker.close()
        for job in (self._copied, self._stored):
            if job is not None:
                job.exception()  # waits
        if self._taker is not None:
            self._taker.release()
        self._taker = self._copied = self._stored = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def enter(self, generation: int, replica: Replica) -> None:
        """Find the partner in a new generation; all ranks call it, after ``leave`` and when they hold the state."""
        if not self.enabled:
            return
        from megatron.core import parallel_state

        self._generation, self._cleaned, self._given_up = generation, False, False
        host = os.environ.get(HOST_VARIABLE, "127.0.0.1")
        if self._receiver is None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._receiver = Receiver(host, self._folder)
            except OSError as err:
                self._give_up(err)  # the others hear of it at the end of the step
        node, domain = os.environ.get(NODE_VARIABLE, ""), os.environ.get(DOMAIN_VARIABLE, "")
        address, token = (self._receiver.address, self._receiver.token) if self._receiver else (("", 0), b"")
        mine = Place(node, domain, address, token)
        places: list[Place] = movement.gather(mine, self._wait)
        group = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
        kept = None if pieces.is_sharded(replica.model) else kept_shares(places, group, dist.get_rank())
        self._replicas = len(group)
        self._kept = [group.index(dist.get_rank())] if kept is None else kept
        partner = copies.partners([(place.node, place.domain) for place in places])[dist.get_rank()]
        if kept is None and partner is not None:
            try:
                self._sender = Sender(places[partner].address, places[partner].token)
            except OSError as err:
                self._give_up(err)

    def take(self, replica: Replica) -> None:
        """Begin to copy the state after a step, if it is time for it: all ranks decide the same."""
        due = self.enabled and replica.applied % self.every == 0
        if not due or self._given_up or self._stored is not None:
            return
        try:
            where = _addresses(replica)
            if self._taker is not None and self._where != where:
                self._taker.turn_to(self._part(replica))  # the optimizer keeps its state in other tensors now
            self._taker, self._where = self._taker or self._make_taker(replica), where
        except (OSError, RuntimeError) as err:  # no room; or a tensor of which there is no flat view
            # The peers hear of it at the end of the step.
            self._stored = Future()
            self._stored.set_exception(err)
            return
        taker, step, digest = self._taker, replica.applied, replica.digest
        self._taken = step
        self._copied = self._thread.submit(taker.copy, taker.ready())
        self._stored = self._thread.submit(taker.store, self._copied, step, digest)

    def _part(self, replica: Replica) -> dict[Piece, torch.Tensor]:
        return parts(replica, self._kept, self._replicas)

    def _make_taker(self, replica: Replica) -> _Taker:
        part = self._part(replica)
        layout = Layout(
            generation=self._generation,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            identity=self._identity,
            pieces=tuple((tuple(piece), piece.bytes) for piece in part),
        )
        return _Taker(self._folder, layout, part, self._sender)

    def wait_copied(self) -> None:
        """Wait until the state has been copied: it may change now."""
        if self._copied is not None:
            self._copied.result()

    @property
    def status(self) -> int:
        """This rank's copy in hand: ``STORED``, ``STORING`` or ``FAILED``."""
        if self._given_up:
            return FAILED
        if self._stored is None:
            return STORED
        if not self._stored.done():
            return STORING
        return STORED if self._stored.exception() is None else FAILED

    def agreed(self, status: int) -> None:
        """Take what all ranks know of the copies in hand: the worst status of any."""
        if status == FAILED and not self._given_up:
            cause = self._stored.exception() if self._stored is not None and self._stored.done() else None
            self._give_up(cause)
        if self._stored is None or status != STORED:
            return
        self._stored, self.stored = None, self._taken
        if self._taker is not None:
            self._taker.stored()
        if not self._cleaned:
            # This generation has left a whole state: older ones are of no use any more.
            self._cleaned = True
            self._thread.submit(copies.remove, self._folder, self._generation)

    def _give_up(self, cause: BaseException | None) -> None:
        """Take no more copies in this generation; what was stored before stays."""
        self._given_up = True
        print(f"unicron: no more in-memory copies: {cause or 'a peer failed'}", file=sys.stderr, flush=True)

    # Using.

    def forget(self) -> None:
        """Delete this node's copies: the task begins anew."""
        if self.enabled:
            copies.remove(self._folder, sys.maxsize)

    def _holdings(self, generation: int, index: int, of: int) -> list[Holding]:
        """Return a share of what this node holds of the states that generations before one have left, whole copies."""
        found, refused = copies.held(self._folder, self._identity, generation, index=index, of=of)
        for reason in refused:
            print(f"unicron: warning: in-memory copy not used: {reason}", file=sys.stderr, flush=True)
        answer = []
        for copy in found:
            values = {}
            for fields, data in copy.pieces.items():
                piece = Piece(*fields)
                flat = torch.frombuffer(data, dtype=pieces.dtype_of(piece.dtype))
                values[piece] = flat.view(piece.shape) if piece.whole else flat
            answer.append(Holding(copy.step, bytes.fromhex(copy.digest), values))
        return answer

    def settle(self, replica: Replica, generation: int, at_least: int, live: Sequence[Holding] = ()) -> Settled | None:
        """Agree on the newest whole state that live memory and the nodes' copies hold together; all ranks call it.

        Args:
            replica: what is to take it.
            generation: copies of older ones count.
            at_least: the step of another source; an older state is of no use. Rank 0's counts.
            live: what this rank holds in its own memory.

        Raises:
            RuntimeError: a peer was lost meanwhile.
        """
        if not self.enabled:
            return None
        told = movement.gather((os.environ.get(NODE_VARIABLE, ""), at_least), self._wait)
        nodes = [node for node, _ in told]
        neighbours = [rank for rank, node in enumerate(nodes) if node == nodes[dist.get_rank()]]
        mine = self._holdings(generation, neighbours.index(dist.get_rank()), len(neighbours))
        settled = movement.settle(
            live,
            [part.shard for part in replica.parts],
            sharded=pieces.is_sharded(replica.model),
            nodes=nodes,
            wait=self._wait,
            copies=mine,
        )
        return settled if settled is not None and settled.version >= told[0][1] else None


def _identity() -> str:
    """Return what tells this task's state from that of another one with its name: a digest of its specification."""
    path = os.environ.get(spec.VARIABLE, "")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else ""
