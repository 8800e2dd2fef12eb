"""The services of the simulation, over a log in memory: the transition service as it is, and the cores of the others.

A service that is started again starts from a state snapshot of two thirds of the log, or as far as its last run came.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

from prometheus_client import CollectorRegistry

from services.detector.decide import DetectorLimits, Monitor
from services.detector.evolve import evolve
from services.detector.incidents import observations
from services.detector.nodes.leftovers import Clean
from services.detector.state.cluster import DetectorState
from services.detector.state.stalls import StallLimits
from services.detector.state.unlogged import SelfTestQuestion
from services.detector.state_snapshot import KEPT as DETECTOR
from services.planner.replay.log_fold import Fold
from services.planner.state.cluster import State
from services.planner.state_snapshot import KEPT as PLANNER
from services.transition.main import Transition, limits
from services.transition.state_snapshot import KEPT as TRANSITION
from shared.bus.endpoints import Endpoint
from shared.errors import Unavailable
from shared.events.union import EVENT, Event, Recorded
from shared.messages.commands import Command, ReleaseTask, Reply
from shared.messages.self_test import SelfTestResult
from shared.messages.signals import Heartbeat, Signal
from shared.service.changes import Changes
from shared.service.core import Append, Logged, Started, StateFold
from shared.service.frame import Context
from shared.service.runner import Runner
from shared.service.state_keeper import StateKeeper
from shared.service.state_snapshots import KeptState
from shared.settings.model import Settings
from tests.kept import folded, restored
from tests.planner.kit import answers_to, recorded_answers
from tests.reconcile.nodes import Cluster
from tests.reconcile.virtual import now

S = TypeVar("S")

LIMITS = DetectorLimits(
    heartbeat_interval_s=0.25,
    node_timeout_s=1.5,
    progress_interval_s=5.0,
    restart_window_s=600.0,
    stalls=StallLimits(
        hang_factor=3.0,
        hang_floor_s=0.5,
        stop_factor=3.0,
        stop_floor_s=0.5,
        collective_floor_s=2.0,
        slow_region_timeout_s=15.0,
    ),
)

SETTINGS = Settings(command_timeout_s=20.0, resume_timeout_s=40.0, slow_region_timeout_s=15.0, node_timeout_s=1.5)

TRANSITION_LIMITS = limits(SETTINGS)


class Log:
    """The log in memory: an event id once, followers in log order."""

    def __init__(self, rng: random.Random) -> None:
        self.records: list[Recorded] = []
        self.changes = Changes()
        self._rng = rng
        self._by_id: dict[str, str] = {}
        self.handled: dict[str, int] = {}
        """Service -> the position up to which its last run has handled the log."""

    def append(self, events: Sequence[Event]) -> None:
        for event in events:
            text = event.canonical()
            known = self._by_id.setdefault(event.event_id, text)
            assert known == text, f"event {event.event_id} twice, with different content:\n{known}\n{text}"
            if known is not text:
                continue
            self.records.append(
                Recorded(
                    position=len(self.records) + 1,
                    stream=event.stream,
                    stream_version=1,
                    recorded_at=now(),
                    event=EVENT.validate_json(text),
                    previous_hash="",
                    hash="",
                )
            )
        self.changes.notify()

    def _has(self, position: int) -> bool:
        return len(self.records) > position

    async def wait(self, position: int) -> Recorded:
        """Return the record behind a position, some time after it is there."""
        await self.changes.until(functools.partial(self._has, position))
        await asyncio.sleep(self._rng.random() * 0.02)
        return self.records[position]


class ServiceLog(Generic[S]):
    """The log and the snapshots as a service has them (``shared.service.runner``)."""

    def __init__(self, log: Log, kept: KeptState[S]) -> None:
        self._log, self._kept = log, kept

    async def append(self, events: Sequence[Event]) -> None:
        self._log.append(events)

    async def follow(self, handle: Callable[[Recorded], Awaitable[None]], *, consumer: str, after: int) -> None:
        for position in itertools.count(after):
            await handle(await self._log.wait(position))

    async def last_position(self) -> int:
        return len(self._log.records)

    position_now = last_position

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def load(self) -> tuple[int, S]:
        until = min(self._log.handled.get(self._kept.service, 0), 2 * len(self._log.records) // 3)
        position, state = folded(self._kept, self._log.records, until)
        return position, restored(self._kept, state)

    def handled(self, position: int) -> None:
        self._log.handled[self._kept.service] = position


class Bus:
    """What the transition service calls of the bus: agents' commands, over the network."""

    connected = True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def call(self, endpoint: Endpoint[Command, Reply], command: Command, node: str) -> Reply:
        carry_out = functools.partial(self._cluster.command, node, command)
        return await self._cluster.network.request(node, carry_out, endpoint.timeout_s)


class Detector(Runner[DetectorState, Any, Any]):
    def __init__(self, log: Log, cluster: Cluster) -> None:
        own = ServiceLog(log, DETECTOR)
        fold = StateFold(lambda state, event, at: evolve(state, event), DetectorState())
        super().__init__(DETECTOR.service, own, fold, now, own)
        self.monitor = Monitor(limits=LIMITS, started_at=now())
        self.cluster = cluster

    def decide(self, state: DetectorState, item: Any, at: datetime) -> tuple[DetectorState, list[Any]]:
        self.monitor.state = state
        match item:
            case Started():
                self.monitor.started_at = at
                decision = self.monitor.escalate(at)
            case Logged(record=record):
                observations.settle(state, record.event, at)
                decision = self.monitor.escalate(at)
            case SelfTestQuestion():
                decision = self.monitor.tested(item, SelfTestResult(incarnation=item.incarnation))
            case Heartbeat():
                decision = self.monitor.heartbeat(item, at)
            case None:
                self.monitor.echo(at)
                decision = self.monitor.tick(at)
            case _:
                decision = self.monitor.signal(item, at)
        appends = [Append(decision.events)] if decision.events else []
        return state, [*appends, *decision.cleans, *decision.tests]

    def perform(self, effect: Any) -> None:
        match effect:
            case Clean():
                self.spawn(self._clean(effect), "clean")
            case SelfTestQuestion():
                self.spawn(self._feed(effect), "self-test")

    async def begin(self) -> None:
        while True:
            await self.feed(None)
            await asyncio.sleep(0.1)

    async def signal(self, signal: Signal) -> None:
        if not self.started.is_set():
            raise Unavailable("starting")
        await self.has_folded_log()
        await self.feed(signal)

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        if self.started.is_set():
            self.spawn(self._feed(heartbeat), "heartbeat")

    async def _feed(self, item: Any) -> None:
        await self.feed(item)

    async def _clean(self, clean: Clean) -> None:
        command = ReleaseTask(
            command_id=str(uuid.uuid4()),
            plan=f"clean/{clean.node}",
            task=clean.task,
            generation=clean.generation,
            workers=clean.workers,
        )
        try:
            await self.cluster.network.request(clean.node, lambda: self.cluster.command(clean.node, command), 5.0)
        except Unavailable:
            pass


class Planner(Runner[State, Logged | Started, Append]):
    def __init__(self, log: Log, cluster: Cluster) -> None:
        own = ServiceLog(log, PLANNER)
        self.plans = Fold()
        super().__init__(PLANNER.service, own, self.plans, now, own)
        self.answers = recorded_answers(log.records)

    async def recorded(self, record: Recorded) -> list[Event] | None:
        return [answer.event for answer in answers_to(record, self.answers)] or None

    def decide(self, state: State, item: Logged | Started, at: datetime) -> tuple[State, list[Append]]:
        if not isinstance(item, Logged) or not (decided := self.plans.decide(item.record)):
            return state, []
        self.plans.answer(item.record, decided)
        return self.plans.state, [Append(decided)]


def transition(log: Log, cluster: Cluster) -> Transition:
    """Return the service as it is, on this log and these agents."""
    own = ServiceLog(log, TRANSITION)
    context = SimpleNamespace(
        journal=own, bus=Bus(cluster), settings=SETTINGS, registry=CollectorRegistry(), ready=lambda: None
    )
    return Transition(cast("Context", context), cast("StateKeeper[Any]", own), now)
