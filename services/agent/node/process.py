"""One rank process as the agent knows it, from its start to its end.

``slots.py`` keeps the processes of a node and changes them; commands and heartbeats read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from pydantic import Field

from services.agent.machine.proc import Scheduled, starved_s
from services.agent.node.step_window import StepWindow
from shared.bus.messages import MAX_SECONDS
from unicron.protocol import messages

_TIMED = frozenset({"begun", "compute", "reduce", "update", "ended"})
"""Phases whose gaps are reported: those within a step, and between two. Other phases may take any time."""

BUSY = 0.5
"""Part of a processor from which a process counts as at work. A thread that computes uses a whole processor, or half of
one if it shares it; a thread that waits, with its helpers, uses a few percent."""

CHILDREN_AFTER_S = 1.0
"""Time without progress after which the processor time of a process's children is asked for: to list them takes a read
for each thread, which a process that makes progress need not cost."""


class WorkSample(NamedTuple):
    """The processor time that a process had used at a time of the agent's monotonic clock, seconds."""

    at_s: float
    cpu_s: float


@dataclass(slots=True)
class Process:
    """One rank process.

    Attributes:
        id: the fork server's name of the process.
        task: the task that the process trains.
        worker: the slot that the process occupies, ``<node>/<slot>``.
        generation: of the last ``Configure``; before the first, of the ``Prepare`` that started the process.
        python: the Python of its fork server; empty: the node's own.
        output: the file that receives the process's output.
        pid: None until the fork server has answered.
        attached: the process has sent ``Hello`` on the agent's socket.
        configured: the process was sent at least one ``Configure``.
        resting: the process has answered a hold or a drain, and waits for ``Configure``.
        ending: the process was asked to end, so its end is no error.
        finished: the process has done the task's last step, and its script has ended.
        result: what the process reported behind the last step, while its script goes on.
        rank: its rank in the present generation.
        step: updates applied.
        phase: the phase of its newest ``Progress``, one of ``protocol.PHASES``.
        micro_batch: the micro-batch of its newest ``Progress``.
        setup_parts: the parts of joining a generation that its newest ``Progress`` reports as done.
        sections: how many boundary sections it has entered behind its newest step, by its newest ``Progress``.
        section: the place in its script of the newest of them.
        progress_at_s: the time of the newest progress, on the agent's monotonic clock.
        progress_schedule: how its main thread had been scheduled by then.
        gaps_s: phase of a step -> the longest time without progress that has ended since the newest heartbeat, without
            the time in which the main thread lacked a CPU.
        held_at_s: the time at which the process was asked to leave its step; None if it was not, or has left it.
        idle_s: the part of the time since its newest progress in which neither the process nor its device was at work;
            None: nothing has been sampled yet.
        sampled: its newest sample of processor time.
        steps_done: the completed steps of its life, over all generations.
        step_s: the duration of its last step.
        steps_timed: the completed steps of this generation.
        loss: the mean loss of its last step.
        memory_every: the steps between its snapshots, with its last step.
        replicated: whether ranks in other failure domains have each part of its task's state.
        recent: its newest steps, of this generation; a successor of the agent begins without any.
        exit_code: None while the process lives; a signal's number is negative.
        resumed: what the process reported when it resumed in this generation.
        raised: the error that the process reported in this generation.
        stopped: what the process reported when it stopped as asked.
        stop_refused: what it reported to the newest request to stop, if its state could not be saved.
    """

    id: str
    task: str
    worker: str
    generation: int
    python: str = ""
    output: str = ""
    pid: int | None = None
    attached: bool = False
    configured: bool = False
    resting: bool = False
    ending: bool = False
    finished: bool = False
    result: messages.Finished | None = None
    rank: int | None = None
    step: int = 0
    phase: str | None = None
    micro_batch: int | None = None
    setup_parts: int | None = None
    sections: int | None = None
    section: str | None = None
    progress_at_s: float | None = None
    progress_schedule: Scheduled | None = None
    gaps_s: dict[str, float] = field(default_factory=dict)
    held_at_s: float | None = None
    idle_s: float | None = None
    sampled: Annotated[WorkSample | None, Field(exclude=True)] = None
    steps_done: int = 0
    step_s: float | None = None
    steps_timed: int = 0
    loss: float | None = None
    memory_every: int | None = None
    replicated: bool | None = None
    recent: Annotated[StepWindow, Field(exclude=True)] = field(default_factory=StepWindow)
    exit_code: int | None = None
    resumed: messages.Resumed | None = None
    raised: messages.Raised | None = None
    stopped: messages.Stopped | None = None
    stop_refused: messages.StopRefused | None = None

    def note_gap(self, at_s: float, schedule: Scheduled | None) -> None:
        """Note the time without progress that ends now, in the phase of the progress before.

        Args:
            at_s: the time on the agent's monotonic clock.
            schedule: how the main thread has been scheduled so far, if known.
        """
        if self.progress_at_s is None or self.phase is None or self.phase not in _TIMED:
            return
        gap_s = at_s - self.progress_at_s
        own_s = gap_s - starved_s(self.progress_schedule, schedule, gap_s, None)
        self.gaps_s[self.phase] = min(max(self.gaps_s.get(self.phase, 0.0), own_s), MAX_SECONDS)

    def note_work(self, at_s: float, cpu_s: float, *, device_busy: bool) -> None:
        """Note how much processor time the process has used by now, which tells for how long it has been idle.

        Args:
            at_s: the time on the agent's monotonic clock.
            cpu_s: processor time since its start, with that of its children.
            device_busy: whether its device computes.
        """
        before, self.sampled = self.sampled, WorkSample(at_s, cpu_s)
        if self.progress_at_s is None:
            return
        if before is None or self.idle_s is None:
            self.idle_s = max(0.0, at_s - self.progress_at_s)  # what it did before the first sample is not known
            return
        if self.progress_at_s >= before.at_s:
            self.idle_s = 0.0
        if not device_busy and cpu_s - before.cpu_s < BUSY * (at_s - before.at_s):
            self.idle_s += max(0.0, at_s - max(before.at_s, self.progress_at_s))

    @property
    def slot_state(self) -> str:
        """``WorkerStatus.state`` of the slot that it occupies."""
        if not self.attached:
            return "starting"
        if not self.configured:
            return "ready"
        return "waiting" if self.resting else "training"

    @property
    def alive(self) -> bool:
        """Whether the end of the process has not been reported yet."""
        return self.exit_code is None

    @property
    def waiting(self) -> bool:
        """Whether the process stands still outside of any collective: never configured, held or drained."""
        return self.attached and (self.resting or not self.configured)

    @property
    def has_saved(self) -> bool:
        """Whether the task's state is durable: its result, or the checkpoint of a stop, is written.

        A rank that has stopped without a checkpoint may have left all of its state in its copies in memory.
        """
        return self.finished or (self.stopped is not None and bool(self.stopped.path))

    @property
    def has_answered_stop(self) -> bool:
        """Whether the process has exited as requested, or has reported that its state cannot be saved."""
        return self.stop_refused is not None or (not self.alive and (self.ending or self.finished))
