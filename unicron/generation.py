"""Joining a generation: communicators, agreement, state, and the deal of an interrupted step.

``Joined.enter`` goes through the phases that ``Resumed`` reports: rebuild, agree, move. Every function here needs the
peers; a failure of any leaves the replica as it was or, while it takes a state, without one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron import agreement, checkpoint, groups
from unicron.agreement import Report
from unicron.errors import SampleAccountingError, UnicronError
from unicron.protocol import Configure
from unicron.replica import EMPTY_DIGEST, Account, Replica
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


def account(replica: Replica, micro_batches: int, runtime: Runtime) -> int:
    """Agree on losses and samples of the step in progress, before its gradients are reduced; return the request.

    So what a rank has contributed is known when its gradients count, even if it is lost. Every micro-batch has a slot
    for a count, its loss and its samples; everything travels as float64 in one reduction: ids are exact up to 2**53.

    Returns:
        The largest request of any rank.

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
    last = parallel_state.get_pipeline_model_parallel_world_size() - 1
    if partial.account is None:
        slots = torch.zeros(micro_batches, 2 + width, dtype=torch.float64)
        # One rank speaks for a replica: the one that knows the loss.
        if coordinate() == (0, last):
            for k, ids in partial.samples.items():
                slots[k] = torch.tensor([1.0, partial.losses[k], *ids], dtype=torch.float64)
        rows = _summed(slots, None, runtime).tolist()
        _check_counts([int(row[0]) for row in rows], partial.step)
        ids = [int(value) for row in rows for value in row[2:]]
        partial.account = Account(math.fsum(row[1] for row in rows) / micro_batches, ids)
        if dist.get_world_size() == data_group().size():
            return agreed  # there are no other shards
    if partial.reduced < replica.sums.buckets:
        counts = torch.zeros(micro_batches, dtype=torch.float64)
        counts[list(partial.samples)] = 1.0
        _check_counts([int(n) for n in _summed(counts, data_group(), runtime).tolist()], partial.step)
    return agreed


def _summed(values: torch.Tensor, group: Any, runtime: Runtime) -> torch.Tensor:
    values = values.to(_device())
    runtime.wait(dist.all_reduce(values, group=group, async_op=True))
    return values


def _check_counts(counts: list[int], step: int) -> None:
    wrong = {k: count for k, count in enumerate(counts) if count != 1}
    if wrong:
        raise SampleAccountingError(f"step {step}: times computed, by micro-batch: {wrong}")


class Joined:
    """How this process came into its generation."""

    def __init__(
        self,
        build: Callable[[int, int], tuple[Any, Any]],
        initialise: Callable[[Any], None] | None,
        *,
        exact: bool = False,
    ) -> None:
        """Start outside of any generation.

        Args:
            build: makes model and optimizer for a tensor- and a pipeline-parallel size.
            initialise: sets a model's first parameters, the same on every rank; without it rank 0's are used.
            exact: whether gradients are added up exactly.
        """
        self._build, self._initialise, self._exact = build, initialise, exact
        self.replica: Replica | None = None
        self.phases: dict[str, float] = {}
        self.source = ""
        self.deal: list[list[int]] = []
        self.resumes = False
        """Whether the next step is an interrupted one, of which the replica holds something."""
        self.computed = 0
        """How many micro-batches this rank computes to complete it."""
        self.buckets_kept = 0
        """How many buckets of gradients are already reduced."""
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
        self.deal, self.resumes, self.computed, self.buckets_kept = [], False, 0, 0
        self.steps_recomputed, self.source = 0, ""
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
                replica = self.replica = Replica(
                    *self._build(*layout), micro_batches=micro_batches, exact=self._exact, parallel=layout != (1, 1)
                )
        else:
            groups.regroup([replica.model, replica.optimizer], self._roles, roles)
        self._roles, self._layout = roles, layout
        rebuilt = time.monotonic()
        if all(source in ("checkpoint", "initial") for _, _, source in configure.members):
            replica.forget()  # the plan says that no live state counts
        reports = self._report(replica, runtime, micro_batches)
        agreed = agreement.newest_state(reports)
        agreed_at = time.monotonic()
        if agreed.step < 0:
            self._restore(configure, replica)
        else:
            self._move(configure, replica, runtime, reports, agreed)
        self._deal(configure, replica, runtime, reports, micro_batches)
        moved = time.monotonic()
        self.phases = {"rebuild": rebuilt - began, "agree": agreed_at - rebuilt, "move": moved - agreed_at}

    def _report(self, replica: Replica, runtime: Runtime, micro_batches: int) -> list[Report]:
        partial = replica.partial
        held = [0] * (4 + micro_batches)
        if partial is not None:
            accounted = partial.account is not None
            held = [partial.step, partial.generation, accounted, partial.reduced, *partial.states(micro_batches)]
        values = [*coordinate(), data_group().rank(), replica.applied, replica.sums.buckets, *held]
        mine = torch.tensor(values, dtype=torch.int64, device=_device())
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        runtime.wait(dist.all_gather(gathered, mine, async_op=True))
        return [
            Report(
                coordinate=(row[0], row[1]),
                replica=row[2],
                applied=row[3],
                buckets=row[4],
                partial=row[5],
                generation=row[6],
                accounted=bool(row[7]),
                reduced=row[8],
                micro_batches=tuple(row[9:]),
            )
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

    def _deal(
        self, configure: Configure, replica: Replica, runtime: Runtime, reports: list[Report], micro_batches: int
    ) -> None:
        """Deal what is missing of the interrupted step; survivors keep what they have."""
        step = replica.applied + 1
        if self.source in ("checkpoint", "initial") or not any(report.partial == step for report in reports):
            replica.discard()
            return
        agreed = agreement.deal(reports, step, micro_batches)
        mine = agreed.shards[coordinate()]
        replica.resume(step, mine, configure.rank, agreed.work[reports[configure.rank].replica])
        partial = replica.partial
        assert partial is not None
        if agreed.accountant >= 0:
            told = [partial.account]
            dist.broadcast_object_list(told, src=agreed.accountant)
            partial.account = told[0]
        replica.give(mine, data_group(), runtime.wait)
        partial.generation = configure.generation
        self.resumes, self.computed, self.buckets_kept = True, len(partial.remaining()), partial.reduced
        self.deal = [
            sorted({*agreed.work[report.replica], *agreed.shards[report.coordinate].kept[rank]})
            for rank, report in enumerate(reports)
        ]


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
