"""The commands of the transition service (``shared/messages/commands.py``), carried out on this node; their subjects.

A command is answered when it is done, or when it cannot be done. A command ends at once when a process that it waits
for dies or raises, or when a command of a newer plan fences it; the caller limits the time of all other waits.

A command carries the generation that it leads to, while the rank still runs an older one. So hold, drain and stop are
sent to a rank with the generation that the rank is in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from services.agent.node.process import Process
from services.agent.node.slots import Node
from shared.bus.cancellation import cancelled
from shared.bus.connection import Bus
from shared.errors import Unavailable, Undecodable
from shared.events.codes import FailureCode
from shared.messages.commands import (
    COMMANDS,
    LEFTOVERS,
    Command,
    ConfigureTask,
    DrainTask,
    HoldTask,
    OpenStore,
    Prepare,
    ReleaseTask,
    Reply,
    StopTask,
    WorkerResult,
)
from shared.service.changes import Changes
from shared.service.log_lines import concerning, ids
from shared.tasks.specification import TaskSpec
from unicron.protocol import messages

logger = logging.getLogger(__name__)

REPLIES_RECORDED = 64
"""Replies that are kept for a successor of the agent, for commands that are repeated to it: a few dozen for each
plan."""

MOST_AT_ONCE = 1024
"""Commands under way at a time: a few for each worker. Each waits for processes, and has memory for its answer."""

ANSWERS_KEPT = 512
"""Answers kept for repeated commands. A repeat comes within seconds, and a large plan sends a node a few dozen."""


class Refused(Exception):
    """A command cannot be done.

    Args:
        code: why.
        detail: the reason in words.
        blameless: processes that did not cause it. The answer lists their workers, so that the others are to blame.
    """

    def __init__(self, code: FailureCode, detail: str, blameless: Iterable[Process] = ()) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail
        self.blameless = {p.worker: WorkerResult(pid=p.pid, step=p.step) for p in blameless}


class Host(Protocol):
    """What a command asks of the agent."""

    async def launch(self, process: Process, spec: TaskSpec) -> None:
        """Start the process. Raises Unavailable if that is not possible."""

    def send(self, process: Process, message: messages.Message) -> None:
        """Send a message to the process."""

    def directory(self, task: str, generation: int) -> str:
        """Return the folder that a generation of the task writes to."""

    async def end(self, processes: Iterable[Process]) -> None:
        """End processes; return when they have ended."""

    async def open_store(self, task: str, generation: int) -> tuple[str, int]:
        """Run a rendezvous store; return its host and port. Raises Unavailable if that is not possible."""

    def close_stores(self, task: str, before: int | None = None) -> None:
        """End the task's stores: those of generations older than ``before``, or all."""

    def forget_state(self, task: str) -> None:
        """Delete the snapshots and the code that the task has on this node."""


class Commands:
    """Carries out commands, each once.

    Args:
        node: the node's processes and fences.
        changes: notified whenever ``node`` changes.
        host: the agent.
        changed: called when a command has changed ``node``.
        replies: of a predecessor of the agent, to the commands that it has carried out.
    """

    def __init__(
        self,
        node: Node,
        changes: Changes,
        host: Host,
        changed: Callable[[], None],
        replies: Iterable[Reply] = (),
    ) -> None:
        self._node, self._changes, self._host, self._changed = node, changes, host, changed
        self._answers: OrderedDict[str, asyncio.Task[Reply]] = OrderedDict()
        self.replies = {reply.command_id: reply for reply in replies}
        """Command id -> the newest replies: a successor of the agent gets them."""

    async def listen(self, bus: Bus) -> None:
        """Begin to take commands."""
        await bus.serve(COMMANDS, self.serve, self._node.name, refuse=self._refuse)
        await bus.serve(LEFTOVERS, self.serve, self._node.name, refuse=self._refuse)

    def _refuse(self, err: Undecodable) -> Reply:
        return self._failed(err.command_id, FailureCode.UNDECODABLE, err.detail)

    async def serve(self, command: Command) -> Reply:
        """Handle one request. A repeated command gets the answer of the first one."""
        if 0 < command.token < self._node.token:
            detail = f"its token is {command.token}, and a transition service with {self._node.token} has taken over"
            return self._failed(command.command_id, FailureCode.FENCED, detail)
        if command.token > self._node.token:
            self._node.token = command.token
            self._changed()  # a successor of this agent refuses the older ones, too
        answer = self._answers.get(command.command_id)
        if answer is None:
            if (done := self.replies.get(command.command_id)) is not None:
                return done
            if sum(not one.done() for one in self._answers.values()) >= MOST_AT_ONCE:
                return self._failed(command.command_id, FailureCode.BUSY, f"{MOST_AT_ONCE} commands are under way")
            answer = asyncio.create_task(self._answer(command), name=f"{command.kind} {command.task}")
            self._answers[command.command_id] = answer
            while len(self._answers) > ANSWERS_KEPT and next(iter(self._answers.values())).done():
                self._answers.popitem(last=False)
        # The command goes on when this request is cancelled; a repeated request waits for the same answer.
        return await asyncio.shield(answer)

    def _failed(self, command_id: str, code: FailureCode, detail: str) -> Reply:
        return Reply(command_id=command_id, node=self._node.name, ok=False, code=code, detail=detail)

    async def stop(self) -> None:
        """Cancel the commands in progress."""
        await cancelled(*self._answers.values())

    async def _answer(self, command: Command) -> Reply:
        with concerning(ids(command)):
            self.replies[command.command_id] = reply = await self.handle(command)
        if len(self.replies) > REPLIES_RECORDED:
            del self.replies[next(iter(self.replies))]
        self._changed()
        return reply

    async def handle(self, command: Command) -> Reply:
        """Carry out a command and return the answer."""
        started_s = time.monotonic()

        def reply(ok: bool, **rest: object) -> Reply:
            taken_s = time.monotonic() - started_s
            fields = {"command_id": command.command_id, "node": self._node.name, "ok": ok, "seconds": taken_s}
            return Reply.model_validate({**fields, **rest})

        try:
            if not self._node.admit(command.task, command.generation, command.plan):
                raise Refused(FailureCode.FENCED, self._fence_text(command))
            self._notify()  # the commands that this one fences end now
            return reply(True, **await self._do(command))
        except Refused as err:
            logger.info("%s of %s refused: %s: %s", command.kind, command.task, err.code, err.detail)
            return reply(False, code=err.code, detail=err.detail, workers=err.blameless)
        except Unavailable as err:
            logger.warning("%s of %s: %s", command.kind, command.task, err.detail)
            return reply(False, code=FailureCode.UNAVAILABLE, detail=err.detail)
        except Exception as err:
            logger.exception("%s of %s failed", command.kind, command.task)
            return reply(False, code=FailureCode.INTERNAL, detail=f"{type(err).__name__}: {err}")

    async def _do(self, command: Command) -> dict[str, object]:
        match command:
            case Prepare():
                return await self._prepare(command)
            case HoldTask() | DrainTask():
                return await self._rest(command)
            case OpenStore():
                host, port = await self._host.open_store(command.task, command.generation)
                if self._node.fenced(command.task, command.generation, command.plan):
                    self._close_stores(command)
                    raise Refused(FailureCode.FENCED, self._fence_text(command))
                return {"host": host, "port": port}
            case ConfigureTask():
                return await self._configure(command)
            case StopTask():
                return await self._stop(command)
            case ReleaseTask():
                return await self._release(command)

    # ---- each command

    async def _prepare(self, command: Prepare) -> dict[str, object]:
        processes = await asyncio.gather(*(self._start(command, worker) for worker in command.workers))
        await self._until(command, processes, lambda p: p.attached)
        return {"workers": {p.worker: WorkerResult(pid=p.pid) for p in processes}}

    async def _start(self, command: Prepare, worker: str) -> Process:
        """Return a process on the worker that has trained nothing: the present one if it has not, or a new one."""
        if worker not in self._node.slots:
            raise Refused(FailureCode.NOT_FOUND, f"{worker} is no worker of {self._node.name}")
        old = self._node.slots[worker]
        if old is not None:
            leaving = old.ending or old.finished
            if old.task == command.task and not old.configured and not leaving:
                old.generation = command.generation
                return old  # it was started for a plan that this plan supersedes
            if old.task != command.task and not leaving:
                raise Refused(FailureCode.BUSY, f"{worker} is occupied by {old.task}")
            if old.task == command.task:
                await self._host.end([old])
            await self._changes.until(lambda: self._node.slots[worker] is not old)
            if self._node.fenced(command.task, command.generation, command.plan):
                raise Refused(FailureCode.FENCED, self._fence_text(command))
            if self._node.slots[worker] is not None:
                return await self._start(command, worker)
        process = self._node.start(command.task, worker, command.generation)
        await self._host.launch(process, command.spec)
        self._notify()
        return process

    async def _rest(self, command: HoldTask | DrainTask) -> dict[str, object]:
        processes = self._all(command.task, command.workers)
        for process in processes:
            if process.waiting:
                continue
            if isinstance(command, HoldTask):
                self._node.hold(process, time.monotonic())
                self._host.send(process, messages.Hold(generation=process.generation, lost=command.lost))
            else:
                self._host.send(process, messages.Drain(generation=process.generation))
        await self._until(command, processes, lambda p: p.waiting)
        return {"workers": {p.worker: WorkerResult(pid=p.pid, step=p.step) for p in processes}}

    async def _configure(self, command: ConfigureTask) -> dict[str, object]:
        stage = command.stage
        members = {m.worker: m for m in stage.members if m.node == self._node.name}
        processes = self._all(command.task, members)
        for process in processes:
            if process.configured and process.generation > stage.generation:
                raise Refused(FailureCode.FENCED, f"{process.worker} is in generation {process.generation}")
            # If a predecessor of the agent has configured the process, what the process has reported since counts.
            if not process.configured or process.generation < stage.generation:
                rank = members[process.worker].rank
                self._node.configure(process, generation=stage.generation, rank=rank, at_s=time.monotonic())
        self._notify()
        directory = self._host.directory(command.task, stage.generation)
        for process in processes:
            self._host.send(process, configure_message(command, members[process.worker].rank, directory))
        results = await self._until_resumed(command, processes)
        self._host.close_stores(command.task, before=stage.generation)
        return {"workers": results}

    async def _until_resumed(self, command: ConfigureTask, processes: list[Process]) -> dict[str, WorkerResult]:
        """Return what each process reports once all have resumed in the command's stage."""
        reports: dict[str, messages.Resumed] = {}

        def resumed(process: Process) -> bool:
            if process.resumed is not None and process.resumed.generation == command.stage.generation:
                reports[process.worker] = process.resumed
            return process.worker in reports

        await self._until(command, processes, resumed, raising=True)
        return {
            p.worker: WorkerResult(
                pid=p.pid,
                step=reports[p.worker].step,
                source=reports[p.worker].source,
                phases=reports[p.worker].phases,
                deal=reports[p.worker].deal,
                steps_recomputed=reports[p.worker].steps_recomputed,
            )
            for p in processes
        }

    async def _stop(self, command: StopTask) -> dict[str, object]:
        processes = self._all(command.task, command.workers)
        idle = [p for p in processes if not p.configured]
        for process in processes:
            process.stop_refused = None
            if process.configured:
                stop = messages.Stop(generation=process.generation, lose_steps=command.lose_steps)
                self._host.send(process, stop)
        if idle:
            await self._host.end(idle)  # they have no state to save
        await self._until(command, processes, lambda p: p.has_answered_stop)
        if refusals := [p.stop_refused for p in processes if p.stop_refused is not None]:
            reason = refusals[0].reason.encode("utf-8", "replace").decode()
            raise Refused(FailureCode.CHECKPOINT_FAILED, reason, processes)
        self._close_stores_if_last(command)
        return {"workers": {p.worker: WorkerResult(pid=p.pid, step=p.step) for p in processes}}

    async def _release(self, command: ReleaseTask) -> dict[str, object]:
        processes = [p for p in self._node.of_task(command.task) if p.worker in command.workers or command.all_workers]
        await self._host.end(processes)
        if command.all_workers:
            self._close_stores(command)
            if not command.keep_copies:
                self._host.forget_state(command.task)
        else:
            self._close_stores_if_last(command)
        if command.delete_copies and not self._node.of_task(command.task):
            self._host.forget_state(command.task)
        return {"workers": {p.worker: WorkerResult(pid=p.pid, step=p.step) for p in processes}}

    # ---- waiting

    async def _until(
        self, command: Command, processes: list[Process], done: Callable[[Process], bool], *, raising: bool = False
    ) -> None:
        """Return when ``done`` is true of every process.

        Args:
            command: the command that waits.
            processes: its processes.
            done: what the command waits for.
            raising: whether an error that a process reports ends the wait.

        Raises:
            Refused: a process that is not done has ended or (where ``raising``) raised, or the command is fenced.
        """

        def check() -> bool:
            left = [p for p in processes if not done(p)]
            if dead := [p for p in left if not p.alive]:
                text = "; ".join(f"{p.worker} (pid {p.pid}) exited with {p.exit_code}" for p in dead)
                raise Refused(FailureCode.PROCESS_EXITED, text, [p for p in processes if p.alive])
            if raising and (raised := [p for p in left if p.raised is not None]):
                text = "; ".join(f"{p.worker}: {p.raised.error}: {p.raised.detail}" for p in raised if p.raised)
                # A rank that lost its peers, or waited for them in vain, reports the failure of another rank.
                guilty = [p for p in raised if p.raised is not None and p.raised.kind != "communication"]
                raise Refused(FailureCode.RANK_RAISED, text, [p for p in processes if p not in guilty])
            if left and self._node.fenced(command.task, command.generation, command.plan):
                raise Refused(FailureCode.FENCED, self._fence_text(command))
            return not left

        await self._changes.until(check)

    def _all(self, task: str, workers: Iterable[str]) -> list[Process]:
        """Return the task's process on each worker.

        Raises:
            Refused: a worker has no living process of the task.
        """
        found: list[Process] = []
        missing: list[str] = []
        for worker in workers:
            process = self._node.slots.get(worker)
            if process is None or process.task != task:
                missing.append(worker)
            else:
                found.append(process)
        if missing:
            text = "; ".join(f"{worker}: no process of {task}" for worker in missing)
            raise Refused(FailureCode.PROCESS_EXITED, text, found)
        return found

    def _close_stores(self, command: Command) -> None:
        # A store of a later generation belongs to a plan that supersedes the command's plan.
        self._host.close_stores(command.task, before=command.generation + 1)

    def _close_stores_if_last(self, command: Command) -> None:
        if not self._node.of_task(command.task):
            self._close_stores(command)

    def _notify(self) -> None:
        self._changes.notify()
        self._changed()

    def _fence_text(self, command: Command) -> str:
        fence = self._node.fences[command.task]
        return f"generation {command.generation} of {command.task}; {fence.generation} is the newest"


def configure_message(command: ConfigureTask, rank: int, directory: str) -> messages.Configure:
    """Return the message to the process of a rank.

    Args:
        command: what is to be formed.
        rank: the receiver's.
        directory: where the generation writes.
    """
    stage = command.stage
    return messages.Configure(
        generation=stage.generation,
        stage=stage.kind,
        rank=rank,
        world_size=stage.layout.world_size,
        tensor=stage.layout.tensor,
        pipeline=stage.layout.pipeline,
        store_host=command.store_host,
        store_port=command.store_port,
        members=[[m.rank, m.worker, m.source] for m in sorted(stage.members, key=lambda m: m.rank)],
        checkpoint=stage.checkpoint,
        complete=stage.complete,
        directory=directory,
        fault_step=command.fault_step,
        resumes=command.resumes,
        shares=stage.shares,
        identity=command.identity,
    )
