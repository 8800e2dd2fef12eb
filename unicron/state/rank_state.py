"""The training state of one rank, and the step it is in.

What a rank has of a step survives the loss of peers: the gradients of finished micro-batches
(``unicron.gradients.accumulators``), the buckets that are already reduced and, once agreed, the account of losses and
samples (``unicron.accounting``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from unicron.accounting import EMPTY_DIGEST, KeptGradients, PartialStep, chain_digest
from unicron.errors import NonFiniteValue, UnsupportedModel, WrongLoop
from unicron.gradients import reduction
from unicron.gradients.buffers import GradientBuffers
from unicron.gradients.overlap import Hooks
from unicron.gradients.precision import Precision
from unicron.link.waiting import Wait
from unicron.megatron import clipping
from unicron.megatron.grad_scaler import GradScaler
from unicron.megatron.model import model_chunks
from unicron.megatron.optimizer import group_counts, is_distributed, torch_optimizers
from unicron.megatron.parallel import Place, data_group
from unicron.megatron.parameter_gather import ParameterGather
from unicron.megatron.schedule import LossScale
from unicron.state import transfer
from unicron.state.finite_checks import FiniteChecks
from unicron.state.tensors import StateTensors
from unicron.state.transfer import AgreedState, AvailableState
from unicron.state.update import Stage, Update


class RankState:
    """A model, its optimizer, and how far they have come.

    ``model`` is Megatron's DistributedDataParallel, a list of such model chunks, or any module; its gradients belong to
    this library from here on (``unicron.gradients.buffers``).
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        micro_batches: int = 1,
        precision: Precision = Precision.FLOAT32,
        model_parallel: bool = False,
    ) -> None:
        """Take what was built for this rank's layout; the values do not count as a state yet.

        Args:
            model: the rank's shard of the model.
            optimizer: its optimizer.
            micro_batches: the most in one step, over all replicas.
            precision: the precision of the sums of gradients.
            model_parallel: whether the model is split over ranks, so that updates have collectives of their own.
        """
        self.model = model
        self.optimizer = optimizer
        self.scaler = GradScaler(optimizer)
        """The loss scale."""
        self.tensors = StateTensors(model, optimizer, self.scaler)
        self.applied = -1
        """Updates applied to the state; -1: there is no usable state."""
        self.digest = EMPTY_DIGEST
        """Digest of the samples of those updates."""
        self.place: Place | None = None
        """The place for which model and optimizer were built."""
        self.update_ungathered = False
        """Whether a distributed optimizer has applied one update more to its own part, not yet gathered by all."""
        self.partial: PartialStep | None = None
        self._chunks = len(model_chunks(model))
        self._exact = precision is Precision.EXACT
        self._buffers = GradientBuffers(model, optimizer)
        self.loss_scale = LossScale(model, micro_batches, self.scaler)
        self.accumulator = self._buffers.accumulator(micro_batches, precision=precision)
        self.finite = FiniteChecks(self.accumulator, self._buffers)
        self.overlap = self._buffers.overlapped(self.accumulator)
        """The object that reduces the gradients beside the backward passes; None: they are reduced afterwards."""
        self.gather = ParameterGather.of(model)
        """The object that gathers parameters beside the next forward pass; None: the optimizer's step gathers them."""
        self._update_has_collectives = model_parallel or self.is_distributed  # norms, a divided optimizer's parameters
        self._update = Update(optimizer, self.scaler)
        if self.scaler.applies:
            self._prepare_scale(precision)
        if self.gather is not None:
            for one in torch_optimizers(optimizer):
                one.register_step_post_hook(self.gather.updated)

    def _prepare_scale(self, precision: Precision) -> None:
        """Let gradients be too large for their scale.

        Raises:
            UnsupportedModel: the sums are integers, which cannot be.
        """
        if self._exact:
            raise UnsupportedModel(
                "OptimizerConfig.fp16, loss_scale: must be unset with exact, which takes no infinity"
            )
        self.accumulator.is_checked = False
        if precision is Precision.FLOAT32 and self.loss_scale.applies:
            self.scaler.spread(data_group().size())

    @property
    def is_distributed(self) -> bool:
        """Whether data-parallel ranks divide the optimizer's state among them."""
        return is_distributed(self.model)

    @property
    def step_in_progress(self) -> PartialStep:
        """The step in progress; there must be one."""
        assert self.partial is not None
        return self.partial

    def set_version(self, version: int, digest: bytes) -> None:
        """Declare that parameters and optimizer are those after ``version`` updates."""
        self.applied, self.digest, self.update_ungathered = version, digest, False
        self._update.reset()
        self.scaler.load()
        self.accumulator.portion = 1.0 / self.scaler.replicas
        if self.overlap is not None:
            self.overlap.portion = self.accumulator.portion
        self.discard()

    def invalidate(self) -> None:
        """Declare that there is no usable state."""
        self.set_version(-1, self.digest)

    # The step in progress.

    def discard(self) -> None:
        """Discard what the step in progress has accumulated."""
        self.partial = None
        if self.overlap is not None:
            self.overlap.reset()
        self._buffers.release()
        self.accumulator.clear()
        self.finite.forget()

    def begin(self, step: int, assigned: list[int], generation: int, micro_batches: int) -> None:
        """Begin a step; ``micro_batches``: their number in the step, over all replicas."""
        self.discard()
        self.loss_scale.micro_batches = micro_batches
        self.partial = PartialStep.begin(step, assigned, generation, self._chunks, micro_batches)

    def resume(self, step: int, kept: KeptGradients, rank: int, assigned: tuple[int, ...], micro_batches: int) -> None:
        """Go on with an interrupted step: keep what counts of this rank's gradients, and drop the rest.

        The reduced buckets that the rank lacks come next, by ``share_reduced``.

        Args:
            step: which step.
            kept: what the ranks of this model shard keep of it.
            rank: this rank.
            assigned: the micro-batches that this rank's replica computes.
            micro_batches: their number in the step, over all replicas.
        """
        before, reduced, own = self.partial, kept.reduced_by_rank[rank], kept.kept_by_rank[rank]
        if before is None or before.step != step or before.reduced > reduced:
            # Reduced buckets that do not count have replaced this rank's own sums.
            account = before.account if before is not None and before.step == step else None
            self.begin(step, [], kept.generation, micro_batches)
            self.step_in_progress.account = account
        elif tuple(before.done) != own:
            # A rank keeps what it has in all of its model chunks, or nothing.
            self.accumulator.clear_from(reduced)
            before.forget_done()
            self.finite.forget()
        partial = self.step_in_progress
        self.loss_scale.micro_batches = micro_batches
        self.clear_gradients()
        partial.generation = kept.generation
        partial.assigned, partial.kept_by_shard = list(assigned), kept.kept
        partial.computed = [set() for _ in range(self._chunks)]

    def share_reduced(self, kept: KeptGradients, group: Any, wait: Wait) -> None:
        """Bring the reduced buckets from their source to the ranks of ``group`` that lack some. All of them call it.

        Raises:
            RuntimeError: a rank was lost meanwhile.
        """
        partial = self.step_in_progress
        for bucket in range(min(kept.reduced_by_rank.values()), kept.reduced):
            total = self.accumulator.load(bucket)
            wait(dist.broadcast(total, src=kept.source, group=group, async_op=True))
            if bucket == partial.reduced:
                self.accumulator.store(bucket, total)
                partial.reduced = bucket + 1
        if partial.remaining():
            self.accumulator.keep(partial.reduced)

    def recover(self, *, computing: bool, garbage: bool = False) -> None:
        """Bring the state into order after a failure in a step.

        Args:
            computing: whether the failure came while the training loop computed, rather than inside this library.
            garbage: whether the sums may contain what aborted collectives have left.
        """
        has_sums = self.overlap is not None and self.overlap.restore()
        if self._update.stage is Stage.NOT_BEGUN:
            self.scaler.restore()
        match self._update.stage:
            case Stage.SKIPPED:
                self.complete_step()
            case Stage.UNDER_WAY:
                self.invalidate()  # the parameters may be half updated
            case Stage.APPLIED:
                self._recover_applied()
            case Stage.NOT_BEGUN if self.partial is not None and self.partial.distrusted:
                self.discard()
            case Stage.NOT_BEGUN if garbage and self.partial is not None:
                self._drop_sums(self.partial)
            case Stage.NOT_BEGUN if computing and self.partial is not None:
                self._recover_sums(self.partial, has_sums=has_sums)

    def _recover_sums(self, partial: PartialStep, *, has_sums: bool) -> None:
        """Bring the sums into order after a failure of the training loop: in a pass, or behind the reduction."""
        self._buffers.release()
        if has_sums or self.accumulator.rewind():
            return
        if partial.remaining() or partial.reduced < self.accumulator.buckets:
            self._drop_sums(partial)
        elif not self.accumulator.is_intact() or self._may_be_unscaled:
            self.discard()

    @property
    def _may_be_unscaled(self) -> bool:
        """Whether the totals may have been divided by the loss scale: Megatron does so where they lie, in float32."""
        return self._update.is_entered and any(tensor.dtype is torch.float32 for tensor in self._buffers.tensors)

    def _drop_sums(self, partial: PartialStep) -> None:
        """Drop the sums that are not reduced: their micro-batches are computed again."""
        self._buffers.release()
        self.accumulator.clear_from(partial.reduced)
        partial.forget_done()
        self.finite.forget()

    def leave_generation(self) -> list[Any]:
        """Give up what still needs the peers of this generation; return the collectives that may never end."""
        given_up = self.overlap.give_up() if self.overlap is not None else []
        if self.gather is not None:
            given_up += self.gather.give_up()
            if self.gather.pending and self.applied > 0 and not self.update_ungathered:
                self.applied, self.update_ungathered = self.applied - 1, True
                self.discard()
            self.gather.pending = False
        return given_up

    def _recover_applied(self) -> None:
        """Bring the state into order after a failure behind this rank's update."""
        if self.is_distributed:
            # This rank's part is updated. Parameters of other ranks' parts may not have arrived, or not all of them.
            self._chain_samples()
            self.update_ungathered = True
            self.discard()
        else:
            self.complete_step()  # the failure came after the update: a user's own collective, for instance

    def clear_gradients(self) -> None:
        """Drop what backward passes have added for a micro-batch that is not committed."""
        self._buffers.release()
        self.accumulator.rewind()

    def commit(
        self,
        losses: dict[int, Any],
        samples: dict[int, list[int]],
        chunk: int | None = None,
        tokens: Mapping[int, Any] | None = None,
    ) -> None:
        """Count micro-batches as done: their gradients (scaled by 1/M, if without ``tokens``) are in the buffers.

        A micro-batch that a chunk has computed before, to fill a schedule, adds nothing: its gradients are zero.

        Args:
            losses: micro-batch -> its loss (``unicron.losses.noted``); empty on ranks that do not compute it.
            samples: micro-batch -> its sample ids.
            chunk: the number of the model chunk that has done them; None: all chunks have.
            tokens: micro-batch -> number of tokens, by whose total the gradients are divided once they are reduced.

        Raises:
            NonFiniteValue: a loss that is a number is not finite or, in exact mode, a gradient.
            WrongLoop: several micro-batches at once, where their gradients must be told apart; or a replaced ``.grad``.
        """
        partial = self.step_in_progress
        self._buffers.check()
        losses = self.finite.losses(partial, losses)
        for number in range(self._chunks) if chunk is None else (chunk,):
            for k in self._commit_chunk(partial, set(samples), number):
                partial.samples[k] = samples[k]
                if number == self._chunks - 1 and k in losses:
                    partial.losses[k] = losses[k]
                    if tokens:
                        partial.tokens[k] = tokens[k]

    def _commit_chunk(self, partial: PartialStep, micro_batches: set[int], chunk: int) -> set[int]:
        """Count micro-batches as done by one model chunk; return those that are in its sums."""
        kept = micro_batches & partial.kept_by_shard[chunk]
        if len(micro_batches) > 1 and (self._exact or (kept and not self.accumulator.in_place)):
            raise WrongLoop("micro-batches must be committed one at a time: see unicron.each_backward")
        added = micro_batches - kept
        if kept:
            self.accumulator.drop(chunk)
        elif added:
            try:
                self.accumulator.add(partial.reduced, chunk)
            except NonFiniteValue as error:
                raise self.finite.refused(partial, error, added) from None
            partial.done[chunk] |= added
            self.finite.committed(partial)
        partial.computed[chunk] |= micro_batches
        return added

    def launch_rest(self, wait: Wait, hooks: Hooks, in_flight: int) -> None:
        """Send what a reduction beside the passes has not sent; the arguments are those of its ``launch_rest``.

        Before the ranks agree on the step: what this rank has sent may be all that the others still need.

        Raises:
            Exception: those of ``OverlappedReduction.launch_rest``.
            NonFiniteValue: this rank's gradients are not finite.
        """
        if self.overlap is not None:
            partial = self.step_in_progress
            try:
                self.overlap.launch_rest(partial, wait, hooks, in_flight)
            except NonFiniteValue as error:
                raise self.finite.named(partial, error) from None
            self.finite.sums(partial)

    def reduce(self, group: Any, wait: Wait, *, done: Callable[[int], None], **options: Any) -> None:
        """Reduce the buckets that are not yet reduced over ``group``, and write the totals into the gradient buffers.

        What is reduced beside the passes is only waited for. The arguments are those of
        ``unicron.gradients.reduction.reduce``.

        Raises:
            NonFiniteValue: this rank's gradients are not finite (its peers see a broken collective).
            RuntimeError: a collective broke.
            WrongLoop: a parameter's ``.grad`` was replaced.
        """
        partial = self.step_in_progress
        self._buffers.check()
        if self.overlap is not None:
            try:
                self.overlap.complete(wait)
            except NonFiniteValue as error:
                raise self.finite.named(partial, error) from None
            return
        self.finite.sums(partial)

        def reduced(count: int) -> None:
            partial.reduced = count
            done(count)

        reduction.reduce(self.accumulator, partial.reduced, group, wait, done=reduced, **options)
        self.accumulator.finish(lambda total, ranks: wait(dist.all_reduce(total, group=ranks, async_op=True)))

    def divide_gradients(self, tokens: float) -> None:
        """Divide the gradients of the global batch by its number of tokens, where they are of sums over tokens.

        This is not done twice: a rank that is interrupted behind this drops what it has changed, as after clipping.
        """
        own = self.overlap.own_gradients() if self.overlap is not None else None
        clipping.scale(self.model, 1.0 / tokens, own)

    def check_updates(self, check: Callable[[], None], once: Callable[[], None]) -> None:
        """Have the next update begin if ``once`` raises nothing, and each with collectives if ``check`` does not."""
        self._update.check_once = once
        self._update.check = check if self._update_has_collectives else self._update.check

    def check_before_step(self) -> None:
        """Check that no update has been applied outside of a step.

        Raises:
            WrongLoop: one has been applied.
        """
        if self._update.stage is not Stage.NOT_BEGUN:
            raise WrongLoop("optimizer.step() was called outside of a step: call it inside, after step.reduce()")

    def check_updated(self) -> None:
        """Check that the optimizer has applied the update of the step in progress.

        Raises:
            WrongLoop: the optimizer has not.
        """
        if self._update.stage not in (Stage.APPLIED, Stage.SKIPPED):
            raise WrongLoop(f"step {self.step_in_progress.step} ended without run.optimizer.step()")

    def complete_step(self) -> None:
        """Record that the optimizer has applied the update of the step in progress."""
        self.applied += 1
        self._chain_samples()
        self._update.reset()
        self.partial = None  # the next step clears what this one has accumulated

    def _chain_samples(self) -> None:
        account = self.step_in_progress.account
        assert account is not None
        self.digest = chain_digest(self.digest, account.sample_ids)

    @property
    def version(self) -> int:
        """Number of updates applied, by all ranks or at least by this one; -1: there is no usable state."""
        return self.applied + self.update_ungathered

    def adopt_step(self, other: RankState) -> None:
        """Take over the interrupted step of another rank state of the same model shard and version."""
        for bucket in range(self.accumulator.buckets):
            self.accumulator.store(bucket, other.accumulator.load(bucket))
        self.partial, other.partial = other.partial, None

    def receive(
        self,
        agreed: AgreedState,
        wait: Wait,
        *,
        stays: bool = False,
        before_round: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Receive the state that the members agreed on.

        Args:
            agreed: the state; something has to move.
            wait: waits for a collective.
            stays: whether this rank's own state is a part of the agreed one, and stays where it is.
            before_round: called before each round of the transfer, with its number.

        Raises:
            RuntimeError: a member was lost meanwhile; unless the state ``stays``, there is no usable state then.
        """
        assert agreed.plan is not None
        if not stays:
            self.invalidate()  # a half-received state is not usable
            self.tensors.allocate(agreed.plan.required[dist.get_rank()])
        transfer.execute(agreed, self.tensors.chunks(), wait, before_round)
        if not stays or self.update_ungathered:
            self.set_version(agreed.version, agreed.digest)
        if not stays:
            self.tensors.count_steps(agreed.version)

    def take_loaded(self, version: int, wait: Wait) -> None:
        """Take what was loaded into model and optimizer as the state behind ``version`` updates. All ranks call it.

        Raises:
            RuntimeError: a peer was lost.
        """
        if self.scaler.applies:
            # Some ranks may update nothing, and so count no updates.
            self.scaler.take(version - max(group_counts(self.optimizer), default=version))
            wait(dist.broadcast(self.scaler.numbers, src=0, async_op=True))
        self.set_version(version, EMPTY_DIGEST)

    def available(self) -> list[AvailableState]:
        """Return the state that other ranks may receive from this rank: none, or all or a part of one version."""
        if self.applied < 0:
            return []
        if not self.tensors.has_optimizer_state:
            return []  # without a part in the optimizer this rank cannot tell what kinds of state it keeps
        chunks = self.tensors.updated_chunks() if self.update_ungathered else self.tensors.chunks()
        return [AvailableState(self.version, self.digest, chunks)]
