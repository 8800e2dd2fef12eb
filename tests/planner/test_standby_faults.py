"""Planners that stand by while the database, the bus or the way to either fails: one decides, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.planner.replay.replay import verify
from shared.bus.connection import Bus
from shared.errors import LeaseLost
from shared.events.union import Event, TaskChanged
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.log.relay import STREAM
from shared.model import utc_now
from tests.condition import until
from tests.instances import LIMIT_S, Instances, keeps_its_lease
from tests.nats_cluster import SERVERS, NatsCluster
from tests.nats_server import OpenServer
from tests.planner.test_shell import node, plans, submission
from tests.postgres import PostgresServer, find_binaries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SOCKET = ".s.PGSQL.5432"


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    if find_binaries() is None:
        pytest.skip("no PostgreSQL")
    with PostgresServer() as server:
        yield server


async def planned(log: EventLog, number: int) -> None:
    """Wait until so many triggers have their plans, each one."""
    await until(lambda: len(plans(log)) >= number, limit_s=LIMIT_S)
    causes = [plan.cause for plan in plans(log)]
    assert len(set(causes)) == len(causes) == number


# ---- a network between


class Way:
    """A way to a PostgreSQL server, which can be cut: what is sent then is late, and nobody is told."""

    def __init__(self, server: Path, folder: Path) -> None:
        self._server, self.folder = server, folder
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self.folder.mkdir()
        async with await asyncio.start_unix_server(self._connected, self.folder / SOCKET):
            try:
                yield
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        to, back = await asyncio.open_unix_connection(self._server / SOCKET)
        for source, sink in ((reader, back), (to, writer)):
            self._tasks.add(asyncio.create_task(self._pass_on(source, sink)))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


async def test_of_two_that_a_network_parts_one_acts(
    tmp_path: Path, bus_server: OpenServer, bus: Bus, postgres: PostgresServer
) -> None:
    planners = Instances("planner", tmp_path, bus_server.url, bus_server.credential_file, postgres.url)
    way = Way(postgres.folder, tmp_path / "way")
    with closing(EventLog(postgres.url)) as log:
        try:
            async with way.opened(), Journal(log, bus) as journal:
                parted = await planners.start(
                    UNICRON_LOG_URL=postgres.url.replace(str(postgres.folder), str(way.folder))
                )
                await planners.start()
                await journal.append([node("n0"), submission("a")])
                await planned(log, 2)
                lease = log.leases()["planner"]
                assert lease.holder.split("/")[1] == str(parted.pid)

                way.cut()
                await journal.append([submission("b")])  # the parted one reads this from the bus
                await planned(log, 3)
                assert log.leases()["planner"].token > lease.token
                way.mend()
                assert await asyncio.wait_for(parted.wait(), LIMIT_S) == LeaseLost.exit_code
                await journal.append([submission("c")])
                await planned(log, 4)
        finally:
            await planners.end()
        assert verify(log).ok


# ---- PostgreSQL fails over


async def test_a_replica_that_takes_over_has_everything_that_was_acknowledged(
    tmp_path: Path, bus_server: OpenServer, bus: Bus, postgres: PostgresServer
) -> None:
    drawn = random.Random(1)
    with PostgresServer(of=postgres) as replica:
        hosts = f"host={postgres.folder}&host={replica.folder}&target_session_attrs=read-write"
        url = f"postgresql+psycopg://postgres@/postgres?{hosts}"
        planners = Instances("planner", tmp_path, bus_server.url, bus_server.credential_file, url)
        with closing(EventLog(url)) as log:
            try:
                for _ in range(2):
                    await planners.start()
                async with Journal(log, bus) as journal:
                    await journal.append([node("n0")])
                    number = drawn.randrange(20, 40)
                    sending = asyncio.create_task(send(journal, 2 * number))
                    await until(lambda: log.last_position() > number, limit_s=LIMIT_S)
                    postgres.kill()  # it stays away: nobody can write there any more
                    replica.promote()
                    await asyncio.wait_for(sending, LIMIT_S)
                    await planned(log, 1 + 2 * number)
            finally:
                await planners.end()
            found = [record.event.event_id for record in log.read_all()]
            assert [each for each in found if each.startswith("submit-")] == [
                f"submit-t{each}" for each in range(2 * number)
            ]
            assert verify(log).ok


async def send(journal: Journal, number: int) -> None:
    """Append so many submissions, one after the other: each is acknowledged before the next."""
    for each in range(number):
        (record,) = await journal.append([submission(f"t{each}")])
        assert record.event.event_id == f"submit-t{each}"


# ---- three NATS servers


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_leader_of_the_stream_is_lost(tmp_path: Path, how: signal.Signals) -> None:
    async with NatsCluster(tmp_path) as servers:
        planners = Instances(
            "planner", tmp_path, servers.urls, servers.credential_file("planner"), f"sqlite:///{tmp_path}/log.db"
        )
        bus = await Bus.connect(servers.urls, credential=servers.credential, name="test", timeout_s=20)
        try:
            with closing(EventLog(f"sqlite:///{tmp_path}/log.db")) as log:
                for _ in range(2):
                    await planners.start(UNICRON_LOG_STREAM_REPLICAS=str(SERVERS))
                async with Journal(log, bus, replicas=SERVERS) as journal:
                    await journal.append([node("n0"), submission("a")])
                    await planned(log, 2)
                    token = log.leases()["planner"].token
                    info = await bus.jetstream.stream_info(STREAM)
                    assert info.cluster is not None
                    assert info.cluster.leader is not None
                    servers.send_signal(info.cluster.leader, how)
                    await journal.append([submission("b")])
                    await planned(log, 3)
                    if how == signal.SIGSTOP:
                        servers.send_signal(info.cluster.leader, signal.SIGCONT)
                    await journal.append([submission("c")])
                    await planned(log, 4)
                assert log.leases()["planner"].token == token, "the lease is no matter of the bus"
                assert verify(log).ok
        finally:
            await bus.close()
            await planners.end()


# ---- too much work


def changes(name: str) -> list[Event]:
    """Return changes of a task, each of which takes a plan."""
    return [
        TaskChanged(
            event_id=f"change-{name}-{number}", occurred_at=utc_now(), task="a", weight=1.0 + number, min_workers=1
        )
        for number in range(100)
    ]


async def test_an_active_one_with_ten_times_the_work_that_it_can_do_keeps_its_lease(
    tmp_path: Path, bus_server: OpenServer, bus: Bus, log: EventLog
) -> None:
    async with Instances("planner", tmp_path, bus_server.url, bus_server.credential_file, log.url) as planners:
        async with Journal(log, bus) as journal:
            await journal.append([node("n0"), submission("a")])
            await planners.start()
            await planned(log, 2)
            await planners.start()
            await keeps_its_lease(planners, log, changes)
