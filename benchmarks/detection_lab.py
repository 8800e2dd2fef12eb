"""What ``benchmarks.detection`` measures with: a stack, a task that trains, faults of its ranks, the log's events."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cli.stack.processes import run_module
from cli.stack.stack import Stack
from cli.waiting import Record, WaitingClient
from shared.errors import Conflict, InvalidInput, Unavailable

WAIT_S = 60.0
"""Longest wait for one condition; each comes true within seconds."""

POLL_S = 0.1
"""Time between two looks: what is measured is in the events, and each look costs the api a few milliseconds."""

EVENTS = 1000
"""Events of one look; between two looks a handful is appended."""

TASK = "detect"

ENVIRONMENT = {
    "UNICRON_FAULT_INJECTION": "1",
    # Hundreds of faults strike one task, worker and node within minutes: none of them is a sign of anything.
    "UNICRON_CAUSE_WORKER_LIMIT": "0",
    "UNICRON_CAUSE_NODE_LIMIT": "0",
    "UNICRON_CAUSE_TASK_LIMIT": "0",
    "UNICRON_CAUSE_PAIR_LIMIT": "0",
    "UNICRON_LEMON_FALSE_POSITIVES": "0",
}

_ANNOUNCED = re.compile(r"injected fault (\S+): .* at step (\d+); unix time ([\d.]+)")
"""What a rank prints right before a fault (``unicron.process.faults.announce``)."""


@dataclass(frozen=True)
class Struck:
    """A fault that has happened. ``at_s``: Unix time by the rank's clock, right before it."""

    id: str
    worker: str
    node: str
    rank: int
    step: int
    at_s: float


@dataclass
class Lab:
    """A stack on which faults are injected, and what its log has said since the last look."""

    stack: Stack
    client: WaitingClient
    corpus: Path
    events: list[Record] = field(default_factory=list)
    """Those behind ``forget``."""
    incidents: dict[str, Record] = field(default_factory=dict)
    """Every incident so far -> its first error event."""
    _position: int = 0

    async def look(self) -> None:
        """Read the events that are new."""
        while True:
            page = await self.client.get("/v1/events", {"after": self._position, "limit": EVENTS})
            self.events += page["items"]
            for record in page["items"]:
                if record["type"] == "error.detected":
                    self.incidents.setdefault(record["event"]["incident"], record)
            if page["items"]:
                self._position = page["items"][-1]["position"]
            if page["next_cursor"] is None:
                return

    async def forget(self) -> None:
        """Leave the events so far behind."""
        await self.look()
        self.events.clear()

    async def event(self, what: str, holds: Callable[[Record], bool], limit_s: float = WAIT_S) -> Record:
        """Return the first event record, since ``forget``, that holds."""

        async def found() -> Record | None:
            await self.look()
            return next((record for record in self.events if holds(record)), None)

        return await self.client.until(what, found, limit_s)

    async def healed(self, error: Record, limit_s: float = WAIT_S) -> None:
        """Wait until the incident of an error event is over."""
        incident = error["event"]["incident"]

        def over(record: Record) -> bool:
            event = record["event"]
            return record["type"] == "state.moved" and bool(event.get("complete")) and event.get("incident") == incident

        await self.event(f"incident {incident} is over", over, limit_s)

    async def train(self, **specification: Any) -> None:
        """Submit the task, and wait until it trains."""
        await self.client.submit({"name": TASK, "data": str(self.corpus), **specification})
        await self.client.until_step(TASK, 10, WAIT_S)

    async def stop(self) -> None:
        """Stop the task."""
        await self.client.post(f"/v1/tasks/{TASK}/stop", {"lose_steps": True})
        await self.client.until_ended(TASK, WAIT_S)

    async def strike(self, fault: str, rank: int, task: str = TASK) -> Struck:
        """Have a fault happen in a rank, as soon as that trains; return when it has."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                asked = await self.client.post(f"/v1/tasks/{task}/faults", {"fault": fault, "rank": rank})
                break
            except (InvalidInput, Conflict, Unavailable):  # the rank has yet to train again
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(POLL_S)
        return await self.client.until(f"{fault} happens", lambda: self._announced(asked, task), WAIT_S)

    async def _announced(self, asked: Record, task: str) -> Struck | None:
        folder = self.stack.run_dir / "tasks" / task / "output"
        for path in folder.glob(f"*-{asked['worker'].replace('/', '-')}.log"):
            try:
                text = path.read_text(errors="replace")
            except FileNotFoundError:  # the agent keeps the newest files of a worker
                continue
            for fault_id, step, at in _ANNOUNCED.findall(text):
                if fault_id == asked["id"]:
                    return Struck(fault_id, asked["worker"], asked["node"], asked["rank"], int(step), float(at))
        return None


@asynccontextmanager
async def laboratory(nodes: int, workers_per_node: int = 1) -> AsyncIterator[Lab]:
    """Start a stack for faults, and stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="unicron-detection-") as name:
        folder = Path(name)
        corpus = folder / "corpus.txt"
        await run_module("unicron.trainer.corpus", str(corpus))
        async with (
            Stack(folder / "run", nodes=nodes, workers_per_node=workers_per_node, environment=ENVIRONMENT) as stack,
            WaitingClient(stack.url, poll_s=POLL_S) as client,
        ):
            yield Lab(stack, client, corpus)


def unix_s(text: str) -> float:
    """Return a time of the interface as Unix seconds."""
    return datetime.fromisoformat(text).timestamp()
