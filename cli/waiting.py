"""Waiting for conditions of a cluster: for verbs that wait, the demo, and the benchmarks.

The calls of ``WaitingClient`` are coroutines, because the demo and the benchmarks run the stack that they ask in their
own event loop; verbs have none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar
from urllib.parse import quote

from shared.errors import TimedOut, Unavailable, UnicronError
from unicron_client.answers import task_path
from unicron_client.asynchronous import AsyncConnection
from unicron_client.resources import ENDED, Client
from unicron_client.waiting import until

Record = dict[str, Any]
"""A JSON object of the interface."""

T = TypeVar("T")

AT_STRENGTH = frozenset({"running", "succeeded"})
"""States of a task that has all workers of its plan, or needs no more."""

POLL_S = 0.1
"""Time between two looks at a condition: short beside the waits, long beside a request."""


class WaitingClient(AsyncConnection):
    """The server's interface, with waiting.

    Args:
        server: the server's address; None: that of ``UNICRON_SERVER``, or else the default port on this machine.
        poll_s: seconds between two looks at a condition.
        patience_s: seconds for which a request is repeated while the server cannot be reached, as when the stack starts
            it anew.

    Raises:
        InvalidInput: the address is not an HTTP address.
    """

    def __init__(self, server: str | None = None, *, poll_s: float = POLL_S, patience_s: float = 0.0) -> None:
        super().__init__(server, poll_s=poll_s, patience_s=patience_s)

    async def submit(self, spec: Record) -> Record:
        """Submit a task; return it."""
        task: Record = await self.post("/v1/tasks", spec)
        return task

    async def task(self, name: str) -> Record:
        """Return a task."""
        task: Record = await self.get(task_path(name))
        return task

    async def incidents(self) -> list[Record]:
        """Return all incidents, the oldest first."""
        return await self.items("/v1/incidents")

    async def until(self, what: str, found: Callable[[], Awaitable[T | None]], limit_s: float | None = None) -> T:
        """Wait until ``found`` returns something other than None or False; return that.

        Args:
            what: is waited for, in words.
            found: looks once.
            limit_s: longest wait in seconds; None: without end.

        Raises:
            TimedOut: the limit has passed.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while True:
            value = await found()
            if value is not None and value is not False:
                return value
            if deadline is not None and time.monotonic() > deadline:
                raise TimedOut(f"waited {limit_s:g} s, and it is not so that {what}")
            await asyncio.sleep(self._poll_s)

    async def until_step(self, name: str, step: int, limit_s: float) -> Record:
        """Wait until a task has done ``step`` steps and is at full strength, or has succeeded; return it.

        Raises:
            TimedOut: the limit has passed.
            UnicronError: the task has failed.
        """

        async def reached() -> Record | None:
            task = await self.living_task(name)
            return task if task["step"] >= step and task["state"] in AT_STRENGTH else None

        return await self.until(f"{name} reaches step {step}", reached, limit_s)

    async def until_ended(self, name: str, limit_s: float | None = None) -> Record:
        """Wait until a task has ended, with success or without; return it.

        Raises:
            TimedOut: the limit has passed.
        """

        async def ended() -> Record | None:
            task = await self.task(name)
            return task if task["state"] in ENDED else None

        return await self.until(f"{name} ends", ended, limit_s)

    async def until_restored(
        self, kind: str, limit_s: float, *, known: frozenset[str] = frozenset(), node: str | None = None
    ) -> Record:
        """Wait until all is back at planned strength after an incident; return the incident.

        Args:
            kind: of the incident.
            limit_s: longest wait in seconds.
            known: ids of earlier incidents, which do not count.
            node: of the incident; None: any.

        Raises:
            TimedOut: the limit has passed.
        """

        async def restored() -> Record | None:
            for incident in await self.incidents():
                if incident["kind"] == kind and incident["id"] not in known and node in (None, incident["node"]):
                    return incident if incident["restored_at"] else None
            return None

        return await self.until(f"the {kind} is healed", restored, limit_s)

    async def known_incidents(self) -> frozenset[str]:
        """Return the ids of all incidents so far."""
        return frozenset([incident["id"] for incident in await self.incidents()])

    async def living_task(self, name: str) -> Record:
        """Return a task that has not failed.

        Raises:
            UnicronError: the task has failed.
        """
        task = await self.task(name)
        if task["state"] == "failed":
            raise UnicronError(f"{name} failed: {task['reason']}")
        return task


def wait_for_stop(server: str | None, name: str) -> Record:
    """Return a task that was asked to stop once it has ended, or has refused since its state cannot be saved."""
    with Client(server) as client:

        def answered() -> Record | None:
            task: Record = client.get(task_path(name))
            return task if task["state"] in ENDED or task["stop_refused"] else None

        return until(f"{name} to stop", answered)


def wait_for_end(server: str | None, name: str, seen: Callable[[Record], None] | None = None) -> Record:
    """Return a task once it has ended, with success or without (for verbs, which have no event loop)."""
    return wait_for_task(server, name, ENDED, None, seen)


def wait_for_task(
    server: str | None,
    name: str,
    states: Collection[str],
    limit_s: float | None,
    seen: Callable[[Record], None] | None = None,
) -> Record:
    """Return a task once it is in one of these states (for verbs). ``seen``: called with the task at each look.

    Raises:
        TimedOut: the limit has passed.
    """
    with Client(server) as client:
        return client.wait_for(name, states, limit_s, seen=seen)


def wait_until_drained(server: str | None, name: str) -> Record:
    """Return a node once it is no longer draining, as a rule because it is drained."""
    with Client(server) as client:

        def drained() -> Record | None:
            node: Record = client.get(f"/v1/nodes/{quote(name, safe='')}")
            return node if node["recorded_state"] != "draining" else None

        return until(f"{name} to be drained", drained)


def wait_for_successor(server: str | None, name: str, incarnation: str, timeout_s: float) -> Record:
    """Return a node once it has another agent than that of an incarnation, or none any more.

    Raises:
        Unavailable: it has the same one after ``timeout_s``.
    """
    with Client(server) as client:

        def succeeded() -> Record | None:
            node: Record = client.get(f"/v1/nodes/{quote(name, safe='')}")
            return node if node["incarnation"] != incarnation or node["state"] in ("lost", "left") else None

        try:
            return until(f"another agent of {name}", succeeded, timeout_s, poll_s=POLL_S)
        except TimedOut as err:
            text = f"node {name!r} has no other agent after {timeout_s:g} s, and its ranks train on: see its log"
            raise Unavailable(text) from err
