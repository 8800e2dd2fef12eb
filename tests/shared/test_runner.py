"""The frame of services: each event is folded once, in order, and what is begun follows from what is in the log."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import Unavailable
from shared.events.union import EventBase, Recorded, TaskStopRequested, derived_id
from shared.model import utc_now
from shared.service.changes import Changes
from shared.service.core import Append, Logged, Started, StateFold
from shared.service.frame import Context
from shared.service.runner import Runner

AT = utc_now()
LIMIT_S = 10.0

State = tuple[str, ...]
"""Ids of the events that were folded, in order."""


def event(event_id: str) -> TaskStopRequested:
    return TaskStopRequested(event_id=event_id, occurred_at=AT, task="a")


def answers_to(cause: EventBase) -> list[TaskStopRequested]:
    """As many events as the id of a foreign event says."""
    _, _, number = cause.event_id.partition("/")
    return [event(derived_id(cause.event_id, "service", index)) for index in range(int(number or 0))]


def evolve(state: State, event: EventBase, at: datetime) -> State:
    return (*state, event.event_id)


@dataclass
class Log:
    """A log in memory, as a journal has it."""

    records: list[Recorded] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)
    broken: bool = False

    async def append(self, events: Sequence[TaskStopRequested]) -> None:
        if self.broken:
            raise Unavailable("the log is away")
        for each in events:
            place: dict[str, Any] = {"position": len(self.records) + 1, "stream_version": 1, "recorded_at": AT}
            self.records.append(Recorded(**place, stream=each.stream, event=each, previous_hash="", hash=""))
        self.changes.notify()
        await asyncio.sleep(0)  # others have their turn, as while a database answers

    async def follow(self, handle: Callable[[Recorded], Awaitable[None]], *, consumer: str, after: int) -> None:
        for position in itertools.count(after):
            await self.changes.until(lambda wanted=position: len(self.records) > wanted)  # type: ignore[misc]
            await handle(self.records[position])

    async def last_position(self) -> int:
        return len(self.records)

    position_now = last_position

    def ids(self) -> list[str]:
        return [record.event.event_id for record in self.records]


@dataclass
class Snapshots:
    """A snapshot to start from, and the positions that were handled."""

    found: tuple[int, State] | None = None
    positions: list[int] = field(default_factory=list)

    async def load(self) -> tuple[int, State] | None:
        return self.found

    def handled(self, position: int) -> None:
        self.positions.append(position)


@dataclass(frozen=True)
class Begun:
    """An effect of the service: what was in the log when it was begun counts. ``of``: the input."""

    of: str


class Service(Runner[State, str, Append | Begun]):
    """Answers each foreign event of the log, and each input, which is such an id; ``log``: where."""

    def __init__(self, log: Log, snapshots: Snapshots | None = None) -> None:
        self.ready = asyncio.Event()
        context = SimpleNamespace(name="service", journal=log, ready=self.ready.set, lease=None)
        super().__init__(cast("Context", context), StateFold(evolve, ()), utc_now, snapshots)
        self.log = log
        self.decided: list[str] = []
        self.begun: list[tuple[str, int]] = []

    def decide(self, state: State, item: str | Logged | Started, at: datetime) -> tuple[State, list[Append | Begun]]:
        name = item if isinstance(item, str) else item.record.event.event_id if isinstance(item, Logged) else "started"
        if name == "wrong":
            raise ValueError(name)
        self.decided.append(name)
        events = answers_to(event(name))
        for each in events:
            state = evolve(state, each, at)
        return state, [*([Append(events)] if events else []), Begun(name)]

    def perform(self, effect: Append | Begun) -> None:
        if isinstance(effect, Begun):
            self.begun.append((effect.of, len(self.log.records)))


@contextlib.asynccontextmanager
async def running(service: Service) -> AsyncIterator[asyncio.Task[None]]:
    """Run a service, ready, for the length of the block."""
    async with asyncio.timeout(LIMIT_S):
        task = asyncio.create_task(service.run())
        try:
            await service.ready.wait()
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})


def of(cause: str) -> Iterator[str]:
    yield cause
    yield from (answer.event_id for answer in answers_to(event(cause)))


@given(st.lists(st.none() | st.integers(0, 3), max_size=30))
def test_each_event_is_folded_once_and_answers_follow_their_cause(course: list[int | None]) -> None:
    """``course``: None delivers the next event; a number appends a foreign event with that many answers."""
    log, fold = Log(), StateFold(evolve, cast("State", ()))

    def append(*events: TaskStopRequested) -> None:
        asyncio.run(replace(log).append(events))

    def deliver(position: int) -> None:
        record = log.records[position]
        if fold.take(record):
            answers = answers_to(record.event)
            fold.answer(record, answers)
            append(*answers)

    delivered = 0
    for number, answers in enumerate(course):
        if answers is not None:
            append(event(f"{number}/{answers}"))
        elif delivered < len(log.records):
            deliver(delivered)
            delivered += 1
    while delivered < len(log.records):
        deliver(delivered)
        delivered += 1
    assert fold.is_delivered
    causes = [each for each in log.ids() if "/" in each]
    assert list(fold.state) == [each for cause in causes for each in of(cause)]
    assert sorted(fold.state) == sorted(log.ids())


def test_an_event_that_comes_again_is_skipped_once_only() -> None:
    log, fold = Log(), StateFold(evolve, cast("State", ()))
    asyncio.run(log.append([event("cause"), event("a"), event("b")]))
    cause, a, b = log.records
    assert fold.take(cause)
    fold.answer(cause, [event("a"), event("b")])
    assert [fold.take(record) for record in (b, b, a)] == [False, True, False]
    assert fold.state == ("cause", "a", "b", "b")
    assert fold.is_delivered


async def test_what_the_log_has_at_the_start_is_folded_and_what_comes_is_decided_on() -> None:
    log, snapshots = Log(), Snapshots(found=(1, ("0/1",)))
    await log.append([event("0/1"), *answers_to(event("0/1")), event("1/2")])
    service = Service(log, snapshots)
    async with running(service):
        assert service.decided == ["started"]
        assert list(service.state) == [*of("0/1"), "1/2"]
        await log.append([event("2/1")])
        await service.has_folded_log()
        await service.has_folded_log()  # and the answer
    assert service.decided == ["started", "2/1"]
    assert list(service.state) == [*of("0/1"), "1/2", *of("2/1")]
    assert log.ids() == [*of("0/1"), "1/2", *of("2/1")]
    assert snapshots.positions == [2, 3, 4, 5]
    assert service.fold.is_delivered


async def test_inputs_take_turns_and_effects_begin_once_events_are_in_the_log() -> None:
    log = Log()
    service = Service(log)
    async with running(service):
        effects = await asyncio.gather(*(service.feed(f"{number}/2") for number in range(3)))
        await service.has_folded_log()
    assert service.begun == [("started", 0), ("0/2", 2), ("1/2", 4), ("2/2", 6)]
    assert [found[-1] for found in effects] == [Begun(f"{number}/2") for number in range(3)]
    assert list(service.state) == log.ids()
    assert service.taken[str] == 3


async def test_events_that_cannot_be_appended_end_the_service() -> None:
    """They are in its state: what it decides from then on would follow from what never was."""
    log = Log()
    service = Service(log)
    async with running(service) as task:
        log.broken = True
        with pytest.raises(Unavailable):
            await service.feed("0/1")
        with pytest.raises(Unavailable):
            await task
    assert service.begun == [("started", 0)]


async def test_an_input_that_the_core_fails_on_is_its_bringers_matter() -> None:
    service = Service(Log())
    async with running(service):
        with pytest.raises(ValueError, match="wrong"):
            await service.feed("wrong")
        assert await service.feed("0/0") == [Begun("0/0")]


@pytest.mark.parametrize("begins", ["record", "work"])
async def test_a_record_or_work_beside_that_fails_ends_the_service(begins: str) -> None:
    async def fail() -> None:
        raise ValueError("wrong")

    log = Log()
    service = Service(log)
    async with running(service) as task:
        if begins == "record":
            await log.append([event("wrong")])
        else:
            service.spawn(fail(), "fails")
        with pytest.raises(ValueError, match="wrong"):
            await task
