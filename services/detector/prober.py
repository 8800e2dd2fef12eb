"""Questions that the detector asks over the network: probes, its own and those of witnesses; whether an agent lives.

The core decides what to ask (``probing.py``, ``admission.py``); the shell (``main.py``) passes the answers back to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from services.detector.decisions.admission import Liveness
from services.detector.nodes.probing import DETECTOR, ProbeQuestion
from shared.bus.connection import Bus
from shared.errors import NoReceiver, Unavailable
from shared.messages import probes
from shared.messages.admission import ALIVE, INCARNATION
from shared.messages.probes import PROBE, Outcome, ProbeRequest, ProbeTarget


class Prober:
    """Asks agents over the network.

    Args:
        bus: connected.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def ask(self, question: ProbeQuestion) -> tuple[dict[str, Outcome], dict[str, float]]:
        """Have a question answered, by this process or by an agent.

        Returns:
            The outcomes, and the round trips in seconds; nothing if the witness does not answer.
        """
        if question.witness == DETECTOR:
            return await self._probe(question), {}
        request = ProbeRequest(peers=dict(question.peers), timeout_s=question.timeout_s)
        limit_s = question.timeout_s + PROBE.timeout_s
        try:
            reply = await self._bus.call(PROBE, request, question.witness, timeout_s=limit_s)
        except Unavailable:
            return {}, {}
        return reply.known(), reply.round_trips_s

    async def alive(self, node: str, incarnation: str) -> Liveness:
        """Ask an agent whether it lives. If the agent has no connection, NATS itself answers, at once."""
        if re.fullmatch(INCARNATION, incarnation) is None:
            return Liveness.GONE  # an older version; its incarnation may be no part of a subject
        try:
            await self._bus.call(ALIVE, None, node, incarnation)
        except NoReceiver:
            return Liveness.GONE
        except Unavailable:
            return Liveness.SILENT
        return Liveness.ANSWERED

    async def _probe(self, question: ProbeQuestion) -> dict[str, Outcome]:
        """Probe nodes from this machine. ``ABSENT`` is proof, since the node is lost for it without any further wait.

        A refused connection alone is none: a firewall refuses those to agents that live. So NATS has to say, too, that
        the agent's connection has ended; and a second probe finds an agent that has handed its port over meanwhile.
        """
        found = await probes.probe(question.peers, question.timeout_s)
        absent = {name: question.peers[name] for name, outcome in found.items() if outcome is Outcome.ABSENT}
        gone = await self._gone(absent)
        again = await probes.probe(gone, question.timeout_s) if gone else {}
        kept = {name: outcome for name, outcome in found.items() if name not in absent}
        return kept | again

    async def _gone(self, peers: Mapping[str, ProbeTarget]) -> dict[str, ProbeTarget]:
        """Return those of the peers that have no connection to NATS."""
        return {
            name: target
            for name, target in peers.items()
            if await self.alive(name, target.incarnation) is Liveness.GONE
        }
