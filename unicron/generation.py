"""Joining a generation: communicators, agreement, state, and the deal of an interrupted step.

``Joined.enter`` goes through the phases that ``Resumed`` reports: rebuild, agree, move. Every function here needs the
peers; a failure of any leaves the replica as it was or, while it takes a state, without one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron import agreement, checkpoint, groups
from unicron.agreement import Report
from unicron.errors import SampleAccountingError, UnicronError
from unicron.protocol import Configure
from unicron.replica import EMPTY_DIGEST, Replica
from unicron.runtime import Runtime


def data_group() -> Any:
    """Return the group of ranks that hold the same shard."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


def coordinate() -> tuple[int, int]:
    """Return this rank's tensor- and pipeline-parallel rank."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()


def own_share(micro_batches: int) -> list[int]:
    """Return this rank's micro-batches of a step that nothing has interrupted."""
    group = data_group()
    return agreement.share(group.rank(), group.size(), micro_batches)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Account:
    """What the ranks agree on at the end of a step."""

    loss: float
    ids: list[int]
    request: int


def account(replica: Replica, micro_batches: int, runtime: Runtime) -> Account:
    """All-reduce losses, sample ids and requests of the step in progress over the world.

    Every micro-batch has a slot for its loss, its samples and a count; one that was not computed exactly once is an
    internal error. Everything travels as float64 in one reduction: ids are exact up to 2**53.

    Raises:
        SampleAccountingError: a micro-batch is missing or was computed twice.
    """
    from megatron.core import parallel_state

    partial = replica.partial
    assert partial is not None
    width = max((len(ids) for ids in partial.samples.values()), default=0)
    # The number of samples in a micro-batch is the same on all ranks, but a rank may have none.
    head = torch.tensor([width, runtime.request], dtype=torch.int64, device=_device())
    runtime.wait(dist.all_reduce(head, op=dist.ReduceOp.MAX, async_op=True))
    width, agreed = int(head[0]), int(head[1])
    slots = torch.zeros(micro_batches, 2 + width, dtype=torch.float64)
    # One rank speaks for a replica: the one that knows the loss.
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        for k, ids in partial.samples.items():
            slots[k] = torch.tensor([1.0, partial.losses[k], *ids], dtype=torch.float64)
    slots = slots.to(_device())
    runtime.wait(dist.all_reduce(slots, async_op=True))
    rows = slots.tolist()
    wrong = {k: int(row[0]) for k, row in enumerate(rows) if row[0] != 1.0}
    if wrong:
        raise SampleAccountingError(f"step {partial.step}: times computed, by micro-batch: {wrong}")
    ids = [int(value) for row in rows for value in row[2:]]
    return Account(sum(row[1] for row in rows) / micro_batches, ids, agreed)


class Joined:
    """How this process came into its generation."""

    def __init__(self, build: Callable[[int, int], tuple[Any, Any]], initialise: Callable[[Any], None] | None) -> None:
        """Start outside of any generation.

        Args:
            build: makes model and optimizer for a tensor- and a pipeline-parallel size.
            initialise: sets a model's first parameters, the same on every rank; without it rank 0's are used.
        """
        self._build, self._initialise = build, initialise
        self.replica: Replica | None = None
        self.phases: dict[str, float] = {}
        self.source = ""
        self.deal: list[list[int]] = []
        self.assigned: tuple[list[int], frozenset[int]] | None = None
        """Micro-batches of the interrupted step that are this rank's, and those it has finished."""
        self.steps_recomputed = 0
        self._roles: dict[str, Any] = {}
        self._layout = (0, 0)

    def enter(
        self,
        configure: Configure,
        runtime: Runtime,
        micro_batches: int,
    ) -> None:
        """Join; the replica then holds the newest state of all members.

        Raises:
            RuntimeError: a member was lost meanwhile, or the generation was held.
            UnicronError: the state that the configuration promises is held by nobody.
        """
        self.deal, self.assigned, self.steps_recomputed, self.source = [], None, 0, ""
        layout = (configure.tensor, configure.pipeline)
        began = time.monotonic()
        groups.leave(abandon=runtime.abandoned)
        runtime.abandoned = False
        groups.join(configure, runtime)
        roles = groups.roles()
        replica = self.replica
        if replica is None or layout != self._layout:
            replica = self.replica = None  # before the new one is built: two may not fit memory
            with groups.building_alone():
                replica = self.replica = Replica(*self._build(*layout))
        else:
            groups.regroup([replica.model, replica.optimizer], self._roles, roles)
        self._roles, self._layout = roles, layout
        rebuilt = time.monotonic()
        if all(source in ("checkpoint", "initial") for _, _, source in configure.members):
            replica.forget()  # the plan says that no live state counts
        reports = self._report(replica, runtime, micro_batches, keep_partial=layout == (1, 1))
        agreed = agreement.newest_state(reports)
        agreed_at = time.monotonic()
        if agreed.step < 0:
            self._restore(configure, replica)
        else:
            self._move(configure, replica, runtime, reports, agreed)
        self._deal(configure, replica, reports, micro_batches)
        moved = time.monotonic()
        self.phases = {"rebuild": rebuilt - began, "agree": agreed_at - rebuilt, "move": moved - agreed_at}

    def _report(self, replica: Replica, runtime: Runtime, micro_batches: int, *, keep_partial: bool) -> list[Report]:
        partial = replica.partial if keep_partial else None
        states = partial.states(micro_batches) if partial is not None else [0] * micro_batches
        step = partial.step if partial is not None else 0
        mine = torch.tensor([*coordinate(), replica.applied, step, *states], dtype=torch.int64, device=_device())
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        runtime.wait(dist.all_gather(gathered, mine, async_op=True))
        return [
            Report(coordinate=(row[0], row[1]), applied=row[2], partial=row[3], micro_batches=tuple(row[4:]))
            for row in (tensor.tolist() for tensor in gathered)
        ]

    def _restore(self, configure: Configure, replica: Replica) -> None:
        """Take the state from the newest checkpoint or, where there is none, from the beginning."""
        if configure.checkpoint:
            checkpoint.load(replica, Path(configure.checkpoint))
            self.source = "checkpoint"
        elif any(source in ("live", "take", "checkpoint") for _, _, source in configure.members):
            raise UnicronError(f"generation {configure.generation}: nobody holds the state, and no checkpoint is given")
        else:
            if self._initialise is not None:
                self._initialise(replica.model)
            else:
                for parameter in replica.model.parameters():
                    dist.broadcast(parameter.data, group=data_group(), group_src=0)
            replica.hold(0, EMPTY_DIGEST)
            self.source = "initial"
        if configure.fault_step:
            self.steps_recomputed = max(0, configure.fault_step - replica.applied)

    def _move(
        self,
        configure: Configure,
        replica: Replica,
        runtime: Runtime,
        reports: list[Report],
        agreed: agreement.Agreement,
    ) -> None:
        """Give the newest state to those that are behind or hold none."""
        mine = coordinate()
        self.source = "live" if configure.rank in agreed.takers else "own"
        if any(reports[rank].coordinate == mine for rank in agreed.takers):
            replica.take(agreed.sources[mine], agreed.step, data_group(), runtime.wait)

    def _deal(self, configure: Configure, replica: Replica, reports: list[Report], micro_batches: int) -> None:
        """Deal what is missing of the interrupted step; survivors keep what they have."""
        step = replica.applied + 1
        if self.source in ("checkpoint", "initial") or not any(report.partial == step for report in reports):
            replica.discard()
            return
        self.deal = agreement.deal(reports, step, micro_batches)
        finished = agreement.kept(reports, step)
        self.assigned = (self.deal[configure.rank], finished[configure.rank])


def alone(directory: str, *, tensor: int = 1, pipeline: int = 1, resume: str = "") -> Configure:
    """Return the one generation of a process without an agent: by itself, or as torchrun's environment says."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    source = "checkpoint" if resume else "initial"
    return Configure(
        generation=1,
        stage="boundary",
        rank=rank,
        world_size=size,
        tensor=tensor,
        pipeline=pipeline,
        store_host=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        store_port=int(os.environ.get("MASTER_PORT", "0")) if size > 1 else 0,
        members=[[r, str(r), source] for r in range(size)],
        checkpoint=resume,
        directory=directory,
    )
