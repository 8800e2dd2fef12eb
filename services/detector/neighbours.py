"""Who measures with whom: a node whose preflight asks for a neighbour gets one that is like it. Part of the shell.

It is another node that asks at the same time, or a member on which no task has a worker, and whose agent agrees.
Nothing of this is in the log: what the two measure is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from services.detector.nodes.drains import tasks_on
from services.detector.state.cluster import DetectorState
from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.messages.preflight import MEET, MeetRequest, NeighbourAnswer, NeighbourRequest

WAIT_S = 6.0
"""For another node to ask: nodes that are started at once have measured the same by then, some seconds apart."""

ASKED = 3
"""Most members that are asked: each takes up to ``MEET.timeout_s``, and the node waits."""


class Neighbours:
    """Gives each node that asks a neighbour.

    Args:
        bus: connected.
        state: returns what the detector knows.
    """

    def __init__(self, bus: Bus, state: Callable[[], DetectorState]) -> None:
        self._bus, self._state = bus, state
        self._waiting: dict[str, tuple[NeighbourRequest, asyncio.Future[NeighbourAnswer]]] = {}

    async def find(self, request: NeighbourRequest) -> NeighbourAnswer:
        """Return a node's neighbour, with nobody if there is none."""
        for other, answer in self._waiting.values():
            if not answer.done() and _suit(request, other):
                answer.set_result(NeighbourAnswer(peer=request.node))
                return NeighbourAnswer(peer=other.node, store=other.store)
        for name in idle(self._state(), request)[:ASKED]:
            with suppress(Unavailable):
                reply = await self._bus.call(MEET, MeetRequest(peer=request.node, store=request.store), name)
                if reply.begins:
                    return NeighbourAnswer(peer=name)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[request.node] = request, answer
        try:
            await asyncio.wait([answer], timeout=WAIT_S)
            return answer.result() if answer.done() else NeighbourAnswer()
        finally:
            answer.cancel()
            if self._waiting.get(request.node) == (request, answer):
                del self._waiting[request.node]


def idle(state: DetectorState, request: NeighbourRequest) -> list[str]:
    """Return the members that may measure with a node: like it, open, and used by no task. Pure."""
    return [
        name
        for name, known in state.preflights.items()
        if name != request.node
        and name not in request.known
        and (known.event.measurement.device, known.event.measurement.count) == (request.device, request.count)
        and (node := state.nodes.get(name)) is not None
        and state.is_open(node)
        and not tasks_on(state, name)
    ]


def _suit(one: NeighbourRequest, other: NeighbourRequest) -> bool:
    alike = (one.device, one.count) == (other.device, other.count)
    return alike and one.node != other.node and one.node not in other.known and other.node not in one.known
