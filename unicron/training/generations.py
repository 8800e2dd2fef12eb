"""The training of a task in this process, over all its generations: what is behind ``Run`` and ``Step``.

It joins generations (``unicron.join``), yields steps, starts checkpoints and snapshots at step boundaries, and decides
which errors a new generation answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any, Literal

from unicron.checkpoint import outcomes, target
from unicron.checkpoint.writer import Outcomes, Writer
from unicron.errors import DamagedCheckpoint, Interrupted, InvalidSpec, MemberDiffers, PeerDiffers, WrongLoop
from unicron.gradients.precision import Precision
from unicron.join import own_identity, user_state
from unicron.join.joining import Build, Joiner, JoinResult, own_share
from unicron.join.member_checks import MemberChecks
from unicron.join.user_state import Origin
from unicron.link import end_of_task, reporting, torchrun
from unicron.link.agent_link import DRAIN, NOTHING, STOP, AgentLink
from unicron.process.faults import FaultInjector
from unicron.protocol.messages import Configure
from unicron.snapshot.snapshots import Snapshots
from unicron.state.rank_state import RankState
from unicron.state.user_state import UserState
from unicron.training import end_of_step
from unicron.training.applied_step import AppliedStep
from unicron.training.compute_time import ComputeTimer
from unicron.training.end_of_step import EndOfStep
from unicron.training.finishing import Finishing, save_and_stop
from unicron.training.metrics import Metrics
from unicron.training.step import Step

End = Literal["complete", "drained", "broken"]
"""The way in which a rank leaves a generation: with the last update in model and user's state, at a boundary that all
ranks have agreed on, or by a failure, which a new generation answers."""


class Training:
    """A task's training in this process, over all its generations."""

    def __init__(
        self,
        link: AgentLink,
        *,
        steps: int,
        micro_batches: int,
        build: Build,
        initialise: Callable[[Any], None] | None = None,
        checkpoint_every: int = 0,
        checkpoint_directory: str = "",
        checkpoint_keep: int = 2,
        order_samples: int = 0,
        memory_every: int | Literal["auto"] = 0,
        precision: Precision = Precision.FLOAT32,
        state: Mapping[str, Any] | None = None,
        interleave: int = 1,
        origin: Origin | None = None,
        micro_batches_of: Callable[[int], int] | None = None,
        runs_script: bool = False,
    ) -> None:
        """Prepare the training.

        Args:
            link: to the agent.
            steps: updates to apply.
            micro_batches: M, the number in one update, or in the largest; the training loop scales gradients by 1/M.
            build: makes model and optimizer.
            initialise: sets the model's first parameters, the same on every rank; without it rank 0's are used.
            checkpoint_every: steps between checkpoints; 0: only when stopped.
            checkpoint_directory: where checkpoints go; empty: the generation's own directory.
            checkpoint_keep: how many of them to keep; at least 2.
            order_samples: samples from whose number their order was drawn, which checkpoints record; 0: not known.
            memory_every: steps between snapshots, where an agent says where they go; 0: none; or ``auto``.
            precision: the precision of the sums of gradients.
            state: the user's state, as ``unicron.attach`` takes it.
            interleave: model chunks of each rank, where there are several pipeline stages.
            origin: the state from which the task begins in place of first parameters.
            micro_batches_of: M of a step, by its number; None: always the same.
            runs_script: whether a user's script may go on behind the last step, with an agent.
        """
        self.runs_script = runs_script and link.supervised
        self.link = link
        self.user = UserState(state)
        self.last_step = steps
        """The step behind which the training ends; an earlier one, once the ranks have agreed to end."""
        self.asked_last_step = 0
        """The step behind which the script asks for the end; 0: it does not ask."""
        self.micro_batches, self._micro_batches_of = micro_batches, micro_batches_of
        self.request = NOTHING
        self.end_of_step: EndOfStep
        self.checkpoint_every = checkpoint_every
        self.faults = FaultInjector()
        link.on_inject = self.faults.request
        self.snapshots = Snapshots(memory_every, link.wait, checkpoint_every)
        self._checkpoint_directory = checkpoint_directory
        self._writer = Writer(checkpoint_keep, order_samples)
        self._checkpoint_due = False
        self._saved = ""
        """The checkpoint that was written and waited for last."""
        self._configure: Configure | None = None
        self.outcomes: Outcomes
        every = {"checkpoint_every": checkpoint_every, "memory_every": memory_every, "interleave": interleave}
        settings = {"steps": steps, "micro_batches": micro_batches, "precision": precision.name, **every}
        self._checks = MemberChecks(own_identity.of_task(settings))
        self._joiner = Joiner(
            build,
            initialise,
            self.snapshots,
            self._checks,
            precision=precision,
            user=self.user,
            interleave=interleave,
            origin=origin,
            counts_each_step=micro_batches_of is not None,
        )
        self._joined = JoinResult(source="")
        self.last_loss: float | None = None
        self.metrics = Metrics()
        self.timer = ComputeTimer()
        self.step: Step | None = None
        """The step that the loop was given last in this generation."""
        self.open_section = 0
        """The step behind which this rank is in a boundary section that is not done; 0: none."""
        self.random: tuple[int, Callable[[], None]] = 0, lambda: None
        """The step of the newest section, and a function that puts random generators back to their state before its
        first run."""
        self._left_step: Step | None = None
        """The step that a failure ended last."""
        self._checks_user = self.in_applied_step = False
        """Whether this step's end, and the boundary behind it, check what the script does to its state; and whether the
        loop is in a step whose update is applied already."""

    @property
    def rank_state(self) -> RankState:
        """The rank's state.

        Raises:
            WrongLoop: there is none before the first generation.
        """
        if self._joiner.rank_state is None:
            raise WrongLoop(
                "run.model and run.optimizer are there from the first step of run.steps() on, before which build(...) "
                "makes them"
            )
        return self._joiner.rank_state

    @property
    def configure(self) -> Configure:
        """The generation that this process is in.

        Raises:
            WrongLoop: it has joined none.
        """
        if self._configure is None:
            raise WrongLoop("run.generation is there from the first step of run.steps() on: there is none before it")
        return self._configure

    def _applied(self) -> int:
        """Return the updates applied to the state; 0 if there is no usable state."""
        return max(0, self._joiner.rank_state.applied) if self._joiner.rank_state is not None else 0

    def steps(self) -> Iterator[Step]:
        """Yield the steps to do, through all generations, until the last one is applied everywhere."""
        drained = False
        self.link.undone = lambda: (self._applied(), self.last_step)
        while self.link.at_end is None:  # otherwise a script asks again behind the last step
            self._leave_generation()
            configure = self.link.next_generation(self._applied(), drained=drained)
            drained = False
            self._begin_life(configure)
            self._configure, self.outcomes = configure, outcomes.reported_to(self.link, configure)
            if not self._attempt(self._join):
                continue
            end = yield from self._steps_of_generation()
            drained = end == "drained"
            if end == "complete" and self._attempt(self._finish):
                if self.request != DRAIN:
                    break
                drained = True  # the result cannot be written yet
        self.link.undone = lambda: None

    def _steps_of_generation(self) -> Generator[Step, None, End]:
        """Yield the steps of one generation until it ends; return how it ended."""
        if self.rank_state.applied == self.last_step:
            self._report_resumed(None)
        repeats = self._joined.repeats_update or self._joined.repeats_section
        if repeats and not (yield from self._repeat_update()):
            return "broken"
        if self._checks.keeps_state and self.rank_state.applied < self.last_step:
            # A newcomer's part is the state that it has received, not what its script may make of it.
            self.snapshots.keep(self.rank_state, self.user.record, at_once=not self._checks.proven)
        first = self._checks_user = True
        while self.rank_state.applied < self.last_step:
            step = self.step = self._next_step(resumes=first)
            self.metrics.begin()
            yield step
            if step.completed:
                self.last_loss = step.loss
            self._place_user_state(step)
            if step.left:
                # This is so behind the last update too: this rank has reported the failure, which a new generation
                # answers.
                return "broken"
            if first:
                # This comes before anybody stores the state.
                if not self._attempt(self._compare):
                    return "broken"
                self._report_resumed(step)
                first = False
            if self.rank_state.applied == self.last_step:
                break
            if self.request == DRAIN:
                return "drained" if self._attempt(self.gather_parameters) else "broken"
            if not self._at_boundary():
                return "broken"
        return "complete"

    def _compare(self) -> None:
        """Compare the parameters behind the first update of a generation."""
        try:
            self._checks.behind_update(self.rank_state, self.configure, self.link)
        except (MemberDiffers, PeerDiffers):
            self.snapshots.settle()  # what the process that leaves has copied may be needed to undo the update
            raise

    def _repeat_update(self) -> Generator[Step, None, bool]:
        """Yield the last step again, whose update is applied; return False if a new generation has to answer."""
        repeated = not self._joined.repeats_update
        step = self.step = AppliedStep(self, self.rank_state.applied, self._left_step, repeated=repeated)
        if repeated and self.random[0] == step.number:
            self.random[1]()
        self.in_applied_step = True
        self.metrics.begin(again=True)
        yield step
        self.in_applied_step = False
        if repeated:
            self.put_back()
            self._left_step = step if step.left else self._left_step
        else:
            self._place_user_state(step)
        return not step.left

    def put_back(self) -> None:
        """Put the user's state back to what it is behind a step that is repeated.

        Raises:
            WrongLoop: a tensor of which there is no copy was changed in place.
        """
        if self.step is None or not self.step.repeated:
            return
        self.user.leave_step(self.step.number, updated=False)
        if not self.user.is_at(self.step.number):
            raise WrongLoop(
                f"step {self.step.number} is repeated for a boundary section, and the loop has changed tensors of its "
                "state in place once more: leave them as they are if step.repeated"
            )

    def _place_user_state(self, step: Step) -> None:
        """Find out behind which update the user's state stands, now that the script has done its part of a step."""
        if step.left:
            self._left_step = step
            self.user.leave_step(step.number, updated=self.rank_state.version >= step.number)
        else:
            self.user.mark(step.number)

    def _at_boundary(self) -> bool:
        """Stop, write a checkpoint and take a snapshot, as due; return False if a new generation has to answer."""
        if self._checks_user and not self._attempt(lambda: user_state.check_equal(self.user, self.link.wait)):
            return False
        self._checks_user = False
        applied = self.rank_state.applied
        due = self.checkpoint_every > 0 and applied % self.checkpoint_every == 0
        self._checkpoint_due = self._checkpoint_due or due
        stopping = self.request >= STOP
        if stopping:
            self.metrics.read()
        if stopping and not self._attempt(lambda: save_and_stop(self)):
            return False
        # One checkpoint is written at a time: where the file system is slower than the interval, training does not wait
        # for it. Nor is the one that a stop could not write tried again at the same boundary.
        if self._checkpoint_due and not stopping and self._writer.idle and not self._attempt(self._begin_checkpoint):
            return False
        self.snapshots.take(self.rank_state, self.user.record, checkpointing=not self._writer.idle)
        return True

    def gather_parameters(self) -> None:
        """Wait until the parameters that other ranks have updated have arrived on this one."""
        if self.rank_state.gather is not None:
            self.rank_state.gather.finish(self.link.synchronize)

    def heartbeat(self) -> None:
        """Report that this rank is at work on something else than a step; see ``Run.heartbeat``."""
        if self.link.at_end is None:  # behind the last step, the time since then is what counts
            self.link.progress(self._applied(), "aside")

    def log(self, values: Mapping[str, Any]) -> None:
        """Take metrics of the step in progress, or of the last one that is done; see ``Run.log``.

        Raises:
            InvalidMetric: a name or a value cannot be kept.
            WrongLoop: there is no step yet.
        """
        if self._joiner.rank_state is None:
            raise WrongLoop("run.log() stands in the loop over run.steps(), or behind it: there is no step yet")
        self.metrics.log(values)
        if not self.metrics.in_step:
            # Behind a step that a fault has broken, this is of a step that comes again.
            broken = self.step is not None and not self.step.completed
            self.end_metrics(self._applied(), done=not broken)
            if self._applied() == self.last_step:
                self.metrics.read()

    def end_metrics(self, step: int, *, done: bool) -> None:
        """End what the script logs of a step; ``done``: whether the step's update is applied."""
        self.metrics.end(self.configure, step, done=done)

    # Between steps.

    def _leave_generation(self) -> None:
        """Give up what still needs the peers of the generation that this process was in, if any."""
        if self._joiner.rank_state is not None:
            self.link.break_off(self._joiner.rank_state.leave_generation())

    def _begin_life(self, configure: Configure) -> None:
        """Tell the script of its generation, and keep the injected faults that are this process's."""
        if self.link.supervised:
            torchrun.publish(configure)
        if self._configure is None:
            source = next((m[2] for m in configure.members if m[0] == configure.rank), "initial")
            self.faults.begin_life(configure.rank, replaces=source == "take" or configure.fault_step > 0)

    def _join(self) -> None:
        step = self._applied() + 1
        self.link.progress(step, "setup")
        try:
            self._joined = self._joiner.join(
                self.configure,
                self.link,
                self.micro_batches,
                fault=lambda at: self.faults.reached(step, at),
                formed=self._prove_target,
                open_section=self.open_section,
                last_step=self.last_step,
            )
            self.last_step = self._joined.last_step
        except DamagedCheckpoint as err:
            # A checkpoint that some nodes do not see looks like one that is damaged.
            if not self._writer.unusable:
                raise
            raise InvalidSpec(f"{err}; {self._writer.unusable}") from err
        self.step = None
        # This holds for a newcomer, too: another fault may come before it is in the section.
        self.open_section = self.rank_state.applied if self._joined.repeats_section else 0
        if self.configure.generation > 1:  # the steps up to here may have failed: see finite_checks
            self.rank_state.finite.each_until = max(self.rank_state.applied, self.configure.fault_step) + 1
        total = partial(end_of_step.total, wait=self.link.wait)
        self.end_of_step = EndOfStep(end_of_step.member(), total)
        # A checkpoint that the last generation was writing is abandoned; the next boundary begins a new one.
        self._checkpoint_due = self._checkpoint_due or not self._writer.idle
        self._writer.enter(self._checkpoint_location(), self.configure.generation, self._joined.checkpoint)
        self.snapshots.enter(self.configure.generation, self.rank_state)
        self.heartbeat()  # what the script does before its first step is no part of joining

    def _prove_target(self) -> None:
        """Find out whether the nodes see the same place for checkpoints, where that is not known.

        This is done before any node reads its state there: a task that resumes would otherwise fail at that, with less
        to say.

        Raises:
            InvalidSpec: they do not, at the start of a task that is to write checkpoints; or a package that would reach
                the place is not installed here.
        """
        problem = target.problem_of(
            target.root(self._checkpoint_directory, self.configure), self.configure, self.link.wait
        )
        if problem is not None:
            self._writer.unusable = problem
            starts = all(source in ("initial", "checkpoint") for _, _, source in self.configure.members)
            if problem and starts and self.checkpoint_every and not self.configure.fault_step:
                raise InvalidSpec(problem)

    def _next_step(self, *, resumes: bool) -> Step:
        """Return the next step; the first of a generation may resume an interrupted one."""
        number = self.rank_state.applied + 1
        self.rank_state.check_before_step()
        self._checks.note()
        if not resumes or self._joined.resumption is None:
            count = self._micro_batches_in(number)
            share = own_share(count, self._joined.shares)
            self.rank_state.begin(number, share, self.configure.generation, count)
        return Step(self, number, self.rank_state.step_in_progress.assigned)

    def _micro_batches_in(self, number: int) -> int:
        """Return how many micro-batches a step has.

        Raises:
            WrongLoop: more than the training may have, or none.
        """
        count = self._micro_batches_of(number) if self._micro_batches_of is not None else self.micro_batches
        if not 1 <= count <= self.micro_batches:
            raise WrongLoop(f"micro_batches_of: step {number} has {count}, and attach says up to {self.micro_batches}")
        return count

    def _report_resumed(self, step: Step | None) -> None:
        """Report the first step of a generation to the agent, with the durations of the phases that led to it."""
        joined, state = self._joined, self.rank_state
        message = joined.message(
            self.configure,
            step=state.applied,
            buckets=state.accumulator.buckets,
            total_s=time.monotonic() - step.began_s if step is not None else 0.0,
            computed_s=step.computed_s if step is not None else 0.0,
        )
        reporting.report_resumed(self.link, message)

    def _checkpoint_location(self) -> str:
        return f"{target.root(self._checkpoint_directory, self.configure)}/step-{self.rank_state.applied}"

    def _begin_checkpoint(self) -> None:
        self._checkpoint_due = False
        self.show_writing()
        self._writer.begin(self.rank_state, self._checkpoint_location(), self.user.record)
        self.faults.reached_checkpoint(self.rank_state.applied)

    def statuses(self) -> tuple[int, ...]:
        """Return what this rank reports at the end of a step: the statuses of its checkpoint and of its snapshot.

        The report also says whether a checkpoint is due, which a rank that came after an interrupted one does not know;
        the rank's wish; and whether the training is to end here.
        """
        ends = self.asked_last_step == self.rank_state.step_in_progress.step
        due = int(self._checkpoint_due)
        return self._writer.status, self.snapshots.status, due, self.snapshots.wish, int(ends)

    def agreed(self, statuses: list[int]) -> None:
        """Act on the worst of what all ranks reported. The state may change once this returns."""
        if self._checks_user:
            self.user.check_unchanged()
        checkpoint, snapshot, due, wish, ends = statuses
        if ends:
            self.last_step = self.rank_state.step_in_progress.step
        self._writer.agreed(checkpoint, self.outcomes)
        self.snapshots.wait_copied()
        lack = self.snapshots.agreed(snapshot, wish)
        reporting.report_copies(self.link, self.configure, self.rank_state.applied, lack)
        self._checkpoint_due = bool(due)

    def complete_checkpoint(self) -> str:
        """Wait for the checkpoint in progress, if any; return why it was given up, empty if it was not."""
        return self._writer.complete(self.outcomes, self.link.wait, self.show_writing)

    def save(self) -> tuple[str, str]:
        """Write a checkpoint of this state, unless there is one; return its place, and why there is none.

        A published checkpoint is never written again: if that failed, there would be none.
        """
        location, reason = self._checkpoint_location(), ""
        if location != self._saved:
            self._begin_checkpoint()
            reason = self.complete_checkpoint()
            self._saved = self._saved if reason else location
        return location, reason

    def show_writing(self) -> None:
        """Report that this rank writes, or waits until it can."""
        self.link.progress(self.rank_state.applied, "checkpoint")

    def meet(self) -> None:
        """Wait for all ranks: the process that goes on from here may end. One of them may still write, for minutes."""

        def wait() -> None:
            self.link.check()
            self.show_writing()

        end_of_task.meet(self._joiner.store, self.configure.world_size, wait)

    def meet_in_section(self, place: str) -> None:
        """Wait until all ranks have come to a place in a boundary section, under an agent, which can end the wait.

        Raises:
            Interrupted: the generation is held.
            RuntimeError: the store does not answer.
        """
        if self.link.supervised:
            end_of_task.meet(self._joiner.store, self.configure.world_size, self.link.check, place)

    def _finish(self) -> None:
        """Write the result and report that the task is finished, or that its script goes on behind the last step."""
        self.show_writing()
        self.gather_parameters()
        self.metrics.read()
        self.complete_checkpoint()
        finished = Finishing(self, can_save=not self._writer.unusable).until_written()
        if finished is None:
            return
        self.meet()
        if self.runs_script:
            end_of_task.begin(self.link, finished, self._joiner.store, self.configure.world_size)
        else:
            self.link.send(finished)

    # Failures.

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Do something that needs the peers; return False if a new generation has to answer."""
        try:
            self.link.enter()
            action()
            self.link.synchronize()
        except Exception as error:
            self.link.leave()
            if not self.survives(error):
                raise
            return False
        self.link.leave()
        return True

    def survives(self, error: BaseException) -> bool:
        """Report an error; return whether the process goes on in a new generation.

        If it does not, a supervised process ends.
        """
        if not isinstance(error, Exception):
            return False
        link = self.link
        broken = reporting.is_communication(error)
        # Where aborted collectives leave garbage, the garbage may have led to any error.
        aborted = link.is_held() and (broken or link.aborts_without_error)
        if link.supervised and (isinstance(error, Interrupted) or aborted):
            reporting.forget_frames(error)
            return True
        reporting.report(link, error, step=self._applied() + 1, starting=self._joiner.rank_state is None)
        if broken and link.supervised:
            reporting.forget_frames(error)
            return True
        if link.supervised:
            link.exit(1)
        return False
