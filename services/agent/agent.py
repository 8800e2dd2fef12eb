"""The agent of one node: puts the node's parts together and keeps their processes running.

It is connected to the fork server, receives the messages of ranks, does what commands ask for (``commands.Host``), and
sends signals and heartbeats to the detector. It never writes the log. The loss of NATS stops nothing: ranks train on,
signals wait, and the client reconnects. Nor does the agent's own end stop anything: its successor goes on from the
record (``record.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from services.agent.background import Background, every
from services.agent.cluster.departure import Leaving
from services.agent.cluster.heartbeats import Heartbeats
from services.agent.cluster.preflight import Preflight
from services.agent.cluster.probe import ProbeServer
from services.agent.cluster.self_test import SelfTests
from services.agent.cluster.signals import SignalQueue
from services.agent.commands import Commands
from services.agent.files.file_server import FileServer
from services.agent.files.rank_users import RankUsers
from services.agent.files.shipped_code import ShippedCode
from services.agent.files.snapshot_folders import SnapshotFolders, node_folder
from services.agent.files.storage_return import StorageReturns
from services.agent.files.task_files import TaskFiles, last_output
from services.agent.files.task_secrets import TaskSecrets
from services.agent.machine.address import NodeAddress
from services.agent.machine.device_watch import DeviceWatch
from services.agent.machine.hardware import NodeHardware
from services.agent.machine.interpreters import Interpreters
from services.agent.machine.oom_kills import OomKills, own_counter
from services.agent.machine.proc import scheduled
from services.agent.metrics import AgentMetrics
from services.agent.node.process import Process
from services.agent.node.record import NodeRecord
from services.agent.node.slots import Node
from services.agent.ranks import fork_server, stacks
from services.agent.ranks.fork_server import Children, Forked
from services.agent.ranks.fork_servers import ForkServers
from services.agent.ranks.output_limits import OutputLimits
from services.agent.ranks.rank_environment import RankEnvironment
from services.agent.ranks.rank_server import RankServer
from services.agent.ranks.stores import ID_PREFIX, Stores
from services.agent.succession import findings
from services.agent.succession.inheritance import Inheritance
from shared.bus.connection import Bus
from shared.clock import PROCESS_CLOCK
from shared.service.changes import Changes
from shared.service.log_lines import ids
from shared.settings.model import Settings
from shared.tasks.specification import TaskSpec
from unicron.protocol import messages

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""Time that all ranks together get to end when the node leaves. The end of the fork server ends the others."""


class Agent:
    """One node's agent.

    Args:
        settings: ``node``, ``workers_per_node``, ``run_dir``, intervals.
        bus: connected; its owner closes it. The agent reports the counters of its ``dropped`` with its heartbeats.
        address: the node's address.
        found: the node's workers and their devices.
        incarnation: of this agent, new for every start.
        inherited: what the agents of one supervisor share.
    """

    def __init__(
        self,
        settings: Settings,
        bus: Bus,
        address: NodeAddress,
        found: NodeHardware,
        incarnation: str,
        inherited: Inheritance,
    ) -> None:
        self._settings, self._bus, self._address, self._inherited = settings, bus, address, inherited
        counters = bus.dropped.counters
        self.incarnation = incarnation
        self._clock = PROCESS_CLOCK
        record = inherited.record.read()
        self._succeeds = record is not None
        self._left = left = record or NodeRecord()
        self.node = Node.restored(
            settings.node,
            incarnation,
            settings.workers_per_node,
            processes=left.processes,
            fences=left.fences,
            token=left.token,
            at_s=self._clock.seconds(),
        )
        self._changes = Changes()
        self._signals = SignalQueue(bus)
        self._signals.put([signal.model_copy(update={"incarnation": incarnation}) for signal in left.signals])
        self.devices = DeviceWatch(settings.node, incarnation, found, self._signals.put, self._clock)
        self._leaving = Leaving(bus, self._signals, settings.node, incarnation)
        self._heartbeats = Heartbeats(
            bus, self.node, address, settings, os.getpid(), self._clock, counters, inherited.supervisor
        )
        self._heartbeats.of_devices(found.kind, self.devices)
        self.metrics = AgentMetrics(self.node, self._heartbeats, self._signals, self._clock, counters, self.devices)
        self._commands = Commands(self.node, self._changes, self, self._note_state, left.replies)
        self._users = users = RankUsers(settings.rank_uids)
        self._interpreters = Interpreters(settings.rank_interpreters, separate_users=users.separate)
        supervisor, python = inherited.supervisor, self._interpreters.default
        self._preflight = Preflight(settings, bus, incarnation, supervisor, found, python, address)
        self._files = TaskFiles(settings.run_dir, settings.node, users)
        self._output_limits = OutputLimits(settings, counters)
        self._oom_kills = OomKills(self._clock, own_counter())
        self._snapshots = SnapshotFolders(node_folder(settings.memory_dir, settings.run_dir, settings.node), users)
        self._heartbeats.copies = lambda: self._snapshots.kept
        secrets = TaskSecrets.of_node(settings.secret_directories, separate_users=users.separate)
        ships = settings.allow_shipped_code
        self._code = ShippedCode(bus, settings.node, self._files, users, self.node.tasks, allowed=ships)
        self._environment = RankEnvironment(
            settings, address, found, inherited.ranks_name, self._files, self._snapshots, users, secrets
        )
        self._file_server = FileServer(
            bus, settings.node, settings.run_dir, users, secrets, self._interpreters, ships=ships
        )
        self._ranks = RankServer(inherited.ranks, self.node, self._changes, self._received, bus.dropped, users)
        self._fork_servers = ForkServers(
            inherited,
            self._changes,
            exited=self._exited,
            stopped=self._heartbeats.request,
            lost=self._fork_server_lost,
            dropped=bus.dropped,
        )
        self._forked: dict[str, Forked] = {}
        """Process id -> the handle of each living rank."""
        self._probes = ProbeServer(bus, settings.node, incarnation, address.ip)
        self._stores = Stores(address.store_host, address.store_ip, self._files, users, self._fork_servers.current)
        folders = [settings.run_dir.resolve() / "nodes" / settings.node, settings.memory_dir]
        self._self_tests = SelfTests(
            self.node,
            address.store_ip,
            folders,
            self._fork_servers.current,
            self.devices.problem,
            self._preflight.check,
        )
        self._stacks = stacks.Stacks(self.node, self._files.stacks, self.send, self._kill)
        self._storage = StorageReturns()
        self._background = Background()
        self._stopping = False
        self._successor = False

    # ---- life

    async def measure(self) -> None:
        """Do the preflight, before ``start``; not in place of an agent whose ranks may train meanwhile."""
        if not self._succeeds:
            await self._preflight.before_joining()

    async def start(self) -> None:
        """Start all parts. The first heartbeat, which announces the node, comes once ranks can be forked."""
        await self._ranks.start()
        used = {*(p.python for p in self._left.processes), *(store.python for store in self._left.stores)}
        await self._take_over(await self._fork_servers.take_over(used))
        self._record()
        await self._commands.listen(self._bus)
        await self._file_server.start()
        self._heartbeats.probe = await self._probes.start()
        await self._self_tests.serve(self._bus)
        await self._preflight.serve(self._background.spawn)
        await self._stacks.serve(self._bus)
        await self.devices.start()
        self._background.spawn(self._signals.run(), vital=True)
        self._background.spawn(self._heartbeats.run(), vital=True)
        self._background.spawn(self._snapshots.keep_looking(self.node.tasks))
        # The record says where the ranks are. To write it at each step would be too often.
        self._background.spawn(every(self._settings.heartbeat_interval_s, self._record))
        self._background.spawn(self._output_limits.keep(self.node.processes))
        self._background.spawn(self._oom_kills.watch())
        self._background.spawn(self._code.keep_forgetting())
        with contextlib.closing(self._probes.listener) as listener:
            self._inherited.report_started(self._probes.answer, listener)
        workers, kind, at = len(self.node.slots), self._heartbeats.hardware, self._address
        logger.info("node %s, incarnation %s, %d workers (%s)", self.node.name, self.incarnation, workers, kind)
        logger.info("address %s (%s), stores at %s", at.ip, at.interface, at.store_host)

    async def run(self) -> None:
        """Wait until cancelled, or raise the error that ended a vital part.

        A node that sends no signals or cannot fork looks healthy to the detector. So the agent ends, and its successor
        tries again.
        """
        raise await self._background.broken

    def keep_snapshots(self) -> None:
        """Have ``stop`` leave the node's snapshots: a successor of this agent on the same machine needs them."""
        self._successor = True

    async def drain(self, reason: str) -> None:
        """Have tasks move away from the node, for ``drain_timeout_s``, and leave; at 0 there is nothing to wait for."""
        if self._settings.drain_timeout_s > 0.0:
            await self._leaving.drain(reason, self._settings.drain_timeout_s)

    async def leave(self, reason: str) -> None:
        """Announce that the node leaves in order, before ``stop``: the end of its processes is no fault then."""
        await self._leaving.leave(reason)

    async def stop(self) -> None:
        """End ranks and stores; the supervisor ends the fork server."""
        self._stopping = True
        await self._commands.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.end(list(self.node.processes()))
        self._stores.close_all()
        self._probes.stop()
        await self._close()
        if not self._successor:
            self._snapshots.close()

    async def hand_over(self) -> None:
        """Leave ranks and stores to a successor."""
        self._stopping = True
        self._record()
        await self._commands.stop()
        self._inherited.report_ending()
        self._probes.stop(hands_over=True)
        await self._close()

    async def _close(self) -> None:
        """Stop all parts."""
        await self._fork_servers.stop()
        await self.devices.stop()
        await self._background.stop()
        await self._ranks.stop()
        self._file_server.stop()
        for forked in self._forked.values():
            forked.close()

    # ---- what commands need (commands.Host)

    async def launch(self, process: Process, spec: TaskSpec) -> None:
        """Start a rank process.

        Raises:
            Unavailable: the process could not be started; its slot is free again.
        """
        output = self._files.output(process.task, process.worker, process.generation)
        process.output = str(output)
        try:
            process.python = self._interpreters.of(spec)
            self._record()
            server = await self._fork_servers.current(process.python)
            spec_path = await asyncio.to_thread(self._files.write_spec, process.task, spec)
            await asyncio.to_thread(self._snapshots.make, process.task)
            env = await asyncio.to_thread(self._environment.of, process, spec)
            forked = await server.fork(
                process.id,
                task=process.task,
                worker=process.worker,
                spec=spec_path,
                output=output,
                stacks=self._files.stacks(process.task, process.worker),
                env=env | await self._code.environment(process.task, spec),
                uid=self._users.uid(process.task),
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

    def send(self, process: Process, message: messages.Message) -> None:
        """Send a message to a rank."""
        self._ranks.send(process, message)

    def directory(self, task: str, generation: int) -> str:
        """Return the folder that a generation of the task writes to."""
        return str(self._files.generation_folder(task, generation))

    async def end(self, processes: Iterable[Process]) -> None:
        """End processes; return when they have ended."""
        ending = [process for process in processes if process.alive]
        for process in ending:
            process.ending = True
        self._record()
        await fork_server.end(ending, self._changes, quit_=self._quit, kill=self._kill)

    async def open_store(self, task: str, generation: int) -> tuple[str, int]:
        """Run a rendezvous store; return its host and port.

        Raises:
            Unavailable: no store could be started.
        """
        python = next((process.python for process in self.node.processes() if process.task == task), "")
        return await self._stores.open(task, generation, python)

    def close_stores(self, task: str, before: int | None = None) -> None:
        """End the task's stores: those of generations older than ``before``, or all."""
        self._stores.close(task, before)

    def forget_state(self, task: str) -> None:
        """Delete this node's snapshots and code of a task that has left the node for good."""
        self._snapshots.forget(task)
        self._background.spawn(self._code.forget(task))

    def _quit(self, process: Process) -> None:
        self.send(process, messages.Quit())

    def _kill(self, process: Process, number: signal.Signals = signal.SIGKILL) -> None:
        if process.id in self._forked:
            self._forked[process.id].kill(number)

    # ---- messages and ends of processes

    def _received(self, process: Process, message: messages.Message) -> None:
        if isinstance(message, messages.Groups):
            self._stacks.receive(process, message)
            return
        schedule = scheduled(process.pid) if isinstance(message, messages.Progress) else None
        at_s, now = self._clock.seconds(), self._clock.now()
        self._signals.put(self.node.receive(process, message, at_s=at_s, now=now, schedule=schedule))
        if isinstance(message, messages.CheckpointFailed) and message.lends:
            self._background.spawn(self._storage.wait(process, message.folders, self._storage_returned))
        # No command waits for progress, which comes many times a second.
        if not isinstance(message, messages.Progress):
            self._note_change()

    def _storage_returned(self, process: Process) -> None:
        self._signals.put([self.node.storage_returned(process, self._clock.now())])

    def _exited(self, process_id: str, exit_code: int) -> None:
        if process_id.startswith(ID_PREFIX):
            self._stores.exited(process_id, exit_code)
            self._fork_servers.acknowledge(process_id)
        else:
            self._background.spawn(self._rank_exited(process_id, exit_code))

    async def _rank_exited(self, process_id: str, exit_code: int) -> None:
        now = self._clock.now()
        if (process := self.node.by_id(process_id)) is None:
            self._fork_servers.acknowledge(process_id)
            return
        await self._ranks.read_rest(process)
        output = "" if process.ending else last_output(Path(process.output))
        stack = stacks.of_fatal_signal(stacks.read(self._files.stacks(process.task, process.worker)))
        oom_killed = self._oom_kills.explain(exit_code)
        signals = self.node.exited(process, exit_code, last_output=output, stack=stack, oom_killed=oom_killed, now=now)
        if (forked := self._forked.pop(process_id, None)) is not None:
            forked.close()
        if signals:
            what = f"{process.worker} (pid {process.pid}) of {process.task}"
            logger.warning("%s exited with %d", what, exit_code, extra=ids(process))
        self._signals.put(signals)
        if not self.node.of_task(process.task):
            if process.has_saved:
                self._snapshots.forget(process.task)
            if process.has_saved or process.finished:
                await self._code.forget(process.task)
        self._note_change()
        self._fork_servers.acknowledge(process_id)

    def _note_change(self) -> None:
        """Note a change of the node, and wake the commands that wait."""
        self._changes.notify()
        self._note_state()

    def _note_state(self) -> None:
        """Write the record, and publish a heartbeat if one is due."""
        self._record()
        self._heartbeats.note_change()

    # ---- predecessor and successor

    def _record(self) -> None:
        """Write down what a successor has to know.

        If there is no memory for the record, training goes on without it.
        """
        try:
            record = NodeRecord(
                processes=list(self.node.processes()),
                fences=self.node.fences,
                token=self.node.token,
                signals=self._signals.waiting,
                stores=self._stores.records(),
                replies=list(self._commands.replies.values()),
            )
            self._inherited.record.write(record)
        except (OSError, ValueError):
            logger.exception("the record of the node was not written: a successor of this agent would know less")

    async def _take_over(self, children: Children) -> None:
        """Match what the predecessor has left with the processes that there are; wait until these have attached."""
        found = findings.compare(self._left, list(self.node.processes()), children)
        for process, pid in found.running:
            process.pid, self._forked[process.id] = pid, Forked(pid)
        for store, pid in found.stores:
            self._stores.restore(store, pid)
        for process in found.never_forked:
            self.node.slots[process.worker] = None
        for process in found.gone:
            self._background.spawn(self._rank_exited(process.id, fork_server.KILLED))
        for process_id, pid in found.unwanted.items():
            logger.warning("process %s (pid %d) is not wanted any more", process_id, pid)
            with contextlib.closing(Forked(pid)) as forked:
                forked.kill()
        for process_id, exit_code in children.ended.items():
            self._exited(process_id, exit_code)
        if found.running:
            logger.info("took over %d rank processes", len(found.running))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(findings.ATTACH_S):
                await self._changes.until(lambda: all(p.attached for p in self.node.processes()))

    def _fork_server_lost(self, python: str) -> None:
        if not self._stopping:
            self._background.spawn(self._replace_fork_server(python), vital=True)

    async def _replace_fork_server(self, python: str) -> None:
        """End the ranks of a lost fork server, report the end of each, and connect to the next of the node's own."""
        for process in [process for process in self.node.processes() if process.python == python]:
            if (forked := self._forked.get(process.id)) is not None:
                forked.kill()
                await asyncio.to_thread(forked.wait, fork_server.KILLED_TIMEOUT_S)
            await self._rank_exited(process.id, fork_server.KILLED)
        self._stores.close_all(python)
        if not python:
            await self._fork_servers.reconnect()
