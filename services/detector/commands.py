"""Commands of the transition service (``shared/commands.py``), carried out on this node.

Each is answered when the thing is done or cannot be done. A command ends at once when a process it waits for dies or
raises, or when a newer plan's command fences it; how long it may take otherwise is the caller's affair.

Hold, drain and stop reach a rank with the generation *that rank is in*: a command carries the generation it leads to,
and everything older than that is what the rank runs now.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from services.detector.changes import Changes
from services.detector.node import Node, Process
from shared.commands import (
    COMMAND,
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
from shared.errors import Unavailable
from shared.tasks import TaskSpec
from unicron import protocol

logger = logging.getLogger(__name__)

ANSWERS_KEPT = 512
"""Answers kept for repeated commands: a repeat comes within seconds, a large plan is a few dozen commands a node."""


class Refused(Exception):
    """A command cannot be done. ``code``: ``fenced``, ``process-exited``, ``rank-raised``, ``busy``, ``not-found``.

    ``blameless``: workers that are not why; the answer lists them, so that the others are the ones to blame.
    """

    def __init__(self, code: str, detail: str, blameless: Iterable[Process] = ()) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail
        self.blameless = {p.worker: WorkerResult(pid=p.pid, step=p.step) for p in blameless}


class Host(Protocol):
    """What the agent does for a command."""

    async def launch(self, process: Process, spec: TaskSpec) -> None:
        """Start the process; Unavailable if that is not possible."""

    def send(self, process: Process, message: protocol.Message) -> None:
        """Send a message to the process."""

    def directory(self, task: str, generation: int) -> str:
        """Return where a generation of the task writes."""

    async def end(self, processes: Iterable[Process]) -> None:
        """End processes; return when they are gone."""

    async def open_store(self, task: str, generation: int) -> tuple[str, int]:
        """Run a rendezvous store; return its address. Unavailable if that is not possible."""

    def close_stores(self, task: str, before: int | None = None) -> None:
        """End the task's stores, all or those of generations older than ``before``."""

    def forget_state(self, task: str) -> None:
        """Delete the in-memory copies that the task has on this node."""


class Commands:
    """Carries out commands, each once."""

    def __init__(self, node: Node, changes: Changes, host: Host, changed: Callable[[], None]) -> None:
        self._node, self._changes, self._host, self._changed = node, changes, host, changed
        self._answers: OrderedDict[str, asyncio.Task[Reply]] = OrderedDict()

    async def serve(self, data: bytes) -> bytes:
        """Handle one request."""
        command = COMMAND.validate_json(data)
        answer = self._answers.get(command.command_id)
        if answer is None:
            answer = asyncio.create_task(self.handle(command), name=f"{command.kind} {command.task}")
            self._answers[command.command_id] = answer
            while len(self._answers) > ANSWERS_KEPT and next(iter(self._answers.values())).done():
                self._answers.popitem(last=False)
        # The command goes on when its requester's wait is cancelled: a repeat joins it.
        return (await asyncio.shield(answer)).model_dump_json().encode()

    async def stop(self) -> None:
        """Abandon what is under way."""
        for answer in self._answers.values():
            answer.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)

    async def handle(self, command: Command) -> Reply:
        """Carry out a command and return the answer."""
        started_s = time.monotonic()

        def reply(ok: bool, **rest: object) -> Reply:
            taken_s = time.monotonic() - started_s
            fields = {"command_id": command.command_id, "node": self._node.name, "ok": ok, "seconds": taken_s}
            return Reply.model_validate({**fields, **rest})

        try:
            if not self._node.admit(command.task, command.generation, command.plan):
                raise Refused("fenced", self._fence_text(command))
            self._changes.notify()  # commands that this one fences end now
            return reply(True, **await self._do(command))
        except Refused as err:
            logger.info("%s of %s refused: %s: %s", command.kind, command.task, err.code, err.detail)
            return reply(False, code=err.code, detail=err.detail, workers=err.blameless)
        except Unavailable as err:
            logger.warning("%s of %s: %s", command.kind, command.task, err.detail)
            return reply(False, code=err.code, detail=err.detail)
        except Exception as err:
            logger.exception("%s of %s failed", command.kind, command.task)
            return reply(False, code="internal", detail=f"{type(err).__name__}: {err}")

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
                    raise Refused("fenced", self._fence_text(command))
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
        """Return a process on the worker that has trained nothing: one that is there already, or a new one."""
        if worker not in self._node.slots:
            raise Refused("not-found", f"{worker} is no worker of {self._node.name}")
        old = self._node.slots[worker]
        if old is not None:
            leaving = old.ending or old.finished
            if old.task == command.task and not old.configured and not leaving:
                old.generation = command.generation
                return old  # started for a plan that this one supersedes
            if old.task != command.task and not leaving:
                raise Refused("busy", f"{worker} is occupied by {old.task}")
            if old.task == command.task:
                await self._host.end([old])
            await self._changes.until(lambda: self._node.slots[worker] is not old)
            if self._node.fenced(command.task, command.generation, command.plan):
                raise Refused("fenced", self._fence_text(command))
            if self._node.slots[worker] is not None:
                return await self._start(command, worker)
        process = self._node.start(command.task, worker, command.generation, "")
        await self._host.launch(process, command.spec)
        self._notify()
        return process

    async def _rest(self, command: HoldTask | DrainTask) -> dict[str, object]:
        processes = self._all(command.task, command.workers)
        message = protocol.Hold if isinstance(command, HoldTask) else protocol.Drain
        for process in processes:
            if not process.waiting:
                if isinstance(command, HoldTask):
                    self._node.hold(process, time.monotonic())
                self._host.send(process, message(generation=process.generation))
        await self._until(command, processes, lambda p: p.waiting)
        return {"workers": {p.worker: WorkerResult(pid=p.pid, step=p.step) for p in processes}}

    async def _configure(self, command: ConfigureTask) -> dict[str, object]:
        stage = command.stage
        members = {m.worker: m for m in stage.members if m.node == self._node.name}
        processes = self._all(command.task, members)
        listed = [[m.rank, m.worker, m.source] for m in sorted(stage.members, key=lambda m: m.rank)]
        for process in processes:
            if process.configured and process.generation > stage.generation:
                raise Refused("fenced", f"{process.worker} is in generation {process.generation}")
            rank = members[process.worker].rank
            self._node.configure(process, generation=stage.generation, rank=rank, at_s=time.monotonic())
            self._host.send(
                process,
                protocol.Configure(
                    generation=stage.generation,
                    stage=stage.kind,
                    rank=rank,
                    world_size=stage.layout.world_size,
                    tensor=stage.layout.tensor,
                    pipeline=stage.layout.pipeline,
                    store_host=command.store_host,
                    store_port=command.store_port,
                    members=listed,
                    checkpoint=stage.checkpoint,
                    complete=stage.complete,
                    directory=self._host.directory(command.task, stage.generation),
                    fault_step=command.fault_step,
                ),
            )
        self._notify()
        said: dict[str, protocol.Resumed] = {}

        def resumed(process: Process) -> bool:
            if process.resumed is not None and process.resumed.generation == stage.generation:
                said[process.worker] = process.resumed
            return process.worker in said

        await self._until(command, processes, resumed, raising=True)
        self._host.close_stores(command.task, before=stage.generation)
        results = {
            p.worker: WorkerResult(
                pid=p.pid,
                step=said[p.worker].step,
                source=said[p.worker].source,
                phases=said[p.worker].phases,
                deal=said[p.worker].deal,
                steps_recomputed=said[p.worker].steps_recomputed,
            )
            for p in processes
        }
        return {"workers": results}

    async def _stop(self, command: StopTask) -> dict[str, object]:
        processes = self._all(command.task, command.workers)
        idle = [p for p in processes if not p.configured]
        for process in processes:
            if process.configured:
                self._host.send(process, protocol.Stop(generation=process.generation))
        if idle:
            await self._host.end(idle)  # they hold nothing that a checkpoint would need
        await self._until(command, processes, lambda p: not p.alive and (p.ending or p.finished))
        self._close_stores_if_last(command)
        return {"workers": {p.worker: WorkerResult(pid=p.pid, step=p.step) for p in processes}}

    async def _release(self, command: ReleaseTask) -> dict[str, object]:
        processes = [p for p in self._node.of_task(command.task) if p.worker in command.workers or command.all_workers]
        await self._host.end(processes)
        if command.all_workers:
            self._close_stores(command)
            self._host.forget_state(command.task)
        else:
            self._close_stores_if_last(command)
        return {"workers": {p.worker: WorkerResult(pid=p.pid, step=p.step) for p in processes}}

    # ---- waiting

    async def _until(
        self, command: Command, processes: list[Process], done: Callable[[Process], bool], *, raising: bool = False
    ) -> None:
        """Return when ``done`` holds for every process.

        Raises:
            Refused: one that is not done has ended or (where ``raising``) raised, or the command is fenced.
        """

        def check() -> bool:
            left = [p for p in processes if not done(p)]
            if dead := [p for p in left if not p.alive]:
                text = "; ".join(f"{p.worker} (pid {p.pid}) exited with {p.exit_code}" for p in dead)
                raise Refused("process-exited", text, [p for p in processes if p.alive])
            if raising and (raised := [p for p in left if p.raised is not None]):
                said = [f"{p.worker}: {p.raised.error}: {p.raised.detail}" for p in raised if p.raised]
                # One that lost its peers, or waited for them in vain, tells of another's failure.
                guilty = [p for p in raised if p.raised is not None and p.raised.kind != "communication"]
                raise Refused("rank-raised", "; ".join(said), [p for p in processes if p not in guilty])
            if left and self._node.fenced(command.task, command.generation, command.plan):
                raise Refused("fenced", self._fence_text(command))
            return not left

        await self._changes.until(check)

    def _all(self, task: str, workers: Iterable[str]) -> list[Process]:
        """Return the task's process on each worker, all of them alive."""
        found: list[Process] = []
        missing: list[str] = []
        for worker in workers:
            process = self._node.slots.get(worker)
            if process is None or process.task != task:
                missing.append(worker)
            else:
                found.append(process)
        if missing:
            raise Refused("process-exited", "; ".join(f"{worker}: no process of {task}" for worker in missing), found)
        return found

    def _close_stores(self, command: Command) -> None:
        # One of a later generation belongs to a plan that supersedes the command's.
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
