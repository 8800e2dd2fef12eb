"""Refused credentials: how a NATS server words it, and how long a client waits before it asks again."""

from __future__ import annotations

import random
from collections.abc import Iterator

REFUSED_FIRST_PAUSE_S = 0.1
"""Pause after the first attempt to reconnect at which the server refuses the credential. Each further pause doubles."""

REFUSED_LONGEST_PAUSE_S = 2.0
"""Longest such pause: all agents and services are refused at once, and each attempt costs the server a connection."""

REFUSED_AT_START_PAUSE_S = 0.1
"""Pause before a process that starts asks a second time. A server that reads its keys anew, since a node was added,
refuses whoever has connected and has not yet sent a credential (nats-server 2.15, ``reloadAuthorization``). Only the
keys decide about the second connection."""

_REFUSALS = ("authorization violation", "user authentication", "account authentication")
"""Beginnings of the server's errors for credentials that it does not accept, or not any more."""


def is_refusal(text: str) -> bool:
    """Return whether an error of the server refuses the credential."""
    return any(refusal in text.lower() for refusal in _REFUSALS)


def refused_pauses_s() -> Iterator[float]:
    """Yield the pauses between attempts of a client whose credential is refused, in seconds, each partly random."""
    pause_s = REFUSED_FIRST_PAUSE_S
    while True:
        yield pause_s + random.uniform(0.0, REFUSED_FIRST_PAUSE_S)  # nosec B311 # spreads attempts, guards nothing
        pause_s = min(2.0 * pause_s, REFUSED_LONGEST_PAUSE_S)
