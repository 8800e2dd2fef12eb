"""Probes: whether a machine reaches the agent of a node, without NATS in between.

An agent listens on a TCP port that its heartbeats advertise (``Heartbeat.probe``) and answers each connection with a
line that names its node and incarnation. The detector probes nodes itself, and asks agents to (``ProbeRequest`` over
core NATS, ``PROBE``). Nobody probes unasked. ``services/agent/cluster/probe.py`` is the agent's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import Field

from shared.bus.cancellation import cancelled
from shared.bus.endpoints import Endpoint
from shared.bus.messages import Message, MessageId, Seconds
from shared.model import Model
from shared.names import Name, SocketAddress

PROBE_TIMEOUT_S = 1.0
"""Time for connection and line, if the asker gives none. A connection and a line take two round trips and a turn of the
agent: 1 ms in a data centre, 0.8 s with a delay of 0.2 s in each direction."""

MAX_TIMEOUT_S = 10.0
"""Longest time-out that an agent accepts: the asker has stopped to wait by then."""

CONNECTIONS = 3
"""Connections that one probe opens at once. A SYN that is lost is repeated only after a second (RFC 6298), which is the
whole time-out; with 5% loss one connection in seven fails, and three in one probe of 350."""

CONNECT_FRACTION = 0.5
"""Part of a probe's time-out after which a machine that has taken no connection is silent. The line takes as long as
the connection, a round trip, so it would come too late in any case."""

CONNECT_LATE_S = 0.05
"""If that time-out fires later than this, the prober may not have seen a connection yet, and waits for all of the
time-out. Four turns of an event loop with nothing else to do take less than a millisecond."""

LATE_S = 0.25
"""A time-out that fires late by more than this shows that the prober did not run; its probe proves nothing."""

_RTT_AT = 8 + 15 * 4
"""Offset of ``tcpi_rtt`` (microseconds) in the kernel's ``struct tcp_info``: after 8 bytes and 15 numbers of 4 bytes
(linux/tcp.h)."""

LINE_BYTES = 256
"""Longest line: a node's name has 63 bytes, an incarnation 32."""


class Outcome(StrEnum):
    """What came of a probe, the strongest evidence first."""

    REACHED = "reached"
    """The agent answered: it runs, and so does its machine."""
    ABSENT = "absent"
    """The machine answered, and the agent no longer listens: it has ended."""
    MUTE = "mute"
    """The machine took the connection, and the agent said nothing: it is stopped, or hangs."""
    SILENT = "silent"
    """Nothing answered: the machine is off, or the link is cut."""


class ProbeTarget(Model):
    """Whom to probe. ``address``: ``ip:port`` of the agent's listener, as its heartbeats advertise it."""

    address: SocketAddress
    incarnation: MessageId


class ProbeRequest(Message):
    """A request to an agent: probe these nodes, all at once.

    ``timeout_s``: the time for connection and line of each.
    """

    peers: dict[Name, ProbeTarget]
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] = PROBE_TIMEOUT_S


class ProbeReply(Message):
    """An agent's answer.

    ``outcomes``: node -> ``Outcome``, without the nodes about which the probe proved nothing. ``round_trips_s``: node
    -> the round trip that the kernel measured, of those that took the connection.
    """

    node: Name
    outcomes: dict[Name, str]
    round_trips_s: dict[Name, Seconds] = Field(default_factory=dict)

    def known(self) -> dict[str, Outcome]:
        """Return the outcomes that this version knows."""
        return {node: Outcome(text) for node, text in self.outcomes.items() if text in _OUTCOMES}

    @property
    def reached(self) -> dict[str, bool]:
        """Whether each node's agent answered."""
        return {node: text == Outcome.REACHED for node, text in self.outcomes.items()}


_OUTCOMES = frozenset(Outcome)

PROBE = Endpoint("unicron.probe.*", ProbeRequest, ProbeReply, by=("detector",), to=("node",), timeout_s=1.0)
"""The time-out is beside that of the request itself: a round trip with a delay of 0.2 s in each direction, and the
repetition of a segment that was lost. With less, a witness in such a network that waits for the whole time-out of a
probe would answer too late, and could never say that a node is silent."""


def line(node: str, incarnation: str) -> bytes:
    """Return what an agent answers to a probe."""
    return f"unicron {node} {incarnation}\n".encode()


def address(ip: str, port: int) -> str:
    """Return ``ip:port``, with an IPv6 address in brackets."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


async def probe(peers: Mapping[str, ProbeTarget], timeout_s: float = PROBE_TIMEOUT_S) -> dict[str, Outcome]:
    """Probe nodes, all at once; return the outcomes, without the nodes about which the probe proved nothing.

    Args:
        peers: node -> whom to probe.
        timeout_s: the time for connection and line.
    """
    return {node: found.outcome for node, found in (await probe_timed(peers, timeout_s)).items()}


class Probed(NamedTuple):
    """What came of a probe, and the round trip in seconds; None where no connection was made."""

    outcome: Outcome
    round_trip_s: float | None


async def probe_timed(peers: Mapping[str, ProbeTarget], timeout_s: float = PROBE_TIMEOUT_S) -> dict[str, Probed]:
    """Probe nodes as ``probe`` does; return also the round trips."""
    found = await asyncio.gather(*(_probe(node, target, timeout_s) for node, target in peers.items()))
    return {node: probed for node, probed in zip(peers, found, strict=True) if probed is not None}


async def _probe(node: str, target: ProbeTarget, timeout_s: float) -> Probed | None:
    """Probe one node; None if the probe proved nothing."""
    connections = [_Connection(target.address, line(node, target.incarnation)) for _ in range(CONNECTIONS)]
    running = {asyncio.create_task(connection.run()) for connection in connections}
    loop = asyncio.get_running_loop()
    connected_by = loop.time() + CONNECT_FRACTION * timeout_s
    deadline = loop.time() + timeout_s
    pending = set(running)
    try:
        while pending and not any(c.outcome is Outcome.REACHED for c in connections):
            connecting = loop.time() < connected_by
            done, pending = await asyncio.wait(
                pending,
                timeout=max(0.0, (connected_by if connecting else deadline) - loop.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if done:
                continue
            none_made = all(c.outcome is Outcome.SILENT for c in connections)
            if not connecting or (none_made and loop.time() <= connected_by + CONNECT_LATE_S):
                break
    finally:
        await cancelled(*running)
    found = {connection.outcome for connection in connections}
    if Outcome.REACHED not in found and loop.time() > deadline + LATE_S:
        return None
    round_trip_s = min((c.round_trip_s for c in connections if c.round_trip_s is not None), default=None)
    return next((Probed(outcome, round_trip_s) for outcome in Outcome if outcome in found), None)


class _Connection:
    """One connection to an agent's listener.

    ``outcome``: what is known so far; None if nothing is. ``round_trip_s``: that of the connection, once it is made.
    """

    def __init__(self, target: str, expected: bytes) -> None:
        self._target, self._expected = target, expected
        self.outcome: Outcome | None = Outcome.SILENT
        self.round_trip_s: float | None = None

    async def run(self) -> None:
        """Connect and read the line."""
        writer = None
        try:
            host, _, port = self._target.rpartition(":")
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=LINE_BYTES)
            self.outcome = Outcome.MUTE
            self.round_trip_s = _round_trip_s(writer.get_extra_info("socket"))
            said = await reader.readuntil(b"\n")
            self.outcome = Outcome.REACHED if said == self._expected else Outcome.ABSENT
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            self.outcome = Outcome.ABSENT  # another program has the port by now, or the agent has ended just now
        except OSError as err:
            self.outcome = _of_error(err)
        except (ValueError, OverflowError):  # not an address
            self.outcome = None
        finally:
            if writer is not None:
                with contextlib.suppress(OSError):
                    writer.close()


def _round_trip_s(connection: socket.socket) -> float | None:
    """Return the kernel's estimate of a connection's round trip; None if the system has none.

    A busy machine, on which processes wait for a CPU, does not lengthen it.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
    except (AttributeError, OSError):
        return None
    return struct.unpack_from("=I", info, _RTT_AT)[0] / 1e6 if len(info) == _RTT_AT + 4 else None


def _of_error(err: OSError) -> Outcome | None:
    """Return what an error of a connection proves about the node; None if nothing, as when files run short."""
    if isinstance(err, ConnectionRefusedError | ConnectionResetError | BrokenPipeError):
        return Outcome.ABSENT
    return Outcome.SILENT if err.errno in (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT) else None
