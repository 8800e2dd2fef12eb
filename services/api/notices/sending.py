"""Sending one notice to one receiver, again and again until it is taken; the metrics of this."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Iterator

import httpx
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from services.api.notices.notice import Notice
from services.api.notices.receivers import Receiver
from services.api.notices.shapes import request
from shared.errors import Unavailable
from shared.service.metrics import StateMetrics, gauge

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Time for each part of one attempt (connecting, sending, the status). Receivers answer first and work afterwards."""

FIRST_PAUSE_S = 1.0
"""Pause after the first attempt; each further one doubles."""

LONGEST_PAUSE_S = 300.0
"""Longest pause: a receiver gets what has waited five minutes after it is back at the latest."""

GIVE_UP_S = 24 * 3600.0
"""After this time a notice is given up: by then people look at the incidents themselves."""


class NotDelivered(Unavailable):
    """The receiver has not taken a notice."""

    code = Unavailable.code


class NoticeMetrics:
    """Takes note of what is sent to each receiver.

    Args:
        registry: of the process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._began_s: dict[str, float | None] = {}
        self._notices = Counter(
            "unicron_notices_total", "Notices that are done with.", ["receiver", "outcome"], registry=registry
        )
        self._failures = Counter(
            "unicron_notice_failures_total", "Attempts that the receiver did not take.", ["receiver"], registry=registry
        )
        registry.register(StateMetrics(self._read))

    def add(self, receiver: str) -> None:
        """Have series of a receiver from the start."""
        self._began_s[receiver] = None
        self._failures.labels(receiver)
        for outcome in ("delivered", "given-up"):
            self._notices.labels(receiver, outcome)

    def begun(self, receiver: str, at_s: float) -> None:
        """Take note of a notice. ``at_s``: the time of the monotonic clock."""
        self._began_s[receiver] = at_s

    def failed(self, receiver: str) -> None:
        """Take note of an attempt that has failed."""
        self._failures.labels(receiver).inc()

    def ended(self, receiver: str, outcome: str | None) -> None:
        """Take note that a notice is done with; ``outcome`` None: another process goes on with it."""
        self._began_s[receiver] = None
        if outcome is not None:
            self._notices.labels(receiver, outcome).inc()

    def _read(self) -> Iterator[Metric]:
        now_s = time.monotonic()
        waits_s = {(name,): 0.0 if began_s is None else now_s - began_s for name, began_s in self._began_s.items()}
        text = "For how long the present notice to a receiver has been tried."
        yield gauge("unicron_notice_waiting_seconds", text, waits_s, "receiver")


class Sender:
    """Sends notices to one receiver, which hears nothing of the others.

    Args:
        receiver: to whom.
        metrics: of the process.
    """

    def __init__(self, receiver: Receiver, metrics: NoticeMetrics) -> None:
        self._receiver, self._metrics = receiver, metrics
        metrics.add(receiver.name)

    async def deliver(self, notice: Notice) -> None:
        """Send until the receiver answers with a status of 200 to 299, or ``GIVE_UP_S`` are over, which is logged."""
        name, outcome = self._receiver.name, None
        self._metrics.begun(name, time.monotonic())
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(NotDelivered),
            wait=wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S) + wait_random(0.0, FIRST_PAUSE_S),
            stop=stop_after_delay(GIVE_UP_S),
            before_sleep=self._note,
            reraise=True,
        )
        try:
            # A proxy would look up the address itself, so the environment's count only where any address is allowed.
            trusts = self._receiver.allow_private
            async with httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=trusts) as client:
                await retrying(self._attempt, client, notice)
            outcome = "delivered"
        except NotDelivered as err:
            outcome = "given-up"
            logger.error("notices to %s: %s given up after %g h: %s", name, notice.type, GIVE_UP_S / 3600.0, err.detail)
        finally:
            self._metrics.ended(name, outcome)

    async def _attempt(self, client: httpx.AsyncClient, notice: Notice) -> None:
        headers, body = request(self._receiver, notice, int(time.time()))
        url, extensions = httpx.URL(self._receiver.url), {}
        if not self._receiver.allow_private:
            # The connection goes to the address that was looked at: a name could lead elsewhere the next time.
            headers["host"] = url.netloc.decode()
            extensions["sni_hostname"] = url.host
            url = url.copy_with(host=await public_address(url.host, url.port or 443))
        try:
            # Of the answer only the status is read: whoever answers must not fill this process's memory.
            async with client.stream("POST", url, content=body, headers=headers, extensions=extensions) as answer:
                status = answer.status_code
        except (httpx.HTTPError, OSError) as err:
            raise NotDelivered(type(err).__name__) from err  # its text may have the address
        if not 200 <= status < 300:
            raise NotDelivered(f"status {status}")

    def _note(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        self._metrics.failed(self._receiver.name)
        if state.attempt_number == 1 and isinstance(error, NotDelivered):
            logger.warning("notices to %s: not delivered: %s; it is sent again", self._receiver.name, error.detail)


async def public_address(host: str, port: int) -> str:
    """Return an address of a host, all of whose addresses are public.

    Raises:
        NotDelivered: it has none, or one of a private network, of this machine or of no single machine.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as err:
        raise NotDelivered("its host has no address") from err
    addresses = [ipaddress.ip_address(address[0]) for *_, address in found]
    if not all(map(_is_public, addresses)):
        raise NotDelivered("its host has a private address, which only allow_private: true allows")
    return str(addresses[0])


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    inner = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (inner or address).is_global and not (inner or address).is_multicast
