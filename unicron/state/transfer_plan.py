"""The plan of a transfer: which rank gives which box of the state to which other rank. Pure.

Every member of a generation evaluates these functions on the same arguments and comes to the same plan. What a rank
needs is covered box by box from what the ranks have; a box that remains uncovered exists nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unicron.state.boxes import Box, boxes_of, difference, intersection
from unicron.state.chunks import ParameterShard, StateChunk, dtype_of, required_chunks, state_kinds

Versioned = tuple[StateChunk, int]
"""A chunk that a rank has in memory, with its version (updates applied)."""


class Transfer(NamedTuple):
    """One box that a rank gives to another rank, or to itself."""

    sender: int
    """The sender's rank."""
    given: int
    """The index of the chunk among the sender's available chunks."""
    receiver: int
    """The receiver's rank."""
    required: int
    """The index of the chunk among the receiver's required chunks."""
    box: Box
    bytes: int


class TransferPlan(NamedTuple):
    """The state that the members of a generation are going to have, and how it gets to each of them."""

    version: int
    required: list[list[StateChunk]]
    """The chunks that each rank requires."""
    transfers: list[Transfer]


class _Source(NamedTuple):
    """A chunk of the wanted version that a rank can give."""

    rank: int
    given: int
    """The index of the chunk among the rank's available chunks."""
    boxes: list[Box]


def newest_complete(
    shards: Sequence[Sequence[ParameterShard]],
    available: Sequence[Sequence[Versioned]],
    *,
    distributed: bool,
    nodes: Sequence[str] = (),
) -> TransferPlan | None:
    """Return the plan for the newest version that the ranks together have completely; None if there is none.

    Args:
        shards: what each rank computes with.
        available: for each rank, the chunks that it can give.
        distributed: whether data-parallel ranks divide the optimizer's state among them.
        nodes: each rank's node.
    """
    for version in sorted({version for listed in available for _, version in listed}, reverse=True):
        found = (chunk for listed in available for chunk, of in listed if of == version)
        kinds = state_kinds(found, distributed=distributed)
        required = [required_chunks(listed, kinds) for listed in shards]
        transfers = plan_transfers(required, available, version, nodes)
        if transfers is not None:
            return TransferPlan(version, required, transfers)
    return None


def plan_transfers(
    required: Sequence[Sequence[StateChunk]],
    available: Sequence[Sequence[Versioned]],
    version: int,
    nodes: Sequence[str] = (),
) -> list[Transfer] | None:
    """Return the transfers after which every rank has all that it requires of a version; None if that is impossible.

    The nearest source gives: the rank itself, then a rank on its node, then any other rank; of equally near ranks the
    one that gives least so far.

    Args:
        required: the chunks that each rank requires.
        available: the chunks that each rank has; those of other versions do not count.
        version: the wanted version.
        nodes: each rank's node; empty: all ranks are on one node.
    """
    planner = _Planner(available, version, nodes or [""] * len(required))
    transfers: list[Transfer] = []
    for receiver, chunks in enumerate(required):
        for index, chunk in enumerate(chunks):
            found = planner.cover(receiver, index, chunk)
            if found is None:
                return None
            transfers += found
    return transfers


class _Planner:
    """A cover of required chunks by available ones, which counts the bytes that each rank gives."""

    def __init__(self, available: Sequence[Sequence[Versioned]], version: int, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._given_bytes = [0] * len(available)
        self._sources: dict[str, list[_Source]] = {}
        for rank, listed in enumerate(available):
            for index, (chunk, of) in enumerate(listed):
                if of == version:
                    source = _Source(rank, index, [box for box, _ in boxes_of(chunk)])
                    self._sources.setdefault(chunk.key, []).append(source)

    def cover(self, receiver: int, required: int, chunk: StateChunk) -> list[Transfer] | None:
        """Return the transfers that bring a chunk to a rank; None if a part of the chunk exists nowhere."""
        size = dtype_of(chunk.dtype).itemsize
        missing = [box for box, _ in boxes_of(chunk)]
        transfers: list[Transfer] = []
        nearest_first = sorted(self._sources.get(chunk.key, []), key=lambda source: self._distance(source, receiver))
        for source in nearest_first:
            if not missing:
                break
            for offered in source.boxes:
                covered, missing = _divide(missing, offered)
                for box in covered:
                    moved = math.prod(box.shape) * size
                    transfers.append(Transfer(source.rank, source.given, receiver, required, box, moved))
                    self._given_bytes[source.rank] += moved if source.rank != receiver else 0
        return None if missing else transfers

    def _distance(self, source: _Source, receiver: int) -> tuple[int, int, int]:
        rank = source.rank
        near = 0 if rank == receiver else 1 if self._nodes[rank] == self._nodes[receiver] else 2
        return near, self._given_bytes[rank], rank


def _divide(wanted: Sequence[Box], offered: Box) -> tuple[list[Box], list[Box]]:
    """Return the boxes of ``wanted`` that ``offered`` covers, and the boxes that remain."""
    covered: list[Box] = []
    rest: list[Box] = []
    for box in wanted:
        common = intersection(box, offered)
        if common is None:
            rest.append(box)
        else:
            covered.append(common)
            rest += difference(box, common)
    return covered, rest


def rounds(transfers: Sequence[Transfer], limit_bytes: int) -> list[list[Transfer]]:
    """Distribute the transfers between different ranks over rounds.

    In each round any rank sends any other rank at most about ``limit_bytes``. A larger box is split. Within a round the
    order is the plan's.
    """
    found: list[list[Transfer]] = []
    sent: dict[tuple[int, int], int] = {}
    for whole in transfers:
        if whole.sender == whole.receiver:
            continue
        for transfer in split(whole, limit_bytes):
            pair = (transfer.sender, transfer.receiver)
            number = sent.get(pair, 0) // limit_bytes
            sent[pair] = sent.get(pair, 0) + transfer.bytes
            while len(found) <= number:
                found.append([])
            found[number].append(transfer)
    return found


def split(transfer: Transfer, limit_bytes: int) -> Iterator[Transfer]:
    """Yield the transfers of boxes of at most ``limit_bytes``, or of one element, that together are a transfer."""
    offset, shape = transfer.box
    axis = next((i for i, n in enumerate(shape) if n > 1), None)
    if transfer.bytes <= limit_bytes or axis is None:
        yield transfer
        return
    row = transfer.bytes // shape[axis]
    rows = max(1, limit_bytes // row)
    for begin in range(0, shape[axis], rows):
        count = min(rows, shape[axis] - begin)
        box = Box(
            (*offset[:axis], offset[axis] + begin, *offset[axis + 1 :]),
            (*shape[:axis], count, *shape[axis + 1 :]),
        )
        yield from split(transfer._replace(box=box, bytes=row * count), limit_bytes)
