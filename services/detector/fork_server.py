"""The agent's end of the fork server: the warm process that all ranks and stores of the node are forked from.

The fork server (``unicron.forkserver``) reaps what it forked and forwards each exit status, so the agent learns of a
death by an event. JSON lines over a socket pair, both ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shared.errors import Unavailable

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "unicron.forkserver")
"""``-P``: a ``unicron/`` folder in the working directory is not taken for ours."""

EXIT_TIMEOUT_S = 2.0
"""How long an ending fork server is waited for before it is killed."""

_SECRET_VARIABLES = ("UNICRON_NATS_TOKEN", "UNICRON_LOG_URL")
"""Not for training processes: they run the user's code."""

_MAX_LINE_BYTES = 1 << 16


class Forked:
    """A process of the fork server's, by a handle that never means another process (a pidfd)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal; nothing happens if the process has ended."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    def wait(self, timeout_s: float) -> bool:
        """Block until the process has ended; return whether it has."""
        if self._pidfd is None:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Give the handle back."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class ForkServer:
    """One fork server process.

    Args:
        command: what to run; ``--fd N`` is added.
        output: file for what it prints.
        environment: added to its environment.
        exited: called with the id and the exit status (negative: a signal's number) of each process that ends.
        stopped: called when a process was stopped by a signal, or goes on.
        lost: called when the fork server ended without being told to.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: Path,
        environment: dict[str, str],
        exited: Callable[[str, int], None],
        stopped: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self._command, self._output, self._environment = command, output, environment
        self._exited, self._stopped, self._lost = exited, stopped, lost
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._stopping = False

    async def start(self) -> None:
        """Start it and wait until it has imported what ranks need.

        Raises:
            Unavailable: it ended before it was ready.
            OSError: no process can be started.
        """
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in _SECRET_VARIABLES}
        environment |= self._environment
        self._output.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._output.open("ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    "--fd",
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=environment,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=_MAX_LINE_BYTES)
        self._reading = asyncio.create_task(self._read(reader))
        await self._ready

    async def fork(
        self, process_id: str, *, task: str, worker: str, spec: Path, output: Path, env: dict[str, str]
    ) -> Forked:
        """Fork a rank process.

        Raises:
            Unavailable: the fork server is gone, or could not.
        """
        paths = {"spec": str(spec), "output": str(output)}
        answer = await self._ask({"do": "fork", "id": process_id, "task": task, "worker": worker, **paths, "env": env})
        return Forked(int(answer["pid"]))

    async def store(self, store_id: str, *, host: str, output: Path) -> tuple[Forked, int]:
        """Run a rendezvous store; return its process and its port.

        Raises:
            Unavailable: the fork server is gone, or the store ended before it listened.
        """
        answer = await self._ask({"do": "store", "id": store_id, "host": host, "output": str(output)})
        return Forked(int(answer["pid"])), int(answer["port"])

    async def stop(self) -> None:
        """Have it exit; kill it if it does not."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        if self._writer is not None:
            with contextlib.suppress(OSError, Unavailable):
                self._send({"do": "exit"})
            self._writer.close()
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[request["id"]] = answer
        try:
            self._send(request)
            return await answer
        finally:
            self._answers.pop(request["id"], None)

    def _send(self, request: dict[str, Any]) -> None:
        if self._writer is None or self._writer.is_closing():
            raise Unavailable("the fork server is gone")
        self._writer.write(json.dumps(request).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._take(json.loads(line))
        # End of file: the process is ending or dead; make sure, so that no half-alive one forks on.
        assert self._process is not None
        assert self._writer is not None
        self._writer.close()
        if not self._stopping:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
        gone = Unavailable(f"the fork server ended with {self._process.returncode}; see {self._output.name}")
        if not self._ready.done():
            self._ready.set_exception(gone)
        elif not self._stopping:
            self._lost()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(gone)

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "ready":
                if not self._ready.done():
                    self._ready.set_result(None)
            case "forked" | "store":
                answer = self._answers.get(event["id"])
                if answer is not None and not answer.done():
                    answer.set_result(event)
            case "error":
                answer = self._answers.get(event["id"])
                if answer is not None and not answer.done():
                    answer.set_exception(Unavailable(f"the fork server could not do it: {event['detail']}"))
            case "exited":
                answer = self._answers.get(event["id"])
                if answer is not None and not answer.done():
                    answer.set_exception(Unavailable(f"ended with {event['code']} before it was ready"))
                self._exited(event["id"], int(event["code"]))
            case "stopped" | "continued":
                self._stopped()
            case unknown:
                logger.warning("fork server: unknown event %r", unknown)
