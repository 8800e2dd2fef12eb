"""An agent that is asked to end: its node leaves in order, or counts as lost where no detector answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.bus.connection import Bus
from shared.events.union import NodeDraining, NodeJoined, NodeLeft
from shared.log.journal import Journal
from shared.messages.admission import DEPARTURES, HELLO, Answer, DepartureAnswer
from shared.settings.model import Settings
from tests.agent.kit import WAIT_S, Driver
from tests.agent.program import Program, running
from tests.detector.conftest import patient, watching


async def end(agent: Program) -> int:
    agent.process.terminate()
    async with asyncio.timeout(WAIT_S):
        return await agent.process.wait()


async def test_a_node_leaves_with_its_agent(settings: Settings, bus: Bus, journal: Journal, tmp_path: Path) -> None:
    async with (
        watching(patient(settings), bus, journal) as log,
        running(settings, "n0", tmp_path / "agent.log") as agent,
    ):
        await agent.ready()
        assert (await Driver(bus).prepare()).ok
        await log.until(bool)
        assert await end(agent) == 0
        first, last = await log.until(lambda events: len(events) > 1)
    assert isinstance(first, NodeJoined)
    assert isinstance(last, NodeLeft)
    assert (last.node, last.incarnation) == ("n0", first.incarnation)


@pytest.mark.slow
async def test_a_second_request_ends_the_drain(settings: Settings, bus: Bus, journal: Journal, tmp_path: Path) -> None:
    """No plan empties the node here, so the agent would wait for all of its time."""
    waiting = running(settings, "n0", tmp_path / "agent.log", environment={"UNICRON_DRAIN_TIMEOUT_S": "600"})
    async with watching(patient(settings), bus, journal) as log, waiting as agent:
        await agent.ready()
        await log.until(bool)
        agent.process.terminate()
        _, draining = await log.until(lambda events: len(events) > 1)
        assert isinstance(draining, NodeDraining)
        assert (draining.by, draining.timeout_s, draining.save) == ("agent", 600.0, False)
        assert (await Driver(bus).prepare()).ok  # the node works meanwhile
        assert await end(agent) == 0
        *_, last = await log.until(lambda events: len(events) > 2)
    assert isinstance(last, NodeLeft)


@pytest.mark.slow
async def test_an_agent_ends_where_no_detector_answers(settings: Settings, bus: Bus, tmp_path: Path) -> None:
    async def admit(_: bytes) -> bytes:
        return Answer(verdict="admitted").model_dump_json().encode()

    await bus.answer(HELLO.subject, lambda _, data: admit(data))
    async with running(settings, "n0", tmp_path / "agent.log") as agent:
        await agent.ready()
        assert await end(agent) == 0
    assert "this node will count as lost" in agent.log.read_text()


async def test_a_departure_that_cannot_be_read_is_answered(settings: Settings, bus: Bus, journal: Journal) -> None:
    async with watching(settings, bus, journal):
        answer = await bus.request(DEPARTURES.at("n0"), b'{"node": "N 0"}', timeout_s=WAIT_S)
    assert DepartureAnswer.model_validate_json(answer).verdict == "refused"
