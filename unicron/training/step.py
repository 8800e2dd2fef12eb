"""One step of a training loop: its micro-batches, the reduction of their gradients, and its end if a peer is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol

from unicron.errors import CommunicationFailed, Interrupted, WrongLoop
from unicron.gradients.overlap import Hooks
from unicron.gradients.reduction import IN_FLIGHT
from unicron.link.agent_link import STOP, AgentLink
from unicron.losses import Loss, noted
from unicron.megatron import clipping
from unicron.megatron.model import model_chunks
from unicron.megatron.optimizer import torch_optimizers
from unicron.megatron.parallel import data_group
from unicron.megatron.schedule import fill
from unicron.process.faults import FaultInjector
from unicron.snapshot.snapshots import Snapshots
from unicron.state.rank_state import RankState
from unicron.training.compute_time import ComputeTimer
from unicron.training.end_of_step import EndOfStep
from unicron.training.metrics import Metrics

BUCKET_REPORTS = 8
"""Messages about the progress of one reduction, however many buckets there are. Chosen: the part of a step between two
of them is short beside the limit for a hang, which is a multiple of the step."""


class StepHost(Protocol):
    """What a step needs from the training that it belongs to (``unicron.training.generations``)."""

    link: AgentLink
    faults: FaultInjector
    request: int
    """What the ranks have agreed to do at the next boundary; the step sets it."""
    end_of_step: EndOfStep
    """The agreements at the end of this generation's steps."""
    snapshots: Snapshots
    """This rank's snapshots."""
    metrics: Metrics
    """What the script logs."""
    timer: ComputeTimer
    """Of this process's own compute time."""
    asked_last_step: int
    """The step behind which the script asks for the end of the training; 0: it does not ask."""

    @property
    def rank_state(self) -> RankState:
        """The rank's state."""

    def statuses(self) -> tuple[int, ...]:
        """Return what this rank reports at the end of a step."""

    def agreed(self, statuses: list[int]) -> None:
        """Act on the worst of what all ranks reported. The state may change once this returns."""

    def put_back(self) -> None:
        """Put the user's state back to what it is behind a step that is repeated."""

    def end_metrics(self, step: int, *, done: bool) -> None:
        """End what the script logs of a step; ``done``: whether the step's update is applied."""

    def survives(self, error: BaseException) -> bool:
        """Report an error; return whether the process goes on in a new generation."""


class Step:
    """One update of the parameters, from its first micro-batch to the optimizer's step.

    Made by ``Run.steps``; the body of its ``with`` block is the part in which peers may be lost.
    """

    def __init__(self, host: StepHost, number: int, assigned: list[int]) -> None:
        """Prepare the step; ``Run.steps`` calls this."""
        self._host = host
        self.number = number
        """Number of the step, counted from 1."""
        self.assigned = assigned
        """The micro-batches that this rank's replica computes; in an interrupted step, those that are missing."""
        self.completed = False
        """Whether the update has been applied."""
        self.loss = float("nan")
        """Mean loss over the global batch, once reduced."""
        self.left = False
        """Whether a failure ended the step here: the same step comes again, or the next one if the update was
        applied."""
        self.repeated = False
        """Whether the step, with the user's state, was done before a fault, and comes once more for a boundary section
        behind it (``Run.boundary``)."""
        self.stops = False
        """Whether the ranks have agreed, as they reduced, to save and stop behind the step, as the task is asked to.
        They do once the loop asks for the next step, unless the state cannot be saved."""
        self.began_s = time.monotonic()
        """When the step began, on this process's monotonic clock."""
        self.computed_s = 0.0
        """Seconds from the beginning until the gradients were reduced."""
        self._to_compute = 0
        self._computed: int | None = None
        """How many micro-batches the rank has computed between the beginning and the reduction."""
        self._gather_waited_s = 0.0
        self._reduced = False
        self._in_one_schedule = False
        """Whether the micro-batches are computed in one schedule (a pipeline's)."""
        self._computing = True
        """Whether the training loop computes, rather than this library: an error then leaves a half-done
        micro-batch."""

    def remaining(self) -> list[int]:
        """Return the rank's micro-batches that are not yet committed."""
        return self._host.rank_state.step_in_progress.remaining()

    def micro_batches(self) -> Iterator[int]:
        """Yield the micro-batches to compute.

        Raises:
            Interrupted: between two of them, where the generation is held. A replica of several ranks that has lost
                none of them goes on: its ranks all leave behind the last one.
            WrongLoop: one of them is not committed before the next, where Megatron's schedules scale the loss; or the
                pipeline is interleaved, whose schedule takes several at once.
        """
        if len(model_chunks(self._host.rank_state.model)) > 1:
            raise WrongLoop("an interleaved schedule computes several micro-batches: use step.all_micro_batches()")
        scale = self._host.rank_state.loss_scale
        for k in self.remaining():
            self._enter_micro_batch()
            # This is not the last call if earlier ones are not committed: the loop may compute all of them together.
            self._begin_call(1, is_last=self.remaining() == [k])
            yield k
            if scale.applies and k in self.remaining():
                raise WrongLoop(
                    f"micro-batch {k} of step {self.number} is not committed before the next one: use "
                    "step.all_micro_batches() for a schedule that computes several at once"
                )

    def all_micro_batches(self) -> list[int]:
        """Return the micro-batches to compute, for a schedule that computes all of them at once: a pipeline's.

        The interleaved schedule takes only some numbers of micro-batches, as a rule multiples of the pipeline size. The
        last one then occurs more than once, to fill the schedule: it is to be computed and committed each time, and
        counts once.

        Raises:
            Interrupted: the generation is held.
        """
        remaining = self.remaining()
        if remaining:
            self._enter_micro_batch()
            filled = fill(self._host.rank_state.model, remaining)
            self._begin_call(len(filled), filling=len(filled) - len(remaining), is_last=True)
            self._in_one_schedule = True
            return filled
        return remaining

    def _begin_call(self, micro_batches: int, *, filling: int = 0, is_last: bool) -> None:
        state = self._host.rank_state
        state.loss_scale.begin_call(micro_batches, filling=filling)
        if state.overlap is not None:
            # All behind the passes where a fault is to come after a number of buckets, and no more may be reduced.
            in_passes = is_last and not self._host.faults.fails_between_buckets(self.number)
            hooks = Hooks(self._before_launch, self._host.link.has_ended)
            state.overlap.announce(micro_batches if in_passes else 0, state.step_in_progress, hooks)
        if state.gather is not None:
            state.gather.before = lambda number: self._host.faults.reached(self.number, f"gather:{number}")

    def _before_launch(self, number: int) -> None:
        """Let an injected fault happen before a bucket is sent, and send none in a generation that is held."""
        self._host.faults.reached(self.number, f"launch:{number}")
        self._host.link.check()

    def _before_rest(self, number: int) -> None:
        """Do so before a bucket is sent behind the passes."""
        self._before_launch(number)
        overlap = self._host.rank_state.overlap
        if overlap is not None and not overlap.keeps_sums:
            self._host.faults.reached(self.number, f"reduce:{number}")

    def _enter_micro_batch(self) -> None:
        self._computing = False
        self._host.link.check()
        self._reach_micro_batch()
        self._computing = True

    def _reach_micro_batch(self) -> None:
        state = self._host.rank_state
        finished = len(state.step_in_progress.finished())
        computes = self._host.timer.counts_running_only
        self._host.faults.reached_micro_batch(self.number, finished, model_chunks(state.model), computes=computes)

    def commit(self, micro_batch: int, loss: Loss | None, ids: list[int], chunk: int | None = None) -> None:
        """Count a micro-batch as done: its gradients are in the buffers. See ``commit_all``."""
        self.commit_all([micro_batch], [] if loss is None else [loss], [ids], chunk)

    def commit_all(
        self, micro_batches: list[int], losses: Sequence[Loss], ids: list[list[int]], chunk: int | None = None
    ) -> None:
        """Count micro-batches as done whose gradients are in the buffers together.

        Args:
            micro_batches: their numbers.
            losses: the mean loss of each, as a number or a tensor of one element, or its sum over tokens and their
                number; empty on ranks that do not compute it (pipeline stages before the last). A tensor is read at the
                end of the step, so that the host does not wait for the device here.
            ids: the samples of each.
            chunk: the number of the model chunk that has done them (``unicron.each_backward`` tells); None: all chunks
                have.

        Raises:
            NonFiniteValue: a loss that is a number is not finite or, in exact mode, a gradient.
            WrongLoop: several at once in exact mode, which must tell their gradients apart; a loss of several elements;
                or sums over tokens for only some micro-batches, if gradients are divided by tokens.
        """
        link, state = self._host.link, self._host.rank_state
        kept = [noted(loss) for loss in losses]
        tokens = state.loss_scale.committed(losses, kept)
        found = self._host.faults.finished_passes(self.number, kept)
        mark = link.mark()
        if state.gather is not None:
            state.gather.settle_once(partial(link.counts, mark, shared=True))
            link.wait_in_passes(for_others=state.gather.pending)
        in_progress = state.step_in_progress
        before = in_progress.remaining()
        state.commit(
            dict(zip(micro_batches, found, strict=False)),
            dict(zip(micro_batches, ids, strict=True)),
            chunk,
            dict(zip(micro_batches, tokens, strict=False)),
        )
        link.finish_micro_batch()
        remaining = in_progress.remaining()
        if len(remaining) == len(before):
            return  # a model chunk that is not the last to have done its part
        for k in set(before).difference(remaining):
            link.progress(self.number, "compute", micro_batch=k)
        if self._in_one_schedule and remaining:
            self._reach_micro_batch()

    def reduce(self) -> None:
        """Replace the gradients by those of the global batch, and agree on loss, samples and what comes next.

        Raises:
            NonFiniteValue: this rank's losses or gradients are not finite.
            SampleAccountingError: the micro-batches were not computed exactly once.
            WrongLoop: the losses that this process has committed in its first step are not those that the passes began
                with: gradients would be wrong by a factor.
        """
        host, number = self._host, self.number
        link, faults, state = host.link, host.faults, host.rank_state
        self._computing = False
        self._end_passes()
        link.end_passes()
        faults.reached(number, "reduce")
        in_progress = state.step_in_progress
        link.progress(number, "reduce", buckets=in_progress.reduced)
        self._gather_rest()
        # Buckets are sent one after the other where a fault is to come after a number of them, and no more may be
        # reduced.
        in_flight = 1 if faults.fails_between_buckets(number) else IN_FLIGHT
        state.finite.read_losses(in_progress)
        state.loss_scale.check()
        state.launch_rest(link.wait, Hooks(self._before_rest, link.has_ended, self._report_buckets), in_flight)
        agreement = host.end_of_step.agree(
            in_progress,
            buckets=state.accumulator.buckets,
            request=link.request,
            statuses=host.statuses(),
        )
        host.request = agreement.request
        self.stops = agreement.request >= STOP
        if state.gather is not None:
            state.gather.settle()  # the agreement has waited for what the device did before it
        assert in_progress.account is not None
        self.loss = in_progress.account.loss
        host.metrics.read()  # the agreement has waited for the device
        state.reduce(
            data_group(),
            link.wait,
            before=lambda bucket: faults.reached(number, f"reduce:{bucket}"),
            done=self._report_buckets,
            broken=link.abandoned.extend,
            in_flight=in_flight,
        )
        host.agreed(agreement.statuses)
        self._reduced = True
        self.computed_s = time.monotonic() - self.began_s
        faults.reached_update(number, torch_optimizers(state.optimizer)[0])
        link.progress(number, "update")
        self._computing = True
        if in_progress.account.tokens:
            state.divide_gradients(in_progress.account.tokens)

    def end_training(self) -> None:
        """Have the training end behind this step, though there are steps left: a task that is resumed does them.

        Call this before ``reduce``, in which the ranks agree on it; it is enough that one of them asks. A process that
        comes later learns of it from the others.

        Raises:
            WrongLoop: the gradients are reduced already.
        """
        if self._reduced:
            raise WrongLoop(f"step {self.number}: step.end_training() comes too late: call it before step.reduce()")
        self._host.asked_last_step = self.number

    def _begin_passes(self) -> None:
        """Begin to measure the rank's own compute time."""
        self._to_compute, self._gather_waited_s = len(self.remaining()), self._waited_s()
        gather = self._host.rank_state.gather
        self._host.link.wait_in_passes(for_others=gather is not None and gather.pending)
        self._host.timer.begin(self.number, alone=self._host.end_of_step.alone)

    def _end_passes(self) -> None:
        self._host.timer.end(self._waited_s() - self._gather_waited_s)
        self._computed = self._to_compute - len(self.remaining())

    def _waited_s(self) -> float:
        gather = self._host.rank_state.gather
        return gather.waited_s if gather is not None else 0.0

    def _gather_rest(self) -> None:
        """Gather the parameters that no forward pass of this rank has used."""
        gather = self._host.rank_state.gather
        if gather is not None and gather.pending:
            gather.complete()
            gather.settle_once(partial(self._host.link.counts, self._host.link.mark(), shared=True))

    def _report_buckets(self, reduced: int) -> None:
        """Report the progress of the reduction to the agent, in at most ``BUCKET_REPORTS`` messages."""
        every = -(-self._host.rank_state.accumulator.buckets // BUCKET_REPORTS)
        if reduced % every == 0:
            self._host.link.progress(self.number, "reduce", buckets=reduced)

    def clip_gradients(self, limit: float) -> float:
        """Scale the gradients so that their norm is at most ``limit``; return the norm before.

        The result is the same to the last bit in every data- and pipeline-parallel layout, as ``exact`` needs it
        (``unicron.megatron.clipping``). Call this between ``reduce`` and the optimizer's step.

        Raises:
            RuntimeError: a collective broke; the gradients are as they were.
            WrongLoop: the optimizer has a loss scale, by which it divides the gradients later, and clips them itself.
        """
        state = self._host.rank_state
        if state.scaler.applies:
            raise WrongLoop(
                "step.clip_gradients: gradients have a loss scale; set the clip_grad of Megatron's optimizer"
            )
        own = state.overlap.own_gradients() if state.overlap is not None else None
        return clipping.clip(state.model, limit, self._host.link.wait, own)

    def __enter__(self) -> Step:
        """Enter the part of the loop in which peers may be lost."""
        self._host.link.enter(computes=True)
        self._host.link.progress(self.number, "begun")
        self._begin_passes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Complete the step; swallow an error that a new generation answers, report every other error."""
        host = self._host
        host.timer.stop()
        if error is None:
            if not self._reduced:
                host.link.leave()
                raise WrongLoop(f"step {self.number} ended without step.reduce()")
            try:
                if host.rank_state.is_distributed and host.rank_state.gather is None:
                    host.link.synchronize()  # the optimizer's step has gathered what other ranks have updated
                if host.rank_state.gather is not None:
                    host.faults.reached(self.number, "gather")
                    host.rank_state.gather.launch()
            except (CommunicationFailed, Interrupted, RuntimeError) as err:
                error = err
        host.link.leave(failed=error is not None)
        state = host.rank_state
        if error is None:
            state.check_updated()
            state.complete_step()
            self.completed = True
            host.end_metrics(self.number, done=True)
            duration_s = time.monotonic() - self.began_s
            host.link.sections = 0, None
            memory_every, replicated = host.snapshots.steps, host.snapshots.replicated
            host.link.progress(
                self.number,
                "ended",
                loss=self.loss,
                duration_s=duration_s,
                compute_s=host.timer.result_s(),
                micro_batches=self._computed,
                memory_every=memory_every,
                replicated=replicated,
            )
            return False
        self.left = True
        state.recover(computing=self._computing, garbage=host.link.has_garbage)
        self.completed = state.applied == self.number
        host.end_metrics(self.number, done=self.completed)
        return host.survives(error)
