"""Agents on several machines (network namespaces): what they are called, and under which address they are reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.bus.connection import Bus
from shared.events.union import NodeJoined
from shared.log.journal import Journal
from shared.messages.signals import HEARTBEATS, Heartbeat
from shared.service.joining import credential_of
from shared.settings.model import Settings
from tests.agent.kit import WAIT_S
from tests.agent.machines import HUB, Network, OpenNats, network
from tests.agent.program import Program, running
from tests.detector.conftest import LogWatch, patient, watching
from tests.nats_server import OpenServer


@pytest.fixture
def net() -> Iterator[Network]:
    with network() as made:
        yield made


@pytest.fixture
async def bus_server(net: Network, tmp_path: Path) -> AsyncIterator[OpenServer]:
    async with OpenNats(tmp_path / "nats") as server:
        yield server


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A hosts file as Debian's installer writes it: the machine's own name stands for a loopback address."""
    path = tmp_path / "hosts"
    path.write_text("127.0.0.1 localhost\n127.0.1.1 Node7.example.org Node7\n")
    return path


@pytest.fixture
def local(settings: Settings, bus_server: OpenNats) -> Settings:
    """Settings of an agent on the hub that reaches NATS by the loopback interface."""
    return settings.model_copy(update={"nats_url": bus_server.local_url})


async def refusal(program: Program) -> str:
    """Wait for the end of an agent that is refused because of an address; return its log lines."""
    async with asyncio.timeout(WAIT_S):
        code = await program.process.wait()
    text = program.log.read_text()
    assert code == 2, text
    assert "unreachable-address" in text
    return text


@pytest.mark.slow
async def test_name_and_address_follow_from_host_name_and_connection(
    net: Network, settings: Settings, bus: Bus, monitor: LogWatch, hosts: Path, tmp_path: Path
) -> None:
    beats: asyncio.Queue[Heartbeat] = asyncio.Queue()

    async def beat(_: str, data: bytes) -> None:
        beats.put_nowait(Heartbeat.model_validate_json(data))

    await bus.listen(HEARTBEATS.subject, beat)
    wrapper = net.command(0, "Node7.example.org", hosts)
    async with running(settings, "", tmp_path / "agent.log", wrapper=wrapper) as agent:
        await agent.ready()
        [joined] = await monitor.until(bool)
        assert isinstance(joined, NodeJoined)
        assert (joined.node, joined.workers) == ("node7", ["node7/0", "node7/1"])
        heartbeat = await beats.get()
        assert heartbeat.addresses == {"address": net.address(0), "store_host": net.address(0)}


@pytest.mark.slow
async def test_an_agent_with_a_loopback_address_is_refused_beside_another_machine(
    net: Network, settings: Settings, local: Settings, monitor: LogWatch, hosts: Path, tmp_path: Path
) -> None:
    async with running(settings, "far", tmp_path / "far.log", wrapper=net.command(0, "far", hosts)) as far:
        await far.ready()
        joined = await monitor.until(bool)
        async with running(local, "near", tmp_path / "near.log") as near:
            text = await refusal(near)
        assert "127.0.0.1" in text
        assert f"node far ({net.address(0)})" in text
        assert "set UNICRON_ADDRESS" in text
        assert [r.event for r in monitor.journal.log.read()] == joined
        async with running(local, "near", tmp_path / "set.log", environment={"UNICRON_ADDRESS": HUB}) as near:
            await near.ready()


@pytest.mark.slow
async def test_an_agent_is_refused_beside_another_machine_with_a_loopback_address(
    net: Network, settings: Settings, local: Settings, monitor: LogWatch, hosts: Path, tmp_path: Path
) -> None:
    async with running(local, "near", tmp_path / "near.log") as near:
        await near.ready()
        await monitor.until(bool)
        async with running(settings, "here", tmp_path / "here.log") as here:
            await here.ready()  # the same machine reaches the loopback address
        async with running(settings, "far", tmp_path / "far.log", wrapper=net.command(0, "far", hosts)) as far:
            text = await refusal(far)
        assert "node near on another machine advertises the loopback address 127.0.0.1" in text
        assert "set UNICRON_ADDRESS" in text


@pytest.mark.parametrize("setting", ["ADDRESS", "STORE_HOST"])
@pytest.mark.slow
async def test_a_loopback_address_that_is_set_is_refused_when_nats_is_on_another_machine(
    setting: str, net: Network, settings: Settings, hosts: Path, tmp_path: Path
) -> None:
    """The own host name is a usual value; where ``/etc/hosts`` makes it 127.0.1.1, no peer would reach it."""
    wrapper, environment = net.command(0, "Node7.example.org", hosts), {f"UNICRON_{setting}": "node7"}
    async with running(settings, "", tmp_path / "agent.log", wrapper=wrapper, environment=environment) as agent:
        text = await refusal(agent)
    assert f"127.0.1.1 is a loopback address and NATS is at {HUB}, on another machine: set UNICRON_{setting}" in text


@pytest.mark.slow
async def test_a_restarted_detector_knows_the_addresses_before_it_admits_anybody(
    net: Network, settings: Settings, local: Settings, journal: Journal, hosts: Path, tmp_path: Path
) -> None:
    async with running(settings, "far", tmp_path / "far.log", wrapper=net.command(0, "far", hosts)) as far:
        bus = await Bus.connect(settings.nats_url, credential=credential_of(settings), name="first")
        async with watching(patient(settings), bus, journal) as monitor:
            await far.ready()
            await monitor.until(bool)
        await bus.close()  # its subscriptions end with the connection
        async with running(local, "near", tmp_path / "near.log") as near:
            bus = await Bus.connect(settings.nats_url, credential=credential_of(settings), name="successor")
            async with watching(patient(settings), bus, journal):
                assert "127.0.0.1" in await refusal(near)
            await bus.close()
