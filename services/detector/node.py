"""One node: its worker slots and the processes in them. Pure: time comes in with each call, effects go out as values.

The agent's shell feeds it what ranks say and what the fork server reports; it answers with the signals to send and
keeps what heartbeats and commands look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from services.detector.proc import Scheduled, starved_s
from shared.events import derived_id
from shared.signals import (
    ProcessExited,
    RankCheckpointed,
    RankFinished,
    RankRaised,
    RankStopped,
    Signal,
    WorkerStatus,
)
from unicron import protocol

_CAUSES = {"communication": "communication", "non_finite": "non_finite"}
"""Kinds of ``Raised`` that are signalled as they are; every other one is an exception of the user's code."""

_IN_STEP = frozenset({"begun", "compute", "reduce", "update"})
"""Phases in which ``Progress.step`` is the step being computed: one less has been applied."""


@dataclass(slots=True)
class Process:
    """One rank process, from its start to its end.

    ``generation``: of the last Configure, before that of the Prepare that started it. ``step``: updates applied.
    ``progress_at_s``: on the agent's monotonic clock; ``progress_schedule``: how it had been scheduled by then.
    ``held_at_s``: when it was told to leave its step. ``ending``: it was told to end, so its end is no error.
    ``resting``: it waits for Configure (held or drained). ``resumed``, ``raised``: what it said in this generation.
    """

    id: str
    task: str
    worker: str
    generation: int
    output: str = ""
    pid: int | None = None
    attached: bool = False
    configured: bool = False
    resting: bool = False
    ending: bool = False
    finished: bool = False
    rank: int | None = None
    step: int = 0
    phase: str | None = None
    micro_batch: int | None = None
    progress_at_s: float | None = None
    progress_schedule: Scheduled | None = None
    held_at_s: float | None = None
    step_s: float | None = None
    steps_timed: int = 0
    loss: float | None = None
    exit_code: int | None = None
    resumed: protocol.Resumed | None = None
    raised: protocol.Raised | None = None
    stopped: protocol.Stopped | None = None

    @property
    def alive(self) -> bool:
        """Whether its end has not been reported yet."""
        return self.exit_code is None

    @property
    def waiting(self) -> bool:
        """Whether it stands still, in no collective: never configured, or held, or drained."""
        return self.attached and (self.resting or not self.configured)


@dataclass(slots=True)
class Fence:
    """The newest generation that commands for a task have named, and the plan that did."""

    generation: int
    plan: str


@dataclass(slots=True)
class Node:
    """The slots of one node and the newest generation seen for each task."""

    name: str
    incarnation: str
    slots: dict[str, Process | None]
    fences: dict[str, Fence] = field(default_factory=dict)
    _processes: int = 0
    _signals: int = 0

    @classmethod
    def create(cls, name: str, incarnation: str, workers: int) -> Node:
        """Return a node with ``workers`` empty slots, named ``<node>/<slot>``."""
        return cls(name=name, incarnation=incarnation, slots={f"{name}/{slot}": None for slot in range(workers)})

    # ---- processes

    def processes(self) -> Iterator[Process]:
        """Return the processes that live."""
        return (process for process in self.slots.values() if process is not None)

    def of_task(self, task: str) -> list[Process]:
        """Return the task's processes that live."""
        return [process for process in self.processes() if process.task == task]

    def by_id(self, process_id: str) -> Process | None:
        """Return the living process the fork server knows by this id."""
        return next((process for process in self.processes() if process.id == process_id), None)

    def by_pid(self, pid: int) -> Process | None:
        """Return the living process with this pid."""
        return next((process for process in self.processes() if process.pid == pid), None)

    def start(self, task: str, worker: str, generation: int, output: str) -> Process:
        """Occupy a slot that is free."""
        if self.slots[worker] is not None:
            raise ValueError(f"{worker} is occupied")
        self._processes += 1
        process = Process(
            id=f"{self.incarnation}-{self._processes}", task=task, worker=worker, generation=generation, output=output
        )
        self.slots[worker] = process
        return process

    def configure(self, process: Process, *, generation: int, rank: int, at_s: float) -> None:
        """Enter a generation: what belonged to the old one is forgotten; set-up is a slow region from here on."""
        process.generation, process.rank = generation, rank
        process.configured, process.resting, process.held_at_s = True, False, None
        process.resumed = process.raised = None
        process.steps_timed, process.step_s, process.micro_batch = 0, None, None
        process.phase, process.progress_at_s = "setup", at_s

    def hold(self, process: Process, at_s: float) -> None:
        """Note that a rank is told to leave its step; telling it again does not give it more time."""
        if process.held_at_s is None:
            process.held_at_s = at_s

    def paused(self, duration_s: float) -> None:
        """Forget a time in which this agent itself did not run: silence in it is nobody's fault."""
        for process in self.processes():
            if process.progress_at_s is not None:
                process.progress_at_s += duration_s
            if process.held_at_s is not None:
                process.held_at_s += duration_s

    # ---- fencing

    def fenced(self, task: str, generation: int, plan: str) -> bool:
        """Whether a command is older than the newest one seen for its task.

        Commands of one plan never fence one another: it prepares workers for its last generation while the
        survivors still join the one before.
        """
        fence = self.fences.get(task)
        return fence is not None and generation < fence.generation and plan != fence.plan

    def admit(self, task: str, generation: int, plan: str) -> bool:
        """Note a command's generation; return False if the command is fenced."""
        if self.fenced(task, generation, plan):
            return False
        fence = self.fences.get(task)
        if fence is None or generation >= fence.generation:
            self.fences[task] = Fence(generation, plan)
        return True

    # ---- what ranks say

    def hear(
        self,
        process: Process,
        message: protocol.Message,
        *,
        at_s: float,
        now: datetime,
        schedule: Scheduled | None = None,
    ) -> list[Signal]:
        """Take one message of a rank; return the signals it gives rise to.

        ``schedule``: how the rank has been scheduled so far, if known.
        """
        match message:
            case protocol.Progress():
                self._progress(process, message, at_s, schedule)
            case protocol.Held(step=step) | protocol.Drained(step=step):
                process.resting, process.step, process.held_at_s = True, step, None
                process.phase, process.progress_at_s = "waiting", at_s
            case protocol.Resumed() if message.generation == process.generation:
                process.resumed, process.step, process.progress_at_s = message, message.step, at_s
            case protocol.Raised() if message.generation >= process.generation:
                process.raised = said = _storable(message)
                return [self._raised(process, said, now)]
            case protocol.Checkpointed():
                return [
                    RankCheckpointed(
                        **self._about(process, now, generation=message.generation, step=message.step),
                        path=message.path,
                    )
                ]
            case protocol.Stopped():
                process.stopped, process.ending, process.step = message, True, message.step
                if message.rank == 0:
                    about = self._about(process, now, generation=message.generation, step=message.step)
                    return [RankStopped(**about, path=message.path)]
            case protocol.Finished():
                process.finished, process.step = True, message.step
                if message.rank == 0:
                    return [self._finished(process, message, now)]
            case _:
                pass
        return []

    def _progress(self, process: Process, message: protocol.Progress, at_s: float, schedule: Scheduled | None) -> None:
        if message.generation != process.generation or not process.configured:
            return
        process.rank, process.phase, process.micro_batch = message.rank, message.phase, message.micro_batch
        process.progress_at_s, process.progress_schedule = at_s, schedule
        if message.phase != "waiting":
            process.resting = False
        if message.phase in _IN_STEP:
            process.step = message.step - 1
        elif message.phase == "ended":
            process.step = message.step
            process.loss = message.loss if message.loss is not None else process.loss
            if message.duration_s is not None:
                process.step_s = message.duration_s
                process.steps_timed += 1

    def _raised(self, process: Process, message: protocol.Raised, now: datetime) -> Signal:
        return RankRaised(
            **self._about(process, now, generation=message.generation, step=process.step),
            cause=_CAUSES.get(message.kind, "exception"),  # type: ignore[arg-type]
            error=message.error,
            detail=message.detail,
            traceback=message.traceback,
        )

    def _finished(self, process: Process, message: protocol.Finished, now: datetime) -> Signal:
        return RankFinished(
            **self._about(process, now, generation=message.generation, step=message.step),
            samples_sha256=message.samples_sha256,
            parameters_path=message.parameters_path,
            loss=message.loss,
        )

    def exited(self, process: Process, exit_code: int, *, last_output: str, now: datetime) -> list[Signal]:
        """Free the slot; signal the end if nobody asked for it and the task was not done."""
        process.exit_code = exit_code
        if self.slots.get(process.worker) is process:
            self.slots[process.worker] = None
        if process.ending or process.finished:
            return []
        return [
            ProcessExited(
                **self._about(process, now, generation=process.generation, step=process.step),
                pid=process.pid or 0,
                exit_code=exit_code,
                last_output=last_output,
            )
        ]

    def _about(self, process: Process, now: datetime, *, generation: int, step: int) -> dict[str, Any]:
        self._signals += 1
        return {
            "signal_id": derived_id(self.incarnation, "agent", self._signals),
            "node": self.name,
            "incarnation": self.incarnation,
            "occurred_at": now,
            "task": process.task,
            "worker": process.worker,
            "generation": generation,
            "rank": process.rank,
            "step": step,
        }

    # ---- heartbeats

    def status(
        self, *, at_s: float, process_states: dict[int, str], schedules: dict[int, Scheduled]
    ) -> list[WorkerStatus]:
        """Return every slot's status.

        Args:
            at_s: now.
            process_states: the kernel's letter of each pid.
            schedules: how each pid has been scheduled so far.
        """
        return [
            self._status(worker, process, at_s, process_states, schedules) for worker, process in self.slots.items()
        ]

    def _status(
        self,
        worker: str,
        process: Process | None,
        at_s: float,
        process_states: dict[int, str],
        schedules: dict[int, Scheduled],
    ) -> WorkerStatus:
        if process is None:
            return WorkerStatus(worker=worker)
        if not process.attached:
            state = "starting"
        elif not process.configured:
            state = "ready"
        else:
            state = "waiting" if process.resting else "training"
        age_s = None if process.progress_at_s is None else max(0.0, at_s - process.progress_at_s)
        process_state = None if process.pid is None else process_states.get(process.pid)
        return WorkerStatus(
            worker=worker,
            state=state,  # type: ignore[arg-type]
            task=process.task,
            generation=process.generation,
            rank=process.rank,
            pid=process.pid,
            step=process.step,
            phase=process.phase,
            micro_batch=process.micro_batch,
            progress_age_s=age_s,
            starved_s=starved_s(
                process.progress_schedule, schedules.get(process.pid or 0), age_s or 0.0, process_state
            ),
            hold_age_s=None if process.held_at_s is None else max(0.0, at_s - process.held_at_s),
            step_s=process.step_s,
            steps_timed=process.steps_timed,
            loss=process.loss,
            process_state=process_state,
        )


def _storable(message: protocol.Raised) -> protocol.Raised:
    """Return the message without lone surrogates: no UTF-8 holds them, and an error may quote any text."""
    error, detail, traceback = (
        text.encode("utf-8", "replace").decode() for text in (message.error, message.detail, message.traceback)
    )
    return replace(message, error=error, detail=detail, traceback=traceback)


def workers_of(name: str, workers: Sequence[WorkerStatus]) -> tuple[object, ...]:
    """Return what a change of makes a heartbeat due at once: who is in which slot, in which state."""
    return (name, *((w.worker, w.state, w.task, w.generation, w.rank, w.pid) for w in workers))
