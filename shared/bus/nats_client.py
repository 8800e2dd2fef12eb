"""The client of NATS that the bus uses: nats-py's, with four defects mended.

Also how it verifies servers, and which of their errors are refusals.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import ssl
import time
from collections.abc import Iterator

import nats.errors
from nats.aio.client import Client
from nats.nuid import NUID

from shared.errors import InvalidInput

LONGEST_SLEEP_S = 3600.0
"""The longest single sleep: an event loop cannot sleep for an infinite time."""

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


class _RandomNames(NUID):
    """Names of inboxes and requests that nobody can guess, in place of those of nats-py, which are counted up.

    Every node may publish to the inboxes of services. A node that knew the names of other requests could answer them.
    """

    def next(self) -> bytearray:
        """Return a name: 128 random bits in 22 letters, digits, hyphens and underscores. nats-py expects 22."""
        return bytearray(secrets.token_urlsafe(16).encode())


class NatsClient(Client):
    """The client, which drops a message that it cannot decode, and reconnects after an error of the server.

    The server forwards bytes that are no subject or no headers. In nats-py 2.16 their exception ends the task that
    reads from the connection, and the client, still connected, hears nothing any more. So does the answer to a flush
    for which nobody waits any more. Nor does it reconnect after an error of the server, for example where its key was
    removed: it closes for good.
    """

    def __init__(self) -> None:
        super().__init__()
        self._nuid = _RandomNames()
        self.away_until_s = 0.0
        """Time on the monotonic clock before which no connection is made (``Bus.stay_away``)."""

    async def _select_next_server(self) -> None:
        while (remaining_s := self.away_until_s - time.monotonic()) > 0.0:  # noqa: ASYNC110 - nothing else ends it
            await asyncio.sleep(min(remaining_s, LONGEST_SLEEP_S))
        await super()._select_next_server()

    async def _process_err(self, err_msg: str) -> None:
        if "permissions violation" in err_msg.lower():
            return await super()._process_err(err_msg)  # an error of one message; the connection stays
        error = nats.errors.Error(f"nats: {err_msg}")
        await self._error_cb(error)
        await self._process_op_err(error)

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()  # for which nobody waits
        await super()._process_pong()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except (ValueError, LookupError) as err:  # UnicodeDecodeError is a ValueError
            await self._error_cb(err)


def tls_context(ca: str) -> ssl.SSLContext:
    """Return how the certificate of a server is verified, and its name.

    Args:
        ca: certificates of those who vouch for it, PEM; empty: the system's.

    Raises:
        InvalidInput: these are no certificates.
    """
    try:
        return ssl.create_default_context(cadata=ca or None)
    except (ssl.SSLError, ValueError) as err:
        raise InvalidInput(f"the certificates for NATS cannot be used: {err}") from err


def is_refusal(text: str) -> bool:
    """Return whether an error of the server refuses the credential."""
    return any(refusal in text.lower() for refusal in _REFUSALS)


def refused_pauses_s() -> Iterator[float]:
    """Yield the pauses between attempts of a client whose credential is refused, in seconds, each partly random."""
    pause_s = REFUSED_FIRST_PAUSE_S
    while True:
        yield pause_s + random.uniform(0.0, REFUSED_FIRST_PAUSE_S)  # nosec B311 # spreads attempts, guards nothing
        pause_s = min(2.0 * pause_s, REFUSED_LONGEST_PAUSE_S)
