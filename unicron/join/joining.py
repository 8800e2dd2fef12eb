"""Joining a generation: communicators, agreement, state, and the deal of an interrupted step.

``Joiner.join`` goes through the phases that ``Resumed`` reports: rebuild, agree, move. Every phase needs the peers; a
failure of any phase leaves the rank state as it was or, while a state is being received, without a usable state.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unicron import device
from unicron.accounting import EMPTY_DIGEST, PartialStep
from unicron.checkpoint import reader
from unicron.errors import InvalidSpec, UnicronError
from unicron.gradients.precision import Precision
from unicron.join import dealing, groups, user_state
from unicron.join.agreement import Report, common_version
from unicron.join.member_checks import MemberChecks
from unicron.join.reports import gather_reports
from unicron.join.user_state import LOADED, Origin
from unicron.link.agent_link import AgentLink
from unicron.link.breaker import BreakMethod
from unicron.link.waiting import Wait
from unicron.megatron import supported
from unicron.megatron.construction import without_collectives
from unicron.megatron.group_references import groups_by_role, replace_groups
from unicron.megatron.optimizer import is_distributed
from unicron.megatron.parallel import data_group, model_coordinate, place, virtual_stages
from unicron.megatron.tied_embedding import tied_group, tied_weight
from unicron.protocol.messages import Configure, Resumed
from unicron.snapshot.snapshots import Snapshots
from unicron.state import transfer
from unicron.state.rank_state import RankState
from unicron.state.transfer import AgreedState
from unicron.state.user_state import UserState

Build = Callable[[int, int], tuple[Any, Any]]
"""(tensor, pipeline) -> (model, optimizer), built in the process groups that exist when the function is called."""


def own_share(micro_batches: int, shares: Sequence[int] = ()) -> list[int]:
    """Return this rank's micro-batches of a step without an interruption; ``shares``: as for ``dealing.share``."""
    group = data_group()
    return dealing.share(group.rank(), group.size(), micro_batches, shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What the members agreed on about an interrupted step, for one rank."""

    deal: list[list[int]]
    """The micro-batches of the step that each rank has kept or computes."""
    computed: int
    """How many micro-batches this rank computes to complete the step."""
    buckets_kept: int
    """How many buckets of gradients are already reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinResult:
    """The way in which this rank has joined a generation."""

    source: str
    """The source of the rank's state: a value of ``Resumed.source``."""
    durations_s: Mapping[str, float] = field(default_factory=dict)
    """Durations of the phases ``rebuild``, ``agree`` and ``move``."""
    steps_recomputed: int = 0
    """Updates that had been applied before the fault and have to be computed again."""
    checkpoint: str = ""
    """The checkpoint that the state was read from; empty: none."""
    resumption: Resumption | None = None
    """The interrupted step that is resumed; None: the next step begins anew."""
    shares: Sequence[int] = ()
    """How many micro-batches of a step each replica computes; empty: equally many."""
    repeats_update: bool = False
    """Whether the user's state lacks the last update: its step comes again, with nothing to compute."""
    last_step: int = 0
    """The step behind which the training ends, the earliest that a member knows."""
    repeats_section: bool = False
    """Whether a boundary section behind the last update is not done: its step comes again for that."""

    def message(self, configure: Configure, *, step: int, buckets: int, total_s: float, computed_s: float) -> Resumed:
        """Return the report of the first step of a generation.

        Args:
            configure: the generation.
            step: updates applied, that step's included.
            buckets: the number of buckets of gradients.
            total_s: duration of that step.
            computed_s: the part of it until the gradients were reduced.
        """
        resumption = self.resumption
        redistribute_s = computed_s if resumption is not None else 0.0
        phases = {**self.durations_s, "redistribute": redistribute_s, "first_step": total_s - redistribute_s}
        deal = resumption.deal if resumption is not None else []
        return Resumed(
            generation=configure.generation,
            step=step,
            source=self.source,
            phases={k: round(v, 6) for k, v in phases.items()},
            # All ranks have agreed on the deal; if each reported it, it would be as large as the square of their
            # number.
            deal={str(r): ks for r, ks in enumerate(deal)} if configure.rank == 0 else {},
            steps_recomputed=self.steps_recomputed,
            computed=resumption.computed if resumption is not None else 0,
            buckets_kept=resumption.buckets_kept if resumption is not None else 0,
            buckets=buckets,
        )


class _FoundOrigin(NamedTuple):
    """The state that the members of a generation have found with ``attach(origin=...)``."""

    generation: int
    step: int
    """Updates applied to the state that was found there; -1: it does not count."""


class Joiner:
    """Brings this process into one generation after the other, and keeps its rank state in between."""

    def __init__(
        self,
        build: Build,
        initialise: Callable[[Any], None] | None,
        snapshots: Snapshots,
        checks: MemberChecks,
        *,
        precision: Precision = Precision.FLOAT32,
        user: UserState | None = None,
        interleave: int = 1,
        origin: Origin | None = None,
        counts_each_step: bool = False,
    ) -> None:
        """Start outside of any generation.

        Args:
            build: makes model and optimizer for a tensor- and a pipeline-parallel size.
            initialise: sets a model's first parameters, the same on every rank; without it rank 0's are used.
            snapshots: used where the members of a generation do not have the whole state live.
            checks: what the members of each generation compare.
            precision: the precision of the sums of gradients.
            user: the user's state.
            interleave: model chunks of each rank, where there are several pipeline stages.
            origin: the state from which the task begins in place of first parameters.
            counts_each_step: whether the loop says how many micro-batches each step has.
        """
        self._origin_found = _FoundOrigin(0, -1)
        self._counts_each_step = counts_each_step
        self._user = user or UserState()
        self._origin = origin
        self._interleave = interleave
        self._checks = checks
        self._build, self._initialise, self._snapshots, self._precision = build, initialise, snapshots, precision
        self.rank_state: RankState | None = None
        self.store: dist.Store
        """The store of the generation joined last."""
        self._roles: dict[str, Any] = {}
        self._random: torch.Tensor | None = None
        """The generator's state before the first model was built."""

    def join(
        self,
        configure: Configure,
        link: AgentLink,
        micro_batches: int,
        fault: Callable[[str], None] = lambda at: None,
        formed: Callable[[], None] = lambda: None,
        open_section: int = 0,
        last_step: int = 0,
    ) -> JoinResult:
        """Join a generation; ``rank_state`` is then the newest state of all members.

        Args:
            configure: the generation.
            link: to the agent; waits for collectives.
            micro_batches: the most in one update.
            fault: lets an injected fault happen.
            formed: called once the members have their groups, before state is read or moved.
            open_section: the step behind which this rank is in a boundary section that is not done; 0: none.
            last_step: the step behind which the training ends, as this rank knows it.

        Raises:
            RuntimeError: a member was lost meanwhile, or the generation was held.
            UnicronError: no member has the state that the configuration promises.
        """
        began_s = time.monotonic()
        self.store = self._rebuild_groups(configure, link)
        formed()
        rank_state = self._fitting(configure, micro_batches)
        rebuilt_s = time.monotonic()
        link.progress(self._next_step(), "setup", setup_parts=2)
        reports = gather_reports(
            rank_state,
            self._usable_partial(rank_state),
            is_complete=rank_state is self.rank_state and not rank_state.update_ungathered,
            micro_batches=micro_batches,
            checks=self._checks,
            open_section=open_section,
            last_step=last_step,
            wait=link.wait,
        )
        self._checks.enter(reports, configure.identity, link.wait)
        agreed = self._agree(configure, rank_state, link, reports)
        agreed_s = time.monotonic()
        if agreed is not None:
            source, checkpoint = self._receive(rank_state, link, agreed, fault), ""
        else:
            source, checkpoint, rank_state = self._without_members(configure, rank_state, micro_batches, link, reports)
        # Only now: what this rank had in another layout was needed until every member had all that it needs.
        self.rank_state = rank_state
        self._checks.begin(reports)
        rank_state.check_updates(link.check_update, once=partial(self._checks.before_update, rank_state, link.wait))
        resumption = None
        if agreed is not None and any(report.partial == rank_state.applied + 1 for report in reports):
            resumption = _resume(configure, rank_state, link, reports)
        else:
            rank_state.discard()
        user_state.bring(
            self._user,
            rank_state,
            configure,
            source=source,
            checkpoint=checkpoint,
            snapshots=self._snapshots,
            wait=link.wait,
        )
        if source == LOADED:
            assert self._origin is not None
            loaded = self._origin.load(rank_state.model, rank_state.optimizer, self._user.objects)
            rank_state.take_loaded(loaded, link.wait)
            self._user.mark(loaded)
        durations_s = {
            "rebuild": rebuilt_s - began_s,
            "agree": agreed_s - rebuilt_s,
            "move": time.monotonic() - agreed_s,
        }
        return JoinResult(
            source=source,
            durations_s=durations_s,
            steps_recomputed=max(0, configure.fault_step - rank_state.applied),
            checkpoint=checkpoint,
            resumption=resumption,
            shares=configure.shares,
            repeats_update=not self._user.is_at(rank_state.applied),
            last_step=min(report.last_step for report in reports),
            repeats_section=rank_state.applied > 0 and any(r.open_section == rank_state.applied for r in reports),
        )

    def _rebuild_groups(self, configure: Configure, link: AgentLink) -> dist.Store:
        """Leave the old process groups, make the new ones, and point the model that lives on to them.

        Returns:
            The generation's store.
        """
        # Old communicators are aborted here: a hold of the new generation must not abort them once more meanwhile.
        link.set_break_method(BreakMethod())
        groups.leave(link.abandoned)
        link.abandoned = []
        # This comes behind the aborts: giving memory back that the device reads waits for all collectives under way.
        self._snapshots.leave()
        store = groups.make(configure, link, interleave=self._interleave)
        link.progress(self._next_step(), "setup", setup_parts=1)
        roles = groups_by_role()
        present = self.rank_state
        if present is not None:
            # This is done in any case: a model that will not be used must not keep the old groups alive either.
            replace_groups([present.model, present.optimizer], self._roles, roles)
        self._roles = roles
        if present is not None and present.applied >= 0 and _has_no_live_state(configure):
            present.invalidate()
        return store

    def _next_step(self) -> int:
        """Return the step that follows the present state."""
        return 1 + (max(0, self.rank_state.applied) if self.rank_state is not None else 0)

    def _fitting(self, configure: Configure, micro_batches: int) -> RankState:
        """Return the rank state to train with: the present one if it was built for this rank's place, or a new one."""
        layout = (configure.tensor, configure.pipeline)
        present = self.rank_state
        if present is not None and present.place == place(layout, distributed=present.is_distributed):
            return present
        if present is not None and present.applied < 0:
            self.rank_state = None  # the old state has nothing to keep beside the new one
        del present
        return self._built(layout, micro_batches)

    def _built(self, layout: tuple[int, int], micro_batches: int) -> RankState:
        """Return a new rank state; each is built with the same random numbers: ``build`` may draw parameters."""
        devices = [torch.cuda.current_device()] if device.is_cuda() else []
        with without_collectives(), torch.random.fork_rng(devices, enabled=self._random is not None):
            if self._random is None:
                self._random = torch.get_rng_state()
            torch.set_rng_state(self._random)
            model, optimizer = self._build(*layout)
            supported.check(model, optimizer, *layout, chunks=virtual_stages(), counts_each_step=self._counts_each_step)
            built = RankState(
                model,
                optimizer,
                micro_batches=micro_batches,
                precision=self._precision,
                model_parallel=layout != (1, 1),
            )
        built.place = place(layout, distributed=is_distributed(model))
        return built

    def _agree(
        self, configure: Configure, rank_state: RankState, link: AgentLink, reports: list[Report]
    ) -> AgreedState | None:
        """Agree on the newest state that the members, or else their nodes, have in memory; None: no complete one.

        Snapshots are of the task's own past generations: at any step they are what the failure-free run had there. Live
        state of the same version counts with them: the part of a lost rank may be all that is missing.
        """
        at_least = reader.newest_step(configure.checkpoint) if configure.checkpoint else 1
        if any(report.undoes for report in reports):
            # No copy or checkpoint has anything of that update. If there is neither, all training would be lost with
            # the update.
            agreed = self._snapshots.agree(rank_state, configure.generation, at_least)
            if agreed is not None or configure.checkpoint:
                if self.rank_state is not None:
                    self.rank_state.invalidate()
                return agreed
            print("unicron: an update stays that was to be undone: there is no copy or checkpoint", file=sys.stderr)
        if common_version(reports) >= 0:
            return AgreedState.in_place(rank_state.applied, rank_state.digest)
        live = [] if self.rank_state is None else self.rank_state.available()
        if not _has_no_live_state(configure):
            agreed = transfer.agree(
                live,
                rank_state.tensors.shards,
                distributed=rank_state.is_distributed,
                nodes=[worker.rpartition("/")[0] for _, worker, _ in configure.members],
                wait=link.wait,
            )
            if agreed is not None:
                return agreed
        begins = all(source == "initial" for _, _, source in configure.members) and not configure.fault_step
        if begins and not configure.resumes:
            self._snapshots.delete_all()  # these snapshots are of an earlier task of the same name
            return None
        at_least = max(at_least, self._origin_step(configure, reports, link.wait))
        return self._snapshots.agree(rank_state, configure.generation, at_least, live)

    def _origin_step(self, configure: Configure, reports: list[Report], wait: Wait) -> int:
        """Return the step of the state that the task is given, if it counts here; -1: it does not.

        The task's own checkpoint counts where it is as new. No other checkpoint counts if an update is to be undone,
        since it may contain that update.

        Raises:
            InvalidSpec: the ranks do not see the same.
        """
        if self._origin is None or any(report.undoes for report in reports):
            return -1
        if self._origin_found.generation == configure.generation:
            return self._origin_found.step
        own = reader.newest_step(configure.checkpoint) if configure.checkpoint else -1
        seen: list[tuple[int, int]] = transfer.gather((self._origin.step(), own), wait)
        if len(steps := {step for step, _ in seen}) > 1:
            raise InvalidSpec(f"{self._origin}: ranks see steps {sorted(steps)}; all nodes have to see the same")
        step, own = seen[0]
        self._origin_found = _FoundOrigin(configure.generation, step if step > own else -1)
        return self._origin_found.step

    def _without_members(
        self, configure: Configure, rank_state: RankState, micro_batches: int, link: AgentLink, reports: list[Report]
    ) -> tuple[str, str, RankState]:
        """Go on where no member and no snapshot has the state.

        Returns:
            Where the state comes from; the checkpoint that it was read from, if it was; and the rank state that has it,
            which may be a new one. For ``LOADED`` nothing is read yet: the origin loads the user's objects as well, and
            these are made later.
        """
        if self._origin_step(configure, reports, link.wait) >= 0:
            rank_state.tensors.reset()  # what is not loaded, such as an optimizer's state, is as at a beginning
            rank_state.invalidate()
            self._tell(f"{self._origin}")
            return LOADED, "", rank_state
        if configure.checkpoint:
            checkpoint = reader.restore(rank_state, configure.checkpoint)
            self._tell(f"the task's own checkpoint, {checkpoint}")
            return "checkpoint", checkpoint, rank_state
        return "initial", "", self._initial(configure, rank_state, micro_batches, link)

    def _tell(self, place: str) -> None:
        """Say where the state comes from, if there are two places for it."""
        if self._origin is not None and dist.get_rank() == 0:
            print(f"unicron: the state is that of {place}", flush=True)

    def _usable_partial(self, rank_state: RankState) -> PartialStep | None:
        """Return the partial step that the rank state can go on with: one with gradients of the same model shard."""
        present = self.rank_state
        if present is None or present.place is None or rank_state.place is None:
            return None
        if not present.place.has_shard_of(rank_state.place):
            return None
        return present.partial

    def _initial(self, configure: Configure, rank_state: RankState, micro_batches: int, link: AgentLink) -> RankState:
        """Begin from the first parameters.

        Returns:
            The rank state, or a new one in its place: a model that has trained has no first parameters left.
        """
        if configure.complete and any(source != "initial" for _, _, source in configure.members):
            raise UnicronError(
                f"generation {configure.generation}: no member has the state, and there is no checkpoint"
            )
        if self._initialise is not None:
            self._initialise(rank_state.model)
        else:
            if rank_state is self.rank_state:
                rank_state = self._built((configure.tensor, configure.pipeline), micro_batches)
            for local in rank_state.tensors.local_shards:
                link.wait(dist.broadcast(local.weights, group=data_group(), group_src=0, async_op=True))
            # Megatron makes the copies equal as it builds them, which needs the other stage.
            weight, group = tied_weight(rank_state.model), tied_group(rank_state.model)
            if weight is not None and group is not None:
                link.wait(dist.broadcast(weight.data, group=group, group_src=0, async_op=True))
        rank_state.tensors.reset()
        rank_state.set_version(0, EMPTY_DIGEST)
        return rank_state

    def _receive(
        self, rank_state: RankState, link: AgentLink, agreed: AgreedState, fault: Callable[[str], None]
    ) -> str:
        """Receive the agreed state; return where it came from."""
        source = agreed.source(dist.get_rank())
        if agreed.plan is None:
            return source
        present = self.rank_state
        stays = rank_state is present and agreed.version == rank_state.version
        rank_state.receive(agreed, link.wait, stays=stays, before_round=lambda number: fault(f"move:{number}"))
        # A rank that passes this reduction may release what it had before.
        link.wait(dist.all_reduce(torch.zeros(1, device=device.current()), async_op=True))
        replaced = present is not None and present is not rank_state and present.version == agreed.version
        if present is not None and replaced and self._usable_partial(rank_state):
            rank_state.adopt_step(present)
        return source


def _has_no_live_state(configure: Configure) -> bool:
    """Return whether the plan says that no live state counts."""
    return all(source in ("checkpoint", "initial") for _, _, source in configure.members)


def _resume(configure: Configure, rank_state: RankState, link: AgentLink, reports: list[Report]) -> Resumption:
    """Deal what is missing of the interrupted step; the survivors keep what they have."""
    step = rank_state.applied + 1
    of_step = max(report.step_micro_batches for report in reports if report.partial == step)
    dealt = dealing.deal(reports, step, of_step, in_place=rank_state.accumulator.in_place)
    kept = dealt.kept[model_coordinate()]
    rank_state.resume(step, kept, configure.rank, dealt.assigned[reports[configure.rank].replica], of_step)
    partial = rank_state.step_in_progress
    if dealt.accountant >= 0:
        partial.account = transfer.gather(partial.account, link.wait)[dealt.accountant]
    rank_state.share_reduced(kept, data_group(), link.wait)
    partial.generation = configure.generation
    return Resumption(
        deal=[dealt.computed_by(rank, report) for rank, report in enumerate(reports)],
        computed=len(partial.remaining()),
        buckets_kept=partial.reduced,
    )
