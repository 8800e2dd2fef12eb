"""Probes over real sockets: each kind of evidence, and requests and replies of other versions."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from shared.messages import probes
from shared.messages.probes import PROBE, Outcome, ProbeReply, ProbeRequest, ProbeTarget

ENOUGH_S = 10.0
"""Time-out of probes that are answered at once."""

SHORT_S = 0.3
"""Time-out of probes that nothing answers."""

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]


def say(text: bytes) -> Handler:
    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(text)
        writer.close()

    return answer


@asynccontextmanager
async def listening(answer: Handler, host: str = "127.0.0.1") -> AsyncIterator[ProbeTarget]:
    server = await asyncio.start_server(answer, host, 0)
    async with server:
        yield ProbeTarget(address=probes.address(*server.sockets[0].getsockname()[:2]), incarnation="first")


@contextmanager
def deaf() -> Iterator[ProbeTarget]:
    """A port whose SYNs the kernel drops, as those to a machine that is off: its queue of connections is full."""
    with socket.socket() as listener, socket.socket() as one, socket.socket() as two:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for client in (one, two):
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield ProbeTarget(address=probes.address(*listener.getsockname()), incarnation="first")


async def outcome(target: ProbeTarget, timeout_s: float = ENOUGH_S) -> Outcome | None:
    return (await probes.probe({"n1": target}, timeout_s)).get("n1")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_an_agent_that_answers_is_reached(host: str) -> None:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    async with listening(say(probes.line("n1", "first")), host) as target:
        assert await outcome(target) is Outcome.REACHED


@pytest.mark.parametrize("text", [probes.line("n1", "second"), probes.line("n2", "first"), b"", b"x" * 1000 + b"\n"])
async def test_another_program_on_the_port_means_that_the_agent_has_ended(text: bytes) -> None:
    async with listening(say(text)) as target:
        assert await outcome(target) is Outcome.ABSENT


async def test_a_refused_connection_means_that_the_agent_has_ended() -> None:
    async with listening(say(b"")) as target:
        pass
    assert await outcome(target) is Outcome.ABSENT


async def test_an_agent_that_says_nothing_is_mute() -> None:
    done = asyncio.Event()

    async def wait(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()

    async with listening(wait) as target:
        assert await outcome(target, SHORT_S) is Outcome.MUTE
        done.set()


async def test_a_machine_that_does_not_answer_is_silent_and_the_others_are_known() -> None:
    with deaf() as silent:
        async with listening(say(probes.line("n2", "first"))) as other:
            found = await probes.probe({"n1": silent, "n2": other}, SHORT_S)
    assert found == {"n1": Outcome.SILENT, "n2": Outcome.REACHED}


@pytest.mark.parametrize("address", ["", "n1", "n1:x", "127.0.0.1:-1"])
async def test_what_is_no_address_proves_nothing(address: str) -> None:
    assert await outcome(ProbeTarget(address=address, incarnation="first")) is None


def test_outcomes_of_a_newer_version_prove_nothing() -> None:
    reply = PROBE.reply.decode(b'{"node": "n0", "outcomes": {"n1": "reached", "n2": "baffled"}, "new": 1}')
    assert reply.known() == {"n1": Outcome.REACHED}
    assert reply.reached == {"n1": True, "n2": False}


def test_a_request_without_a_time_out_has_the_default() -> None:
    request = PROBE.request.decode(b'{"peers": {"n1": {"address": "127.0.0.1:1", "incarnation": "first"}}}')
    assert request == ProbeRequest(peers={"n1": ProbeTarget(address="127.0.0.1:1", incarnation="first")})
    assert request.timeout_s == probes.PROBE_TIMEOUT_S


def test_a_reply_is_read_as_it_was_sent() -> None:
    reply = ProbeReply(node="n0", outcomes={"n1": str(Outcome.MUTE)})
    assert PROBE.reply.decode(reply.model_dump_json().encode()).known() == {"n1": Outcome.MUTE}


async def test_the_round_trip_is_known_of_a_machine_that_took_the_connection() -> None:
    with deaf() as silent:
        async with listening(say(probes.line("n2", "first"))) as other:
            found = await probes.probe_timed({"n1": silent, "n2": other}, SHORT_S)
    assert found["n1"] == (Outcome.SILENT, None)
    round_trip_s = found["n2"].round_trip_s
    # Loopback takes microseconds; the kernel's number, and not that of another field of the structure.
    assert round_trip_s is not None
    assert 0.0 < round_trip_s < ENOUGH_S


def test_a_reply_of_an_older_version_has_no_round_trips() -> None:
    assert PROBE.reply.decode(b'{"node": "n0", "outcomes": {"n1": "reached"}}').round_trips_s == {}
