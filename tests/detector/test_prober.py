"""What counts as proof that an agent has ended: a real bus, and real ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from services.detector.decisions.admission import Liveness
from services.detector.nodes.probing import DETECTOR, ProbeQuestion
from services.detector.prober import Prober
from shared.bus.connection import Bus
from shared.messages import probes
from shared.messages.admission import ALIVE
from shared.messages.probes import Outcome, ProbeTarget

INCARNATION = "0" * 32

PATIENT_S = 8.0
"""Time-out of a probe on a busy machine."""


def question(port: int) -> ProbeQuestion:
    peers = {"n1": ProbeTarget(address=f"127.0.0.1:{port}", incarnation=INCARNATION)}
    return ProbeQuestion(DETECTOR, peers, datetime.now(UTC), PATIENT_S)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """An agent's port."""

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(probes.line("n1", INCARNATION))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_an_agent_whose_port_and_connection_are_gone_has_ended(bus: Bus) -> None:
    prober = Prober(bus)
    assert await prober.alive("n1", INCARNATION) is Liveness.GONE
    assert await prober.ask(question(closed_port())) == ({"n1": Outcome.ABSENT}, {})


async def test_an_agent_that_a_firewall_hides_has_not_ended(bus: Bus) -> None:
    """It still has its connection to NATS, so nothing is known."""

    async def alive(_: bytes) -> bytes:
        return b""

    await bus.answer(ALIVE.at("n1", INCARNATION), lambda _, data: alive(data))
    assert await Prober(bus).ask(question(closed_port())) == ({}, {})


async def test_an_agent_that_answers_a_probe_is_reached(bus: Bus) -> None:
    async with listening() as port:
        assert await Prober(bus).ask(question(port)) == ({"n1": Outcome.REACHED}, {})
