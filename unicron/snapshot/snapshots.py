"""Snapshots of each rank's part of the state, in the memory of its own node and of a peer's, taken beside training.

After a step each rank copies its part of the state to shared memory (``unicron.snapshot.files``) while the next step's
forward and backward passes run; the copy is complete before the optimizer may touch the state again (``wait_copied``).
The agreement at the end of a step shows whether all ranks have stored their snapshots. Only then is the next one taken,
into the other slot, so one whole state exists at any moment.

Every part is copied in two failure domains. Data-parallel ranks have the same chunks: each copies its share of them and
the share of the rank whose partner it is, and nothing crosses the network. Where the optimizer is distributed, where
there is one replica, and where replicas share a failure domain, snapshots are sent to a partner
(``unicron.snapshot.transport``). Where the members of a generation lack a part of the state, they take it from the
snapshots on their nodes, in any layout (``agree``).

Each step asks whether a rank's snapshots are still where a recovery would look for them, so that is cheap.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from unicron.link.waiting import Wait
from unicron.megatron.parallel import data_group, model_coordinate
from unicron.protocol import environment
from unicron.snapshot import files
from unicron.snapshot.contents import Document, addresses_of, identity, read_states
from unicron.snapshot.files import SnapshotMeta
from unicron.snapshot.interval import KEEP, Every, Interval, StepTimes, best_exponent, loss_mtbf_s
from unicron.snapshot.partners import Location, copied_shares, is_replicated, partners
from unicron.snapshot.taker import SnapshotTaker
from unicron.snapshot.transport import Receiver, Sender
from unicron.state import transfer
from unicron.state.chunks import StateChunk
from unicron.state.copied_shares import copied_chunks, shared_chunks
from unicron.state.rank_state import RankState
from unicron.state.transfer import AgreedState, AvailableState
from unicron.state.user_chunks import document_chunk
from unicron.state.user_state import Record

STORED, LOST, STORING, FAILED = 0, 1, 2, 3
"""The status of a rank's snapshot in progress (``STORED`` also if there is none); the worst of all ranks counts.
``LOST``: what was stored is gone from a folder, and can be stored anew."""

SETTLE_S = 10.0
"""Longest time that a process which is about to leave waits for its copy. Chosen: a copy that takes a step is stored
within the next one; beyond that the partner may be lost."""


class SnapshotWatch:
    """Watches a rank's files and those that it keeps for peers; each loss is said once."""

    def __init__(self, folder: Path) -> None:
        """Args: folder: the task's, on this node."""
        self._folder = folder
        self._noted = False
        self.unmade = False
        """Whether the files could not be made since the folder was gone."""
        self.reason = ""
        """What was lost, until somebody has taken it to report it."""

    @property
    def can_store(self) -> bool:
        """Whether the folder is there. The agent makes it anew: the folder above may be that of another user."""
        return self._folder.is_dir()

    def is_lost(self, taker: SnapshotTaker | None, receiver: Receiver | None) -> bool:
        """Return whether a recovery would lack what this rank has stored, for itself or for a peer.

        Args:
            taker: the taker of this rank's snapshots; None: the rank has taken none in this generation.
            receiver: the receiver of its peers' snapshots, if there is one.
        """
        here = self.unmade or any(kept is not None and kept.is_lost for kept in (taker, receiver))
        if here and not self._noted:
            self.reason = f"in-memory copies are gone from {self._folder}: something else has removed or changed them"
            print(f"unicron: {self.reason}; new ones follow", file=sys.stderr, flush=True)
        self._noted = here
        return here or (taker is not None and not taker.is_kept_by_partner)


class Snapshots:
    """This rank's snapshots, over all generations."""

    def __init__(self, every: Every, wait: Wait, checkpoint_every: int = 0) -> None:
        """Prepare; does nothing where ``UNICRON_MEMORY`` is not set, or with ``every`` 0.

        Args:
            every: steps between snapshots, or ``auto``.
            wait: waits for a collective.
            checkpoint_every: steps between persistent checkpoints; 0: there are none.
        """
        folder = environment.text(environment.MEMORY)
        self.every: Every = every if folder else 0
        self._checkpoint_every = checkpoint_every
        self.replicated: bool | None = None
        """Whether ranks in other failure domains have each part of this generation's state, beside the snapshots; None:
        this is not known, since no snapshots are taken."""
        self._interval, self._times = Interval(), StepTimes()
        self._adjusts = False
        """Whether the next agreement changes the interval, which happens once for each snapshot."""
        self._nodes = 1
        self._boundary_s = 0.0
        """When the newest boundary was reached, on the monotonic clock; 0: none in this generation."""
        self._disturbed = False
        """Whether a checkpoint was being written behind that boundary."""
        self._size_bytes = 0
        self.stored = -1
        """The step of the newest snapshot that all ranks have stored, in this process's life; -1: none."""
        self._folder = Path(folder)
        self._wait = wait
        self._identity = identity()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unicron-memory")
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._taker: SnapshotTaker | None = None
        self._copied: Future[None] | None = None
        self._stored: Future[None] | None = None
        self._generation = self._step = 0
        self._addresses: list[int] = []
        self._document = Document()
        self._users: list[AvailableState] | None = None
        self._shares: list[int] = []
        self._replicas = 1
        self._cleaned = self._given_up = self.renews = False
        """``renews``: whether a copy is due because one is gone: the same on all ranks."""
        self._watch = SnapshotWatch(self._folder)
        self._reason = ""
        self._lacks = False
        """Whether copies were missing, or may have been, since all ranks have stored theirs: the same on all ranks."""

    @property
    def enabled(self) -> bool:
        """Whether snapshots are taken and used."""
        return self.every != 0

    @property
    def steps(self) -> int:
        """Steps between two snapshots at present; 0: none are taken."""
        if not self.enabled or self._given_up:
            return 0
        return self.every if isinstance(self.every, int) else self._interval.steps

    # Taking.

    def leave(self) -> None:
        """Leave a generation: end what is in progress. The state may be overwritten afterwards."""
        self._users = None
        if self._taker is not None:
            self._taker.close()
        for job in (self._copied, self._stored):
            if job is not None:
                job.exception()  # this waits for what is in progress
        if self._taker is not None:
            self._taker.release()
        self._taker = self._copied = self._stored = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def enter(self, generation: int, rank_state: RankState) -> None:
        """Find the partner in a new generation; all ranks call it, after ``leave`` and once they have the state.

        Raises:
            RuntimeError: a rank was lost meanwhile.
        """
        if not self.enabled:
            return
        self._generation, self._cleaned, self._given_up = generation, False, False
        self._lacks = True
        self.renews = self._watch.unmade = False
        self._listen()
        if self._receiver is not None:
            self._receiver.generation = generation
        rank = dist.get_rank()
        # The longest interval that a member knows goes on: what a snapshot costs was measured in its generation.
        own = (self._location(), model_coordinate(), self._interval.exponent)
        gathered: list[tuple[Location, tuple[int, int], int]] = transfer.gather(own, self._wait)
        locations = [location for location, _, _ in gathered]
        places = [(one.node, one.domain) for one in locations]
        self._interval.enter(exponent for _, _, exponent in gathered)
        self._times, self._boundary_s, self._adjusts = StepTimes(), 0.0, False
        self._nodes = len({node for node, _ in places})
        self.replicated = not rank_state.is_distributed and is_replicated(places, [shard for _, shard, _ in gathered])
        group = dist.get_process_group_ranks(data_group())
        shares = None if rank_state.is_distributed else copied_shares(locations, group, rank)
        self._replicas = len(group)
        self._shares = [group.index(rank)] if shares is None else shares
        partner = partners(places)[rank]
        if shares is None and partner is not None:
            self._connect(locations[partner])

    def _listen(self) -> None:
        """Listen for snapshots of peers, if this rank does not yet."""
        if self._receiver is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._receiver = Receiver(environment.text(environment.HOST, "127.0.0.1"), self._folder)
        except OSError as err:
            self._give_up(err)  # the others see the status at the end of the step

    def _location(self) -> Location:
        receiver = self._receiver
        address, token = (receiver.address, receiver.token) if receiver is not None else (("", 0), b"")
        return Location(environment.text(environment.NODE), environment.text(environment.DOMAIN), address, token)

    def _connect(self, partner: Location) -> None:
        try:
            self._sender = Sender(partner.address, partner.token)
        except OSError as err:
            self._give_up(err)

    def take(self, rank_state: RankState, record: Record | None = None, *, checkpointing: bool = False) -> None:
        """Begin to copy the state after a step, if a snapshot is due: all ranks decide the same.

        Args:
            rank_state: the rank's.
            record: the user's state after the same step, if there is any.
            checkpointing: whether a checkpoint is being written, the same on all ranks.
        """
        if not self.enabled or self._given_up:
            return
        self._time_step(checkpointing)
        if self._stored is None and (self.renews or self._is_due(rank_state.applied, checkpointing)):
            self.begin(rank_state, record)

    def keep(self, rank_state: RankState, record: Record | None, *, at_once: bool) -> None:
        """Begin to copy the state with which a generation begins; all ranks do.

        Args:
            rank_state: the rank's.
            record: the user's state of the same step, if there is any.
            at_once: whether to wait until this rank's part is copied.
        """
        if not self.enabled or self._given_up or rank_state.applied <= 0:
            return
        self.begin(rank_state, record)
        if at_once:
            self.wait_copied()

    def settle(self) -> None:
        """Wait until this rank's part, and what it sends of it, is stored: the process may be about to end."""
        if self._stored is not None:
            with contextlib.suppress(Exception):  # a rank that is lost, or has no room, has stored nothing
                self._stored.result(SETTLE_S)

    def _is_due(self, applied: int, checkpointing: bool) -> bool:
        """Return whether a snapshot is due after a step. With ``auto`` it stays due until it is begun."""
        if isinstance(self.every, int):
            return applied % self.every == 0
        return self._interval.is_due(applied, checkpointing=checkpointing)

    def _time_step(self, checkpointing: bool) -> None:
        """Time the step that has ended at this boundary, from the boundary before."""
        if self.every != "auto":
            return
        now_s = time.monotonic()
        if self._boundary_s:
            self._times.add(now_s - self._boundary_s, disturbed=self._disturbed)
            if self._stored is None:
                self._times.end_copy()
        self._boundary_s, self._disturbed = now_s, checkpointing

    def begin(self, rank_state: RankState, record: Record | None) -> None:
        """Begin to copy the state; all ranks do, and none while a copy is in progress."""
        self.renews = False
        self._interval.begin_copy()
        self._times.begin_copy()
        self._stored = Future()
        try:
            taker = self._ready_taker(rank_state, record)
        except FileNotFoundError:  # there is no folder
            self._watch.unmade = True
            self._stored.set_result(None)
            return
        except (OSError, RuntimeError) as err:  # there is no room, or a tensor has no flat view
            # The peers see the status at the end of the step.
            self._stored.set_exception(err)
            return
        self._step = rank_state.applied
        self._copied = self._thread.submit(taker.copy, taker.ready())
        self._stored = self._thread.submit(taker.store, self._copied, self._step, rank_state.digest)

    def _ready_taker(self, rank_state: RankState, record: Record | None) -> SnapshotTaker:
        """Return the generation's taker, with the tensors in which the state is now as its sources."""
        addresses = addresses_of(rank_state, record)
        if record is not None:
            self._document.fill(record.content, first=self._taker is None)
        if self._taker is None:
            part = self._part(rank_state, record)
            meta = SnapshotMeta(
                generation=self._generation,
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                identity=self._identity,
                chunks=tuple((tuple(chunk), chunk.bytes) for chunk in part),
            )
            self._taker = SnapshotTaker(self._folder, meta, part, self._sender)
            self._size_bytes = meta.payload_bytes
        elif self._addresses != addresses:
            self._taker.replace_sources(self._part(rank_state, record))
        self._addresses = addresses
        return self._taker

    def _part(self, rank_state: RankState, record: Record | None) -> dict[StateChunk, torch.Tensor]:
        part = copied_chunks(rank_state, self._shares, self._replicas)
        if record is not None:
            part |= shared_chunks(record.chunks, self._shares, self._replicas)
            part[document_chunk(len(self._document.room))] = self._document.room
        return part

    def wait_copied(self) -> None:
        """Wait until the state has been copied: it may change afterwards."""
        if self._copied is not None:
            self._copied.result()

    @property
    def status(self) -> int:
        """The status of this rank's snapshot in progress: ``STORED``, ``STORING`` or ``FAILED``."""
        if self._given_up:
            return FAILED
        if self._stored is not None and not self._stored.done():
            return STORING
        if self._stored is not None and self._stored.exception() is not None:
            return FAILED
        # Looked at in every step: a loss of the live state relies on it in every step.
        if not self.enabled or not self._watch.is_lost(self._taker, self._receiver):
            return STORED
        return LOST if self._watch.can_store else STORING

    @property
    def wish(self) -> int:
        """What this rank wants the interval to become (``unicron.snapshot.interval``)."""
        if not self._adjusts:
            return KEEP
        best, cost_s, step_s = None, self._times.cost_s(self._size_bytes), self._times.step_s()
        if cost_s is not None and step_s is not None:
            replicated = bool(self.replicated)
            node_mtbf_s = environment.number(environment.MTBF_NODE_S)
            best = best_exponent(
                cost_s=cost_s,
                step_s=step_s,
                mtbf_s=loss_mtbf_s(node_mtbf_s, self._nodes, replicated=replicated),
                checkpoint_every=self._checkpoint_every,
                replicated=replicated,
            )
        return self._interval.wish(best=best, checkpoint_every=self._checkpoint_every)

    def agreed(self, status: int, wish: int = KEEP) -> str | None:
        """Act on the worst status and the largest wish of all ranks.

        Returns: What there is to say of copies since the last call: why some of this rank's copies are missing. Empty,
            on all ranks: all have stored their copies, for the first time in the generation or since some were missing.
            None: there is nothing to say.
        """
        if self._adjusts:
            self._interval.apply(wish)
            self._adjusts = False
        if status == FAILED and not self._given_up:
            cause = self._stored.exception() if self._stored is not None and self._stored.done() else None
            self._give_up(cause)
        reason, self._reason = self._reason or self._watch.reason, ""
        self._watch.reason = ""
        self._lacks = self._lacks or status in (LOST, FAILED)
        if status == LOST:
            self._renew()
        if self._stored is None or status != STORED:
            return reason or None
        reported, self._lacks = not self._lacks, False
        self._stored, self.stored = None, self._step
        # The times of its last step are known at the boundary that follows. The generation's first one tells nothing.
        self._adjusts = self.every == "auto" and self._cleaned
        if self._taker is not None:
            self._taker.switch()
        if not self._cleaned:
            # This generation has a whole state in snapshots: snapshots of older generations are not needed any more.
            self._cleaned = True
            self._thread.submit(files.remove, self._folder, self._generation)
        return reason or (None if reported else "")

    def _renew(self) -> None:
        """Have all ranks take a new snapshot at the next boundary; a rank whose files are gone makes them anew.

        The others keep theirs: what is left may be all that there is of the state until the new one is stored.
        """
        self.renews, self._watch.unmade = True, False
        stored, self._stored = self._stored, None
        if self._taker is None:
            return
        if self._taker.is_lost:
            self._taker.release()
            self._taker = None
        elif stored is not None:
            self._taker.switch()

    def _give_up(self, cause: BaseException | None) -> None:
        """Take no more snapshots in this generation; what was stored before stays."""
        self._given_up = True
        if cause is not None:
            self._reason = f"no more in-memory copies in this generation: {type(cause).__name__}: {cause}"
        print(f"unicron: no more snapshots in this generation: {cause or 'a peer failed'}", file=sys.stderr, flush=True)

    # Using.

    def delete_all(self) -> None:
        """Delete this node's snapshots: the task begins anew."""
        if self.enabled:
            files.remove(self._folder, sys.maxsize)

    def agree(
        self, rank_state: RankState, generation: int, at_least: int, live: Sequence[AvailableState] = ()
    ) -> AgreedState | None:
        """Agree on the newest whole state in live memory and the nodes' snapshots together; all ranks call it.

        Args:
            rank_state: the rank state that is to receive it.
            generation: snapshots of older ones count.
            at_least: the step of another source; an older state is of no use. Rank 0's value counts.
            live: what this rank has in its own memory.

        Raises:
            RuntimeError: a peer was lost meanwhile.
        """
        if not self.enabled:
            return None
        gathered = transfer.gather((environment.text(environment.NODE), at_least), self._wait)
        nodes = [node for node, _ in gathered]
        mine = self._read(generation, nodes)
        agreed = transfer.agree(
            live,
            rank_state.tensors.shards,
            distributed=rank_state.is_distributed,
            nodes=nodes,
            wait=self._wait,
            snapshots=mine,
        )
        return agreed if agreed is not None and agreed.version >= gathered[0][1] else None

    def user_states(self, generation: int, nodes: Sequence[str]) -> list[AvailableState]:
        """Return the user's state in this rank's share of its node's snapshots, of generations before one.

        Args:
            generation: its number.
            nodes: each rank's node.
        """
        if self.enabled and self._users is None:
            self._read(generation, nodes)
        return self._users or []

    def _read(self, generation: int, nodes: Sequence[str]) -> list[AvailableState]:
        """Return one rank's share of this node's whole snapshots of generations before one; keep the user's state."""
        available, self._users = read_states(self._folder, self._identity, generation, nodes)
        return available
