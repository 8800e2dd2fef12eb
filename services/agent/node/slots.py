"""One node: its worker slots, the processes in them, and the fence of each task. Pure: time comes in with each call.

The agent (``agent.py``) passes in the messages of ranks and the ends of processes, and sends the signals that follow.
Commands and heartbeats read the node's processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from services.agent.machine.proc import Scheduled, starved_s
from services.agent.node.process import Process
from services.agent.node.step_window import step_report
from shared.bus.messages import MAX_SECONDS
from shared.events.evidence import DETAIL_CHARACTERS, TRACEBACK_CHARACTERS
from shared.events.union import derived_id
from shared.messages.signals import (
    ProcessExited,
    RankCheckpointed,
    RankCheckpointFailed,
    RankCopies,
    RankFinished,
    RankIdentified,
    RankRaised,
    RankStopped,
    Signal,
    StorageReturned,
    WorkerStatus,
)
from shared.model import filled
from shared.names import LABEL_CHARACTERS
from unicron.protocol import messages

_CAUSES = frozenset({"communication", "non_finite", messages.REFUSED, messages.DIFFERS, messages.WRONG_LOOP})
"""Kinds of ``Raised`` that are signalled under their own name. Every other kind is signalled as ``exception``."""

_IN_STEP = frozenset({"begun", "compute", "reduce", "update"})
"""Phases in which ``Progress.step`` names the step in progress: one update less has been applied."""

ENDS = EXPECTED, UNEXPECTED = "expected", "unexpected"
"""How processes end: as asked for or with the task done; and in all other ways."""


def worker_names(node: str, workers: int) -> list[str]:
    """Return the names of a node's workers, in the order of their slots."""
    return [f"{node}/{slot}" for slot in range(workers)]


@dataclass(slots=True)
class Fence:
    """The newest generation that any command for a task has named, and the plan of that command."""

    generation: int
    plan: str


@dataclass(slots=True)
class Node:
    """The worker slots of one node, and the fence of each task."""

    name: str
    incarnation: str
    slots: dict[str, Process | None]
    fences: dict[str, Fence] = field(default_factory=dict)
    token: int = 0
    """The newest token of a transition service that any command has named."""
    ended: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(ENDS, 0)))
    """How rank processes have ended -> how many have ended so, for metrics; the keys are ``ENDS``."""
    _processes: int = 0
    _signals: int = 0

    @classmethod
    def create(cls, name: str, incarnation: str, workers: int) -> Node:
        """Return a node with ``workers`` empty slots, named ``<node>/<slot>``."""
        return cls(name=name, incarnation=incarnation, slots=dict.fromkeys(worker_names(name, workers)))

    @classmethod
    def restored(
        cls,
        name: str,
        incarnation: str,
        workers: int,
        *,
        processes: Iterable[Process],
        fences: dict[str, Fence],
        token: int = 0,
        at_s: float,
    ) -> Node:
        """Return a node with the processes and fences that a predecessor of the agent has left.

        Args:
            name: of the node.
            incarnation: of the agent.
            workers: how many slots the node has.
            processes: the predecessor's, which have yet to attach to this agent.
            fences: of the tasks.
            token: the newest of any command.
            at_s: the time on the agent's monotonic clock. What ranks did while there was no agent is not known, so
                their silence counts from here.
        """
        node = cls.create(name, incarnation, workers)
        node.fences, node.token = dict(fences), token
        for process in processes:
            if process.worker in node.slots:
                process.attached, process.progress_schedule = False, None
                process.sampled = process.idle_s = None
                process.progress_at_s = None if process.progress_at_s is None else at_s
                process.held_at_s = None if process.held_at_s is None else at_s
                node.slots[process.worker] = process
        return node

    # ---- processes

    @property
    def started(self) -> int:
        """How many processes were put into a slot since the start of the agent."""
        return self._processes

    def processes(self) -> Iterator[Process]:
        """Yield the living processes."""
        return (process for process in self.slots.values() if process is not None)

    def tasks(self) -> set[str]:
        """Return the tasks that have a living process here."""
        return {process.task for process in self.processes()}

    def of_task(self, task: str) -> list[Process]:
        """Return the living processes of a task."""
        return [process for process in self.processes() if process.task == task]

    def by_id(self, process_id: str) -> Process | None:
        """Return the living process that the fork server knows by this id."""
        return next((process for process in self.processes() if process.id == process_id), None)

    def by_pid(self, pid: int) -> Process | None:
        """Return the living process with this pid."""
        return next((process for process in self.processes() if process.pid == pid), None)

    def start(self, task: str, worker: str, generation: int) -> Process:
        """Put a new process into a free slot.

        Raises:
            KeyError: the node has no such worker.
            ValueError: the slot is occupied.
        """
        if self.slots[worker] is not None:
            raise ValueError(f"{worker} is occupied")
        self._processes += 1
        process = Process(id=f"{self.incarnation}-{self._processes}", task=task, worker=worker, generation=generation)
        self.slots[worker] = process
        return process

    def configure(self, process: Process, *, generation: int, rank: int, at_s: float) -> None:
        """Enter a generation: reset what belongs to the old generation; the process is in phase ``setup``."""
        process.generation, process.rank = generation, rank
        process.configured, process.resting, process.held_at_s = True, False, None
        process.resumed = process.raised = process.result = None
        process.steps_timed, process.step_s = 0, None
        process.recent.steps.clear()
        process.micro_batch = process.setup_parts = process.sections = process.section = None
        process.gaps_s.clear()
        process.phase, process.progress_at_s = "setup", at_s

    def hold(self, process: Process, at_s: float) -> None:
        """Note that a rank is asked to leave its step. The time of the first request counts."""
        if process.held_at_s is None:
            process.held_at_s = at_s

    def paused(self, duration_s: float) -> None:
        """Take a time in which the agent did not run off the ages of all processes: no rank caused that silence."""
        for process in self.processes():
            if process.progress_at_s is not None:
                process.progress_at_s += duration_s
            if process.held_at_s is not None:
                process.held_at_s += duration_s

    # ---- fencing

    def fenced(self, task: str, generation: int, plan: str) -> bool:
        """Return whether a command is older than the newest command of another plan for its task.

        Commands of one plan never fence one another: a plan prepares workers for its last generation while the
        survivors still join the generation before.
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

    # ---- messages of ranks

    def receive(
        self,
        process: Process,
        message: messages.Message,
        *,
        at_s: float,
        now: datetime,
        schedule: Scheduled | None = None,
    ) -> list[Signal]:
        """Take one message of a rank; return the signals that follow.

        Args:
            process: the sender.
            message: the message.
            at_s: the time on the agent's monotonic clock.
            now: the same time in UTC.
            schedule: how the rank has been scheduled so far, if known.
        """
        match message:
            case messages.Progress():
                self._progress(process, message, at_s, schedule)
            # An answer that a rank repeats may be older than its last Configure.
            case messages.Held(step=step) | messages.Drained(step=step) if message.generation >= process.generation:
                process.resting, process.step, process.held_at_s = True, step, None
                process.phase, process.progress_at_s = "waiting", at_s
            case messages.Resumed() if message.generation == process.generation:
                phases = {name: s for name, s in message.phases.items() if 0.0 <= s <= MAX_SECONDS}
                process.resumed = replace(message, phases=phases)
                process.step, process.progress_at_s = message.step, at_s
            case messages.Raised() if message.generation >= process.generation or _refuses_to_start(process, message):
                process.raised = storable(message)
                return [self._raised(process, process.raised, now)]
            case messages.Identified() | messages.Checkpointed() | messages.CheckpointFailed() | messages.Copies():
                return [self._reported(process, message, now)]
            case messages.Stopped():
                # The signal is made first: a message of which none can be made (ValidationError) changes nothing.
                signals = [self._stopped(process, message, now)] if message.rank == 0 else []
                process.stopped, process.ending, process.step = message, True, message.step
                return signals
            case messages.StopRefused():
                process.stop_refused = replace(message, reason=encodable(message.reason))
                process.step = message.step
            case messages.Finished(ended=False):
                process.result, process.step = message, message.step
            case messages.Finished():
                signals = [self._finished(process, message, now)] if message.rank == 0 else []
                process.finished, process.step = True, message.step
                return signals
            case _:
                pass
        return []

    def exited(
        self, process: Process, exit_code: int, *, last_output: str, now: datetime, **about: Any
    ) -> list[Signal]:
        """Free the slot of an ended process; return the signal of an end that was neither asked for nor the task's.

        Args:
            process: that has ended.
            exit_code: its exit status, or the negative number of a signal.
            last_output: the end of its output.
            now: the time.
            about: what else the signal has: ``stack``, ``oom_killed``.
        """
        process.exit_code = exit_code
        quit_in_tail = process.result is not None and exit_code == 0  # its script has ended the process
        expected = process.ending or process.finished or quit_in_tail
        self.ended[EXPECTED if expected else UNEXPECTED] += 1
        if self.slots.get(process.worker) is process:
            self.slots[process.worker] = None
        if expected:
            reports = quit_in_tail and not process.ending and not process.finished and process.rank == 0
            return [self._finished(process, process.result, now)] if reports and process.result is not None else []
        about |= self._about(process, now, generation=process.generation, step=process.step)
        about |= {"pid": process.pid or 0, "last_output": last_output, "trained": process.result is not None}
        return [ProcessExited(exit_code=exit_code, **about)]

    def _progress(self, process: Process, message: messages.Progress, at_s: float, schedule: Scheduled | None) -> None:
        if message.generation != process.generation or not process.configured:
            return
        process.note_gap(at_s, schedule)
        process.rank, process.phase = message.rank, message.phase
        process.micro_batch, process.setup_parts = message.micro_batch, message.setup_parts
        process.sections = message.sections
        process.section = None if message.section is None else _on_one_line(message.section)
        process.progress_at_s, process.progress_schedule = at_s, schedule
        if message.phase != "waiting":
            process.resting = False
        if message.phase in _IN_STEP:
            process.step = message.step - 1
        elif message.phase == "ended":
            process.step = message.step
            process.loss = message.loss if message.loss is not None else process.loss
            process.memory_every, process.replicated = message.memory_every, message.replicated
            if message.duration_s is not None and 0.0 <= message.duration_s <= MAX_SECONDS:
                process.step_s = message.duration_s
                process.steps_timed += 1
                process.steps_done += 1
            process.recent.add(step_report(message), at_s)
        elif message.phase == "script":
            self._script_progress(process, message)

    def _script_progress(self, process: Process, message: messages.Progress) -> None:
        """Note what a script that restarts whole says of its steps; it reports only some of them."""
        if message.step > process.step and message.duration_s is not None and 0.0 <= message.duration_s <= MAX_SECONDS:
            process.step_s = message.duration_s
            process.steps_timed += 1
        process.steps_done += max(0, message.step - process.step)
        process.step = message.step
        process.loss = message.loss if message.loss is not None else process.loss

    def _raised(self, process: Process, message: messages.Raised, now: datetime) -> Signal:
        generation = max(message.generation, process.generation)
        return RankRaised(
            **self._about(process, now, generation=generation, step=process.step),
            cause=message.kind if message.kind in _CAUSES else "exception",  # type: ignore[arg-type]
            error=message.error,
            detail=message.detail,
            traceback=message.traceback,
            parameter=message.parameter,
            micro_batch=message.micro_batch,
            difference=message.difference,
            resource=message.resource,
            limit=message.limit,
            trained=process.result is not None,
        )

    def _reported(self, process: Process, message: Any, now: datetime) -> Signal:
        about = self._about(process, now, generation=message.generation, step=message.step)
        match message:
            case messages.Identified():
                return RankIdentified(**about, identity=message.identity)
            case messages.Checkpointed():
                return RankCheckpointed(**about, path=message.path)
            case messages.Copies():
                return RankCopies(**about, lack=encodable(message.lack))
        reason = encodable(message.reason)
        return RankCheckpointFailed(**about, reason=reason, lends=message.lends)

    def storage_returned(self, process: Process, now: datetime) -> Signal:
        """Return the signal that a storage can be written again, for which a task waits since this process said so."""
        return StorageReturned(**self._about(process, now, generation=process.generation, step=process.step))

    def _stopped(self, process: Process, message: messages.Stopped, now: datetime) -> Signal:
        about = self._about(process, now, generation=message.generation, step=message.step)
        return RankStopped(**about, path=message.path)

    def _finished(self, process: Process, message: messages.Finished, now: datetime) -> Signal:
        return RankFinished(
            **self._about(process, now, generation=message.generation, step=message.step),
            samples_sha256=message.samples_sha256,
            parameters_path=message.parameters_path,
            loss=message.loss,
        )

    def _about(self, process: Process, now: datetime, *, generation: int, step: int) -> dict[str, Any]:
        """Return the fields that every signal about a rank has, with a new signal id."""
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
        """Return the status of every slot.

        Args:
            at_s: the time on the agent's monotonic clock.
            process_states: pid -> the kernel's letter for the process.
            schedules: pid -> how the process has been scheduled so far.
        """
        return [
            WorkerStatus(worker=worker)
            if process is None
            else _status(process, at_s, process_states.get(process.pid or 0), schedules.get(process.pid or 0))
            for worker, process in self.slots.items()
        ]


def _status(process: Process, at_s: float, process_state: str | None, schedule: Scheduled | None) -> WorkerStatus:
    age_s = None if process.progress_at_s is None else max(0.0, at_s - process.progress_at_s)
    return filled(
        WorkerStatus,
        process,
        state=process.slot_state,
        progress_age_s=age_s,
        gaps_s=dict(process.gaps_s),
        starved_s=starved_s(process.progress_schedule, schedule, age_s or 0.0, process_state),
        idle_s=None if process.idle_s is None else min(process.idle_s, age_s or 0.0),
        hold_age_s=None if process.held_at_s is None else max(0.0, at_s - process.held_at_s),
        process_state=process_state,
        steps=process.recent.reported(at_s),
    )


def _on_one_line(text: str) -> str:
    """Return a text of a rank as the heartbeats' short texts are (``shared.names.Label``)."""
    return "".join(character for character in text if character.isprintable())[:LABEL_CHARACTERS]


def _refuses_to_start(process: Process, message: messages.Raised) -> bool:
    """Return whether a process reports that it cannot run its task, before any generation (the message's is 0)."""
    return message.kind == messages.REFUSED and not process.configured


def storable(message: messages.Raised) -> messages.Raised:
    """Return the message cut to its limits, without lone surrogates: an error quotes any text; UTF-8 has none."""
    error, parameter = encodable(message.error), encodable(message.parameter)
    detail = encodable(message.detail[:DETAIL_CHARACTERS])
    traceback = encodable(message.traceback[-TRACEBACK_CHARACTERS:])
    limit = encodable(message.limit[:DETAIL_CHARACTERS])
    difference = encodable(message.difference[:DETAIL_CHARACTERS])
    shortened = replace(message, error=error, detail=detail, traceback=traceback, parameter=parameter)
    return replace(shortened, limit=limit, difference=difference)


def encodable(text: str) -> str:
    """Return a text without lone surrogates."""
    return text.encode("utf-8", "replace").decode()
