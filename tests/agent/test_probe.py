"""The agent answers probes where its heartbeats say, and probes others on request."""

from __future__ import annotations

import asyncio

from services.agent.agent import Agent
from shared.bus.connection import Bus
from shared.messages import probes
from shared.messages.probes import PROBE, Outcome, ProbeRequest, ProbeTarget
from tests.agent.kit import Ear

TIMEOUT_S = 10.0
"""Far longer than an answer takes."""


async def advertised(ear: Ear) -> str:
    """Return where the agent listens, by its heartbeats."""
    await ear.until(lambda: bool(ear.heartbeats))
    return ear.heartbeats[-1].probe


async def test_an_agent_answers_where_its_heartbeats_say(ear: Ear, agent: Agent) -> None:
    target = ProbeTarget(address=await advertised(ear), incarnation=agent.incarnation)
    assert target.address.startswith("127.0.0.1:")
    assert await probes.probe({"n0": target}, TIMEOUT_S) == {"n0": Outcome.REACHED}
    await agent.stop()
    assert await probes.probe({"n0": target}, TIMEOUT_S) == {"n0": Outcome.ABSENT}


async def test_an_agent_probes_those_it_is_asked_about(ear: Ear, agent: Agent, bus: Bus) -> None:
    address = await advertised(ear)

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(probes.line("n1", "other"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as peer:
        port = peer.sockets[0].getsockname()[1]
        request = ProbeRequest(
            peers={
                "n1": ProbeTarget(address=probes.address("127.0.0.1", port), incarnation="other"),
                "n2": ProbeTarget(address=address, incarnation="gone"),
            },
            timeout_s=TIMEOUT_S,
        )
        data = await bus.request(PROBE.at("n0"), request.model_dump_json().encode(), timeout_s=2 * TIMEOUT_S)
    reply = PROBE.reply.decode(data)
    assert (reply.node, reply.known()) == ("n0", {"n1": Outcome.REACHED, "n2": Outcome.ABSENT})


async def test_a_request_that_cannot_be_read_is_counted_and_answered(ear: Ear, agent: Agent, bus: Bus) -> None:
    reply = PROBE.reply.decode(await bus.request(PROBE.at("n0"), b'{"protocol": 9}', timeout_s=TIMEOUT_S))
    assert reply.known() == {}
    await ear.until(lambda: ear.heartbeats[-1].counters.get("undecodable") == 1)
