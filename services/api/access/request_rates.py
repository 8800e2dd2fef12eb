"""How many requests a peer may send: a bucket of tokens for each, which fills at a constant rate.

The rate is a multiple of what people, dashboards and scripts that poll ask for. It keeps one client in a loop from
taking the event loop for itself.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from shared.errors import TooManyRequests

BURST_S = 5.0
"""A peer that was silent may send what it is allowed in this time at once: a page of a user interface, a script's
loop."""

REPORTS_BURST_S = 200.0
"""As ``BURST_S``, of new reports of troubles, one a second: a monitor that starts in a large cluster may send 200 at
once."""

MOST_PEERS = 4096
"""Peers that are remembered. The one that was silent for the longest is forgotten first, and its bucket is full."""


class RequestRates:
    """The buckets of all peers. Only the event loop may use it.

    Args:
        per_s: requests of one peer in a second, in the long run; 0: any number.
        burst_s: what a peer may send in this time it may send at once.
        limit: what refuses more, in words.
    """

    def __init__(
        self, per_s: float, burst_s: float = BURST_S, limit: str = "requests a second; UNICRON_REQUESTS_PER_S sets it"
    ) -> None:
        self._per_s, self._most, self._limit = per_s, max(1.0, per_s * burst_s), limit
        self._peers: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Peer -> tokens that it had, and when."""

    def admit(self, peer: str, at_s: float) -> None:
        """Count a request.

        Args:
            peer: who sends it: a user of this machine, a token, or an address (``peer_of``).
            at_s: the time on a monotonic clock.

        Raises:
            TooManyRequests: the peer sends too many.
        """
        if not self._per_s:
            return
        tokens, since_s = self._peers.pop(peer, (self._most, at_s))
        tokens = min(self._most, tokens + (at_s - since_s) * self._per_s)
        admitted = tokens >= 1.0
        self._peers[peer] = (tokens - admitted, at_s)
        if len(self._peers) > MOST_PEERS:
            self._peers.popitem(last=False)
        if not admitted:
            raise TooManyRequests(f"{peer} has sent too many: allowed are {self._per_s:g} {self._limit}")


def reports_of_a_source() -> RequestRates:
    """Return the buckets of those who report troubles of nodes: what is new in their reports is in the log for ever."""
    return RequestRates(1.0, REPORTS_BURST_S, "report a second that is new")


def peer_of(address: str) -> str:
    """Return whom an address stands for: with IPv6 its network of 64 bits, whose addresses one machine can have."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
