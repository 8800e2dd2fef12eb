"""Ranks on two machines (network namespaces) whose host names stand for loopback addresses there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.detector.main import DetectorService
from shared.bus import Bus
from shared.log.journal import Journal
from shared.nats_server import NatsServer
from shared.settings import Settings
from tests.agent.kit import SPEC, Driver, stage
from tests.agent.machines import MACHINES, Network, OpenNats, network
from tests.agent.program import AGENT, running

ROOT = Path(__file__).parents[2]


@pytest.fixture
def net() -> Iterator[Network]:
    with network() as made:
        yield made


@pytest.fixture
async def nats(net: Network, tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with OpenNats(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def detector(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[None]:
    """A running detector, which admits the agents."""
    service = asyncio.create_task(DetectorService(settings, bus, journal).run())
    yield
    service.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await service


@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_ranks_of_two_machines_train_together_without_any_setting(
    net: Network, settings: Settings, bus: Bus, detector: None, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    async with contextlib.AsyncExitStack() as stack:
        agents = []
        for number in range(MACHINES):
            hosts = tmp_path / f"hosts-{number}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 m{number}.example.org m{number}\n")
            wrapper = net.command(number, f"m{number}", hosts)
            environment = {"PYTHONPATH": str(ROOT), "UNICRON_JOIN_TIMEOUT_S": "60"}
            log = tmp_path / f"agent-{number}.log"
            agent = running(settings, "", log, wrapper=wrapper, environment=environment, program=AGENT)
            agents.append(await stack.enter_async_context(agent))
        await asyncio.gather(*(agent.ready() for agent in agents))
        drivers = [Driver(bus, f"m{number}") for number in range(MACHINES)]
        workers = [f"m{number}/0" for number in range(MACHINES)]
        spec = {**SPEC, "data": str(corpus)}
        prepared = await asyncio.gather(
            *(d.ask("prepare", 1, workers=[w], spec=spec) for d, w in zip(drivers, workers, strict=True))
        )
        assert all(reply.ok for reply in prepared), prepared
        store = await drivers[0].ask("open-store", 1)
        assert (store.ok, store.host) == (True, net.address(0)), store
        joined = stage(1, workers, source="initial").model_dump(mode="json")
        at = {"store_host": store.host, "store_port": store.port}
        replies = await asyncio.gather(*(d.ask("configure", 1, stage=joined, **at) for d in drivers))
        assert all(reply.ok for reply in replies), replies
