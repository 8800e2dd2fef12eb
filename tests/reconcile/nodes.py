"""The nodes of the simulation: the agent's real core and commands, over modelled processes (``ranks.py``)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from services.agent.commands import Commands
from services.agent.node.process import Process
from services.agent.node.slots import Node
from shared.errors import Unavailable
from shared.messages.commands import COMMANDS, Command, Reply
from shared.messages.signals import Heartbeat, Signal
from shared.service.changes import Changes
from shared.tasks.specification import TaskSpec
from tests.reconcile.ranks import Group, Rank
from tests.reconcile.virtual import Network, now, seconds, watched
from unicron.protocol import messages

START_S = 0.4
ATTACH_S = 0.01
"""How long ranks take to attach to the successor of their agent."""

HEARTBEAT_S = 0.25


class Agent:
    """One incarnation of a node's agent: what ``commands.Host`` asks for, signals and heartbeats.

    ``before``: the agent of the same supervisor whose record and ranks it takes over.
    """

    def __init__(
        self, cluster: Cluster, name: str, incarnation: str, workers: int, supervisor: str, before: Agent | None = None
    ) -> None:
        self.cluster, self.name, self.supervisor, self.workers = cluster, name, supervisor, workers
        self.changes = Changes()
        self.ranks: dict[str, Rank] = before.ranks if before is not None else {}
        self.signals: list[Signal] = []
        self.unheard: list[Callable[[], None]] = []
        """What happened while there was no agent: ranks say it again, and the fork server repeats it."""
        self.node = Node.create(name, incarnation, workers)
        if before is not None:
            processes = [process for process in before.node.processes() if process.pid is not None]
            self.node = Node.restored(
                name, incarnation, workers, processes=processes, fences=before.node.fences, at_s=seconds()
            )
            self.signals = [signal.model_copy(update={"incarnation": incarnation}) for signal in before.signals]
            for rank in self.ranks.values():
                rank.agent = self
            cluster.loop.call_later(ATTACH_S, self._reattach, before)
        replies = before.commands.replies.values() if before is not None else ()
        self.commands: Commands = Commands(self.node, self.changes, self, self._notify, replies)
        self._sequence = 0
        self._due = asyncio.Event()
        self._tasks = [watched(self._send_signals()), watched(self._beat())]
        self.ended_for_good = self.may_be_followed = False

    # ---- life

    async def part(self) -> None:
        """End the agent alone. Its ranks go on, and a successor may follow."""
        self.ended_for_good = self.may_be_followed = True
        for task in self._tasks:
            task.cancel()
        await self.commands.stop()

    def _reattach(self, before: Agent) -> None:
        """Have the ranks attach, and take what they and the fork server repeat."""
        for process in self.node.processes():
            process.attached = process.attached or not self.ranks[process.id].starting
        for repeat in before.unheard:
            repeat()
        self._notify()

    async def kill(self) -> None:
        """End the agent and its ranks, without a word."""
        self.ended_for_good, self.may_be_followed = True, False
        for task in self._tasks:
            task.cancel()
        for rank in self.ranks.values():
            rank.process.exit_code = -9
        await self.commands.stop()

    def _notify(self) -> None:
        self.changes.notify()
        self._due.set()

    # ---- commands.Host

    async def launch(self, process: Process, _: TaskSpec) -> None:
        key = (self.node.incarnation, process.task, process.worker, process.generation)
        assert key not in self.cluster.launched, f"started twice for one plan: {key}"
        self.cluster.launched.add(key)
        await asyncio.sleep(0.01)
        process.pid = next(self.cluster.pids)
        self.ranks[process.id] = Rank(self, process)
        self.cluster.loop.call_later(START_S, self._attached, process)
        if process.ending:
            self.ended(process, -9)
        self._notify()

    def _attached(self, process: Process) -> None:
        rank = self.ranks[process.id]
        rank.starting = False
        if rank.alive:
            process.attached = True
            rank.agent._notify()

    def send(self, process: Process, message: messages.Message) -> None:
        if isinstance(message, messages.Configure):
            self.cluster.check_members(process.task, message)
        rank = self.ranks.get(process.id)
        if rank is not None:
            self.cluster.loop.call_later(0.002, rank.receive, message)

    def directory(self, task: str, generation: int) -> str:
        return f"/{task}/{generation}"

    async def end(self, processes: Iterable[Process]) -> None:
        ending = [process for process in processes if process.alive]
        for process in ending:
            process.ending = True
            rank = self.ranks.get(process.id)
            if rank is not None:
                self.cluster.loop.call_later(0.05, rank.end, -9)
        await self.changes.until(lambda: not any(p.alive for p in ending))

    async def open_store(self, task: str, generation: int) -> tuple[str, int]:
        await asyncio.sleep(0.02)
        return "store", 1

    def close_stores(self, task: str, before: int | None = None) -> None: ...

    def forget_state(self, task: str) -> None: ...

    # ---- ranks

    def hear(self, process: Process, message: messages.Message) -> None:
        if self.ended_for_good:
            if self.may_be_followed and not isinstance(message, messages.Progress):
                self.unheard.append(lambda: self.ranks[process.id].agent.hear(process, message))
            return
        self.signals += self.node.receive(process, message, at_s=seconds(), now=now())
        if not isinstance(message, messages.Progress):
            self._notify()
        self.changes.notify()

    def ended(self, process: Process, exit_code: int, *, signalled: bool = True) -> None:
        """Note the end of a process. ``signalled``: whether its signal is sent."""
        if not process.alive or process.pid is None:
            return  # without a pid the fork server has not answered; ``launch`` goes on
        rank = self.ranks[process.id]
        rank.ended = True
        if self.ended_for_good:
            if self.may_be_followed:
                self.unheard.append(lambda: rank.agent.ended(process, exit_code, signalled=signalled))
            return
        signals = self.node.exited(process, exit_code, last_output="", now=now())
        if signalled:
            self.signals += signals
        self._notify()

    # ---- to the control plane

    async def _send_signals(self) -> None:
        while True:
            await self.changes.until(lambda: bool(self.signals))
            signal = self.signals[0]
            try:
                await self.cluster.network.request(self.name, lambda s=signal: self.cluster.take_signal(s), 1.0)  # type: ignore[misc]
            except Unavailable:
                await asyncio.sleep(0.1)
                continue
            self.signals.pop(0)

    async def _beat(self) -> None:
        while True:
            self._due.clear()
            self._sequence += 1
            heartbeat = Heartbeat(
                node=self.name,
                incarnation=self.node.incarnation,
                agent_pid=1,
                sequence=self._sequence,
                sent_at=now(),
                interval_s=HEARTBEAT_S,
                supervisor=self.supervisor,
                workers=self.node.status(at_s=seconds(), process_states={}, schedules={}),
            )
            self.cluster.network.post(self.name, lambda h=heartbeat: self.cluster.take_heartbeat(h))  # type: ignore[misc]
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._due.wait()
            except TimeoutError:
                pass


@dataclass
class Cluster:
    """All nodes, and the data plane between them."""

    network: Network
    take_signal: Callable[[Signal], Awaitable[None]]
    take_heartbeat: Callable[[Heartbeat], object]
    steps_of: dict[str, int]
    """Task -> its last step."""

    agents: dict[str, Agent] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    """Task -> updates applied to the state that its newest group has."""
    saved: dict[str, int] = field(default_factory=dict)
    """Task -> the step at which it was saved last."""
    newest: dict[str, int] = field(default_factory=dict)
    """Task -> the most updates that any group of it has applied."""
    again: dict[str, int] = field(default_factory=dict)
    """Task -> updates that had been applied before, and were lost."""
    launched: set[tuple[str, str, str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.pids = itertools.count(1000)
        self._incarnations = itertools.count(1)
        self._groups: dict[tuple[str, int], Group] = {}
        self._members: dict[tuple[str, int], list[list[object]]] = {}

    def step(self, task: str) -> int:
        return self.steps.get(task, 0)

    def group(self, task: str, configure: messages.Configure) -> Group:
        key = task, configure.generation
        if key not in self._groups:
            self._groups[key] = Group(self, task, configure)
        return self._groups[key]

    def check_members(self, task: str, configure: messages.Configure) -> None:
        members = [list(member) for member in configure.members]
        known = self._members.setdefault((task, configure.generation), members)
        assert known == members, f"generation {configure.generation} of {task} configured twice: {known}, {members}"

    def training(self, task: str, generation: int, workers: Iterable[str]) -> bool:
        """Return whether a generation of exactly these workers trains."""
        group = self._groups.get((task, generation))
        return group is not None and group.trains and group.whole and set(group.members) == set(workers)

    def processes(self, task: str) -> set[str]:
        """Return the workers that have a process of the task."""
        return {p.worker for agent in self.agents.values() for p in agent.node.of_task(task)}

    def start_agent(self, name: str, workers: int) -> None:
        incarnation = f"{name}-{next(self._incarnations)}"
        self.agents[name] = Agent(self, name, incarnation, workers, f"supervisor {incarnation}")

    def follow_agent(self, name: str) -> None:
        """Start the successor of an agent that has ended alone, unless its machine has failed since."""
        before = self.agents[name]
        if before.may_be_followed:
            incarnation = f"{name}-{next(self._incarnations)}"
            self.agents[name] = Agent(self, name, incarnation, before.workers, before.supervisor, before)

    async def command(self, node: str, command: Command) -> Reply:
        """Carry out a command at whatever agent the node has now."""
        agent = self.agents.get(node)
        if agent is None or agent.ended_for_good:
            raise Unavailable("nobody listens")
        try:
            return await agent.commands.serve(COMMANDS.request.decode(COMMANDS.request.encode(command)))
        except asyncio.CancelledError:
            raise Unavailable("the agent ended") from None

    def living(self) -> list[Rank]:
        """Return the ranks that live, in the order of their start."""
        return [rank for name in sorted(self.agents) for rank in self.agents[name].ranks.values() if rank.alive]
