"""The services of the simulation: the real cores in shells as thin as ``main`` of each, over a log in memory.

A service that is started again starts from a state snapshot of two thirds of the log, or as far as its last run came.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from services.detector.decide import DetectorLimits, Monitor
from services.detector.decisions.decision import Decision
from services.detector.nodes.leftovers import Clean
from services.detector.state.stalls import StallLimits
from services.detector.state_snapshot import KEPT as DETECTOR
from services.planner.replay.log_fold import Fold
from services.planner.state_snapshot import KEPT as PLANNER
from services.transition import state as transition
from services.transition.decide import decide
from services.transition.evolve import evolve
from services.transition.main import RETRY_S
from services.transition.state_snapshot import KEPT as TRANSITION
from shared.errors import Unavailable
from shared.events.union import EVENT, Event, Recorded
from shared.log.own_events import OwnEvents
from shared.messages.commands import COMMANDS, Command, ReleaseTask, Reply
from shared.messages.self_test import SelfTestResult
from shared.messages.signals import Heartbeat, Signal
from shared.service.changes import Changes
from shared.service.state_snapshots import KeptState
from tests.kept import folded, restored
from tests.planner.kit import answers_to, recorded_answers
from tests.reconcile.nodes import Cluster
from tests.reconcile.virtual import now, watched

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

TRANSITION_LIMITS = transition.TransitionLimits(command_s=20.0, resume_s=40.0, grace_s=2.0)


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

    async def follow(self, handle: Callable[[Recorded], object]) -> None:
        for position in itertools.count():
            await self.changes.until(functools.partial(self._has, position))
            await asyncio.sleep(self._rng.random() * 0.02)
            handle(self.records[position])

    def _has(self, position: int) -> bool:
        return len(self.records) > position


def snapshot(kept: KeptState[S], log: Log) -> tuple[int, S]:
    """Return position and state of a snapshot of the log."""
    until = min(log.handled.get(kept.service, 0), 2 * len(log.records) // 3)
    position, state = folded(kept, log.records, until)
    return position, restored(kept, state)


class Service:
    """One run of a service: ``end`` is its kill."""

    name: str
    after: int
    """Position of the snapshot from which it starts."""

    def __init__(self, log: Log, cluster: Cluster) -> None:
        self.log, self.cluster = log, cluster
        self.tasks: set[asyncio.Task[Any]] = set()
        self.last = len(log.records)
        self.position = 0
        self.own = OwnEvents()
        self.spawn(log.follow(self._record))

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        task = watched(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def end(self) -> None:
        for task in list(self.tasks):
            task.cancel()

    def _record(self, record: Recorded) -> None:
        if record.position > self.after:
            self.take(record)
            self.log.handled[self.name] = record.position
        self.position = record.position
        self.log.changes.notify()

    def take(self, record: Recorded) -> None:
        raise NotImplementedError


class Detector(Service):
    name = DETECTOR.service

    def __init__(self, log: Log, cluster: Cluster) -> None:
        self.after, state = snapshot(DETECTOR, log)
        self.monitor = Monitor(limits=LIMITS, started_at=now(), state=state)
        self.ready = False
        super().__init__(log, cluster)
        if self.last == 0:
            self._begin()

    def _begin(self) -> None:
        self.ready = True
        self.monitor.started_at = now()
        self._carry_out(self.monitor.escalate(now()))
        self.spawn(self._tick())

    def take(self, record: Recorded) -> None:
        if self.own.skip(record.event):
            pass
        elif self.ready:
            self._carry_out(self.monitor.record(record.event, now()))
        else:
            self.monitor.fold(record.event)
        if not self.ready and record.position >= self.last:
            self._begin()

    async def signal(self, signal: Signal) -> None:
        position = len(self.log.records)
        if not self.ready:
            raise Unavailable("starting")
        await self.log.changes.until(lambda: self.position >= position)
        self._carry_out(self.monitor.signal(signal, now()))

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        if self.ready:
            self._carry_out(self.monitor.heartbeat(heartbeat, now()))

    async def _tick(self) -> None:
        while True:
            self.monitor.echo(now())
            self._carry_out(self.monitor.tick(now()))
            await asyncio.sleep(0.1)

    def _carry_out(self, decision: Decision) -> None:
        self.own.add(decision.events)
        self.log.append(decision.events)
        for clean in decision.cleans:
            self.spawn(self._clean(clean))
        for question in decision.tests:
            result = SelfTestResult(incarnation=question.incarnation)
            self._carry_out(self.monitor.tested(question, result))

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


class Planner(Service):
    name = PLANNER.service

    def __init__(self, log: Log, cluster: Cluster) -> None:
        self.after, state = snapshot(PLANNER, log)
        self.fold = Fold(state=state)
        self.answers = recorded_answers(log.records)
        super().__init__(log, cluster)

    def take(self, record: Recorded) -> None:
        if not self.fold.take(record):
            return
        if recorded := answers_to(record, self.answers):
            self.fold.answer(record, [r.event for r in recorded])
        elif decided := self.fold.decide(record):
            self.fold.answer(record, decided)
            self.log.append(decided)


class Transition(Service):
    name = TRANSITION.service

    def __init__(self, log: Log, cluster: Cluster) -> None:
        self.after, state = snapshot(TRANSITION, log)
        self.state = replace(state, limits=TRANSITION_LIMITS)
        self.requests: dict[str, asyncio.Task[None]] = {}
        super().__init__(log, cluster)

    def take(self, record: Recorded) -> None:
        self._input(transition.Logged(record))

    def _input(self, item: transition.Input) -> None:
        if not (isinstance(item, transition.Logged) and self.own.skip(item.record.event)):
            self.state = evolve(self.state, item)
        if isinstance(item, transition.Logged) and item.record.position < self.last:
            return
        self.state, effects = decide(self.state, now())
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: transition.Effect) -> None:
        match effect:
            case transition.Append(event=event):
                self.own.add([event])
                self.log.append([event])
            case transition.Send(command=command):
                request = self.spawn(self._request(effect))
                self.requests[command.command_id] = request
            case transition.Cancel(command_id=command_id):
                if (waiting := self.requests.get(command_id)) is not None:
                    waiting.cancel()
            case transition.Timer():
                self.spawn(self._wait(effect))

    async def _wait(self, timer: transition.Timer) -> None:
        await asyncio.sleep(timer.after_s)
        self._input(transition.TimerFired(timer.plan, timer.task, timer.name, now()))

    async def _request(self, send: transition.Send) -> None:
        reply: Reply | None = None
        try:
            async with asyncio.timeout(send.timeout_s):
                reply = await self._reply(send.node, send.command)
        except TimeoutError:
            pass
        self._input(transition.Replied(send.command.command_id, reply, now()))

    async def _reply(self, node: str, command: Command) -> Reply:
        while True:
            try:
                carry_out = functools.partial(self.cluster.command, node, command)
                return await self.cluster.network.request(node, carry_out, COMMANDS.timeout_s)
            except Unavailable:
                await asyncio.sleep(RETRY_S)
