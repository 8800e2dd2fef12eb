"""The ranks of the simulation, and the groups in which they meet in collectives.

A *group* is the ranks of one generation. It trains while all its members are there; a member that has died makes the
others raise, one that hangs makes them wait.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.agent.node.process import Process
from tests.reconcile.virtual import seconds, watched
from unicron.protocol import messages

if TYPE_CHECKING:
    from tests.reconcile.nodes import Agent, Cluster

STEP_S = 0.2
JOIN_S = 0.1
"""Joining a generation, once all members are there."""

JOIN_TIMEOUT_S = 10.0
"""For how long a rank waits for the other members."""


@dataclass
class Rank:
    """A process of a task.

    ``mode``: what it does in its generation. ``step``: updates applied to the state that it has; None: it has none.
    """

    agent: Agent
    process: Process
    mode: str = "idle"
    hung: bool = False
    drain: bool = False
    stop: bool = False
    number: int = 0
    group: Group | None = None
    starting: bool = True
    step: int | None = None
    ended: bool = False
    """Whether the process has ended; its agent may not know yet."""

    @property
    def alive(self) -> bool:
        return self.process.alive and not self.ended

    def end(self, exit_code: int) -> None:
        """End, and have whatever agent the node has notice."""
        self.agent.ended(self.process, exit_code)

    def say(self, message: messages.Message) -> None:
        if self.alive:
            self.agent.hear(self.process, message)

    def progress(self, phase: str, step: int, duration_s: float | None = None) -> None:
        assert self.group is not None
        if not self.hung:
            self.say(
                messages.Progress(
                    generation=self.group.generation,
                    rank=self.number,
                    step=step,
                    phase=phase,
                    micro_batch=0,
                    duration_s=duration_s,
                )
            )

    def receive(self, message: messages.Message) -> None:
        """Take a message of the agent. A rank that hangs takes none."""
        if not self.alive or self.hung:
            return
        match message:
            case messages.Configure():
                self.drain = self.stop = False
                self.number, self.mode = message.rank, "joining"
                self.group = self.agent.cluster.group(self.process.task, message)
                self.progress("setup", 0)
                self.group.join(self)
            case messages.Hold():
                self.leave("held")
                self.say(messages.Held(generation=message.generation, step=self.step or 0))
            case messages.Drain():
                self.drain = True
                if self.mode != "training":
                    self.rest()
            case messages.Stop():
                self.stop = True  # one that is between two generations has no peers to save its state with
            case messages.Quit():
                self.end(0)
            case _:
                pass

    def leave(self, mode: str) -> None:
        self.mode = mode
        if self.group is not None:
            self.group.broken = True

    def rest(self) -> None:
        self.mode = "waiting"
        self.say(messages.Drained(generation=self.process.generation, step=self.step or 0))

    def save(self) -> None:
        step = self.step or 0
        self.agent.cluster.saved[self.process.task] = step
        self.say(
            messages.Stopped(generation=self.process.generation, rank=self.number, step=step, path=f"/step-{step}")
        )
        self.end(0)

    def fail(self, kind: str) -> None:
        """Raise, and wait for what comes."""
        if self.mode in ("joining", "training") and not self.hung and self.group is not None:
            self.mode = "broken"
            generation, step = self.group.generation, self.step or 0
            self.say(
                messages.Raised(
                    generation=generation,
                    rank=self.number,
                    step=step,
                    kind=kind,
                    error="Failed",
                    detail="a peer is gone",
                    traceback="",
                )
            )


class Group:
    """The ranks of one generation of a task."""

    def __init__(self, cluster: Cluster, task: str, configure: messages.Configure) -> None:
        self.cluster, self.task, self.generation = cluster, task, configure.generation
        self.members = [str(worker) for _, worker, _ in configure.members]
        self.stored = int(configure.checkpoint.rpartition("-")[2] or 0)
        """The step of the stored state that members read where none of them has a live one."""
        self.ranks: dict[str, Rank] = {}
        self.broken = self.trains = False
        self._run = watched(self._work())

    def join(self, rank: Rank) -> None:
        self.ranks[rank.process.worker] = rank

    @property
    def whole(self) -> bool:
        """Whether every member is there and takes part."""
        return (
            not self.broken
            and set(self.ranks) == set(self.members)
            and all(rank.alive and rank.group is self for rank in self.ranks.values())
        )

    async def _work(self) -> None:
        deadline = seconds() + JOIN_TIMEOUT_S
        while not self.whole:
            await asyncio.sleep(0.05)
            if self.broken or seconds() > deadline:
                return self._break()
        await asyncio.sleep(JOIN_S)
        if await self._wait_for_hung():
            return self._break()
        live = [rank.step for rank in self.ranks.values() if rank.step is not None]
        step = self.cluster.steps[self.task] = max(live, default=self.stored)
        newest = self.cluster.newest.get(self.task, 0)
        self.cluster.again[self.task] = self.cluster.again.get(self.task, 0) + max(0, newest - step)
        for rank in self.ranks.values():
            rank.mode, rank.step = "training", step
            rank.say(messages.Resumed(generation=self.generation, step=step, source="own"))
        self.trains = True
        while True:
            if await self._step():
                self.trains = False
                return self._break()
            if self._at_boundary():
                self.trains = False
                return None

    async def _step(self) -> bool:
        """Do a step; return whether the group broke in it."""
        step = self.cluster.step(self.task)
        for rank in self.ranks.values():
            rank.progress("compute", step + 1)
        await asyncio.sleep(STEP_S / 2)
        for rank in self.ranks.values():
            rank.progress("reduce", step + 1)
        await asyncio.sleep(STEP_S / 2)
        if await self._wait_for_hung():
            return True
        self.cluster.steps[self.task] = step + 1
        self.cluster.newest[self.task] = max(step + 1, self.cluster.newest.get(self.task, 0))
        for rank in self.ranks.values():
            rank.step = step + 1
            rank.progress("ended", step + 1, STEP_S)
        return False

    async def _wait_for_hung(self) -> bool:
        """Wait while a rank hangs; return whether the group broke."""
        while self.whole and any(rank.hung for rank in self.ranks.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return not self.whole

    def _at_boundary(self) -> bool:
        """Let ranks drain, stop or finish; return whether the group ends."""
        ranks = list(self.ranks.values())
        if self.cluster.step(self.task) >= self.cluster.steps_of[self.task]:
            for rank in ranks:
                rank.mode = "finished"
                rank.say(
                    messages.Finished(
                        generation=self.generation,
                        rank=rank.number,
                        step=self.cluster.step(self.task),
                        samples_sha256="s",
                        parameters_path="p",
                    )
                )
                self.cluster.loop.call_later(0.2, rank.end, 0)
            return True
        if not any(rank.drain or rank.stop for rank in ranks):
            return False
        for rank in ranks:
            rank.mode = "waiting"
            if rank.stop:
                rank.save()
            elif rank.drain:
                rank.rest()
        return True

    def _break(self) -> None:
        """The sockets break: who still takes part raises."""
        self.broken = True
        for rank in self.ranks.values():
            if rank.group is self:
                rank.fail("communication")
