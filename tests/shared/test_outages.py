"""The database goes away under the journal: it waits, goes on, and appends and delivers every event once."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import create_engine

from shared.bus.connection import Bus
from shared.bus.outages import LOG, Outages
from shared.errors import AccessDenied, Corrupt, Unavailable
from shared.log.driver_errors import database_errors
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.log.schema import StoredRow, begin_write
from shared.service.frame import Context
from shared.settings.model import Settings
from tests.condition import until
from tests.postgres import PostgresServer, find_binaries
from tests.shared.collector import Collector, following
from tests.shared.cutter import Cutter
from tests.shared.samples import node_joined

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A server that the tests of this module may kill."""
    if find_binaries() is None:
        pytest.skip("no server binaries of PostgreSQL are installed")
    with PostgresServer() as server:
        yield server


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """The server with an empty database."""
    yield postgres
    postgres.execute("DROP TABLE IF EXISTS log CASCADE")
    postgres.execute("DROP FUNCTION IF EXISTS log_refuse")


@pytest.fixture
async def journal(database: PostgresServer, bus: Bus) -> AsyncIterator[Journal]:
    """The log in PostgreSQL, with its relay running."""
    log = EventLog(database.url)
    async with Journal(log, bus) as opened:
        yield opened
    log.close()


async def test_a_killed_database_is_waited_for(journal: Journal, database: PostgresServer) -> None:
    """Followers and appenders go on, the waits are shown meanwhile, and every event is there once, in order."""
    async with following(journal) as follower:
        await journal.append([node_joined(1)])
        await follower.until(1)
        assert journal.outages.detail == ""
        database.kill()
        appending = [asyncio.create_task(journal.append([node_joined(number)])) for number in (2, 3, 4)]
        await until(lambda: "waiting for the log: log postgres: " in journal.outages.detail)
        assert not any(task.done() for task in appending)
        database.start()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*appending)
        await follower.until(4)
        await until(lambda: journal.outages.detail == "")
        await journal.append([node_joined(5)])
        await follower.until(5)
        assert follower.records == journal.log.read()
    assert journal.log.verify().ok
    assert sorted(r.event.event_id for r in follower.records) == sorted(node_joined(n).event_id for n in range(1, 6))
    assert await journal.relay() == 5


@pytest.mark.parametrize("how", ["before", "after"])
async def test_an_append_whose_outcome_is_unknown(
    how: Literal["before", "after"], database: PostgresServer, bus: Bus, tmp_path: Path
) -> None:
    """The connection is lost in COMMIT: whether the server has done it or not, the event is in the log once."""
    async with Cutter(database.folder, tmp_path) as cutter:
        log = await asyncio.to_thread(EventLog, cutter.url)
        async with Journal(log, bus) as journal:
            (first,) = await journal.append([node_joined(1)])
            cutter.cut = how
            (second,) = await journal.append([node_joined(2)], expected={"node/n0": 1})
            assert cutter.cuts == 1
            (third,) = await journal.append([node_joined(3)])
            assert await asyncio.to_thread(log.read) == [first, second, third]
            assert [record.position for record in (first, second, third)] == [1, 2, 3]
        await asyncio.to_thread(log.close)


@pytest.mark.slow
async def test_an_append_has_a_limit_where_one_is_given(journal: Journal, database: PostgresServer) -> None:
    database.kill()
    with pytest.raises(Unavailable, match="log postgres"):
        await journal.append([node_joined(1)], limit_s=0.2)
    database.start()
    assert await journal.append([node_joined(1)])


async def test_a_sleep_begins_anew_after_an_outage(journal: Journal, database: PostgresServer) -> None:
    """Nothing that the sleeper waits for can happen while the log is away, even if it notices the outage only late."""
    database.kill()
    sleeping = asyncio.create_task(journal.sleep(0.05))
    await until(lambda: journal.outages.detail)
    assert not sleeping.done()
    database.start()
    async with asyncio.timeout(LIMIT_S):
        await sleeping
    assert journal.outages.detail == ""
    assert journal.outages.count == 2


async def test_a_writer_that_says_nothing_any_more_keeps_nobody_waiting(
    database: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the power of its machine had failed between two statements of an append. If it lives, it tries again."""
    log = await asyncio.to_thread(EventLog, database.url)
    engine = create_engine(database.url)
    with engine.connect() as abandoned:
        with monkeypatch.context() as short:
            short.setattr("shared.log.schema.ABANDONED_S", 0.2)
            begin_write(abandoned)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.to_thread(log.append, [node_joined(1)])
        with pytest.raises(Unavailable, match="idle-in-transaction"), database_errors("log"):
            abandoned.exec_driver_sql("SELECT 1")
        abandoned.invalidate()
    engine.dispose()
    log.close()


async def test_a_log_that_lost_events_ends_the_following(journal: Journal, database: PostgresServer) -> None:
    """A server takes over that lacks the newest events: who has folded them must not go on, and says so."""
    collector = Collector()
    await journal.append([node_joined(1), node_joined(2), node_joined(3)])
    task = asyncio.create_task(journal.follow(collector.handle, consumer="test", after=0))
    await collector.until(3)
    database.execute("ALTER TABLE log DISABLE TRIGGER ALL; DELETE FROM log WHERE position = 3")
    with pytest.raises(Corrupt, match="no longer has the event at position 3"):
        async with asyncio.timeout(LIMIT_S):
            await task


async def test_a_table_that_is_gone_is_no_outage(journal: Journal, database: PostgresServer) -> None:
    database.execute("ALTER TABLE log RENAME TO elsewhere")
    try:
        with pytest.raises(Corrupt, match='relation "log" does not exist'):
            await journal.append([node_joined(1)])
    finally:
        database.execute("ALTER TABLE elsewhere RENAME TO log")


async def test_who_starts_waits_for_a_database_that_starts(database: PostgresServer) -> None:
    database.kill()
    outages = Outages()
    opening = functools.partial(EventLog, database.url)
    with pytest.raises(Unavailable):
        await outages.outlast(LOG, opening, limit_s=0.2, starting=True)
    waiting = asyncio.create_task(outages.outlast(LOG, opening, limit_s=LIMIT_S, starting=True))
    await until(lambda: outages.detail)
    database.start()
    (await waiting).close()


@pytest.mark.parametrize("change", [("postgres@", "nobody@"), ("/postgres?", "/nowhere?")])
async def test_who_starts_does_not_wait_for_one_that_refuses(database: PostgresServer, change: tuple[str, str]) -> None:
    opening = functools.partial(EventLog, database.url.replace(*change))
    with pytest.raises(AccessDenied, match="does not exist"):
        await Outages().outlast(LOG, opening, limit_s=1e6, starting=True)


async def test_a_wrong_password_is_a_refusal(database: PostgresServer) -> None:
    database.execute("CREATE ROLE locked LOGIN PASSWORD 'right'")
    rules = database.folder / "data" / "pg_hba.conf"
    text = rules.read_text()
    rules.write_text(f"local all locked scram-sha-256\n{text}")
    database.execute("SELECT pg_reload_conf()")
    try:
        wrong = database.url.replace("postgres@", "locked:wrong@")
        await until(lambda: _refused(wrong))
    finally:
        rules.write_text(text)
        database.execute("SELECT pg_reload_conf()")
        database.execute("DROP ROLE locked")


def _refused(url: str) -> bool:
    """Return whether the server refuses the password, which it does once it has read its rules again."""
    try:
        EventLog(url).close()
    except AccessDenied as err:
        return "password authentication failed" in err.detail
    except Exception:  # without the rule anyone may connect, and this role may not make a table
        return False
    return False


async def test_a_log_that_can_be_read_may_still_be_waited_for(journal: Journal) -> None:
    """On a full disk reads succeed and appends do not; the health says so all the time."""
    await journal.append([node_joined(1)])
    blocked, append = True, journal.log.append_rows

    def full(*arguments: Any, **options: Any) -> list[StoredRow]:
        if blocked:
            raise Unavailable("no space left")
        return append(*arguments, **options)

    journal.log.append_rows = full  # type: ignore[method-assign]
    appending = asyncio.create_task(journal.append([node_joined(2)]))
    await until(lambda: journal.outages.detail)
    assert await journal.last_position() == 1
    assert journal.outages.detail == "waiting for the log to take events: no space left"
    blocked = False
    await appending
    assert journal.outages.detail == ""
    blocked = True
    with pytest.raises(Unavailable):
        await journal.append([node_joined(3)], limit_s=0.1)
    assert journal.outages.detail == ""  # nobody waits for it now


@pytest.mark.slow
async def test_the_health_says_what_is_waited_for(journal: Journal, bus: Bus, database: PostgresServer) -> None:
    context = Context(Settings(), bus, journal, asyncio.Event(), "thing", outages=journal.outages)

    assert ((await context.health()).ready, (await context.health()).detail) == (False, "starting")
    context.ready()
    assert ((await context.health()).ready, (await context.health()).detail) == (True, "")
    database.kill()
    appending = asyncio.create_task(journal.append([node_joined(1)]))
    await until(lambda: journal.outages.detail)
    assert not (await context.health()).ready
    assert (await context.health()).detail.startswith("waiting for the log to take events: log postgres: ")
    database.start()
    await appending
    assert (await context.health()).ready
