"""The whole system in simulated time: services, nodes, a network that fails, and faults at given times."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import HealthCheck, Phase, settings

from shared.errors import Unavailable
from shared.events.union import ClusterConfigured, TaskStopRequested, TaskSubmitted
from shared.messages.signals import HEARTBEATS, SIGNALS, Heartbeat, Signal
from shared.service.runner import Runner
from tests.examples import examples
from tests.planner.kit import spec
from tests.reconcile.nodes import Cluster
from tests.reconcile.services import Detector, Log, Planner, Transition
from tests.reconcile.virtual import FAILED, Network, now, seconds, watched

Kind = Literal[
    "exit",
    "vanish",
    "hang",
    "silence",
    "agent",
    "restart",
    "detector",
    "planner",
    "transition",
    "stop",
    "kill",
    "finish",
    "submit",
]

WORKERS = {"n0": 2, "n1": 1, "n2": 1}

LIMIT_S = 400.0
"""Within this time after the network has healed everything has settled. A wait for another task's worker takes up to
140 s with the limits here (``TransitionLimits.wait_s``), and a node may be given up after that."""


def courses(usual: int) -> settings:
    """Return the settings of a test that draws a share of courses (``examples``), the same ones in each run.

    A failing course is not made smaller.
    """
    return settings(
        max_examples=examples(usual),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )


@dataclass(frozen=True)
class ScheduledFault:
    """``which`` selects the rank, node or task."""

    at_s: float
    kind: Kind
    which: int
    lasts_s: float = 1.0


@dataclass(frozen=True)
class Script:
    """What happens, until ``healed_s``."""

    seed: int
    loss: float = 0.0
    repeat: float = 0.0
    delay_s: float = 0.0
    faults: list[ScheduledFault] = field(default_factory=list)
    healed_s: float = 20.0
    max_restarts: int = 20
    tasks: tuple[tuple[str, int], ...] = (("a", 3), ("b", 2))
    """Name and most workers of each task."""
    calm_s: float = 3.0
    """For so long the cluster must stay as it is, to count as settled."""


class Simulation:
    """One run of a script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        rng = random.Random(script.seed)
        self.network = Network(rng, script.loss, script.repeat, script.delay_s)
        self.log = Log(rng)
        self.cluster = Cluster(self.network, self._signal, self._heartbeat, {"a": 10**6, "b": 10**6})
        self.services: dict[str, Runner[Any, Any, Any]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._background: list[asyncio.Task[None]] = []

    @property
    def detector(self) -> Detector | None:
        found = self.services.get("detector")
        assert found is None or isinstance(found, Detector)
        return found

    async def _signal(self, signal: Signal) -> None:
        if self.detector is None:
            raise Unavailable("no detector")
        await self.detector.bus.deliver(SIGNALS, signal)

    def _heartbeat(self, heartbeat: Heartbeat) -> None:
        if self.detector is not None:
            watched(self.detector.bus.publish(HEARTBEATS, heartbeat))

    def _start(self, name: str) -> None:
        kinds: dict[str, Callable[[Log, Cluster], Runner[Any, Any, Any]]] = {
            "detector": Detector,
            "planner": Planner,
            "transition": Transition,
        }
        self.services[name] = kinds[name](self.log, self.cluster)
        self._running[name] = watched(self.services[name].run())

    def kill(self, name: str) -> None:
        del self.services[name]
        self._running.pop(name).cancel()

    async def run(self) -> str:
        """Run the script and wait until all has settled; return what has not settled, empty if all has."""
        FAILED.clear()
        try:
            return await self._run()
        finally:
            for name in list(self.services):
                self.kill(name)
            for agent in self.cluster.agents.values():
                await agent.kill()
            for task in self._background:
                task.cancel()

    async def _run(self) -> str:
        parameters = {"mtbf_node_s": 1e6, "throughput_hysteresis": 0.2, "transition_prior_s": 2.0}
        rates = {"worker_flop_per_s": 5e9, "price_per_worker_hour": 2.0, "currency": "USD"}
        self.log.append([ClusterConfigured(event_id="configured", occurred_at=now(), **parameters, **rates)])  # type: ignore[arg-type]
        for name in ("planner", "detector", "transition"):
            self._start(name)
        for node, workers in WORKERS.items():
            self.cluster.start_agent(node, workers)
        for name, most in self.script.tasks:
            self.submit(name, most, f"submit-{name}")
        for fault in self.script.faults:
            self._background.append(watched(self._inject(fault)))
        self._background.append(watched(self.course()))
        await asyncio.sleep(self.script.healed_s)
        self.network.heal()
        await asyncio.gather(*self._background)
        deadline, calm_since = seconds() + LIMIT_S, seconds()
        while True:
            await asyncio.sleep(0.25)
            if FAILED:
                raise FAILED[0]
            unsettled = self.unsettled()
            if unsettled:
                calm_since = seconds()
            if seconds() - calm_since > self.script.calm_s or seconds() > deadline:
                return unsettled

    def submit(self, name: str, most_workers: int, event_id: str) -> None:
        task = spec(
            name,
            workers={"min": 1, "max": most_workers},
            max_restarts=self.script.max_restarts,
            checkpoint={"every": 10},
        )
        saved = self.cluster.saved.get(name, 0)
        event = TaskSubmitted(
            event_id=event_id,
            occurred_at=now(),
            task=name,
            spec=task,
            checkpoint=f"/step-{saved}" if saved else "",
            step=saved,
        )
        self.log.append([event])

    async def course(self) -> None:
        """Do what a test adds to its script's faults; nothing here."""

    # ---- faults

    async def _inject(self, fault: ScheduledFault) -> None:
        await asyncio.sleep(fault.at_s)
        ranks, nodes = self.cluster.living(), sorted(WORKERS)
        rank = ranks[fault.which % len(ranks)] if ranks else None
        node, task = nodes[fault.which % len(nodes)], "ab"[fault.which % 2]
        match fault.kind:
            case "exit" | "vanish" if rank is not None:
                rank.agent.ended(rank.process, -9, signalled=fault.kind == "exit")
            case "hang" if rank is not None and rank.mode == "training":
                rank.hung = True
            case "silence":
                self.network.cut.add(node)
                await asyncio.sleep(fault.lasts_s)
                self.network.cut.discard(node)
            case "agent":
                await self.cluster.agents[node].kill()
                await asyncio.sleep(fault.lasts_s)
                if self.cluster.agents[node].ended_for_good:
                    self.cluster.start_agent(node, WORKERS[node])
            case "restart" if not self.cluster.agents[node].ended_for_good:
                await self.cluster.agents[node].part()
                await asyncio.sleep(fault.lasts_s)
                self.cluster.follow_agent(node)
            case "detector" | "planner" | "transition" if fault.kind in self.services:
                self.kill(fault.kind)
                await asyncio.sleep(fault.lasts_s)
                self._start(fault.kind)
            case "stop" | "kill":
                kill = fault.kind == "kill"
                request = TaskStopRequested(
                    event_id=f"{fault.kind}-{fault.at_s}-{task}",
                    occurred_at=now(),
                    task=task,
                    lose_steps=kill,
                    at_once=kill,
                )
                self.log.append([request])
            case "finish":
                self.cluster.steps_of[task] = self.cluster.step(task) + 1
            case "submit" if self._has_ended(task):
                self.cluster.steps_of[task] = 10**6
                self.submit(task, 2, f"submit-{fault.at_s}-{task}")
            case _:
                pass

    def _has_ended(self, name: str) -> bool:
        """Return whether the newest event of the task's life in the log is its end, as the api has to know."""
        kinds = [r.event.type for r in self.log.records if r.stream == f"task/{name}"]
        lives = [kind for kind in kinds if kind in ("task.submitted", "task.finished", "task.failed")]
        return lives[-1] != "task.submitted"

    # ---- whether all has settled

    def unsettled(self) -> str:
        """Return what is not as it should be, in words; empty if nothing is left to do."""
        detector, planner, mover = (self.services.get(name) for name in ("detector", "planner", "transition"))
        assert isinstance(detector, Detector)
        assert isinstance(planner, Planner)
        assert isinstance(mover, Transition)
        if any(service.position < len(self.log.records) for service in self.services.values()):
            return "the log has not been read"
        if lost := [node.name for node in detector.state.nodes.values() if node.lost is not None]:
            return f"nodes {lost} are healthy and count as lost"
        for name, task in planner.state.tasks.items():
            watched, part = detector.state.tasks.get(name), mover.state.task(name).part
            there = self.cluster.processes(name)
            if part is not None and part.active:
                return f"{name}: the transition service carries out {part.plan}: {sorted(part.runs)}"
            if task.life == "ended" or not task.members:
                if there:
                    return f"{name}: {task.life}, and has processes on {sorted(there)}"
                if task.life != "ended" and not task.queued:
                    return f"{name}: {task.life} without workers and without a reason"
                continue
            assert watched is not None, "the detector takes it for ended"
            if task.change is not None or watched.change is not None or watched.unanswered:
                return f"{name}: plan {task.plan} is outstanding: {watched.change}, {watched.unanswered}"
            if there != set(task.members):
                return f"{name}: processes on {sorted(there)}, planned on {sorted(task.members)}"
            if not self.cluster.training(name, watched.generation, task.members):
                return f"{name}: generation {watched.generation} on {task.members} does not train"
        return ""
