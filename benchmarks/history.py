"""What a long history costs the api: catching up, readiness, lists. JSON lines; exit status 1 if a bound is missed.

    .venv/bin/python -m benchmarks.history [--events 50000] [--seconds 20] [--folder FOLDER]

The log is made by the real planner (``benchmarks.log_course``: its mix and its seed). Then

    catch-up    the log is read and folded into the projections, in events for each second of processor time
    ready       the service is started on these projections: the time from the start of its process until it serves
    lists       every list is asked for at random places, all together a hundred times a second, whether answers come or
                not; a latency counts from the time at which the request was due

The service is the real one, over a bus of its own, which has the whole log before the service is started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.log_course import SEED, prepare
from benchmarks.report import Report, at_least, run
from benchmarks.stream import fill
from cli.stack.child import Child
from services.api.store.projection_store import Store
from shared.errors import Unavailable
from shared.log.log import EventLog
from shared.nats.nats_server import NatsServer

REQUESTS_PER_S = 100
"""Of all lists together."""
LIMIT = 50
MOST_P99_S = 0.1
MOST_READY_S = 5.0
LEAST_CATCH_UP = 1_000
"""Events for each second of processor time."""

_BATCH = 500
"""As the service folds while it catches up."""
_TIMEOUT_S = 60.0
"""Of a request: far above any bound."""

LISTS = {
    "tasks": "/v1/tasks",
    "tasks by state": "/v1/tasks?state=running&state=degraded",
    "incidents": "/v1/incidents",
    "incidents by task and state": "/v1/incidents?state=closed&task={task}",
    "plans": "/v1/plans",
    "plans by task and state": "/v1/plans?state=done&task={task}",
    "nodes": "/v1/nodes",
    "events": "/v1/events",
    "costs": "/v1/costs",
    "waf": "/v1/waf?from=2000-01-01T00:00:00Z&points=1000",
    "incidents, newest first": "/v1/incidents?order=newest",
    "plans, newest first": "/v1/plans?order=newest",
    "heads": "/v1/log/heads",
}
"""Every list, with the filters that its rows are found by."""
_WITHOUT_CURSOR = frozenset({"nodes", "costs", "waf", "heads"})
_WITHOUT_LIMIT = frozenset({"waf", "heads"})


@dataclass
class Latencies:
    """Of one list. ``failed``: answers that were no success."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0

    def quantile(self, share: float) -> float:
        """Return the latency that a share of the requests does not exceed."""
        return sorted(self.seconds)[min(int(share * len(self.seconds)), len(self.seconds) - 1)]


def catch_up(run_dir: Path, report: Report) -> int:
    """Fold the log into projections, as the service does; return its last position."""
    log = EventLog(f"sqlite:///{run_dir / 'log.db'}", read_only=True)
    store = Store(f"sqlite:///{run_dir / 'projections.db'}")
    position, began = store.position(), time.process_time()
    first = position
    while records := log.read(after=position, limit=_BATCH):
        position = store.fold(records)
    cpu_s = time.process_time() - began
    store.close()
    log.close()
    if position > first:
        rate = round((position - first) / cpu_s)
        report.at_least("catch-up, events per CPU-second", rate, LEAST_CATCH_UP, events=position - first)
    return position


@asynccontextmanager
async def service(run_dir: Path, report: Report) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Start the service on a log and its projections; yield its URL and process."""
    async with AsyncExitStack() as stack:
        # In memory: a million messages are not to wait for the disk.
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="unicron-history-", dir="/dev/shm"))
        nats = await stack.enter_async_context(NatsServer(Path(store)))
        (run_dir / "services").mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "UNICRON_RUN_DIR": str(run_dir),
            "UNICRON_NATS_URL": nats.url,
            "UNICRON_NATS_CREDENTIAL": str(nats.keys.credential_file("api")),
            "UNICRON_PORT": "0",
        }
        log = stack.enter_context(closing(EventLog(f"sqlite:///{run_dir / 'log.db'}", read_only=True)))
        await fill(nats, log)
        child = Child("api", "services.api.main", environment, run_dir)
        stack.push_async_callback(child.end)
        began = time.perf_counter()
        process = await child.start()
        report.at_most("ready after a restart, s", round(time.perf_counter() - began, 2), MOST_READY_S)
        port = int((run_dir / "services" / "api.port").read_text())
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)


async def measure_service(run_dir: Path, events: int, seconds: float, report: Report) -> None:
    """Start the service, and ask it for its lists."""
    async with service(run_dir, report) as (url, process):
        await _lists(url, process, events, seconds, report)


async def _lists(url: str, process: psutil.Process, events: int, seconds: float, report: Report) -> None:
    drawn = random.Random(SEED)
    latencies = {name: Latencies() for name in LISTS}
    limits = httpx.Limits(max_connections=REQUESTS_PER_S, max_keepalive_connections=REQUESTS_PER_S)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client:
        tasks = await _tasks(client)
        requests = [_request(name, drawn, events, tasks) for name in LISTS for _ in range(int(seconds * 10) + 1)]
        drawn.shuffle(requests)
        del requests[int(seconds * REQUESTS_PER_S) :]
        for _, path in requests[: len(LISTS) * 5]:  # what is loaded on first use
            await client.get(path)
        before = process.cpu_times()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, (name, path) in enumerate(requests):
                due = began + number / REQUESTS_PER_S
                await asyncio.sleep(max(due - time.perf_counter(), 0.0))
                group.create_task(_ask(client, path, due, latencies[name]))
        after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    report.line("service", requests=len(requests), cpu_ms_per_request=round(1000 * cpu_s / len(requests), 2))
    for name, found in latencies.items():
        report.equal(f"{name}: answers that failed", found.failed, 0)
        p50_ms = round(1000 * found.quantile(0.5), 1)
        report.below(f"{name}: p99, s", round(found.quantile(0.99), 4), MOST_P99_S, p50_ms=p50_ms)


async def _tasks(client: httpx.AsyncClient) -> list[str]:
    """Return the names of some tasks."""
    answer = await client.get("/v1/tasks", params={"limit": 1000})
    return [item["name"] for item in answer.raise_for_status().json()["items"]]


def _request(name: str, drawn: random.Random, events: int, tasks: list[str]) -> tuple[str, str]:
    path = LISTS[name].format(task=drawn.choice(tasks))
    if name not in _WITHOUT_LIMIT:
        path += f"{'&' if '?' in path else '?'}limit={LIMIT}"
    if name not in _WITHOUT_CURSOR and "task=" not in path:
        path += f"&cursor={drawn.randrange(events)}"
    return name, path


async def _ask(client: httpx.AsyncClient, path: str, due: float, latencies: Latencies) -> None:
    try:
        answer = await client.get(path)
        latencies.failed += not answer.is_success
    except httpx.HTTPError:
        latencies.failed += 1
    latencies.seconds.append(time.perf_counter() - due)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=at_least(1000), default=50_000)
    parser.add_argument("--seconds", type=at_least(1), default=20, help="of the requests for lists")
    parser.add_argument("--folder", type=Path, help="keep log and projections here, and use those that are there")
    given = parser.parse_args()

    async def whole(report: Report) -> None:
        with tempfile.TemporaryDirectory(prefix="unicron-history-") as temporary:
            run_dir = (given.folder or Path(temporary)).resolve()
            prepare(run_dir, given.events, report)
            events = catch_up(run_dir, report)
            if not events:
                raise Unavailable(f"{run_dir / 'log.db'} has no events")
            await measure_service(run_dir, events, given.seconds, report)

    return run(whole)


if __name__ == "__main__":
    sys.exit(main())
