"""One request to a webhook, signed as Standard Webhooks describes and sent again until it is taken; its metrics.

https://www.standardwebhooks.com has the signature, for which receivers have libraries: the header ``webhook-signature``
is ``v1,`` and the base64 of the HMAC-SHA256 of ``<webhook-id>.<webhook-timestamp>.<body>``. A request that is repeated
has the same ``webhook-id``, by which a receiver drops what it has already.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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

from shared.errors import InvalidInput, Unavailable
from shared.service.metrics import StateMetrics, gauge

logger = logging.getLogger(__name__)

PREFIX = "whsec_"
"""What a secret begins with; the base64 of the key follows."""

LEAST_KEY_BYTES = 24
"""Least length of a key: what Standard Webhooks asks for (192 bits)."""

TIMEOUT_S = 10.0
"""Time for each part of one attempt (connecting, sending, the status). Receivers answer first and work afterwards."""

FIRST_PAUSE_S = 1.0
"""Pause after the first attempt; each further one doubles."""

LONGEST_PAUSE_S = 300.0
"""Longest pause: a receiver gets what has waited five minutes after it is back at the latest."""

GIVE_UP_S = 24 * 3600.0
"""After this time a request is given up: by then people look at the incidents themselves."""


@dataclass(frozen=True)
class Delivery:
    """What is sent. ``id``: of all attempts; ``body``: JSON. ``incident``: that it is about."""

    id: str
    body: bytes
    incident: str


class NotDelivered(Unavailable):
    """The receiver has not taken a request."""


def read_secret(path: Path) -> bytes:
    """Return the key in a file.

    Raises:
        InvalidInput: it cannot be read, or is no secret.
    """
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as err:
        raise _refused(path, f"cannot be read: {err}") from err
    try:
        key = base64.b64decode(text.removeprefix(PREFIX), validate=True) if text.startswith(PREFIX) else b""
    except binascii.Error:
        key = b""
    if len(key) < LEAST_KEY_BYTES:
        raise _refused(path, f"must have {PREFIX} and the base64 of {LEAST_KEY_BYTES} bytes or more")
    return key


def _refused(path: Path, problem: str) -> InvalidInput:
    errors = [{"field": "webhook_secret_file", "value": str(path), "problem": problem}]
    return InvalidInput(f"settings refused: webhook_secret_file: {path} {problem}", errors)


def signed(key: bytes, delivery: Delivery, at_s: int) -> dict[str, str]:
    """Return the headers of an attempt. ``at_s``: when it is made, in seconds since the epoch."""
    content = b".".join((delivery.id.encode(), str(at_s).encode(), delivery.body))
    signature = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    return {
        "content-type": "application/json",
        "webhook-id": delivery.id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": f"v1,{signature}",
    }


class Webhook:
    """A receiver.

    Args:
        url: of the receiver.
        key: that it knows too.
        metrics: of the process.
    """

    def __init__(self, url: str, key: bytes, metrics: WebhookMetrics) -> None:
        self._url, self._key, self._metrics = url, key, metrics

    async def deliver(self, delivery: Delivery) -> bool:
        """Send until the receiver answers with a status of 200 to 299; return whether that was within ``GIVE_UP_S``."""
        self._metrics.begun(time.monotonic())
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(NotDelivered),
            wait=wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S) + wait_random(0.0, FIRST_PAUSE_S),
            stop=stop_after_delay(GIVE_UP_S),
            before_sleep=self._note,
            reraise=True,
        )
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False) as client:
                await retrying(self._attempt, client, delivery)
        except NotDelivered as err:
            logger.error("webhook: given up after %g h: %s", GIVE_UP_S / 3600.0, err.detail)
            self._metrics.ended("given-up")
            return False
        self._metrics.ended("delivered")
        return True

    async def _attempt(self, client: httpx.AsyncClient, delivery: Delivery) -> None:
        headers = signed(self._key, delivery, int(time.time()))
        try:
            # Of the answer only the status is read: whoever answers must not fill this process's memory.
            async with client.stream("POST", self._url, content=delivery.body, headers=headers) as answer:
                status = answer.status_code
        except (httpx.HTTPError, OSError) as err:
            raise NotDelivered(f"{type(err).__name__} {err}") from err
        if not 200 <= status < 300:
            raise NotDelivered(f"status {status}")

    def _note(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        self._metrics.failed()
        if state.attempt_number == 1 and isinstance(error, NotDelivered):
            logger.warning("webhook: not delivered: %s; it is sent again", error.detail)


class WebhookMetrics:
    """Takes note of requests to the webhook.

    Args:
        registry: of the process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._began_s: float | None = None
        self._requests = Counter(
            "unicron_webhook_requests_total",
            "Requests to the webhook that are done with.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("delivered", "given-up"):
            self._requests.labels(outcome)
        self._failures = Counter(
            "unicron_webhook_failures_total", "Attempts that the receiver did not take.", registry=registry
        )
        registry.register(StateMetrics(self._read))

    def begun(self, at_s: float) -> None:
        """Take note of a request. ``at_s``: the time of the monotonic clock."""
        self._began_s = at_s

    def failed(self) -> None:
        """Take note of an attempt that has failed."""
        self._failures.inc()

    def ended(self, outcome: str) -> None:
        """Take note that a request is done with."""
        self._began_s = None
        self._requests.labels(outcome).inc()

    def _read(self) -> Iterator[Metric]:
        waits_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        yield gauge("unicron_webhook_waiting_seconds", "For how long the present request has been tried.", waits_s)
