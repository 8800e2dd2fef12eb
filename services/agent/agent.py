"""The agent of one node: puts the node's parts together and keeps their processes running.

It starts the fork server, receives the messages of ranks, does what commands ask for (``commands.Host``), and sends
signals and heartbeats to the detector. It never writes the log. The loss of NATS stops nothing: ranks train on, signals
wait, and the client reconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from services.agent import fork_server, hardware
from services.agent.address import NodeAddress, socket_environment
from services.agent.commands import Commands
from services.agent.departure import Leaving
from services.agent.file_server import FileServer
from services.agent.fork_server import Forked, ForkServer
from services.agent.heartbeats import Heartbeats
from services.agent.node import Node
from services.agent.probe import ProbeServer
from services.agent.proc import process_state, scheduled
from services.agent.process import Process
from services.agent.rank_server import RankServer, socket_name
from services.agent.self_test import SelfTests
from services.agent.signals import SignalQueue
from services.agent.snapshot_folders import SWEEP_INTERVAL_S, SnapshotFolders, node_folder
from services.agent.stores import ID_PREFIX, Stores
from services.agent.task_files import TaskFiles, last_output
from shared.bus import Bus
from shared.changes import Changes
from shared.clock import PROCESS_CLOCK
from shared.commands import COMMANDS
from shared.dropped import DroppedMessages
from shared.errors import Unavailable
from shared.self_test import SELF_TEST
from shared.settings import Settings
from shared.tasks import TaskSpec
from unicron import environment, protocol

logger = logging.getLogger(__name__)

QUIT_GRACE_S = 0.5
"""A waiting rank has nothing to save. A waiting rank that was asked to quit is killed after this time."""

FINISH_GRACE_S = 5.0
"""The same for a rank that has finished its task: the rank flushes its output and leaves its process group."""

STOP_TIMEOUT_S = 5.0
"""All ranks together get this long to end when the agent stops. The end of the fork server ends the others."""

KILLED_TIMEOUT_S = 1.0
"""How long the agent waits for the end of a killed rank whose fork server has ended."""

RESTART_PAUSE_S = 1.0
"""Pause between attempts to start a fork server that does not start."""

KILLED = -9
"""Exit code of a rank that ended together with its fork server."""


class Agent:
    """One node's agent.

    Args:
        settings: ``node``, ``workers_per_node``, ``run_dir``, intervals.
        bus: connected; its owner closes it.
        address: the node's address.
        incarnation: of this agent, new for every start.
        command: the fork server's command line.
        counters: numbers by name that the agent reports with its health and its heartbeats.
    """

    def __init__(
        self,
        settings: Settings,
        bus: Bus,
        address: NodeAddress,
        incarnation: str,
        *,
        command: Sequence[str] = fork_server.COMMAND,
        counters: dict[str, int] | None = None,
    ) -> None:
        self._settings, self._bus, self._address, self._command = settings, bus, address, command
        self._dropped = DroppedMessages(counters if counters is not None else {})
        self.incarnation = incarnation
        self.node = Node.create(settings.node, self.incarnation, settings.workers_per_node)
        self._clock = PROCESS_CLOCK
        self._changes = Changes()
        self._signals = SignalQueue(bus, self._dropped)
        self._leaving = Leaving(bus, self._signals, settings.node, incarnation)
        self._heartbeats = Heartbeats(
            bus, self.node, address, settings, os.getpid(), self._clock, self._dropped.counters
        )
        self._commands = Commands(self.node, self._changes, self, self._heartbeats.note_change, self._dropped)
        self._files = TaskFiles(settings.run_dir, settings.node)
        self._file_server = FileServer(bus, settings.node, settings.run_dir, self._dropped)
        self._snapshots = SnapshotFolders(node_folder(settings.memory_dir, settings.run_dir, settings.node))
        self._socket = socket_name(settings.run_dir, settings.node, self.incarnation)
        self._ranks = RankServer(self._socket, self.node, self._changes, self._received, self._dropped)
        self._fork_server: ForkServer | None = None
        self._forked: dict[str, Forked] = {}
        """Process id -> handle of each living rank."""
        self._probes = ProbeServer(bus, settings.node, incarnation, address.ip, self._dropped)
        self._stores = Stores(address.store_host, address.store_ip, self._files, self._server)
        folders = [settings.run_dir.resolve() / "nodes" / settings.node, settings.memory_dir]
        self._self_tests = SelfTests(self.node, address.store_ip, folders, self._server, self._dropped)
        self._background: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._successor = False

    # ---- life

    async def start(self) -> None:
        """Start all parts. The first heartbeat, which announces the node, comes once ranks can be forked."""
        await self._ranks.start()
        await self._start_fork_server()
        await self._bus.serve(f"{COMMANDS}.{self._settings.node}", self._commands.serve)
        await self._file_server.start()
        self._heartbeats.probe = await self._probes.start()
        await self._bus.serve(f"{SELF_TEST}.{self._settings.node}", self._self_tests.serve)
        self._heartbeats.hardware = kind = await asyncio.to_thread(hardware.kind, self._settings.hardware)
        self._spawn(self._signals.run(), vital=True)
        self._spawn(self._heartbeats.run(), vital=True)
        self._spawn(self._sweep_snapshots())
        workers = len(self.node.slots)
        logger.info("node %s, incarnation %s, %d workers (%s)", self.node.name, self.incarnation, workers, kind)
        logger.info(
            "address %s (%s), stores at %s", self._address.ip, self._address.interface, self._address.store_host
        )

    async def run(self) -> None:
        """Wait until cancelled, or raise the error that ended a vital part.

        A node that sends no signals or cannot fork looks healthy to the detector. The end of its agent is noticed, and
        a new incarnation of the agent starts anew.
        """
        raise await self._broken

    def keep_snapshots(self) -> None:
        """Have ``stop`` leave the node's snapshots: on the same machine they are those of this agent's successor."""
        self._successor = True

    async def drain(self, reason: str) -> None:
        """Have tasks move away from the node, for ``drain_timeout_s``, and leave; at 0 there is nothing to wait for."""
        if self._settings.drain_timeout_s > 0.0:
            await self._leaving.drain(reason, self._settings.drain_timeout_s)

    async def leave(self, reason: str) -> None:
        """Announce that the node leaves in order, before ``stop``: the end of its processes is no fault then."""
        await self._leaving.leave(reason)

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
        self._probes.stop()
        await self._ranks.stop()
        self._file_server.stop()
        for forked in self._forked.values():
            forked.close()
        if not self._successor:
            self._snapshots.close()

    # ---- what commands need (commands.Host)

    async def launch(self, process: Process, spec: TaskSpec) -> None:
        """Start a rank process.

        Raises:
            Unavailable: the process could not be started; its slot is free again.
        """
        output = self._files.output(process.task, process.worker, process.generation)
        process.output = str(output)
        try:
            server = await self._server()
            spec_path = await asyncio.to_thread(self._files.write_spec, process.task, spec)
            forked = await server.fork(
                process.id,
                task=process.task,
                worker=process.worker,
                spec=spec_path,
                output=output,
                env=self._environment(process, spec),
            )
        except BaseException:
            if self.node.slots[process.worker] is process:
                self.node.slots[process.worker] = None
            self._note_change()
            raise
        process.pid = forked.pid
        self._forked[process.id] = forked
        if process.ending:
            forked.kill()  # a release came before the fork server's answer
        self._note_change()

    def send(self, process: Process, message: protocol.Message) -> None:
        """Send a message to a rank."""
        self._ranks.send(process, message)

    def directory(self, task: str, generation: int) -> str:
        """Return the folder that a generation of the task writes to."""
        return str(self._files.generation_folder(task, generation))

    async def end(self, processes: Iterable[Process]) -> None:
        """End processes; return when they have ended.

        A process that waits is asked to quit, and killed after a grace. A process that computes, blocks or is stopped
        is killed at once: it has nothing to save, and might never read a message.
        """
        ending = [process for process in processes if process.alive]
        grace_s = 0.0
        for process in ending:
            process.ending = True
            stopped = process.pid is not None and process_state(process.pid) in ("T", "t")
            if (process.waiting or process.finished) and not stopped:
                self.send(process, protocol.Quit())
                grace_s = max(grace_s, FINISH_GRACE_S if process.finished else QUIT_GRACE_S)
            else:
                self._kill(process)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s or None):
                await self._changes.until(lambda: not any(p.alive for p in ending))
        for process in ending:
            if process.alive:
                self._kill(process)
        await self._changes.until(lambda: not any(p.alive for p in ending))

    async def open_store(self, task: str, generation: int) -> tuple[str, int]:
        """Run a rendezvous store; return its host and port.

        Raises:
            Unavailable: no store could be started.
        """
        return await self._stores.open(task, generation)

    def close_stores(self, task: str, before: int | None = None) -> None:
        """End the task's stores: those of generations older than ``before``, or all."""
        self._stores.close(task, before)

    def forget_state(self, task: str) -> None:
        """Delete this node's snapshots of a task that has left the node for good."""
        self._snapshots.forget(task)

    def _kill(self, process: Process) -> None:
        if process.id in self._forked:
            self._forked[process.id].kill()

    def _environment(self, process: Process, spec: TaskSpec) -> dict[str, str]:
        """Return the environment variables of a rank process."""
        return {
            "OMP_NUM_THREADS": "1",
            **socket_environment(self._address.interface),
            **hardware.device_environment(process.worker, os.environ.get(hardware.VISIBLE_VARIABLE)),
            **spec.env,
            environment.SOCKET: f"@{self._socket}",
            environment.TASK: process.task,
            environment.WORKER: process.worker,
            environment.RUN_DIR: str(self._files.folder(process.task)),
            environment.MEMORY: str(self._snapshots.of_task(process.task)),
            environment.NODE: self.node.name,
            environment.DOMAIN: self._settings.domain,
            environment.HOST: self._address.store_ip,
            environment.ORPHAN_GRACE_S: str(self._settings.orphan_grace_s),
        }

    # ---- messages and ends of processes

    def _received(self, process: Process, message: protocol.Message) -> None:
        schedule = scheduled(process.pid) if isinstance(message, protocol.Progress) else None
        at_s, now = self._clock.seconds(), self._clock.now()
        self._signals.put(self.node.receive(process, message, at_s=at_s, now=now, schedule=schedule))
        # No command waits for progress, which comes many times a second.
        if not isinstance(message, protocol.Progress):
            self._note_change()

    def _exited(self, process_id: str, exit_code: int) -> None:
        if process_id.startswith(ID_PREFIX):
            self._stores.exited(process_id, exit_code)
        else:
            self._spawn(self._rank_exited(process_id, exit_code))

    async def _rank_exited(self, process_id: str, exit_code: int) -> None:
        now = self._clock.now()
        process = self.node.by_id(process_id)
        if process is None:
            return
        await self._ranks.read_rest(process)
        output = "" if process.ending else last_output(Path(process.output))
        signals = self.node.exited(process, exit_code, last_output=output, now=now)
        forked = self._forked.pop(process_id, None)
        if forked is not None:
            forked.close()
        if signals:
            logger.warning("%s (pid %s) of %s exited with %d", process.worker, process.pid, process.task, exit_code)
        self._signals.put(signals)
        if (process.finished or process.stopped is not None) and not self.node.of_task(process.task):
            self._snapshots.forget(process.task)
        self._note_change()

    def _note_change(self) -> None:
        """Wake the commands that wait, and the heartbeats."""
        self._changes.notify()
        self._heartbeats.note_change()

    # ---- fork server

    async def _start_fork_server(self) -> None:
        server = ForkServer(
            self._command,
            output=self._settings.run_dir.resolve() / "nodes" / self.node.name / "forkserver.log",
            environment={
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                "OPENBLAS_NUM_THREADS": "1",
                environment.ORPHAN_GRACE_S: str(self._settings.orphan_grace_s),
            },
            exited=self._exited,
            stopped=self._heartbeats.request,
            lost=self._fork_server_lost,
            dropped=self._dropped,
        )
        try:
            await server.start()
        except BaseException:
            await server.stop()
            raise
        self._fork_server = server
        self._changes.notify()

    async def _server(self) -> ForkServer:
        """Return the fork server; wait while it is being replaced. Callers limit the wait."""
        await self._changes.until(lambda: self._fork_server is not None)
        assert self._fork_server is not None
        return self._fork_server

    def _fork_server_lost(self) -> None:
        self._fork_server = None
        if not self._stopping:
            logger.error("the fork server ended; its ranks end with it")
            self._spawn(self._replace_fork_server(), vital=True)

    async def _replace_fork_server(self) -> None:
        """End the ranks of a lost fork server, report the end of each, and start a new fork server."""
        for process in list(self.node.processes()):
            forked = self._forked.get(process.id)
            if forked is not None:
                forked.kill()
                await asyncio.to_thread(forked.wait, KILLED_TIMEOUT_S)
            await self._rank_exited(process.id, KILLED)
        self._stores.close_all()
        while self._fork_server is None:
            try:
                await self._start_fork_server()
            except (Unavailable, OSError) as err:
                # OSError: a machine that is short of memory or processes may have some again later.
                logger.error("the fork server does not start: %s", err)
                await asyncio.sleep(RESTART_PAUSE_S)

    # ---- background work

    async def _sweep_snapshots(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self._snapshots.sweep({process.task for process in self.node.processes()}, self._clock.seconds())

    def _spawn(self, work: Coroutine[Any, Any, None], *, vital: bool = False) -> None:
        """Run something in the background; the failure of ``vital`` work ends the agent."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(functools.partial(self._done, vital=vital))

    def _done(self, task: asyncio.Task[None], *, vital: bool) -> None:
        self._background.discard(task)
        if not task.cancelled() and (err := task.exception()) is not None:
            logger.error("background work failed", exc_info=err)
            if vital and not self._broken.done():
                self._broken.set_result(err)
