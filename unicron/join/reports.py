"""The exchange of the reports that the members of a new generation agree on (``unicron.join.agreement``)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from unicron import device
from unicron.accounting import PartialStep, bits_of
from unicron.join.agreement import Report
from unicron.join.member_checks import MemberChecks
from unicron.link.waiting import Wait
from unicron.megatron.model import model_chunks
from unicron.megatron.parallel import data_group, model_coordinate
from unicron.state.rank_state import RankState
from unicron.torch_names import all_gather_single


class Row(NamedTuple):
    """A report as integers. The bits of the micro-batches follow: those assigned, then for each chunk those done."""

    tensor_rank: int
    pipeline_rank: int
    replica: int
    complete: int
    buckets: int
    partial: int = 0
    generation: int = 0
    accounted: int = 0
    reduced: int = 0
    identity: int = 0
    proven: int = 0
    uncompared: int = 0
    undoes: int = 0
    open_section: int = 0
    step_micro_batches: int = 0
    last_step: int = 0


_NUMBERS = struct.Struct(f"<{len(Row._fields)}q")
"""The binary form of a row."""


def gather_reports(
    rank_state: RankState,
    partial: PartialStep | None,
    *,
    is_complete: bool,
    micro_batches: int,
    checks: MemberChecks,
    open_section: int,
    last_step: int,
    wait: Wait,
) -> list[Report]:
    """Return the reports of all members, by rank. All members call it.

    Args:
        rank_state: what this rank is going to train with.
        partial: what the rank has of an interrupted step that it can go on with.
        is_complete: whether the rank state has all that its place needs.
        micro_batches: the most in one step.
        checks: what this rank is beside its state, and what it knows of the others.
        open_section: the step behind which the rank is in a boundary section that is not done; 0: none.
        last_step: the step behind which the training ends, as this rank knows it.
        wait: waits for a collective.

    Raises:
        RuntimeError: a member was lost meanwhile.
    """
    row = Row(
        *model_coordinate(),
        replica=data_group().rank(),
        complete=rank_state.applied if is_complete else -1,
        buckets=rank_state.accumulator.buckets,
        identity=checks.digest(),
        proven=int(checks.proven),
        uncompared=int(checks.uncompared),
        undoes=int(checks.undoes),
        open_section=open_section,
        last_step=last_step,
    )
    chunks = len(model_chunks(rank_state.model))
    assigned, done = 0, [0] * chunks
    if partial is not None:
        row = row._replace(
            partial=partial.step,
            generation=partial.generation,
            accounted=int(partial.account is not None),
            reduced=partial.reduced,
            step_micro_batches=partial.micro_batches,
        )
        assigned, done = bits_of(partial.assigned), [bits_of(one) for one in partial.done]
    size = (micro_batches + 7) // 8
    packed = pack(row, [assigned, *done], size)
    mine = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device.current())
    everything = torch.empty(dist.get_world_size() * len(packed), dtype=torch.uint8, device=device.current())
    wait(all_gather_single(everything, mine, async_op=True))
    received = everything.cpu().numpy().tobytes()
    return [unpack(received[at : at + len(packed)], size) for at in range(0, len(received), len(packed))]


def pack(row: Row, bits: Sequence[int], size: int) -> bytes:
    """Return the binary form of a report; ``bits``: of micro-batches, each ``size`` bytes long."""
    return _NUMBERS.pack(*row) + b"".join(one.to_bytes(size, "little") for one in bits)


def unpack(packed: bytes, size: int) -> Report:
    """Return a report from its binary form."""
    row = Row(*_NUMBERS.unpack_from(packed))
    parts = range(_NUMBERS.size, len(packed), size)
    assigned, *done = (int.from_bytes(packed[at : at + size], "little") for at in parts)
    return Report(
        coordinate=(row.tensor_rank, row.pipeline_rank),
        replica=row.replica,
        complete=row.complete,
        buckets=row.buckets,
        partial=row.partial,
        generation=row.generation,
        accounted=bool(row.accounted),
        reduced=row.reduced,
        identity=row.identity,
        proven=bool(row.proven),
        uncompared=bool(row.uncompared),
        undoes=bool(row.undoes),
        open_section=row.open_section,
        step_micro_batches=row.step_micro_batches,
        last_step=row.last_step,
        assigned_bits=assigned,
        done_bits=tuple(done),
    )
