"""The agent's end of the fork server: the warm process from which all ranks and stores of the node are forked.

The fork server (``unicron.forkserver``) reaps the processes that it forked and forwards each exit status, so the agent
learns of a death by an event. Both sides send JSON lines. The supervisor (``supervisor.py``) starts it, and another one
in its place when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from services.agent.machine.proc import process_state
from services.agent.node.process import Process
from services.agent.versions import agreed
from shared.bus.cancellation import cancelled
from shared.bus.dropped import DroppedMessages
from shared.bus.messages import Integer, decode, shown
from shared.errors import Unavailable, Undecodable
from shared.model import Model
from shared.service.changes import Changes

_MAX_LINE_BYTES = 1 << 16
"""Longest line that the fork server sends: an event of a few hundred bytes, or an error message."""


QUIT_GRACE_S = 0.5
"""Time after which a waiting rank that was asked to quit is killed: it has nothing to save."""

FINISH_GRACE_S = 5.0
"""The grace of a rank that has finished its task: the rank flushes its output and leaves its process group."""

KILLED = -9
"""Exit code of a rank that ended together with its fork server."""

KILLED_TIMEOUT_S = 1.0
"""How long to wait for the end of a killed rank whose fork server has ended."""


async def end(
    processes: Sequence[Process],
    changes: Changes,
    *,
    quit_: Callable[[Process], None],
    kill: Callable[[Process], None],
) -> None:
    """End processes; return when they have ended.

    A process that waits is asked to quit, and killed after a grace. A process that computes, blocks or is stopped is
    killed at once: it has nothing to save, and might never read a message.

    Args:
        processes: alive.
        changes: notified whenever a process changes.
        quit_: asks a process to quit.
        kill: kills a process.
    """
    grace_s = 0.0
    for process in processes:
        stopped = process.pid is not None and process_state(process.pid) in ("T", "t")
        if (process.waiting or process.finished) and not stopped:
            quit_(process)
            grace_s = max(grace_s, FINISH_GRACE_S if process.finished else QUIT_GRACE_S)
        else:
            kill(process)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s or None):
            await changes.until(lambda: not any(p.alive for p in processes))
    for process in processes:
        if process.alive:
            kill(process)
    await changes.until(lambda: not any(p.alive for p in processes))


class ForkServerEvent(Model):
    """A message of the fork server (``unicron.forkserver`` lists them). Each has the fields of its event."""

    event: str
    id: str | None = None
    pid: Integer | None = None
    port: Integer | None = None
    code: Integer | None = None
    detail: str | None = None
    version: Integer = 1
    newest: Integer | None = None
    library: str = ""


EVENT: TypeAdapter[ForkServerEvent] = TypeAdapter(ForkServerEvent)

_FIELDS = {
    "ready": (),
    "forked": ("id", "pid"),
    "store": ("id", "pid", "port"),
    "exited": ("id", "code"),
    "error": ("id", "detail"),
    "stopped": (),
    "continued": (),
}
"""The fields that the agent needs of each event."""


class Forked:
    """A process that the fork server forked, by a pidfd: a handle that never stands for another process."""

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
        """Block until the process has ended, for ``timeout_s`` at most; return whether it has ended."""
        if self._pidfd is None:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Close the handle."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


@dataclass
class Children:
    """What a fork server has when an agent turns to it.

    ``living``: process id -> pid. ``ended``: process id -> exit status, of those whose end no agent has acknowledged.
    """

    living: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)


class ForkServer:
    """The connection to one fork server process.

    Args:
        name: of the socket on which it listens, in Linux's abstract namespace.
        log: name of the file with what it prints, for errors.
        exited: called with the id and the exit status of each process that ends (negative: a signal's number).
        stopped: called when a process was stopped by a signal, and when a stopped process goes on.
        lost: called when the fork server ended.
        dropped: counts the messages that cannot be decoded.
    """

    def __init__(
        self,
        name: str,
        *,
        exited: Callable[[str, int], None],
        stopped: Callable[[], None],
        lost: Callable[[], None],
        dropped: DroppedMessages,
        log: str = "forkserver.log",
    ) -> None:
        self._dropped = dropped
        self._name, self._log = name, log
        self._exited, self._stopped, self._lost = exited, stopped, lost
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._children = Children()
        self._answers: dict[str, asyncio.Future[ForkServerEvent]] = {}
        self._stopping = False

    async def start(self) -> Children:
        """Connect, and wait until the fork server has imported the modules that ranks need; return its children.

        Raises:
            Unavailable: the fork server ended before it was ready.
            OSError: nothing listens.
        """
        reader, self._writer = await asyncio.open_unix_connection(f"\0{self._name}", limit=_MAX_LINE_BYTES)
        self._reading = asyncio.create_task(self._read(reader))
        await self._ready
        return self._children

    async def fork(
        self,
        process_id: str,
        *,
        task: str,
        worker: str,
        spec: Path,
        output: Path,
        env: dict[str, str],
        stacks: Path | None = None,
        uid: int | None = None,
    ) -> Forked:
        """Fork a rank process, which runs as the user ``uid``, or as the fork server's.

        The process writes its output to ``output``, and on request its stacks to ``stacks``.

        Raises:
            Unavailable: the fork server has ended, or could not fork.
        """
        paths = {"spec": str(spec), "output": str(output), **({"stacks": str(stacks)} if stacks is not None else {})}
        rank = {"task": task, "worker": worker, **paths, "env": env, "uid": uid}
        answer = await self._ask({"do": "fork", "id": process_id, **rank})
        return Forked(answer.pid or 0)

    async def store(self, store_id: str, *, host: str, output: Path, uid: int | None = None) -> tuple[Forked, int]:
        """Run a rendezvous store as the user ``uid``, or as the fork server's; return its process and its port.

        Raises:
            Unavailable: the fork server has ended, or the store ended before it listened.
        """
        answer = await self._ask({"do": "store", "id": store_id, "host": host, "output": str(output), "uid": uid})
        return Forked(answer.pid or 0), answer.port or 0

    async def check(self, check_id: str, *, output: Path, memory_bytes: int, devices: bool) -> Forked:
        """Run a process that computes and tests memory, and prints what it found (``unicron.process.self_check``).

        Raises:
            Unavailable: the fork server has ended, or could not fork.
        """
        request = {"do": "check", "id": check_id, "output": str(output)}
        answer = await self._ask({**request, "memory_bytes": memory_bytes, "devices": devices})
        return Forked(answer.pid or 0)

    def acknowledge(self, process_id: str) -> None:
        """Have the fork server forget the end of a process, which it would repeat to a successor."""
        with contextlib.suppress(Unavailable):
            self._send({"do": "acknowledge", "id": process_id})

    async def stop(self) -> None:
        """Close the connection."""
        self._stopping = True
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            await cancelled(self._reading)

    async def _ask(self, request: dict[str, Any]) -> ForkServerEvent:
        """Send a request; return the event that answers it."""
        answer: asyncio.Future[ForkServerEvent] = asyncio.get_running_loop().create_future()
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
            while line := await _line(reader):
                try:
                    event = _event(line)
                except Undecodable as err:
                    self._dropped.note("the fork server", err)
                    continue
                self._take(event)
        assert self._writer is not None
        self._writer.close()
        gone = Unavailable(f"the fork server ended; see {self._log} of the node")
        if not self._ready.done():
            self._ready.set_exception(gone)
        elif not self._stopping:
            self._lost()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(gone)

    def _pending(self, request_id: str) -> asyncio.Future[ForkServerEvent] | None:
        """Return the answer that a request still waits for, if it does."""
        answer = self._answers.get(request_id)
        return answer if answer is not None and not answer.done() else None

    def _take(self, event: ForkServerEvent) -> None:
        """Handle one event of the fork server."""
        about = event.id or ""
        match event.event:
            case "ready":
                self._greeted(event)
            case "forked" if not self._ready.done():
                self._children.living[about] = event.pid or 0
            case "forked" | "store":
                if (answer := self._pending(about)) is not None:
                    answer.set_result(event)
            case "error":
                if (answer := self._pending(about)) is not None:
                    answer.set_exception(Unavailable(f"the fork server could not do it: {event.detail}"))
            case "exited":
                code = event.code or 0
                if not self._ready.done():
                    self._children.ended[about] = code
                    return
                if (answer := self._pending(about)) is not None:
                    answer.set_exception(Unavailable(f"ended with {code} before it was ready"))
                self._exited(about, code)
            case "stopped" | "continued":
                self._stopped()

    def _greeted(self, event: ForkServerEvent) -> None:
        if self._ready.done():
            return
        try:
            agreed("the fork server", event.version, event.newest, event.library)
        except Unavailable as err:
            # The fork server has the library of the supervisor's start, or one that was replaced since.
            self._ready.set_exception(Unavailable(f"{err.detail}, and start the node's service again"))
        else:
            self._ready.set_result(None)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line; empty at the end. A line that is too long is returned as one that is no event."""
    try:
        return await reader.readline()
    except ValueError:
        return b"\n"


def _event(line: bytes) -> ForkServerEvent:
    """Return the event in a line.

    Raises:
        Undecodable: not an event that is known here, or without a field that the event needs.
    """
    event = decode(EVENT, line)
    if (needed := _FIELDS.get(event.event)) is None:
        raise Undecodable(f"event {shown(event.event)} is not known", kind="unknown event")
    if missing := [name for name in needed if getattr(event, name) is None]:
        raise Undecodable(f"event {event.event} lacks {', '.join(missing)}", kind=event.event)
    return event
