"""The services of the simulation, over a log in memory: detector and transition service as they are, but for the bus.

A service that is started again starts from a state snapshot of two thirds of the log, or as far as its last run came.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

from prometheus_client import CollectorRegistry

from services.detector import main as detector
from services.detector.decisions.inputs import Input
from services.detector.main import DetectorService
from services.detector.state_snapshot import KEPT as DETECTOR
from services.planner.replay.log_fold import Fold
from services.planner.state.cluster import State
from services.planner.state_snapshot import KEPT as PLANNER
from services.transition import main as transition
from services.transition.main import Transition as TransitionService
from services.transition.state_snapshot import KEPT as TRANSITION
from shared.bus.dropped import DroppedMessages
from shared.bus.endpoints import Endpoint
from shared.bus.newest import Newest
from shared.errors import Unavailable
from shared.events.union import EVENT, Event, Recorded
from shared.messages.commands import COMMANDS, LEFTOVERS
from shared.messages.self_test import SELF_TEST, SelfTestResult
from shared.model import Clock
from shared.service.changes import Changes
from shared.service.core import Append, Logged, Started
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

SETTINGS = Settings(
    hang_floor_s=0.5,
    stop_floor_s=0.5,
    collective_floor_s=2.0,
    slow_region_timeout_s=15.0,
    command_timeout_s=20.0,
    resume_timeout_s=40.0,
)

LIMITS = detector.limits(SETTINGS)

TRANSITION_LIMITS = transition.limits(SETTINGS)


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
    """What a service calls of the bus: it is told what comes, and its commands go over the network."""

    connected = True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._handlers: dict[Endpoint[Any, Any], Callable[[Any], Awaitable[Any]]] = {}

    async def subscribe(self, endpoint: Endpoint[Any, Any], handle: Callable[[Any], Awaitable[Any]], *_: str) -> None:
        self._handlers[endpoint] = handle

    async def newest(self, endpoint: Endpoint[Any, Any], clock: Clock) -> Newest[Any]:
        found: Newest[Any] = Newest(endpoint, DroppedMessages({}), clock)

        async def put(message: Any) -> None:
            await found.put(f"from.{message.node}", endpoint.request.encode(message))

        self._handlers[endpoint] = put
        return found

    async def serve(
        self, endpoint: Endpoint[Any, Any], handle: Callable[[Any], Awaitable[Any]], *, refuse: object
    ) -> None:
        self._handlers[endpoint] = handle

    async def publish(self, endpoint: Endpoint[Any, Any], message: object, *_: str) -> None:
        if endpoint in self._handlers:
            await self._handlers[endpoint](message)

    async def deliver(self, endpoint: Endpoint[Any, Any], message: object) -> None:
        """Have a request answered.

        Raises:
            Unavailable: nobody has subscribed.
        """
        if endpoint not in self._handlers:
            raise Unavailable("starting")
        await self._handlers[endpoint](message)

    async def call(
        self, endpoint: Endpoint[Any, Any], request: Any, node: str, *, timeout_s: float | None = None
    ) -> Any:
        if endpoint is SELF_TEST:
            return SelfTestResult(incarnation=self._cluster.agents[node].node.incarnation)
        if endpoint not in (COMMANDS, LEFTOVERS):
            raise Unavailable("no agent here answers that")
        carry_out = functools.partial(self._cluster.command, node, request)
        return await self._cluster.network.request(node, carry_out, endpoint.timeout_s)


def context(log: ServiceLog[Any], bus: Bus) -> Context:
    """Return what a service gets from its frame."""
    parts = SimpleNamespace(
        lease=None,
        name="service",
        journal=log,
        bus=bus,
        settings=SETTINGS,
        registry=CollectorRegistry(),
        ready=lambda: None,
    )
    return cast("Context", parts)


class Detector(DetectorService):
    def __init__(self, log: Log, cluster: Cluster) -> None:
        own, self.bus = ServiceLog(log, DETECTOR), Bus(cluster)
        super().__init__(context(own, self.bus), cast("StateKeeper[Any]", own), now)

    async def _take(self, item: Input, what: str, at: datetime | None = None) -> None:
        """Decide. What the core fails on is no reason to go on."""
        await self.feed(item, at)


class Planner(Runner[State, Logged | Started, Append]):
    def __init__(self, log: Log, cluster: Cluster) -> None:
        own = ServiceLog(log, PLANNER)
        self.plans = Fold()
        super().__init__(context(own, Bus(cluster)), self.plans, now, own)
        self.records = log.records

    async def end_of_log(self) -> int:
        """Fold the log as ``LogStart`` does."""
        last, answers = len(self.records), recorded_answers(self.records)
        for record in self.records[self.position : last]:
            if self.plans.take(record):
                answer = [each.event for each in answers_to(record, answers)] or self.plans.decide(record)
                self.plans.answer(record, answer)
                await self._context.journal.append(answer)
        self.position = last
        return last

    def decide(self, state: State, item: Logged | Started, at: datetime) -> tuple[State, list[Append]]:
        if not isinstance(item, Logged) or not (decided := self.plans.decide(item.record)):
            return state, []
        self.plans.answer(item.record, decided)
        return self.plans.state, [Append(decided)]


class Transition(TransitionService):
    def __init__(self, log: Log, cluster: Cluster) -> None:
        own = ServiceLog(log, TRANSITION)
        super().__init__(context(own, Bus(cluster)), cast("StateKeeper[Any]", own), now)
