"""The log's stream on several servers of a NATS cluster (``log_stream_replicas``)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.log.log import EventLog
from shared.log.relay import STREAM, Relay
from tests.condition import until
from tests.nats_cluster import SERVERS, NatsCluster
from tests.shared.samples import node_joined


async def replicas(bus: Bus) -> int | None:
    return (await bus.jetstream.stream_info(STREAM)).config.num_replicas


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_stream_on_three_servers_outlives_one_of_them(log: EventLog, tmp_path: Path) -> None:
    async with NatsCluster(tmp_path) as servers:
        bus = await Bus.connect(servers.urls, credential=servers.credential, name="test", timeout_s=20)
        try:
            log.append([node_joined(1)])
            await relayed(Relay(log, bus), 1)
            assert await replicas(bus) == 1

            relay = Relay(log, bus, SERVERS)
            log.append([node_joined(2)])
            await relayed(relay, 2)
            assert await replicas(bus) == SERVERS
            await relayed(Relay(log, bus), 2)
            assert await replicas(bus) == SERVERS, "a service with another setting leaves the stream as it is"

            info = await bus.jetstream.stream_info(STREAM)
            assert info.cluster is not None
            assert info.cluster.replicas
            follower = info.cluster.replicas[0].name
            assert follower is not None
            servers.kill(follower)
            log.append([node_joined(3)])
            await relayed(relay, 3)
        finally:
            await bus.close()


async def relayed(relay: Relay, position: int) -> None:
    """Relay until the stream has the position: its servers agree on a leader anew, and one may be gone."""

    async def run() -> int:
        with contextlib.suppress(Unavailable):
            return await relay.run()
        return 0

    assert await until(run) == position


@pytest.mark.slow
async def test_a_new_stream_is_on_as_many_servers_as_set(log: EventLog, tmp_path: Path) -> None:
    async with NatsCluster(tmp_path) as servers:
        bus = await Bus.connect(servers.urls, credential=servers.credential, name="test", timeout_s=20)
        try:
            log.append([node_joined(1)])
            await relayed(Relay(log, bus, SERVERS), 1)
            assert await replicas(bus) == SERVERS
        finally:
            await bus.close()
