"""The contents of a snapshot, and whose it is: states that ranks can take, and the user's state that is packed."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from unicron.megatron.optimizer import torch_optimizers
from unicron.protocol import environment
from unicron.snapshot import files
from unicron.snapshot.files import Snapshot
from unicron.state.chunks import StateChunk, dtype_of
from unicron.state.rank_state import RankState
from unicron.state.transfer import AvailableState
from unicron.state.user_chunks import is_users
from unicron.state.user_state import Record

DOCUMENT_ROOM = 4
"""Room for the packed part of the user's state, as a multiple of its size when the generation takes its first snapshot.
Chosen: numbers get a few more digits; what grows without end does not belong into snapshots."""


class Document:
    """The packed part of the user's state, in the place from which it is copied."""

    def __init__(self) -> None:
        self.room = torch.empty(0, dtype=torch.uint8)

    def fill(self, content: bytes, *, first: bool) -> None:
        """Put the packed part into the place from which it is copied; no copy is in progress.

        Args:
            content: the packed part.
            first: whether the generation's snapshots are about to be made, which makes room.

        Raises:
            RuntimeError: it has grown too large for the generation's snapshots.
        """
        if first:
            self.room = torch.zeros(DOCUMENT_ROOM * len(content), dtype=torch.uint8)
        if len(content) > len(self.room):
            raise RuntimeError("the state given to attach has outgrown its place")
        self.room[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)


def read_states(
    folder: Path, identity: str, before: int, nodes: Sequence[str]
) -> tuple[list[AvailableState], list[AvailableState]]:
    """Return one rank's share of its node's whole snapshots: of the rank state, and of the user's.

    Args:
        folder: the task's, on this node.
        identity: that of the task's specification.
        before: snapshots of generations before this one count.
        nodes: each rank's node.
    """
    rank = dist.get_rank()
    neighbours = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    found, torn = files.whole_snapshots(folder, identity, before, index=neighbours.index(rank), of=len(neighbours))
    for reason in torn:
        print(f"unicron: warning: snapshot not used: {reason}", file=sys.stderr, flush=True)
    states = [states_of(snapshot) for snapshot in found]
    return [values for values, _ in states], [users for _, users in states]


def states_of(snapshot: Snapshot) -> tuple[AvailableState, AvailableState]:
    """Return what a snapshot has of the rank state, and of the user's."""
    values: dict[StateChunk, torch.Tensor] = {}
    users: dict[StateChunk, torch.Tensor] = {}
    for fields, data in snapshot.chunks.items():
        chunk = StateChunk(*fields)
        flat = torch.frombuffer(data, dtype=dtype_of(chunk.dtype))
        into = users if is_users(chunk) else values
        into[chunk] = flat.view(chunk.shape) if chunk.is_whole else flat
    digest = bytes.fromhex(snapshot.digest)
    return AvailableState(snapshot.step, digest, values), AvailableState(snapshot.step, digest, users)


def addresses_of(rank_state: RankState, record: Record | None) -> list[int]:
    """Return the addresses of tensors that an optimizer, or the user, may replace by new ones."""
    states = (state for one in torch_optimizers(rank_state.optimizer) for state in one.state.values())
    found = [value.data_ptr() for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return found if record is None else [*found, *(value.data_ptr() for value in record.chunks.values())]


def identity() -> str:
    """Return a digest of the task's specification, in which tasks of the same name differ."""
    path = os.environ.get(environment.SPEC, "")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else ""
