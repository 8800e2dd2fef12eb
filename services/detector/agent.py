"""The node agent: supervises one node's rank processes. ``python -P -m services.detector.agent``.

It starts the fork server, hears the ranks, carries out the transition service's commands and tells the detector what
happens (``unicron.signals``) and that the node lives (``unicron.heartbeats.<node>``). It never writes the log. Losing
NATS stops nothing: the ranks train on, signals wait, the client reconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from services.detector import fork_server, hardware
from services.detector.changes import Changes
from services.detector.clock import SteadyClock
from services.detector.commands import Commands
from services.detector.fork_server import Forked, ForkServer
from services.detector.memory import SWEEP_INTERVAL_S, TaskMemory, node_folder
from services.detector.node import Node, Process
from services.detector.proc import process_state, scheduled
from services.detector.ranks import RankServer, socket_name
from services.detector.stores import Stores
from services.detector.uplink import Heartbeats, Signals
from shared.bus import Bus
from shared.commands import COMMANDS
from shared.errors import Unavailable
from shared.service import Context, run
from shared.settings import Settings
from shared.tasks import TaskSpec
from unicron import protocol

logger = logging.getLogger(__name__)

QUIT_GRACE_S = 0.5
"""A waiting rank that was told to quit holds nothing; one that has not gone by then is killed."""

FINISH_GRACE_S = 5.0
"""The same for a rank that said it has finished: it flushes its output and leaves its process group."""

STOP_TIMEOUT_S = 5.0
"""All ranks together get this long when the agent stops; the fork server's end takes the rest with it."""

LAST_OUTPUT_BYTES = 4096
"""How much of a dead process's output goes into the incident: a traceback or two."""

RESTART_PAUSE_S = 1.0
"""Between attempts to start a fork server that does not start."""


class Agent:
    """One node's agent.

    Args:
        settings: ``node``, ``workers_per_node``, ``run_dir``, intervals.
        bus: connected; closed by whoever opened it.
        command: the fork server's command line.
    """

    def __init__(self, settings: Settings, bus: Bus, *, command: Sequence[str] = fork_server.COMMAND) -> None:
        self._settings, self._bus, self._command = settings, bus, command
        self.incarnation = uuid.uuid4().hex
        self.node = Node.create(settings.node, self.incarnation, settings.workers_per_node)
        self._clock = SteadyClock()
        self._changes = Changes()
        self._signals = Signals(bus)
        self._heartbeats = Heartbeats(bus, self.node, settings, os.getpid(), self._clock)
        self._commands = Commands(self.node, self._changes, self, self._heartbeats.changed)
        self._memory = TaskMemory(node_folder(settings.memory_dir, settings.run_dir, settings.node))
        self._socket = socket_name(settings.run_dir, settings.node, self.incarnation)
        self._ranks = RankServer(self._socket, self.node, self._changes, self._heard)
        self._fork_server: ForkServer | None = None
        self._forked: dict[str, Forked] = {}
        self._stores = Stores(settings, self._server)
        self._background: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._stopping = False

    # ---- life

    async def start(self) -> None:
        """Start everything; the node is announced once ranks can be forked."""
        await self._ranks.start()
        await self._start_fork_server()
        await self._bus.serve(f"{COMMANDS}.{self._settings.node}", self._commands.serve)
        self._heartbeats.hardware = kind = await asyncio.to_thread(hardware.kind, self._settings.hardware)
        self._spawn(self._signals.run(), vital=True)
        self._spawn(self._heartbeats.run(), vital=True)
        self._spawn(self._sweep_memory())
        workers = len(self.node.slots)
        logger.info("node %s, incarnation %s, %d workers (%s)", self.node.name, self.incarnation, workers, kind)

    async def run(self) -> None:
        """Wait until cancelled, or raise what ended a part that the node is of no use without.

        A node whose signals are not sent, or that cannot fork, looks healthy from afar. The end of its agent is seen,
        and a new incarnation heals whatever it was.
        """
        raise await self._broken

    async def stop(self) -> None:
        """End ranks, stores and fork server."""
        self._stopping = True
        await self._commands.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.end(list(self.node.processes()))
        self._stores.close_all()
        if self._fork_server is not None:
            await self._fork_server.stop()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._ranks.stop()
        for forked in self._forked.values():
            forked.close()
        self._memory.close()

    # ---- what commands need (commands.Host)

    async def launch(self, process: Process, spec: TaskSpec) -> None:
        """Start a rank process. Raises Unavailable, with the slot freed, if that is not possible."""
        directory = self._settings.run_dir.resolve() / "tasks" / process.task
        output = directory / "output" / f"{process.generation}-{process.worker.replace('/', '-')}.log"
        process.output = str(output)
        try:
            server = await self._server()
            spec_path = await asyncio.to_thread(_write_spec, directory, spec, self.node.name)
            forked = await server.fork(
                process.id,
                task=process.task,
                worker=process.worker,
                spec=spec_path,
                output=output,
                env=self._environment(process, spec, directory),
            )
        except BaseException:
            if self.node.slots[process.worker] is process:
                self.node.slots[process.worker] = None
            self._changed()
            raise
        process.pid = forked.pid
        self._forked[process.id] = forked
        if process.ending:
            forked.kill()  # released while it was being born
        self._changed()

    def send(self, process: Process, message: protocol.Message) -> None:
        """Send a message to a rank."""
        self._ranks.send(process, message)

    def directory(self, task: str, generation: int) -> str:
        """Return where a generation of the task writes."""
        return str(self._settings.run_dir.resolve() / "tasks" / task / f"generation-{generation}")

    async def end(self, processes: Iterable[Process]) -> None:
        """End processes; return when they are gone.

        One that waits is asked to quit and killed after a grace; one that computes, blocks or is stopped is killed
        at once: nothing in it is worth keeping, and it might never look at a message.
        """
        ending = [process for process in processes if process.alive]
        grace_s = 0.0
        for process in ending:
            process.ending = True
            stopped = process.pid is not None and process_state(process.pid) in ("T", "t")
            if (process.waiting or process.finished) and not stopped:
                self.send(process, protocol.Quit())
                grace_s = max(grace_s, FINISH_GRACE_S if process.finished else QUIT_GRACE_S)
            elif process.id in self._forked:
                self._forked[process.id].kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s or None):
                await self._changes.until(lambda: not any(p.alive for p in ending))
        for process in ending:
            if process.alive and process.id in self._forked:
                self._forked[process.id].kill()
        await self._changes.until(lambda: not any(p.alive for p in ending))

    async def open_store(self, task: str, generation: int) -> tuple[str, int]:
        """Run a rendezvous store; return its address. Unavailable if that is not possible."""
        return await self._stores.open(task, generation)

    def close_stores(self, task: str, before: int | None = None) -> None:
        """End the task's stores, all or those of generations older than ``before``."""
        self._stores.close(task, before)

    def forget_state(self, task: str) -> None:
        """Delete the in-memory copies of a task that goes on elsewhere or not at all."""
        self._memory.forget(task)

    async def _sweep_memory(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self._memory.sweep({process.task for process in self.node.processes()}, self._clock.seconds())

    # ---- what happens

    def _heard(self, process: Process, message: protocol.Message) -> None:
        schedule = scheduled(process.pid) if isinstance(message, protocol.Progress) else None
        at_s, now = self._clock.seconds(), self._clock.now()
        signals = self.node.hear(process, message, at_s=at_s, now=now, schedule=schedule)
        self._signals.put(signals)
        # Progress changes nothing that a command waits for, and comes many times a second.
        if not isinstance(message, protocol.Progress):
            self._changed()

    def _exited(self, process_id: str, exit_code: int) -> None:
        if process_id.startswith("store-"):
            self._stores.exited(process_id, exit_code)
        else:
            self._spawn(self._rank_exited(process_id, exit_code))

    async def _rank_exited(self, process_id: str, exit_code: int) -> None:
        now = self._clock.now()
        process = self.node.by_id(process_id)
        if process is None:
            return
        await self._ranks.last_words(process)
        output = "" if process.ending else last_output(Path(process.output))
        signals = self.node.exited(process, exit_code, last_output=output, now=now)
        forked = self._forked.pop(process_id, None)
        if forked is not None:
            forked.close()
        if signals:
            logger.warning("%s (pid %s) of %s exited with %d", process.worker, process.pid, process.task, exit_code)
        self._signals.put(signals)
        if (process.finished or process.stopped is not None) and not self.node.of_task(process.task):
            self._memory.forget(process.task)
        self._changed()

    def _fork_server_lost(self) -> None:
        self._fork_server = None
        if not self._stopping:
            logger.error("the fork server ended; its ranks end with it")
            self._spawn(self._replace_fork_server(), vital=True)

    async def _replace_fork_server(self) -> None:
        """Its ranks have lost their parent: end them, report each, start anew."""
        processes = list(self.node.processes())
        for process in processes:
            forked = self._forked.get(process.id)
            if forked is not None:
                forked.kill()
                await asyncio.to_thread(forked.wait, 1.0)
            await self._rank_exited(process.id, -9)
        self._stores.close_all()
        while self._fork_server is None:
            try:
                await self._start_fork_server()
            except (Unavailable, OSError) as err:
                # OSError: a machine short of memory or processes starts one later.
                logger.error("the fork server does not start: %s", err)
                await asyncio.sleep(RESTART_PAUSE_S)

    async def _start_fork_server(self) -> None:
        server = ForkServer(
            self._command,
            output=self._settings.run_dir.resolve() / "nodes" / self.node.name / "forkserver.log",
            environment={
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                "OPENBLAS_NUM_THREADS": "1",
                "UNICRON_ORPHAN_GRACE_S": str(self._settings.orphan_grace_s),
            },
            exited=self._exited,
            stopped=self._heartbeats.due,
            lost=self._fork_server_lost,
        )
        try:
            await server.start()
        except BaseException:
            await server.stop()
            raise
        self._fork_server = server
        self._changes.notify()

    async def _server(self) -> ForkServer:
        """Return the fork server; wait while it is being replaced (callers have limits of their own)."""
        await self._changes.until(lambda: self._fork_server is not None)
        assert self._fork_server is not None
        return self._fork_server

    def _environment(self, process: Process, spec: TaskSpec, directory: Path) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            **hardware.device_environment(process.worker, os.environ.get(hardware.VISIBLE_VARIABLE)),
            **spec.env,
            protocol.SOCKET_VARIABLE: f"@{self._socket}",
            "UNICRON_TASK": process.task,
            "UNICRON_WORKER": process.worker,
            "UNICRON_RUN_DIR": str(directory),
            protocol.MEMORY_VARIABLE: str(self._memory.of_task(process.task)),
            protocol.NODE_VARIABLE: self.node.name,
            protocol.DOMAIN_VARIABLE: self._settings.domain,
            protocol.HOST_VARIABLE: self._settings.store_host,
            "UNICRON_ORPHAN_GRACE_S": str(self._settings.orphan_grace_s),
        }

    def _changed(self) -> None:
        self._changes.notify()
        self._heartbeats.changed()

    def _spawn(self, work: Coroutine[Any, Any, None], *, vital: bool = False) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(functools.partial(self._done, vital=vital))

    def _done(self, task: asyncio.Task[None], *, vital: bool) -> None:
        self._background.discard(task)
        if not task.cancelled() and (err := task.exception()) is not None:
            logger.error("background work failed", exc_info=err)
            if vital and not self._broken.done():
                self._broken.set_result(err)


def last_output(path: Path) -> str:
    """Return the end of what a process wrote; empty if it wrote nothing."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LAST_OUTPUT_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _write_spec(directory: Path, spec: TaskSpec, node: str) -> Path:
    """Write the specification for the rank; whole at every moment, also when several nodes share the folder."""
    (directory / "output").mkdir(parents=True, exist_ok=True)
    path = directory / "spec.json"
    partial = directory / f".spec.{node}.{uuid.uuid4().hex}.json"
    partial.write_text(spec.model_dump_json(by_alias=True))
    os.replace(partial, path)
    return path


async def serve(context: Context) -> None:
    """Run the agent until cancelled."""
    agent = Agent(context.settings, context.bus)
    try:
        await agent.start()
        context.ready()
        await agent.run()
    finally:
        await agent.stop()


def main() -> int:
    """Run the node agent."""
    # Settings are read, and complained of, by ``run``.
    return run(f"agent-{os.environ.get('UNICRON_NODE', 'n0')}", serve, journal=False)


if __name__ == "__main__":
    raise SystemExit(main())
