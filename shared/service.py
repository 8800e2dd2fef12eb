"""What every service process does around its own work: settings, logging, signals, bus, journal, health, readiness."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from shared.bus import Bus
from shared.errors import InvalidInput, Unavailable, UnicronError
from shared.journal import Journal
from shared.log import EventLog
from shared.parent import die_with_parent
from shared.settings import Settings

logger = logging.getLogger(__name__)

HEALTH = "unicron.health"
"""Subject prefix of health requests; the service's name follows."""

PARENT_DEATH_VARIABLE = "UNICRON_PARENT_DEATH"
"""Environment variable: end when the parent does. Its value is the parent's pid, or ``1`` for whoever that is."""


@dataclass
class Context:
    """What a service works with. ``stop`` is set when the process has been asked to end.

    ``counters``: what the service counts, for its health.
    """

    settings: Settings
    bus: Bus
    journal: Journal
    stop: asyncio.Event
    name: str = ""
    is_ready: bool = field(default=False, init=False)
    counters: dict[str, int] = field(default_factory=dict, init=False)

    def ready(self) -> None:
        """Say that the service does its work from here on: one line ``ready`` on stdout, and in its health."""
        if not self.is_ready:
            self.is_ready = True
            print("ready", flush=True)

    async def health(self, _: bytes = b"") -> bytes:
        """Return the answer to a health request: JSON with name, pid, whether the service is ready, and counters."""
        answer = {"name": self.name, "pid": os.getpid(), "ready": self.is_ready, "counters": self.counters}
        return json.dumps(answer).encode()


Main = Callable[[Context], Coroutine[Any, Any, None]]


class _NoJournal(Journal):
    """Stands where a process has no log of its own to write (node agents): every use is an error."""

    def __init__(self) -> None:
        """Open nothing."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("this process was started without a journal")


def run(name: str, main: Main, *, journal: bool = True) -> int:
    """Run a service until it is told to stop; return its exit code.

    Args:
        name: what the service is called on the bus and in its log lines.
        main: the service. SIGTERM and SIGINT set ``stop`` and cancel it.
        journal: whether it opens the event log (node agents do not).
    """
    _log_to_stderr(name)
    if not _watch_parent():
        logger.error("the parent is gone")
        return 1
    try:
        settings = Settings()
    except ValidationError as err:
        logger.error("settings: %s", err)
        return InvalidInput.exit_code
    try:
        return asyncio.run(_run(name, main, settings, journal))
    except UnicronError as err:
        logger.error("%s: %s", err.code, err.detail)
        return err.exit_code
    except Exception:
        logger.exception("ended by an error")
        return 1


async def _run(name: str, main: Main, settings: Settings, with_journal: bool) -> int:
    stop = asyncio.Event()
    work: asyncio.Task[None] | None = None

    def on_signal(signum: signal.Signals) -> None:
        logger.info("%s: stopping", signum.name)
        stop.set()
        if work is not None:
            work.cancel()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum)
    work = asyncio.create_task(_work(name, main, settings, stop, with_journal), name=name)
    try:
        await work
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    logger.info("stopped")
    return 0


async def _work(name: str, main: Main, settings: Settings, stop: asyncio.Event, with_journal: bool) -> None:
    async with contextlib.AsyncExitStack() as stack:
        bus = await Bus.connect(settings.nats_url, token=settings.nats_token, name=name)
        stack.push_async_callback(bus.close)
        journal: Journal = _NoJournal()
        if with_journal:
            log = await asyncio.to_thread(EventLog, settings.log_database_url)
            stack.callback(log.close)
            journal = await stack.enter_async_context(Journal(log, bus))
        context = Context(settings, bus, journal, stop, name)
        await bus.serve(f"{HEALTH}.{name}", context.health)
        await _until_done(main(context), bus)


async def _until_done(work: Coroutine[Any, Any, None], bus: Bus) -> None:
    """Do the work; end it when the bus is gone for good, since a service without it must be started anew."""
    main, lost = asyncio.create_task(work), asyncio.create_task(bus.wait_closed())
    try:
        await asyncio.wait({main, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            raise Unavailable("the connection to NATS was closed for good")
        main.result()
    finally:
        for task in (main, lost):
            task.cancel()
        await asyncio.gather(main, lost, return_exceptions=True)


def _watch_parent() -> bool:
    """Ask to be told when the parent ends, if the environment says so; return whether it is still there."""
    value = os.environ.get(PARENT_DEATH_VARIABLE, "")
    if not value.isdigit() or value == "0":
        return True
    return die_with_parent(signal.SIGTERM, int(value) if value != "1" else None)


def _log_to_stderr(name: str) -> None:
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)s {name}[{os.getpid()}] %(name)s: %(message)s")
    formatter.converter = time.gmtime
    formatter.datefmt = "%Y-%m-%dT%H:%M:%S"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
