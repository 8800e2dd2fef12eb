"""Bringing every rank of a new generation to the newest state that its members together hold, through memory.

Each member tells what it holds and what its place needs; all come to the same plan (``unicron.moves``), and boxes
travel in rounds of one all-to-all each, so that memory stays bounded and no two ranks can wait for each other in a
cycle. A collective suits a runtime that breaks sockets: it can be waited for in slices, which a gloo receive cannot
(its time-out closes the connection).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unicron import device
from unicron.moves import Agreed, Move, newest, region
from unicron.pieces import Piece, Shard, dtype_of
from unicron.runtime import Wait

ROUND_VARIABLE = "UNICRON_ROUND_BYTES"
"""Environment variable: bytes that a rank sends, and receives, in one round; the same for all ranks of a task."""

ROUND_BYTES = 64 << 20
"""The latency of a round (below 1 ms) is nothing beside it, and two buffers of it fit beside any state."""


class Holding(NamedTuple):
    """State in a rank's memory: pieces, complete or not, of one step."""

    version: int
    """Updates applied."""
    digest: bytes
    """Of the samples of those updates."""
    values: Mapping[Piece, torch.Tensor]


class Settled(NamedTuple):
    """What the members agreed on."""

    version: int
    digest: bytes
    agreed: Agreed | None
    """Who gives what to whom; None: every member has all it needs, in place."""
    held: list[tuple[Piece, torch.Tensor]]
    """What this rank has to give, as the plan numbers it."""
    live: Sequence[int] = ()
    """For each rank, how many of its pieces, the first ones, are its memory's own; the others are copies'."""
    nodes: Sequence[str] = ()
    """Each rank's node."""

    @classmethod
    def in_place(cls, version: int, digest: bytes) -> Settled:
        """Return that nothing has to move."""
        return cls(version, digest, None, [])

    def source(self, rank: int) -> str:
        """Return where a rank has its state from, the farthest part of it.

        Returns:
            ``own``, ``live`` (another member's memory), ``memory`` (copies on its node) or ``peer-memory`` (elsewhere).
        """
        taken = [] if self.agreed is None else [move for move in self.agreed.moves if move.taker == rank]
        copied = {self.nodes[move.source] for move in taken if move.held >= self.live[move.source]}
        if copied:
            return "memory" if copied == {self.nodes[rank]} else "peer-memory"
        return "own" if all(move.source == rank for move in taken) else "live"


def settle(
    holdings: Sequence[Holding],
    shards: Sequence[Shard],
    *,
    sharded: bool,
    nodes: Sequence[str],
    wait: Wait,
    copies: Sequence[Holding] = (),
) -> Settled | None:
    """Agree on the newest state that the members together hold; None if they hold no complete one.

    Args:
        holdings: what this rank holds live.
        shards: what it computes with in the new generation.
        sharded: whether the optimizer's state is divided among data-parallel ranks.
        nodes: each rank's node.
        wait: waits for a collective.
        copies: in-memory copies that this rank has at hand; at equal distance what is live is preferred.
    """
    everything = [*holdings, *copies]
    mine = [(piece, holding.version) for holding in everything for piece in holding.values]
    digests = {holding.version: holding.digest for holding in everything}
    told = gather((mine, digests, list(shards), sum(len(holding.values) for holding in holdings)), wait)
    agreed = newest([t[2] for t in told], [t[0] for t in told], sharded=sharded, nodes=nodes)
    if agreed is None:
        return None
    digest = next(t[1][agreed.version] for t in told if agreed.version in t[1])
    values = [item for holding in everything for item in holding.values.items()]
    return Settled(agreed.version, digest, agreed, values, [t[3] for t in told], list(nodes))


def gather(value: Any, wait: Wait) -> list[Any]:
    """Return every rank's value, in rank order."""
    where = device.current()
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(where)
    size = dist.get_world_size()
    sizes = torch.empty(size, dtype=torch.int64, device=where)
    wait(dist.all_gather_into_tensor(sizes, torch.tensor([data.numel()], device=where), async_op=True))
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=where)
    padded[: data.numel()] = data
    everything = torch.empty(size * longest, dtype=torch.uint8, device=where)
    wait(dist.all_gather_into_tensor(everything, padded, async_op=True))
    rows = everything.view(size, longest).cpu()
    return [pickle.loads(row[: int(n)].numpy().tobytes()) for row, n in zip(rows, sizes.tolist(), strict=True)]


def carry_out(
    settled: Settled,
    into: Mapping[Piece, torch.Tensor],
    wait: Wait,
    before: Callable[[int], None] = lambda number: None,
) -> int:
    """Move what the plan says; return the bytes that this rank received from others.

    Args:
        settled: the plan.
        into: this rank's needed pieces, to be written to. A piece that is its own source is left as it is.
        wait: waits for a collective.
        before: called before each round, with its number.
    """
    agreed = settled.agreed
    if agreed is None:
        return 0
    rank, size, where = dist.get_rank(), dist.get_world_size(), device.current()
    needed = agreed.needed

    def given(move: Move) -> torch.Tensor:
        return region(*settled.held[move.held], move.offset, move.shape)

    def taken(move: Move) -> torch.Tensor:
        piece = needed[rank][move.needed]
        return region(piece, into[piece], move.offset, move.shape)

    received = 0
    for move in agreed.moves:
        if move.source == move.taker == rank:
            target, source = taken(move), given(move)
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
    limit = max(1, int(os.environ.get(ROUND_VARIABLE, ROUND_BYTES)) // size)
    for number, moves in enumerate(rounds(agreed.moves, limit)):
        before(number)
        sent = [m for m in moves if m.source == rank]
        sent.sort(key=lambda m: m.taker)
        wanted = [m for m in moves if m.taker == rank]
        wanted.sort(key=lambda m: m.source)
        flat = [given(m).reshape(-1).view(torch.uint8).to(where) for m in sent]
        out = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=where)
        buffer = torch.empty(sum(m.bytes for m in wanted), dtype=torch.uint8, device=where)
        work = dist.all_to_all_single(
            buffer,
            out,
            [sum(m.bytes for m in wanted if m.source == peer) for peer in range(size)],
            [sum(m.bytes for m in sent if m.taker == peer) for peer in range(size)],
            async_op=True,
        )
        wait(work)
        start = 0
        for move in wanted:
            dtype = dtype_of(needed[rank][move.needed].dtype)
            # A copy of its own: a view of another dtype needs its alignment.
            values = buffer[start : start + move.bytes].clone().view(dtype).view(move.shape)
            taken(move).copy_(values)
            start += move.bytes
        received += start
    return received


def rounds(moves: Iterable[Move], limit: int) -> list[list[Move]]:
    """Deal the moves between different ranks into rounds; in each, any rank sends any other at most about ``limit``.

    Boxes larger than ``limit`` bytes are split. Within a round the order is the plan's.
    """
    answer: list[list[Move]] = []
    sent: dict[tuple[int, int], int] = {}
    for whole in moves:
        if whole.source == whole.taker:
            continue
        for move in split(whole, limit):
            pair = (move.source, move.taker)
            number = sent.get(pair, 0) // limit
            sent[pair] = sent.get(pair, 0) + move.bytes
            while len(answer) <= number:
                answer.append([])
            answer[number].append(move)
    return answer


def split(move: Move, limit: int) -> Iterator[Move]:
    """Cut a move into boxes of at most ``limit`` bytes, or of one element."""
    axis = next((i for i, n in enumerate(move.shape) if n > 1), None)
    if move.bytes <= limit or axis is None:
        yield move
        return
    row = move.bytes // move.shape[axis]
    rows = max(1, limit // row)
    for begin in range(0, move.shape[axis], rows):
        count = min(rows, move.shape[axis] - begin)
        offset = (*move.offset[:axis], move.offset[axis] + begin, *move.offset[axis + 1 :])
        shape = (*move.shape[:axis], count, *move.shape[axis + 1 :])
        yield from split(move._replace(offset=offset, shape=shape, bytes=row * count), limit)
