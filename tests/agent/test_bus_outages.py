"""The bus goes away, or refuses, under an agent whose ranks train."""

from __future__ import annotations

import os
import signal

from services.agent.agent import Agent
from tests.agent.kit import Driver, Ear, alive, train
from tests.condition import until
from tests.nats_server import OpenServer


async def test_the_loss_of_the_bus_stops_no_rank(agent: Agent, driver: Driver, ear: Ear, nats: OpenServer) -> None:
    pids = await train(driver)
    await nats.stop()
    os.kill(pids["n0/1"], signal.SIGKILL)
    await nats.start()
    await ear.until(lambda: [s.worker for s in ear.signals] == ["n0/1"])
    seen = len(ear.heartbeats)
    await ear.until(lambda: len(ear.heartbeats) > seen)
    assert alive(pids["n0/0"])


async def test_a_key_that_is_refused_for_a_while_stops_no_rank(
    agent: Agent, driver: Driver, ear: Ear, nats: OpenServer
) -> None:
    pids = await train(driver)
    nats.refuse()
    await until(lambda: "Authorization Violation" in agent._bus.trouble, seen=lambda: agent._bus.trouble)
    os.kill(pids["n0/1"], signal.SIGKILL)
    nats.accept()
    await ear.until(lambda: [s.worker for s in ear.signals] == ["n0/1"])
    seen = len(ear.heartbeats)
    await ear.until(lambda: len(ear.heartbeats) > seen)
    assert alive(pids["n0/0"])
