"""Planners that stand by: real processes on one log, of which one decides whatever becomes of the others."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.planner.replay.replay import verify
from shared.bus.connection import Bus
from shared.errors import LeaseLost
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.settings.model import Settings
from tests.condition import until
from tests.instances import LIMIT_S, Instances
from tests.nats_server import OpenServer
from tests.planner.test_shell import node, plans, submission
from tests.postgres import PostgresServer, find_binaries

LEASE_S = float(Settings.model_fields["lease_s"].default)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EventLog]:
    """An empty log, in both databases."""
    sqlite = request.param == "sqlite"
    with closing(
        EventLog(f"sqlite:///{tmp_path}/log.db" if sqlite else request.getfixturevalue("postgres_url"))
    ) as log:
        yield log


@pytest.fixture
async def planners(tmp_path: Path, bus_server: OpenServer, log: EventLog) -> AsyncIterator[Instances]:
    found = Instances("planner", tmp_path, bus_server.url, bus_server.credential_file, log.url)
    yield found
    await found.end()


async def test_one_planner_decides_whatever_becomes_of_the_others(
    planners: Instances, journal: Journal, log: EventLog
) -> None:
    killed = await planners.start()
    stopped = await planners.start()
    assert f"process {killed.pid} on " in planners.lines(stopped)
    assert "stands by and takes over" in planners.lines(stopped)
    await journal.append([node("n0"), submission("a")])
    await until(lambda: len(plans(log)) == 2, limit_s=LIMIT_S)

    killed.kill()
    await journal.append([submission("b")])
    await until(lambda: len(plans(log)) == 3, limit_s=LIMIT_S)
    assert "this planner takes over" in planners.lines(stopped)

    last = await planners.start()
    lease = log.leases()["planner"]
    stopped.send_signal(signal.SIGSTOP)
    await journal.append([submission("c")])
    await until(lambda: len(plans(log)) == 4, limit_s=LIMIT_S)
    assert log.leases()["planner"].token > lease.token
    with pytest.raises(LeaseLost):
        log.append([submission("never")], lease=lease)
    stopped.send_signal(signal.SIGCONT)
    assert await asyncio.wait_for(stopped.wait(), LIMIT_S) == LeaseLost.exit_code
    assert "lease-lost: another planner has taken the lease" in planners.lines(stopped)
    assert "Traceback" not in planners.lines(stopped)

    last.terminate()
    assert await asyncio.wait_for(last.wait(), LIMIT_S) == 0
    assert log.leases()["planner"].holder == ""
    assert [plan.cause for plan in plans(log)] == ["join-n0", "submit-a", "submit-b", "submit-c"]
    # Each plan is decided again from the log alone, and is the recorded one byte for byte.
    assert verify(log).ok


@pytest.mark.slow
async def test_an_outage_of_the_database_is_no_takeover(tmp_path: Path, bus_server: OpenServer, bus: Bus) -> None:
    if find_binaries() is None:
        pytest.skip("no PostgreSQL")
    with PostgresServer() as server, closing(EventLog(server.url)) as log:
        found = Instances("planner", tmp_path, bus_server.url, bus_server.credential_file, server.url)
        try:
            for _ in range(2):
                await found.start()
            before = log.leases()["planner"]
            server.kill()
            await until(lambda: all("waiting for the log" in found.lines(each) for each in found.processes[1:]))
            await asyncio.sleep(2 * LEASE_S)  # it is away for longer than a lease lasts
            server.start()
            async with Journal(log, bus) as journal:
                await journal.append([node("n0"), submission("a")])
                await until(lambda: len(plans(log)) == 2, limit_s=LIMIT_S)
            assert log.leases()["planner"].token == before.token
        finally:
            await found.end()
