"""When a node's heartbeats are published: at the interval, and soon after changes, however many there are."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from services.agent.cluster.heartbeats import Heartbeats
from services.agent.machine.address import NodeAddress
from services.agent.node.slots import Node
from shared.bus.connection import Bus
from shared.clock import SteadyClock
from shared.messages.signals import Heartbeat
from shared.settings.model import Settings
from tests.condition import until

RANKS = 8


class Published:
    """Takes the place of the bus: what was published."""

    def __init__(self) -> None:
        self.heartbeats: list[Heartbeat] = []

    async def publish(self, _: object, heartbeat: Any, *__: str) -> None:
        self.heartbeats.append(heartbeat)


async def test_changes_that_follow_one_another_are_one_heartbeat() -> None:
    bus, node = Published(), Node.create("n0", "first", RANKS)
    address = NodeAddress(ip="127.0.0.1", interface="lo", store_host="127.0.0.1", store_ip="127.0.0.1", network="")
    settings = Settings(heartbeat_interval_s=2.0, node_timeout_s=12.0)
    heartbeats = Heartbeats(cast(Bus, bus), node, address, settings, 1, SteadyClock(), {}, "")
    running = asyncio.create_task(heartbeats.run())
    try:
        await until(lambda: len(bus.heartbeats) == 1)
        for worker in node.slots:
            node.start("gpt", worker, 1)
            heartbeats.note_change()
            for _ in range(5):
                await asyncio.sleep(0)  # everything else has a turn, as between the messages of two ranks
        await until(lambda: len(bus.heartbeats) > 1)
        assert [sum(w.task == "gpt" for w in each.workers) for each in bus.heartbeats] == [0, RANKS]
    finally:
        running.cancel()
