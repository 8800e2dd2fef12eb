"""The frame of a service process: settings, logging, signals, bus, journal, health and readiness.

``run`` is the entry point of every service. It opens the bus (``shared.bus.connection``) and the journal
(``shared.log.journal``) and calls the service's own ``main`` with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from shared.bus import cancellation
from shared.bus.cancellation import cancelled
from shared.bus.connection import Bus
from shared.bus.credentials import Credential
from shared.bus.dropped import DroppedMessages
from shared.bus.outages import LOG, Outages
from shared.clock import PROCESS_CLOCK
from shared.errors import Unavailable, UnicronError
from shared.machine.process import END_SIGNAL, collect_seldom, hide_memory, watch_parent
from shared.machine.process_names import process_name
from shared.messages import common_time
from shared.messages.health import AGENT, HEALTH, Health
from shared.service import metrics
from shared.service.joining import check_identity, credential_of, joined
from shared.service.log_lines import log_to_stderr
from shared.settings.endpoints import listening
from shared.settings.model import Settings, read_settings

if TYPE_CHECKING:
    from shared.log.journal import Journal
    from shared.service.lease_keeper import LeaseKeeper

logger = logging.getLogger(__name__)


@dataclass
class Ending:
    """How a process that was asked to end (SIGTERM, SIGINT, ``END_SIGNAL``) ends.

    ``cancels``: whether the first request cancels the service's work. A further request always does.
    """

    cancels: bool = True


@dataclass
class Context:
    """What a service gets from the frame.

    ``opened``: the journal, if the process opens one. ``stop``: set when the process was asked to end; ``ending``: what
    a request to end does. ``lease``: that of a service of which one instance decides; else None. ``counters``: numbers
    by name that the service reports with its health. ``registry``: its metrics.
    """

    settings: Settings
    bus: Bus
    opened: Journal | None
    stop: asyncio.Event
    name: str = ""
    ending: Ending = field(default_factory=Ending)
    outages: Outages = field(default_factory=Outages)
    is_ready: bool = field(default=False, init=False)
    lease: LeaseKeeper | None = field(default=None, init=False)
    counters: dict[str, int] = field(default_factory=dict, init=False)
    registry: CollectorRegistry = field(default_factory=metrics.new_registry, init=False)

    def __post_init__(self) -> None:
        self.registry.register(metrics.StateMetrics(self._metrics))

    @property
    def journal(self) -> Journal:
        """The journal.

        Raises:
            RuntimeError: the process has none.
        """
        if self.opened is None:
            raise RuntimeError("this process was started without a journal")
        return self.opened

    @property
    def is_active(self) -> bool:
        """Whether this process does the service's work: it neither stands by nor fails to move its lease on."""
        return self.lease is None or self.lease.is_held

    def ready(self) -> None:
        """Report that the service works from now on: with a line ``ready`` on stdout, and in its health.

        What the process has loaded by then stays for as long as it lives. Frozen, it is not visited by the garbage
        collector, which otherwise stops the process for a tenth of a second or more each time it visits everything.
        The collector seldom visits objects that are made from then on.
        """
        if not self.is_ready:
            collect_seldom()
            self.is_ready = True
            print("ready", flush=True)

    async def health(self, _: None = None) -> Health:
        """Return the reply to a health request."""
        detail = self.outages.detail or ("" if self.is_ready else "starting")
        return Health(
            name=self.name,
            pid=os.getpid(),
            ready=not detail,
            detail=detail,
            counters=self.counters,
            handled=self.opened.handled if self.opened is not None else None,
            process=process_name(),
            active=self.is_active,
            token=self.lease.token if self.lease is not None else 0,
        )

    def _metrics(self) -> Iterator[Metric]:
        """Yield the metrics that every service and agent has."""
        yield metrics.gauge(
            "unicron_build_info", "1, with the version.", {(self.name, metrics.version()): 1.0}, "service", "version"
        )
        ready = float(self.is_ready and not self.outages.detail)
        yield metrics.gauge("unicron_ready", "Whether the process works.", {(self.name,): ready}, "service")
        text = "Whether the process does the service's work: it holds the lease, if the service has one."
        yield metrics.gauge("unicron_active", text, {(self.name,): float(self.is_active)}, "service")
        yield from metrics.dropped(self.counters, self.name)
        connected, reconnects = float(self.bus.connected), float(self.bus.reconnects)
        yield metrics.gauge("unicron_bus_connected", "Whether NATS is reached.", {(self.name,): connected}, "service")
        text = "Connections to NATS after the first."
        yield metrics.counter("unicron_bus_reconnects_total", text, {(self.name,): reconnects}, "service")
        if self.opened is not None:
            yield from self._log_metrics(self.opened)

    def _log_metrics(self, journal: Journal) -> Iterator[Metric]:
        handled, relayed = {(self.name,): float(journal.handled)}, {(self.name,): float(journal.relayed)}
        text = "Position of the log up to which the process has handled it."
        yield metrics.gauge("unicron_log_handled_position", text, handled, "service")
        text = "Position up to which the process knows that the log's stream has it."
        yield metrics.gauge("unicron_log_relayed_position", text, relayed, "service")


Main = Callable[[Context], Coroutine[Any, Any, None]]


def run(name: str, main: Main, *, journal: bool = True, leased: bool = False) -> int:
    """Run a service until it ends or is asked to stop; return its exit code.

    Args:
        name: the service's name on the bus and in its log lines.
        main: the service's own work. A signal to end sets ``Context.stop`` and cancels it (``Ending``).
        journal: whether the process opens the event log (node agents do not).
        leased: whether one instance of the service decides, and others stand by.
    """
    log_to_stderr(name, node="" if journal else name.removeprefix(AGENT))
    hide_memory()
    if not watch_parent():
        logger.error("the parent is gone")
        return 1
    try:
        return asyncio.run(_run(name, main, journal, leased))
    except UnicronError as err:
        logger.error("%s: %s", err.code, err.detail)
        return err.exit_code
    except Exception:
        logger.exception("ended by an error")
        return 1


async def _run(name: str, main: Main, with_journal: bool, leased: bool) -> int:
    settings = read_settings()
    credential = credential_of(settings)
    check_identity(credential, name if with_journal else "")
    settings = joined(settings, credential)
    stop, ending = asyncio.Event(), Ending()
    work: asyncio.Task[None] | None = None

    def on_signal(signum: signal.Signals) -> None:
        logger.info("%s: stopping", signum.name)
        cancels = ending.cancels or stop.is_set()
        stop.set()
        if work is not None and cancels:
            work.cancel()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT, END_SIGNAL):
        loop.add_signal_handler(signum, on_signal, signum)
    work = asyncio.create_task(_work(name, main, settings, credential, stop, ending, with_journal, leased), name=name)
    try:
        await work
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    logger.info("stopped")
    return 0


async def _work(
    name: str,
    main: Main,
    settings: Settings,
    credential: Credential,
    stop: asyncio.Event,
    ending: Ending,
    with_journal: bool,
    leased: bool,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        limit_s = settings.connect_timeout_s
        bus = await Bus.connect(settings.nats_url, credential=credential, name=name, timeout_s=limit_s)
        stack.push_async_callback(bus.close)
        context = Context(settings, bus, None, stop, name, ending)
        bus.dropped = DroppedMessages(context.counters)
        if (address := listening(settings.metrics_address)) is not None:
            # Most processes need no HTTP server, and an agent starts faster without one.
            from shared.service.metrics_server import keep_serving

            serving = keep_serving(context.registry, *address, settings.allowed_host_names)
            stack.push_async_callback(cancellation.cancelled, asyncio.create_task(serving, name="metrics"))
        await bus.serve(HEALTH, context.health, name)
        if with_journal:
            # Node agents have no journal, and start in two thirds of the time without SQLAlchemy.
            from shared.log.journal import Journal
            from shared.log.log import EventLog

            await common_time.join(bus, PROCESS_CLOCK)
            opening = functools.partial(EventLog, settings.log_database_url, segments=settings.log_segments)
            log = await context.outages.outlast(LOG, opening, limit_s=limit_s, starting=True)
            stack.callback(log.close)
            journal = Journal(log, bus, context.outages, settings.log_stream_replicas)
            context.opened = await stack.enter_async_context(journal)
            if leased:
                from shared.service.lease_keeper import LeaseKeeper

                context.lease = LeaseKeeper(journal, name, settings.lease_s)
        await _until_done(main(context), bus)


async def _until_done(work: Coroutine[Any, Any, None], bus: Bus) -> None:
    """Do the work; end it when the bus was closed for good, because the service must then be started again."""
    main, lost = asyncio.create_task(work), asyncio.create_task(bus.wait_closed())
    try:
        await asyncio.wait({main, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            raise Unavailable("the connection to NATS was closed for good")
        main.result()
    finally:
        await cancelled(main, lost)
