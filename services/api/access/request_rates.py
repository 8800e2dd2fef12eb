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

MOST_PEERS = 4096
"""Peers that are remembered. The one that was silent for the longest is forgotten first, and its bucket is full."""


class RequestRates:
    """The buckets of all peers. Only the event loop may use it.

    Args:
        per_s: requests of one peer in a second, in the long run; 0: any number.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s, self._most = per_s, max(1.0, per_s * BURST_S)
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
            raise TooManyRequests(
                f"more than {self._per_s:g} requests a second of {peer}; the setting is UNICRON_REQUESTS_PER_S"
            )


def peer_of(address: str) -> str:
    """Return whom an address stands for: with IPv6 its network of 64 bits, whose addresses one machine can have."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
