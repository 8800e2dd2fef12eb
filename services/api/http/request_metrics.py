"""Metrics of requests: their number, and the time until their answers begin."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""From a probe to the longest computation (``services.api.http.computations.LIMIT_S``)."""

NO_ROUTE = "none"
"""Route of a request that was refused before it had one, or for whose path there is none."""

METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
"""Methods that have a label; whatever else is sent counts as ``other``."""


class RequestMetrics:
    """ASGI middleware that takes note of requests. The label ``route`` is the path's pattern, never the path.

    A stream counts with the time until it begins.

    Args:
        app: what answers.
        registry: of the process.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "unicron_http_requests_total", "Requests to the api.", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "unicron_http_request_seconds",
            "Time from a request until its answer begins.",
            ["method", "route"],
            buckets=BUCKETS_S,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                seconds = time.perf_counter() - began_s
                method = scope["method"] if scope["method"] in METHODS else "other"
                route = getattr(scope.get("route"), "path", NO_ROUTE)
                self._requests.labels(method, route, str(message["status"])).inc()
                self._seconds.labels(method, route).observe(seconds)
            await send(message)

        await self._app(scope, receive, sending)
