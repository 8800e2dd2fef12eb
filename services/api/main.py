"""The gateway's process: ``python -P -m services.api.main``.

The process folds the log into the projections (``Feed``), takes in heartbeats (``Live``), and serves HTTP on
``settings.host`` and ``settings.port`` (0: any free one). Once it answers, it writes the port to
``<run_dir>/services/api.port``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI
from fastapi_offline import FastAPIOffline

from services.api import openapi
from services.api.access.access import Access
from services.api.access.socket_owners import end
from services.api.gateway import Gateway
from services.api.http import problems
from services.api.http.http_policy import HttpPolicy
from services.api.http.request_metrics import RequestMetrics
from services.api.live import Live
from services.api.notices.notices import Notices
from services.api.notices.sending import NoticeMetrics
from services.api.postmortem import page as postmortem_page
from services.api.requests import trouble_requests
from services.api.route_parts.joined_answers import JoinedAnswers
from services.api.route_parts.log_positions import PositionHeader, add_to_reads
from services.api.route_parts.parameters import refuse_unknown
from services.api.routers import (
    browser,
    costs,
    events,
    faults,
    files,
    health,
    ids,
    incidents,
    limits,
    log,
    metrics,
    nodes,
    page,
    planning,
    plans,
    slow_workers,
    task_metrics,
    tasks,
    troubles,
    waf,
)
from services.api.signed_heads import SignedHeads
from services.api.store.feed import PROJECTIONS, Feed
from services.api.store.fold_metrics import FoldMetrics
from services.api.store.projection_store import Store, database_url
from shared.bus.cancellation import cancelled
from shared.errors import InvalidInput
from shared.machine.durable_files import replace_file
from shared.messages.reachability import REACHABILITY
from shared.service import tokens
from shared.service.frame import Context, run
from shared.service.http_server import HttpServer, listen
from shared.settings.model import Settings

_SHUTDOWN_S = 2
"""Requests under way when the process is asked to end are given this long; streams are ended at once."""

_KEEP_ALIVE_S = 75
"""For how long a connection without requests stays open: longer than clients and proxies keep one, which is 5 s (httpx)
to 60 s (nginx). Where both close after 5 s, uvicorn's default, a request may meet the end and gets no answer."""

ROUTERS = tuple(
    add_to_reads(module.router)
    for module in (
        tasks,
        task_metrics,
        files,
        nodes,
        limits,
        faults,
        incidents,
        slow_workers,
        plans,
        planning,
        events,
        log,
        costs,
        waf,
        ids,
        browser,
        health,
        troubles,
        metrics,
        page,
    )
)


def application() -> FastAPI:
    """Return the endpoints, without a gateway that they could work with, and without what is before them."""
    app = FastAPIOffline(
        redoc_url=None,
        title="Unicron",
        summary="Workload manager for large-model training that heals itself at the lowest total cost.",
        version=metadata.version("unicron-cluster") if _installed() else "0",
    )
    problems.install(app)
    for router in ROUTERS:
        app.include_router(router, dependencies=[Depends(refuse_unknown)])
    openapi.install(app)
    return app


def create_app(gateway: Gateway) -> FastAPI:
    """Return the application."""
    app = application()
    app.state.gateway = gateway
    postmortem_page.load()
    settings = gateway.settings
    app.add_middleware(JoinedAnswers)
    app.add_middleware(PositionHeader, feed=gateway.feed)
    app.add_middleware(
        Access,
        token_file=settings.token_file,
        sessions=gateway.sessions,
        requests_per_s=settings.requests_per_s,
    )
    app.add_middleware(HttpPolicy, hosts=gateway.settings.allowed_host_names, routes=app.routes)
    app.add_middleware(RequestMetrics, registry=gateway.registry)
    return app


def _installed() -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("unicron-cluster"))
    return False


def check_exposure(settings: Settings) -> None:
    """Refuse to send tokens and tasks over a network in the clear, or to listen there for nobody.

    Raises:
        InvalidInput: the api is to listen elsewhere than on loopback without TLS or without a token.
    """
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise _setting("tls_key", settings.tls_key, "must be given together with tls_certificate")
    address = end(settings.host, 0)
    if settings.insecure or settings.host == "localhost" or (address is not None and address.address.is_loopback):
        return
    if settings.tls_certificate is None:
        raise _setting(
            "host",
            settings.host,
            "needs UNICRON_TLS_CERTIFICATE and UNICRON_TLS_KEY, since others can read what is sent there; "
            "UNICRON_INSECURE=true where a proxy has TLS, or nobody else is on that network",
        )
    if not tokens.read(settings.token_file):
        raise _setting("host", settings.host, f"needs a token in {settings.token_file}: `unicron token add NAME`")


def _setting(field: str, value: object, problem: str) -> InvalidInput:
    return InvalidInput.of(field, str(value), problem, f"settings refused: {field}: {problem} (given: {value})")


def write_port(run_dir: Path, port: int) -> None:
    """Write the port where ``unicron up`` looks for it; a reader sees the whole number or no file."""
    replace_file(run_dir / "services" / "api.port", f"{port}\n".encode(), mode=0o644)


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Wait for the first of several tasks; raise what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def serve(context: Context) -> None:
    """Run the gateway until cancelled."""
    settings = context.settings
    check_exposure(settings)
    heads = SignedHeads(settings, context.journal.log)
    notices = Notices(settings, database_url(settings, "notices"), NoticeMetrics(context.registry))
    opening = functools.partial(Store, database_url(settings, "projections"))
    limit_s = settings.connect_timeout_s
    store = await context.journal.outages.outlast(PROJECTIONS, opening, limit_s=limit_s, starting=True)
    feed = Feed(store, context.journal, FoldMetrics(context.registry).folded)
    live = Live()
    try:
        await feed.catch_up()
        await context.bus.subscribe(REACHABILITY, live.hear_detector)
        gateway = Gateway(settings, context.bus, context.journal, store, feed, live, context.registry)
        await gateway.code.serve(context.bus)
        app = create_app(gateway)
        listening = listen(settings.host, settings.port)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_SHUTDOWN_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
            # Whoever is at the other end of the connection, not whom a header names.
            proxy_headers=False,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        )
        server = HttpServer(config)
        following = asyncio.create_task(feed.follow(), name="feed")
        serving = asyncio.create_task(server.serve(sockets=[listening]), name="http")
        signing = asyncio.create_task(heads.keep_signing(), name="signed-heads")
        sending = asyncio.create_task(notices.keep_sending(gateway), name="notices")
        hearing = asyncio.create_task(live.keep_hearing(context.bus), name="heartbeats")
        collecting = asyncio.create_task(gateway.metrics.keep_collecting(), name="metrics")
        removing = asyncio.create_task(gateway.code.keep_removing(), name="code")
        ending = asyncio.create_task(trouble_requests.keep_ending(gateway, health.readiness), name="troubles")
        try:
            await _first(asyncio.create_task(server.listens.wait()), serving, following)
            write_port(settings.run_dir, listening.getsockname()[1])
            context.ready()
            await _first(following, serving)
        finally:
            await feed.close()
            server.should_exit = True
            await asyncio.wait({serving})
            await cancelled(following, hearing, signing, sending, collecting, removing, ending)
            await gateway.metrics.close()
            await gateway.code.close()
    finally:
        await asyncio.to_thread(store.close)


def main() -> int:
    """Run the service."""
    return run("api", serve)


if __name__ == "__main__":
    sys.exit(main())
