"""``/metrics`` of a process that serves no HTTP otherwise: on an address of its own (``metrics_address``).

Services do without it: an address that cannot be listened on is said in the log and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterable

import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.errors import Unavailable
from shared.service.http_server import HttpServer, KnownHosts, listen

logger = logging.getLogger(__name__)

RETRY_S = 10.0
"""Pause before an address is tried again: below the default interval of Prometheus (15 s, or 60 s)."""

SHUTDOWN_S = 1
"""How long an answer that is under way may take once the process ends; an answer takes milliseconds."""

MOST_CONNECTIONS = 16
"""Most connections at a time; further ones are answered 503. A Prometheus keeps one open, a pair of them two."""


def application(registry: CollectorRegistry, hosts: KnownHosts) -> ASGIApp:
    """Return the ASGI application that answers ``/metrics`` under this machine's names, and nothing else."""
    metrics = make_asgi_app(registry)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = metrics
        if not hosts.includes(Headers(scope=scope).get("host", "")):
            app = PlainTextResponse("the host is no name of this server\n", status_code=421)
        elif scope["path"] != "/metrics":
            app = PlainTextResponse("Not Found", status_code=404)
        elif scope["method"] not in ("GET", "HEAD"):
            app = PlainTextResponse("Method Not Allowed", status_code=405, headers={"Allow": "GET, HEAD"})
        await app(scope, receive, send)

    return answer


async def _serve(server: HttpServer, listening: socket.socket) -> None:
    """Run a server until cancelled; its connections are closed then."""
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await asyncio.wait({serving})


async def keep_serving(registry: CollectorRegistry, host: str, port: int, names: Iterable[str] = ()) -> None:
    """Serve the metrics until cancelled.

    Args:
        registry: the process's.
        host: the host to listen on.
        port: the port to listen on; 0: any free one, which the log names.
        names: further names of this machine (``allowed_hosts``).
    """
    app, trouble = application(registry, KnownHosts(names)), ""
    while True:
        try:
            with contextlib.closing(listen(host, port)) as listening:
                trouble = ""
                logger.info("metrics on %s:%d", *listening.getsockname()[:2])
                config = uvicorn.Config(
                    app,
                    log_config=None,
                    access_log=False,
                    lifespan="off",
                    ws="none",
                    limit_concurrency=MOST_CONNECTIONS,
                    timeout_graceful_shutdown=SHUTDOWN_S,
                    proxy_headers=False,
                )
                await _serve(HttpServer(config), listening)
        except Unavailable as err:
            if err.detail != trouble:
                logger.error("no metrics: %s; tried again every %g s", err.detail, RETRY_S)
            trouble = err.detail
        await asyncio.sleep(RETRY_S)
