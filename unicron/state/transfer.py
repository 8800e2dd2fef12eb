"""The transfer that brings every rank of a new generation to the newest state that its members together have in memory.

Each member reports what it has and what its place needs; all come to the same plan (``unicron.state.transfer_plan``).
Boxes travel in rounds of one all-to-all each, so memory stays bounded and no two ranks can wait for each other in a
cycle. An all-to-all is used instead of sends and receives because a collective can be waited for in slices
(``unicron.link.waiting``), which a gloo receive cannot: its time-out closes the connection.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unicron import device
from unicron.link.waiting import Wait
from unicron.protocol import environment
from unicron.state.boxes import view_of_box
from unicron.state.chunks import ParameterShard, StateChunk, dtype_of
from unicron.state.transfer_plan import Transfer, TransferPlan, newest_complete, rounds
from unicron.torch_names import all_gather_single


class AvailableState(NamedTuple):
    """State that a rank can give: chunks, complete or not, of one version."""

    version: int
    """Updates applied."""
    digest: bytes
    """Digest of the samples of those updates."""
    values: Mapping[StateChunk, torch.Tensor]


class AgreedState(NamedTuple):
    """The state that the members of a generation have agreed on."""

    version: int
    digest: bytes
    plan: TransferPlan | None
    """How the state gets to every member; None: every member has all that it needs, in place."""
    available: list[tuple[StateChunk, torch.Tensor]]
    """What this rank can give, in the plan's numbering."""
    live_chunks: Sequence[int] = ()
    """How many of each rank's available chunks, the first ones, are live; the others are from snapshots."""
    nodes: Sequence[str] = ()
    """Each rank's node."""

    @classmethod
    def in_place(cls, version: int, digest: bytes) -> AgreedState:
        """Return the state of members that already have all that they need."""
        return cls(version, digest, None, [])

    def source(self, rank: int) -> str:
        """Return where a rank's state comes from: the farthest of all sources of its parts.

        Returns:
            ``own``, ``live`` (another member's memory), ``memory`` (snapshots on the rank's node) or ``peer-memory``
            (snapshots on another node).
        """
        received = [] if self.plan is None else [one for one in self.plan.transfers if one.receiver == rank]
        from_snapshots = {self.nodes[one.sender] for one in received if one.given >= self.live_chunks[one.sender]}
        if from_snapshots:
            return "memory" if from_snapshots == {self.nodes[rank]} else "peer-memory"
        return "own" if all(one.sender == rank for one in received) else "live"


def agree(
    live: Sequence[AvailableState],
    shards: Sequence[ParameterShard],
    *,
    distributed: bool,
    nodes: Sequence[str],
    wait: Wait,
    snapshots: Sequence[AvailableState] = (),
) -> AgreedState | None:
    """Agree on the newest state that the members together have completely; None if there is none. All members call it.

    Args:
        live: what this rank has in its own memory.
        shards: what this rank computes with in the new generation.
        distributed: whether data-parallel ranks divide the optimizer's state among them.
        nodes: each rank's node.
        wait: waits for a collective.
        snapshots: snapshots that this rank has read; at equal distance live state is preferred.

    Raises:
        RuntimeError: a member was lost meanwhile.
    """
    everything = [*live, *snapshots]
    mine = [(chunk, state.version) for state in everything for chunk in state.values]
    digests = {state.version: state.digest for state in everything}
    reports = gather((mine, digests, list(shards), sum(len(state.values) for state in live)), wait)
    plan = newest_complete([r[2] for r in reports], [r[0] for r in reports], distributed=distributed, nodes=nodes)
    if plan is None:
        return None
    digest = next(r[1][plan.version] for r in reports if plan.version in r[1])
    values = [item for state in everything for item in state.values.items()]
    return AgreedState(plan.version, digest, plan, values, [r[3] for r in reports], list(nodes))


def gather(value: Any, wait: Wait) -> list[Any]:
    """Return every rank's value, in rank order. All ranks call it.

    Args:
        value: can be pickled.
        wait: waits for a collective.

    Raises:
        RuntimeError: a rank was lost meanwhile.
    """
    where = device.current()
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(where)
    size = dist.get_world_size()
    sizes = torch.empty(size, dtype=torch.int64, device=where)
    wait(all_gather_single(sizes, torch.tensor([data.numel()], device=where), async_op=True))
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=where)
    padded[: data.numel()] = data
    everything = torch.empty(size * longest, dtype=torch.uint8, device=where)
    wait(all_gather_single(everything, padded, async_op=True))
    rows = everything.view(size, longest).cpu()
    pickled = [row[: int(n)].numpy().tobytes() for row, n in zip(rows, sizes.tolist(), strict=True)]
    return [pickle.loads(one) for one in pickled]  # nosec B301 # of ranks of this task, which run the same program


def execute(
    agreed: AgreedState,
    into: Mapping[StateChunk, torch.Tensor],
    wait: Wait,
    before_round: Callable[[int], None] = lambda number: None,
) -> int:
    """Carry out the plan of an agreed state. All members call it.

    Args:
        agreed: the state, with what this rank can give.
        into: this rank's required chunks, to be written to. A chunk that is its own source stays as it is.
        wait: waits for a collective.
        before_round: called before each round, with its number from 0.

    Returns:
        The bytes that this rank received from others.

    Raises:
        RuntimeError: a member was lost meanwhile; what has been written so far is a mixture.
    """
    plan = agreed.plan
    if plan is None:
        return 0
    rank, size = dist.get_rank(), dist.get_world_size()

    def source(one: Transfer) -> torch.Tensor:
        return view_of_box(*agreed.available[one.given], one.box)

    def target(one: Transfer) -> torch.Tensor:
        chunk = plan.required[rank][one.required]
        return view_of_box(chunk, into[chunk], one.box)

    for one in plan.transfers:
        if one.sender == one.receiver == rank:
            target_view, source_view = target(one), source(one)
            if target_view.data_ptr() != source_view.data_ptr():
                target_view.copy_(source_view)
    received_bytes = 0
    limit_bytes = max(1, int(environment.number(environment.ROUND_BYTES)) // size)
    for number, transfers in enumerate(rounds(plan.transfers, limit_bytes)):
        before_round(number)
        sent = sorted((one for one in transfers if one.sender == rank), key=lambda one: one.receiver)
        wanted = sorted((one for one in transfers if one.receiver == rank), key=lambda one: one.sender)
        buffer = _exchange(sent, wanted, [source(one) for one in sent], wait)
        start = 0
        for one in wanted:
            dtype = dtype_of(plan.required[rank][one.required].dtype)
            # A copy of its own: a view of another dtype needs that dtype's alignment.
            values = buffer[start : start + one.bytes].clone().view(dtype).view(one.box.shape)
            target(one).copy_(values)
            start += one.bytes
        received_bytes += start
    return received_bytes


def _exchange(
    sent: Sequence[Transfer], wanted: Sequence[Transfer], values: Sequence[torch.Tensor], wait: Wait
) -> torch.Tensor:
    """Send this rank's boxes of one round; return the bytes received, in the order of ``wanted``."""
    size, where = dist.get_world_size(), device.current()
    flat = [box.reshape(-1).view(torch.uint8).to(where) for box in values]
    out = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=where)
    buffer = torch.empty(sum(one.bytes for one in wanted), dtype=torch.uint8, device=where)
    work = dist.all_to_all_single(
        buffer,
        out,
        [sum(one.bytes for one in wanted if one.sender == peer) for peer in range(size)],
        [sum(one.bytes for one in sent if one.receiver == peer) for peer in range(size)],
        async_op=True,
    )
    wait(work)
    return buffer
