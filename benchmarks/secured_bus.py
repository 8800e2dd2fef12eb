"""What TLS and the rights of identities on the bus cost a fault. JSON lines; exit status 1 if a bound is missed.

    .venv/bin/python -m benchmarks.secured_bus [--faults 60]

Two whole control planes with two node agents each run side by side: one over NATS without TLS, where every key may do
everything; the other over TLS, with the rights that ship. A rank is killed in one and then in the other, in turns. The
ranks are those of ``tests/agent/stand_in.py``, which train nothing: what is measured is detection, decision and the
commands of the transition, which is all that uses the bus. Times are from the kill to the incident's milestones.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from pathlib import Path

from benchmarks.report import Report, at_least, run
from cli.stack.child import Child
from cli.waiting import Record, WaitingClient
from shared.bus.identities import node_identity
from shared.clock import PROCESS_CLOCK
from shared.errors import Unavailable
from shared.nats.key_directory import KeyDirectory
from shared.nats.nats_server import NatsServer
from shared.nats.rights import Rights, rights
from shared.service.joining import CREDENTIAL
from shared.settings.model import Settings
from tests.agent.program import running

SERVICES = ("detector", "planner", "transition", "api")
NODES = ("n0", "n1")
TASK = "killed"

MOST_S = 0.005
"""Required: the difference of the medians."""

WARM_FAULTS = 3
"""Faults of each side that are not counted: the first ones load what is used then."""

LIMIT_S = 60.0
"""For one fault, which takes a fraction of a second."""

POLL_S = 0.02
"""Between two looks; the events' own times are measured."""

MILESTONES = {"resumed": "resumed_at", "full strength": "restored_at"}
"""What is measured -> the field of the incident that has its time."""


class Side:
    """One of the two systems.

    Args:
        folder: of the run.
        tls: whether its NATS has TLS.
        rights_of: what its identities may do.
    """

    def __init__(self, folder: Path, *, tls: bool, rights_of: Callable[[str], Rights | None]) -> None:
        self.folder = folder
        keys = KeyDirectory(folder / "nats" / "keys", rights_of)
        keys.make(more=[node_identity(node) for node in NODES])
        self._nats = NatsServer(folder / "nats", keys=keys, tls=("127.0.0.1",) if tls else ())
        self._client: WaitingClient | None = None
        self._healed: set[str] = set()

    async def start(self, stack: AsyncExitStack) -> None:
        """Start everything, and a task that trains on both nodes."""
        await stack.enter_async_context(self._nats)
        (self.folder / "services").mkdir()
        (self.folder / "corpus.txt").write_text("the cat sat on the mat. " * 50)
        own = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")} | {
            "UNICRON_RUN_DIR": str(self.folder),
            "UNICRON_NATS_URL": self._nats.url,
            "UNICRON_PORT": "0",
        }
        for name in SERVICES:
            credential = {CREDENTIAL: str(self._nats.keys.credential_file(name))}
            child = Child(name, f"services.{name}.main", own | credential, self.folder)
            stack.push_async_callback(child.end)
            await child.start()
        for node in NODES:
            settings = Settings(
                run_dir=self.folder,
                nats_url=self._nats.url,
                nats_credential=self._nats.keys.credential_file(node_identity(node)),
            )
            one_worker = {"UNICRON_WORKERS_PER_NODE": "1"}
            log = self.folder / f"{node}.log"
            program = await stack.enter_async_context(running(settings, node, log, environment=one_worker))
            await program.ready()
        port = int((self.folder / "services" / "api.port").read_text())
        self._client = await stack.enter_async_context(WaitingClient(f"http://127.0.0.1:{port}"))
        await self._client.post("/v1/tasks", specification(self.folder / "corpus.txt"))
        await self._until("the task is whole", self._whole)

    async def fault(self, number: int) -> dict[str, float]:
        """Kill a rank, wait until the task is whole again; return the seconds to each milestone."""
        assert self._client is not None
        task = await self._until("the task is whole", self._whole)
        victim = task["ranks"][number % len(NODES)]["pid"]
        killed_at = PROCESS_CLOCK.now()
        os.kill(victim, signal.SIGKILL)
        incident = await self._until("the fault is healed", self._incident)
        self._healed.add(incident["id"])
        return {
            name: (datetime.fromisoformat(incident[field]) - killed_at).total_seconds()
            for name, field in MILESTONES.items()
        }

    async def _whole(self) -> Record | None:
        assert self._client is not None
        task = await self._client.get(f"/v1/tasks/{TASK}")
        ready = [one for one in task["ranks"] if one["pid"] is not None and one["state"] == "training"]
        return task if task["state"] == "running" and len(ready) == len(NODES) else None

    async def _incident(self) -> Record | None:
        """Return the incident that is new, once it is over."""
        assert self._client is not None
        new = [one for one in await self._client.incidents() if one["id"] not in self._healed]
        return new[0] if new and new[0]["restored_at"] is not None else None

    async def _until(self, what: str, look: Callable[[], Awaitable[Record | None]]) -> Record:
        deadline_s = time.monotonic() + LIMIT_S
        while (found := await look()) is None:
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{self.folder.name}: {what}: not within {LIMIT_S:g} s")
            await asyncio.sleep(POLL_S)
        return found


def specification(corpus: Path) -> Record:
    """Return a task of one rank on each node that never ends by itself."""
    return {
        "name": TASK,
        "model": {"layers": 2, "hidden": 64, "heads": 4, "sequence_length": 32},
        "batch": {"global": 12},
        "steps": 1_000_000,
        "data": str(corpus),
        "workers": {"min": len(NODES), "max": len(NODES)},
        "max_restarts": 1000,
        "env": {"BEHAVIOUR": "train"},
    }


async def measure(report: Report, faults: int) -> None:
    """Kill ranks of both sides in turns; print each time, the medians and the bounds."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unicron-secured-bus-")))
        sides = {
            "plain": Side(folder / "plain", tls=False, rights_of=lambda _: None),
            "secured": Side(folder / "secured", tls=True, rights_of=rights),
        }
        for side in sides.values():
            await side.start(stack)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for number in range(-WARM_FAULTS, faults):
            # Each turn begins with the other side, so that slow changes of the machine hit both alike.
            for name in sorted(sides, reverse=number % 2 == 0):
                seconds = await sides[name].fault(number)
                if number >= 0:
                    found[name].append(seconds)
                    report.line("fault", side=name, number=number, **{k: round(v, 4) for k, v in seconds.items()})
    for milestone in MILESTONES:
        medians = {name: statistics.median(one[milestone] for one in found[name]) for name in sides}
        report.line("median", milestone=milestone, **{name: round(median, 4) for name, median in medians.items()})
        difference_s = round(medians["secured"] - medians["plain"], 4)
        report.below(f"{milestone}: what TLS and rights cost a fault, s", difference_s, MOST_S)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.secured_bus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=at_least(1), default=60, help="of each side")
    given = parser.parse_args()
    return run(partial(measure, faults=given.faults))


if __name__ == "__main__":
    sys.exit(main())
