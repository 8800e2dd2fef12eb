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

from unicron import agreement, checkpoint, device, groups, movement, pieces, supported
from unicron.agreement import Report
from unicron.errors import SampleAccountingError, UnicronError
from unicron.memory import Memory
from unicron.movement import Settled
from unicron.pieces import is_sharded
from unicron.protocol import Configure
from unicron.replica import EMPTY_DIGEST, Account, Partial, Replica
from unicron.runtime import Runtime


def data_group() -> Any:
    """Return the group of ranks that hold the same shard."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


def coordinate() -> tuple[int, int]:
    """Return this rank's tensor- and pipeline-parallel rank."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()


SHARD_PLACE = 4
"""How much of a place says which shard of the model a rank computes; the rest, which part of it it updates."""


def place(layout: tuple[int, int], *, sharded: bool) -> tuple[int, ...]:
    """Return what a rank's model and optimizer are built for: the layout, and where in it the rank is."""
    group = data_group()
    data = (group.size(), group.rank()) if sharded else ()
    return (*layout, *coordinate(), *data)


def _has_no_live_state(configure: Configure) -> bool:
    """Return whether the plan says that no state in memory counts."""
    return all(source in ("checkpoint", "initial") for _, _, source in configure.members)


def own_share(micro_batches: int) -> list[int]:
    """Return this rank's micro-batches of a step that nothing has interrupted."""
    group = data_group()
    return agreement.share(group.rank(), group.size(), micro_batches)


def account(
    replica: Replica, micro_batches: int, runtime: Runtime, statuses: tuple[int, ...] = ()
) -> tuple[int, list[int]]:
    """Agree on losses and samples of the step in progress, before its gradients are reduced; return the request.

    So what a rank has contributed is known when its gradients count, even if it is lost. Every micro-batch has a slot
    for a count, its loss and its samples; everything travels as float64 in one reduction: ids are exact up to 2**53.

    Returns:
        The largest request of any rank, and the largest of what each told in ``statuses``, place by place.

    Raises:
        SampleAccountingError: a micro-batch is missing or was computed twice.
    """
    from megatron.core import parallel_state

    partial = replica.partial
    assert partial is not None
    width = max((len(ids) for ids in partial.samples.values()), default=0)
    # The number of samples in a micro-batch is the same on all ranks, but a rank may have none.
    head = torch.tensor([width, runtime.request, *statuses], dtype=torch.int64, device=device.current())
    runtime.wait(dist.all_reduce(head, op=dist.ReduceOp.MAX, async_op=True))
    width, agreed, *told = head.tolist()
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
            return agreed, told  # there are no other shards
    if partial.reduced < replica.sums.buckets:
        counts = torch.zeros(micro_batches, dtype=torch.float64)
        counts[list(partial.samples)] = 1.0
        _check_counts([int(n) for n in _summed(counts, data_group(), runtime).tolist()], partial.step)
    return agreed, told


def _summed(values: torch.Tensor, group: Any, runtime: Runtime) -> torch.Tensor:
    values = values.to(device.current())
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
        memory: Memory,
        *,
        exact: bool = False,
    ) -> None:
        """Start outside of any generation.

        Args:
            build: makes model and optimizer for a tensor- and a pipeline-parallel size.
            initialise: sets a model's first parameters, the same on every rank; without it rank 0's are used.
            memory: in-memory copies, for a generation without whole live state.
            exact: whether gradients are added up exactly.
        """
        self._build, self._initialise, self._memory, self._exact = build, initialise, memory, exact
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
        self.checkpoint = ""
        """The checkpoint that the state was read from, if it was."""
        self._roles: dict[str, Any] = {}
        self._random: torch.Tensor | None = None
        """The generator's state before the first model was built."""

    def enter(
        self,
        configure: Configure,
        runtime: Runtime,
        micro_batches: int,
        fault: Callable[[str], None] = lambda at: None,
    ) -> None:
        """Join; the replica then holds the newest state of all members.

        Args:
            configure: the generation.
            runtime: waits for collectives.
            micro_batches: in one update.
            fault: lets an injected fault happen.

        Raises:
            RuntimeError: a member was lost meanwhile, or the generation was held.
            UnicronError: the state that the configuration promises is held by nobody.
        """
        self.deal, self.resumes, self.computed, self.buckets_kept = [], False, 0, 0
        self.steps_recomputed, self.source, self.checkpoint = 0, "", ""
        layout = (configure.tensor, configure.pipeline)
        began = time.monotonic()
        groups.leave(runtime.abandoned)
        runtime.abandoned = []
        groups.join(configure, runtime)
        runtime.progress(self._step(), "setup", micro_batch=1)
        roles = groups.roles()
        held = self.replica
        if held is not None:
            # Whatever becomes of it: it must not keep the groups that are gone.
            groups.regroup([held.model, held.optimizer], self._roles, roles)
        self._roles = roles
        if held is not None and held.applied >= 0 and _has_no_live_state(configure):
            held.forget()
        replica = self._replica(layout, micro_batches)
        rebuilt = time.monotonic()
        runtime.progress(self._step(), "setup", micro_batch=2)
        reports = self._report(replica, runtime, micro_batches)
        settled = self._settle(configure, replica, runtime, reports)
        agreed_at = time.monotonic()
        if settled is None:
            replica = self._restore(configure, replica, micro_batches, runtime)
        else:
            self._move(replica, runtime, settled, fault)
        # Only now: what was held in another layout was needed until every member had what it needs.
        self.replica = replica
        self.steps_recomputed = max(0, configure.fault_step - replica.applied)
        self._deal(configure, replica, runtime, reports, micro_batches)
        moved = time.monotonic()
        self.phases = {"rebuild": rebuilt - began, "agree": agreed_at - rebuilt, "move": moved - agreed_at}

    def _step(self) -> int:
        """Return the step that the state held leads to."""
        return 1 + (max(0, self.replica.applied) if self.replica is not None else 0)

    def _replica(self, layout: tuple[int, int], micro_batches: int) -> Replica:
        """Return the replica to train with: the one that is held if it was built for this rank's place."""
        held = self.replica
        if held is not None and held.place == place(layout, sharded=is_sharded(held.model)):
            return held
        if held is not None and held.applied < 0:
            held = self.replica = None  # nothing to keep beside the new one
        return self._built(layout, micro_batches)

    def _built(self, layout: tuple[int, int], micro_batches: int) -> Replica:
        """Return a new replica; each is built with the random numbers of the first: ``build`` may draw parameters."""
        devices = [torch.cuda.current_device()] if device.is_cuda() else []
        with groups.building_alone(), torch.random.fork_rng(devices, enabled=self._random is not None):
            if self._random is None:
                self._random = torch.get_rng_state()
            torch.set_rng_state(self._random)
            model, optimizer = self._build(*layout)
            supported.check(model, optimizer, *layout)
            built = Replica(model, optimizer, micro_batches=micro_batches, exact=self._exact, parallel=layout != (1, 1))
        built.place = place(layout, sharded=is_sharded(built.model))
        return built

    def _settle(
        self, configure: Configure, replica: Replica, runtime: Runtime, reports: list[Report]
    ) -> Settled | None:
        """Agree on the newest state that the members, or else their nodes, hold in memory; None: no complete one.

        Copies are of the task's own past generations: at any step they are what the failure-free run had there. What
        members hold live of the same step counts with them: the part of a rank that is lost may be all that is missing.
        """
        if agreement.all_complete(reports) >= 0:
            return Settled.in_place(replica.applied, replica.digest)
        live = [] if self.replica is None else self.replica.holdings()
        if not _has_no_live_state(configure):
            settled = movement.settle(
                live,
                [part.shard for part in replica.parts],
                sharded=is_sharded(replica.model),
                nodes=[worker.rpartition("/")[0] for _, worker, _ in configure.members],
                wait=runtime.wait,
            )
            if settled is not None:
                return settled
        if all(source == "initial" for _, _, source in configure.members) and not configure.fault_step:
            self._memory.forget()  # the task begins: what is there is of an earlier one with its name
            return None
        at_least = checkpoint.newest_step(Path(configure.checkpoint)) if configure.checkpoint else 1
        return self._memory.settle(replica, configure.generation, at_least, live)

    def _report(self, replica: Replica, runtime: Runtime, micro_batches: int) -> list[Report]:
        complete = replica.applied if replica is self.replica and not replica.ahead else -1
        partial = self._partial(replica)
        held = [0] * (4 + micro_batches)
        if partial is not None:
            accounted = partial.account is not None
            held = [partial.step, partial.generation, accounted, partial.reduced, *partial.states(micro_batches)]
        values = [*coordinate(), data_group().rank(), complete, replica.sums.buckets, *held]
        mine = torch.tensor(values, dtype=torch.int64, device=device.current())
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        runtime.wait(dist.all_gather(gathered, mine, async_op=True))
        return [
            Report(
                coordinate=(row[0], row[1]),
                replica=row[2],
                complete=row[3],
                buckets=row[4],
                partial=row[5],
                generation=row[6],
                accounted=bool(row[7]),
                reduced=row[8],
                micro_batches=tuple(row[9:]),
            )
            for row in (tensor.tolist() for tensor in gathered)
        ]

    def _partial(self, replica: Replica) -> Partial | None:
        """Return what is held of an interrupted step that the replica can go on with: gradients of the same shard."""
        held = self.replica
        if held is None or held.place[:SHARD_PLACE] != replica.place[:SHARD_PLACE]:
            return None
        return held.partial

    def _restore(self, configure: Configure, replica: Replica, micro_batches: int, runtime: Runtime) -> Replica:
        """Take the state from the newest checkpoint or, without any, from the beginning.

        Returns:
            The replica, or a new one in its place: one that has trained has no first state left.
        """
        if configure.checkpoint:
            self.checkpoint = str(checkpoint.restore(replica, Path(configure.checkpoint)))
            self.source = "checkpoint"
        else:
            if configure.complete and any(source != "initial" for _, _, source in configure.members):
                raise UnicronError(f"generation {configure.generation}: nobody holds the state; no checkpoint is given")
            if self._initialise is not None:
                self._initialise(replica.model)
                pieces.reset(replica)
            else:
                if replica is self.replica:
                    replica = self._built((configure.tensor, configure.pipeline), micro_batches)
                for part in replica.parts:
                    runtime.wait(dist.broadcast(part.weights, group=data_group(), group_src=0, async_op=True))
                pieces.reset(replica)
            replica.hold(0, EMPTY_DIGEST)
            self.source = "initial"
        return replica

    def _move(self, replica: Replica, runtime: Runtime, settled: Settled, fault: Callable[[str], None]) -> None:
        """Take what the plan says into the replica; its own pieces stay where they are."""
        self.source = settled.source(dist.get_rank())
        if settled.agreed is None:
            return
        held = self.replica
        stays = replica is held and settled.version == replica.version
        replica.take(settled, runtime.wait, stays=stays, before=lambda number: fault(f"move:{number}"))
        # Whoever passes this may let go of what it held before.
        runtime.wait(dist.all_reduce(torch.zeros(1, device=device.current()), async_op=True))
        if held is not None and held is not replica and held.version == settled.version and self._partial(replica):
            replica.adopt(held)

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
            partial.account = movement.gather(partial.account, runtime.wait)[agreed.accountant]
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
