"""Services that stand by: several processes of one, of which one decides."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Self

from shared.errors import Unavailable
from shared.events.union import Event
from shared.log.log import EventLog
from tests.condition import until

LIMIT_S = 60.0

LOAD_S = 60.0
"""Time for which the load is above what a service can do."""


class Instances:
    """Processes of a service on one log, each with a file for its log lines; a context manager, which ends them.

    Args:
        service: the service's name.
        folder: of the run, and of these files.
        nats_url: the server's, or those of several.
        credential: the file of the processes' credential.
        log_url: of the log.
    """

    def __init__(self, service: str, folder: Path, nats_url: str, credential: Path, log_url: str) -> None:
        self.service, self._folder = service, folder
        self._environment = {
            **os.environ,
            "UNICRON_RUN_DIR": str(folder),
            "UNICRON_LOG_URL": log_url,
            "UNICRON_NATS_URL": nats_url,
            "UNICRON_NATS_CREDENTIAL": str(credential),
            "UNICRON_PARENT_DEATH": str(os.getpid()),
        }
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, **environment: str) -> asyncio.subprocess.Process:
        """Start one more, with further settings; return when it works or stands by."""
        with self.lines_file(len(self.processes)).open("wb") as lines:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", f"services.{self.service}.main"),
                stdout=asyncio.subprocess.PIPE,
                stderr=lines,
                env=self._environment | environment,
            )
        self.processes.append(process)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), LIMIT_S) == b"ready\n", self.lines(process)
        return process

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def end(self) -> None:
        """Kill those that have not ended."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def lines_file(self, number: int) -> Path:
        return self._folder / f"{self.service}-{number}.log"

    def lines(self, process: asyncio.subprocess.Process) -> str:
        """Return what one has logged."""
        return self.lines_file(self.processes.index(process)).read_text()


@contextlib.asynccontextmanager
async def busy_machine() -> AsyncIterator[None]:
    """Have other programs want all processors."""
    spinning = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            await process.wait()


async def keeps_its_lease(instances: Instances, log: EventLog, batch: Callable[[str], list[Event]]) -> None:
    """Assert that the active instance keeps its lease while the log gets ten times what the instance can handle.

    Args:
        instances: an active one, and one that stands by.
        log: their log.
        batch: returns further events, of any name.
    """
    lease, before = log.leases()[instances.service], log.last_position()
    ended = threading.Event()

    def append(writer: int) -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            with contextlib.suppress(Unavailable):  # the queue at SQLite's lock is long
                log.append(batch(f"{writer}-{number}"))

    async with busy_machine():
        flood = [asyncio.create_task(asyncio.to_thread(append, writer)) for writer in range(4)]
        try:
            await asyncio.sleep(LOAD_S)  # this is the load
            appended, handled = log.last_position() - before, log.leases()[instances.service].handled - before
        finally:
            ended.set()
            await asyncio.gather(*flood)
        print(f"appended={appended} handled={handled}")
        assert appended > 10 * handled > 0, "it was no load"
        assert log.leases()[instances.service].token == lease.token
        # It goes on with what is left; the other one goes on folding behind it.
        await until(lambda: log.leases()[instances.service].handled > before + handled, limit_s=LIMIT_S)
    assert log.leases()[instances.service].token == lease.token
    assert [process.returncode for process in instances.processes] == [None, None]
