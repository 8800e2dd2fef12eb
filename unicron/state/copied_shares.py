"""The part of a task's state that each rank copies into its snapshots, and into its part of a checkpoint.

What data-parallel ranks have in common is divided into equal shares. A rank copies its own share; into a snapshot also
those of the ranks whose partner it is (``unicron.snapshot.partners``). A rank copies by itself what it alone has: its
part of a distributed optimizer's state.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from unicron.state.chunks import StateChunk, dtype_of
from unicron.state.rank_state import RankState


def equal_share(chunks: Sequence[StateChunk], index: int, of: int) -> list[StateChunk]:
    """Return the ``index``-th of ``of`` equal shares of some chunks: chunks, or ranges of chunks.

    The shares of all indices together are the chunks, each number once.
    """
    total = sum(chunk.bytes for chunk in chunks)
    low, high = total * index // of, total * (index + 1) // of
    found = []
    begin = 0
    for chunk in chunks:
        size = dtype_of(chunk.dtype).itemsize
        # An element belongs to the share that contains its first byte.
        first = min(max(-(-(low - begin) // size), 0), chunk.stop - chunk.start)
        last = min(max(-(-(high - begin) // size), 0), chunk.stop - chunk.start)
        if last > first:
            found.append(chunk._replace(start=chunk.start + first, stop=chunk.start + last))
        begin += chunk.bytes
    return found


def copied_chunks(rank_state: RankState, shares: Sequence[int], of: int) -> dict[StateChunk, torch.Tensor]:
    """Return the part of the state that one of ``of`` data-parallel ranks copies, as flat views.

    Args:
        rank_state: the rank's.
        shares: indices of the shares that it copies of what the ranks have in common.
        of: the number of data-parallel ranks.
    """
    if rank_state.gather is not None:
        # Parameters of other ranks' parts may still be on their way: each rank copies those of its own part.
        available, own = rank_state.tensors.updated_chunks(), rank_state.tensors.own_chunks()
    else:
        available = rank_state.tensors.chunks()
        own = {chunk for chunk in available if rank_state.is_distributed and chunk.is_optimizer_state}
    chosen = {chunk: available[chunk].detach().view(-1) for chunk in own}
    return chosen | shared_chunks({c: v for c, v in available.items() if c not in own}, shares, of)


def shared_chunks(
    common: Mapping[StateChunk, torch.Tensor], shares: Sequence[int], of: int
) -> dict[StateChunk, torch.Tensor]:
    """Return some of ``of`` equal shares of what data-parallel ranks have in common, as flat views."""
    chosen = {}
    by_place = {(chunk.key, chunk.offset): chunk for chunk in common}
    for chunk in itertools.chain.from_iterable(equal_share(list(common), index, of) for index in shares):
        whole = by_place[chunk.key, chunk.offset]
        chosen[chunk] = common[whole].detach().reshape(-1)[chunk.start - whole.start : chunk.stop - whole.start]
    return chosen
