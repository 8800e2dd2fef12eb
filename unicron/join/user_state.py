"""How the user's state (``unicron.state.user_state``) gets to a generation's members, once they have the rank state.

It has to stand at the same version. A member whose state does gives it to the others; else it comes from the snapshots
on the members' nodes, or from the checkpoint that the rank state was read from. Where all are one update behind (a
fault met all ranks between the update and the user's code behind it), the update's step is yielded once more, with
nothing to compute (``unicron.training.applied_step``).

A task may be given a state from outside: a checkpoint of another format than this library's. Such a state counts if no
member and no snapshot has one, and the task has no checkpoint of its own that is as new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from unicron import device
from unicron.checkpoint import reader
from unicron.errors import UnicronError, UnsupportedState
from unicron.link.waiting import Wait
from unicron.protocol import environment
from unicron.protocol.messages import Configure
from unicron.snapshot.snapshots import Snapshots
from unicron.state import transfer
from unicron.state.chunks import StateChunk
from unicron.state.rank_state import RankState
from unicron.state.transfer import AgreedState
from unicron.state.transfer_plan import TransferPlan, plan_transfers
from unicron.state.user_chunks import DOCUMENT
from unicron.state.user_state import UserState

LOADED = "loaded"
"""The source of a rank's state: the value of ``Resumed.source``."""


class Origin(Protocol):
    """The argument of ``attach(origin=...)``; its text says where the state is."""

    def step(self) -> int:
        """Return how many updates the state stands behind, as this rank sees it; -1: there is none."""

    def load(self, model: Any, optimizer: Any, objects: Mapping[str, Any]) -> int:
        """Load the state into what ``build`` has returned, and into the objects of ``attach(state=...)``.

        All ranks call it, in the process groups of the generation, and collectives in it may be broken off.

        Returns: The updates behind which the state stands.

        Raises:
            InvalidSpec: the state cannot be loaded into these.
            RuntimeError: a peer was lost.
        """


class _Part(NamedTuple):
    """The user's state of one version that a rank can give: live, or from a snapshot."""

    version: int
    content: bytes
    """The packed state; empty: this rank has none."""
    chunks: list[tuple[StateChunk, torch.Tensor]]


class _Report(NamedTuple):
    """What one rank tells the others of its parts of one version."""

    content_bytes: int
    chunks: list[StateChunk]


def bring(
    user: UserState,
    rank_state: RankState,
    configure: Configure,
    *,
    source: str,
    checkpoint: str,
    snapshots: Snapshots,
    wait: Wait,
) -> None:
    """Bring the user's state to the version of the rank state, or to the one before it. All members call it.

    Args:
        user: this rank's.
        rank_state: the state on which the members have agreed.
        configure: the generation.
        source: where the rank state came from.
        checkpoint: the checkpoint that it was read from; empty: none.
        snapshots: those on this node.
        wait: waits for a collective.

    Raises:
        RuntimeError: a member was lost meanwhile.
        UnsupportedState: the state is not for this layout.
        UnicronError: no member has it.
    """
    if not user.enabled:
        return
    stays = user.belongs_to(rank_state.model)
    user.bind(rank_state.model, rank_state.optimizer, (configure.tensor, configure.pipeline))
    user.groups.align(transfer.gather(user.groups.plain(), wait))
    if source in ("initial", LOADED):  # the snapshots change the tensors next
        user.reset()
    elif checkpoint:
        _read(user, checkpoint)
    else:
        _receive(user, rank_state.applied, stays=stays, generation=configure.generation, snapshots=snapshots, wait=wait)
        return
    user.mark(rank_state.applied)


def _read(user: UserState, checkpoint: str) -> None:
    content, allocated = reader.load_user_state(user.shards, checkpoint)
    if content:
        remarks = user.load(content, allocated.fill)
    else:
        user.reset()
        remarks = ["it has no state that a script gives to attach; that of this one begins anew"]
    if dist.get_rank() == 0:
        for remark in remarks:
            print(f"unicron: checkpoint {checkpoint}: {remark}", flush=True)


def _receive(user: UserState, version: int, *, stays: bool, generation: int, snapshots: Snapshots, wait: Wait) -> None:
    """Take the state from the members' memory or snapshots."""
    reports = transfer.gather((user.version, stays, environment.text(environment.NODE)), wait)
    if all(stood == version and kept for stood, kept, _ in reports):
        return
    nodes = [node for _, _, node in reports]
    live = _Part(user.version, b"", [])
    if user.record is not None:
        live = _Part(user.version, user.record.content, list(user.record.chunks.items()))
    if any(stood == version for stood, _, _ in reports) and _take(user, version, [live], nodes, stays, wait):
        return
    stored = [_part_of(one.version, one.values) for one in snapshots.user_states(generation, nodes)]
    if snapshots.enabled and _take(user, version, [live, *stored], nodes, stays, wait):
        return
    if _take(user, version - 1, [live], nodes, stays, wait):
        return
    raise UnicronError(f"no member has the state given to attach as of step {version}, nor has a snapshot")


def _part_of(version: int, values: Any) -> _Part:
    """Return what a snapshot has of the user's state."""
    content = next((tensor.numpy().tobytes() for chunk, tensor in values.items() if chunk.key == DOCUMENT), b"")
    return _Part(version, content, [(chunk, tensor) for chunk, tensor in values.items() if chunk.key != DOCUMENT])


def _take(user: UserState, version: int, parts: Sequence[_Part], nodes: Sequence[str], stays: bool, wait: Wait) -> bool:
    """Take the state of a version from the members' parts, if these are all of it; return whether they are."""
    mine = [part for part in parts if part.version == version]
    content = next((part.content for part in mine if part.content), b"")
    available = [item for part in mine for item in part.chunks]
    reports: list[_Report] = transfer.gather(_Report(len(content), [chunk for chunk, _ in available]), wait)
    source = next((rank for rank, report in enumerate(reports) if report.content_bytes), -1)
    if source < 0:
        return False
    given = [report.chunks for report in reports]
    needs = not (stays and user.version == version)
    required = user.shards.required(chunk for chunks in given for chunk in chunks) if needs else []
    of_ranks: list[list[StateChunk]] = transfer.gather(required, wait) if any(given) else [[] for _ in given]
    transfers = plan_transfers(of_ranks, [[(chunk, version) for chunk in chunks] for chunks in given], version, nodes)
    if transfers is None:
        return False
    allocated = user.shards.allocate(required)
    plan = TransferPlan(version, of_ranks, transfers)
    transfer.execute(AgreedState(version, b"", plan, available), allocated.chunks, wait)
    received = _broadcast(content, source, reports[source].content_bytes, wait)
    if needs:
        user.load(received, allocated.fill)
        user.mark(version)
    return True


def _broadcast(content: bytes, source: int, size_bytes: int, wait: Wait) -> bytes:
    buffer = torch.empty(size_bytes, dtype=torch.uint8)
    if dist.get_rank() == source:
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    buffer = buffer.to(device.current())
    wait(dist.broadcast(buffer, src=source, async_op=True))
    return buffer.cpu().numpy().tobytes()


def check_equal(user: UserState, wait: Wait) -> None:
    """Check that the values are the same on all ranks: any rank's may replace any other's. All ranks call it.

    Raises:
        UnsupportedState: the values differ.
        RuntimeError: a member was lost meanwhile.
    """
    if not user.enabled:
        return
    digests = transfer.gather(user.digests(), wait)
    for rank, other in enumerate(digests):
        for name, digest in digests[0].items():
            if other.get(name) != digest:
                raise UnsupportedState(
                    f"state: {name}: not the same on ranks 0 and {rank}. Values must be the same on every rank; only "
                    "tensors under the name and in the shape of a parameter may differ"
                )
