"""The clock of a process: it never goes back, and services have one time, whatever their machines' clocks say."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from shared import clock
from shared.bus.connection import Bus
from shared.clock import TOLERANCE_S, SteadyClock
from shared.log import journal as journals
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.messages import common_time
from shared.messages.signals import ProcessExited, received
from shared.model import utc_now
from tests.shared.collector import following
from tests.shared.samples import node_joined

HOUR = timedelta(hours=1)


class SteppedDatetime(datetime):
    """A wall clock that has been stepped back by an hour."""

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return datetime.now(UTC) - HOUR


def test_a_stepped_wall_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = SteadyClock()
    before, process_before = steady.now(), utc_now()
    monkeypatch.setattr(clock, "datetime", SteppedDatetime)
    assert before <= steady.now() < before + HOUR
    assert process_before <= utc_now() < process_before + HOUR


def test_a_clock_that_is_behind_goes_forward_and_none_goes_back() -> None:
    steady, seconds = SteadyClock(), time.monotonic()
    now = steady.now()
    steady.not_before(now - HOUR)
    steady.not_before(now + timedelta(seconds=TOLERANCE_S / 2))
    assert now <= steady.now() < now + timedelta(seconds=time.monotonic() - seconds + TOLERANCE_S / 2)
    steady.not_before(now + HOUR)
    assert steady.now() >= now + HOUR
    assert steady.seconds() - seconds < HOUR.total_seconds()


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch) -> SteadyClock:
    """A clock for the journals of a test alone."""
    own = SteadyClock()
    monkeypatch.setattr(journals, "PROCESS_CLOCK", own)
    return own


async def test_a_follower_is_not_behind_the_log(journal: Journal, own_clock: SteadyClock) -> None:
    ahead = own_clock.now() + HOUR
    other = EventLog(journal.log.url, clock=lambda: ahead)
    try:
        other.append([node_joined(1)])
    finally:
        other.close()
    async with following(journal) as follower:
        await follower.until(1)
        assert own_clock.now() >= ahead


async def test_who_appends_is_not_behind_the_log(journal: Journal, own_clock: SteadyClock) -> None:
    ahead = own_clock.now() + HOUR
    other = EventLog(journal.log.url, clock=lambda: ahead)
    try:
        other.append([node_joined(1)])
    finally:
        other.close()
    await journal.append([node_joined(2)])
    assert own_clock.now() >= ahead


@pytest.mark.parametrize("wrong", [HOUR, -HOUR], ids=["ahead", "behind"])
async def test_a_service_that_starts_takes_the_time_of_those_that_run(wrong: timedelta, bus: Bus) -> None:
    first, second = SteadyClock(), SteadyClock()
    first.adopt(first.now() + wrong)
    before = first.now()
    await common_time.join(bus, first)
    await common_time.join(bus, second)
    assert before <= second.now() <= first.now()


async def test_a_time_that_cannot_be_read_is_ignored(bus: Bus) -> None:
    async def nonsense(_: bytes) -> bytes:
        return b"noon"

    await bus.answer(common_time.TIME.subject, lambda _, data: nonsense(data))
    own = SteadyClock()
    before = own.now()
    await common_time.join(bus, own)
    assert before <= own.now() < before + HOUR


AT = datetime(2026, 1, 1, tzinfo=UTC)


def exited(occurred_at: datetime, sent_at: datetime | None) -> ProcessExited:
    return ProcessExited(
        signal_id="one", node="n0", incarnation="i", occurred_at=occurred_at, sent_at=sent_at, task="gpt",
        worker="n0/0", generation=1, rank=0, step=3, pid=4, exit_code=-9,
    )  # fmt: skip


@pytest.mark.parametrize("wrong", [HOUR, -HOUR, timedelta()], ids=str)
def test_a_signal_tells_how_long_ago_whatever_the_time_is_on_its_node(wrong: timedelta) -> None:
    waited = timedelta(seconds=7)
    signal = exited(AT + wrong, AT + wrong + waited)
    assert received(signal, AT + waited).occurred_at == AT


def test_a_signal_of_an_older_agent_has_the_time_of_its_node() -> None:
    assert received(exited(AT - HOUR, None), AT).occurred_at == AT - HOUR
