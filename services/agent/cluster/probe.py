"""The agent's side of probes (``messages/probes.py``): it answers the probes of others, and probes nodes on request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from services.agent.machine.bandwidth import BandwidthServer
from shared.bus.connection import Bus
from shared.messages import probes
from shared.messages.probes import PROBE, ProbeReply, ProbeRequest


class ProbeServer:
    """Listens for probes, and serves requests to probe.

    Args:
        bus: connected.
        node: name of this node.
        incarnation: of this agent.
        ip: address to listen on: the node's.
    """

    def __init__(self, bus: Bus, node: str, incarnation: str, ip: str) -> None:
        self._bus, self._node, self._ip = bus, node, ip
        self._line = probes.line(node, incarnation)
        self._bandwidth = BandwidthServer()
        self._server: asyncio.Server | None = None

    @property
    def answer(self) -> bytes:
        """The line with which a probe is answered."""
        return self._line

    @property
    def listener(self) -> socket.socket:
        """A duplicate of the socket that listens (after ``start``); the caller closes it."""
        assert self._server is not None
        return socket.socket(fileno=os.dup(self._server.sockets[0].fileno()))

    async def start(self) -> str:
        """Listen on a port that the kernel chooses; return ``ip:port``.

        Raises:
            OSError: the address is none of this machine.
        """
        self._server = await asyncio.start_server(self._answer, self._ip, 0)
        await self._bus.serve(PROBE, self._probe, self._node, refuse=self._refuse)
        return probes.address(self._ip, self._server.sockets[0].getsockname()[1])

    def stop(self, *, hands_over: bool = False) -> None:
        """Stop to listen: a probe finds the agent absent from now on, unless it leaves the listener to others."""
        if self._server is not None:
            if not hands_over:
                with contextlib.closing(self.listener) as listener, contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # the supervisor has a duplicate
            self._server.close()
            self._server = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(self._line)
            await self._bandwidth.serve(reader, writer)
        finally:
            writer.close()

    def _refuse(self, _: object) -> ProbeReply:
        """Answer an unreadable request without an outcome, since nothing is known."""
        return ProbeReply(node=self._node, outcomes={})

    async def _probe(self, request: ProbeRequest) -> ProbeReply:
        """Probe the nodes that a request names."""
        found = await probes.probe_timed(request.peers, request.timeout_s)
        outcomes = {node: str(probed.outcome) for node, probed in found.items()}
        timed = {node: probed.round_trip_s for node, probed in found.items() if probed.round_trip_s is not None}
        return ProbeReply(node=self._node, outcomes=outcomes, round_trips_s=timed)
