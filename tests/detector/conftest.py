"""An agent with real processes on a real bus."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.detector.agent import Agent
from services.detector.changes import Changes
from services.detector.monitor import MonitorService
from shared.bus import Bus
from shared.commands import COMMANDS, Reply
from shared.events import Event
from shared.journal import Journal
from shared.plans import Stage
from shared.settings import Settings
from shared.signals import HEARTBEATS, SIGNAL, SIGNALS, Heartbeat, Signal
from tests.detector.kit import SPEC, stage

STAND_IN = (sys.executable, "-m", "tests.detector.stand_in")
WAIT_S = 20.0


@dataclass
class Ear:
    """Hears what agents say; the signals it answers are those a detector would get."""

    bus: Bus
    changes: Changes = field(default_factory=Changes)
    signals: list[Signal] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    answering: bool = True

    async def signal(self, data: bytes) -> bytes:
        self.signals.append(SIGNAL.validate_json(data))
        self.changes.notify()
        if not self.answering:
            await asyncio.Event().wait()
        return b"+"

    async def heartbeat(self, _: str, data: bytes) -> None:
        self.heartbeats.append(Heartbeat.model_validate_json(data))
        self.changes.notify()

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.changes.until(predicate)

    def kinds(self) -> list[str]:
        return [signal.kind for signal in self.signals]

    def workers(self) -> dict[str, str]:
        return {w.worker: w.state for w in self.heartbeats[-1].workers} if self.heartbeats else {}


@pytest.fixture
async def ear(bus: Bus) -> Ear:
    found = Ear(bus)
    await bus.serve(SIGNALS, found.signal)
    await bus.subscribe(f"{HEARTBEATS}.*", found.heartbeat)
    return found


class Driver:
    """Asks an agent as the transition service does."""

    def __init__(self, bus: Bus, node: str = "n0") -> None:
        self.bus, self.node = bus, node
        self.workers = [f"{node}/0", f"{node}/1"]
        self._ids = itertools.count(1)

    async def ask(self, kind: str, generation: int, **rest: Any) -> Reply:
        command = {"kind": kind, "command_id": f"c{next(self._ids)}", "plan": f"p{generation}", "task": "gpt"}
        return await self.send({**command, "generation": generation, **rest})

    async def send(self, command: dict[str, Any]) -> Reply:
        data = json.dumps(command).encode()
        return Reply.model_validate_json(await self.bus.request(f"{COMMANDS}.{self.node}", data, timeout_s=WAIT_S))

    async def prepare(self, generation: int = 1, workers: Any = None, *, behaviour: str = "train") -> Reply:
        spec = {**SPEC, "env": {"BEHAVIOUR": behaviour}}
        return await self.ask("prepare", generation, workers=workers or self.workers, spec=spec)

    async def configure(self, generation: int = 1, workers: list[str] | None = None) -> Reply:
        joined: Stage = stage(generation, workers or self.workers)
        store = {"store_host": "127.0.0.1", "store_port": 1}
        return await self.ask("configure", generation, stage=joined.model_dump(mode="json"), **store)


@pytest.fixture
async def agent(settings: Settings, bus: Bus) -> AsyncIterator[Agent]:
    started = Agent(settings, bus, command=STAND_IN)
    try:
        await started.start()
        yield started
    finally:
        await started.stop()


@pytest.fixture
def driver(bus: Bus, agent: Agent) -> Driver:
    return Driver(bus)


class LogWatch:
    """Waits for events in the log."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    async def until(self, found: Callable[[list[Event]], bool]) -> list[Event]:
        async with asyncio.timeout(WAIT_S):
            while True:
                events = [r.event for r in await asyncio.to_thread(self.journal.log.read)]
                if found(events):
                    return events
                await asyncio.sleep(0.01)  # the table has no other way to be waited on than to be read


@contextlib.asynccontextmanager
async def watching(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[LogWatch]:
    """A running monitor."""
    ready = asyncio.Event()
    running = asyncio.create_task(MonitorService(settings, bus, journal).run(ready.set))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({waiting, running}, return_when=asyncio.FIRST_COMPLETED)
    assert ready.is_set(), running.exception()
    try:
        yield LogWatch(journal)
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


@pytest.fixture
async def monitor(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[LogWatch]:
    async with watching(settings, bus, journal) as watch:
        yield watch
