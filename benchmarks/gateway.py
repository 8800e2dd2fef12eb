"""What clients cost the others who ask for too much, or are many. JSON lines; exit status 1 if a bound is missed.

    .venv/bin/python -m benchmarks.gateway [--only {clients,viewers,output}] [--seconds 60] [--clients 20]
        [--viewers 20] [--events-per-s 10] [--log 1000000] [--output-bytes-per-s 10000000]

First, clients that ask for too much. The services are the real ones, over a bus of their own. Each client has an
address of its own, asks for the heaviest query there is (a search over layouts that would take hours) and asks again as
soon as it is answered or refused. Meanwhile probes ask for ``/healthz`` and ``/readyz`` ten times a second each,
whether answers come or not, and a task is submitted each second.

Then, people who look at the live page while many events come (``benchmarks.viewers``); and once more, while each of
them also follows the output of the same task, whose ranks print much.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import psutil

from benchmarks import viewers
from benchmarks.report import Report, at_least, run
from cli.stack.child import Child
from shared.nats.nats_server import NatsServer
from shared.service.joining import CREDENTIAL

HEAVIEST = {
    "layers": 5040, "hidden": 1_000_000, "heads": 10_000, "sequence_length": 2048,
    "global_batch": 720_720, "workers": 720_720,
}  # fmt: skip
"""As many divisors as the limits of the sizes allow."""

PROBES_PER_S = 10
MOST_P99_S = 0.3
MOST_GROWTH_MIB = 50.0
"""Of the gateway's memory: what its first requests load. A leak of a kilobyte a request would be more."""
SERVICES = ("detector", "planner", "transition", "api")
_TIMEOUT_S = 60.0
"""Of a request: far above any bound, and above the longest computation."""


async def measure(report: Report, clients: int, seconds: float) -> None:
    """Start the services, and have clients, probes and submissions ask them."""
    async with AsyncExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unicron-gateway-")))
        nats = await stack.enter_async_context(NatsServer(run_dir / "nats"))
        (run_dir / "services").mkdir()
        environment = {
            **os.environ,
            "UNICRON_RUN_DIR": str(run_dir),
            "UNICRON_NATS_URL": nats.url,
            "UNICRON_PORT": "0",
        }
        for name in SERVICES:
            own = {**environment, CREDENTIAL: str(nats.keys.credential_file(name))}
            child = Child(name, f"services.{name}.main", own, run_dir)
            stack.push_async_callback(child.end)
            process = await child.start()
        gateway = psutil.Process(process.pid)
        url = f"http://127.0.0.1:{int((run_dir / 'services' / 'api.port').read_text())}"
        async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as http:
            for path in ("/healthz", "/readyz"):  # what is loaded on first use
                await http.get(path)
            await _contend(report, http, gateway, clients, seconds)


async def _contend(
    report: Report, http: httpx.AsyncClient, gateway: psutil.Process, clients: int, seconds: float
) -> None:
    url, until = str(http.base_url), time.perf_counter() + seconds
    answers: Counter[int] = Counter()
    latencies: dict[str, list[float]] = {"/healthz": [], "/readyz": []}
    submitted: Counter[int] = Counter()
    lasting = {*gateway.children()}
    before_bytes = _memory_bytes(gateway, *lasting)
    async with asyncio.TaskGroup() as group:
        heavy = [group.create_task(_insist(url, number, answers)) for number in range(clients)]
        probing = [group.create_task(_probe(http, path, until, found)) for path, found in latencies.items()]
        submitting = group.create_task(_submit(http, until, submitted))
        processes = 0
        while time.perf_counter() < until:
            processes = max(processes, len({*gateway.children()} - lasting))
            await asyncio.sleep(0.2)
        await asyncio.wait([*probing, submitting])
        for task in heavy:
            task.cancel()
    growth_mib = (_memory_bytes(gateway, *lasting) - before_bytes) / 2**20
    report.line("heavy", clients=clients, answers={str(status): n for status, n in sorted(answers.items())})
    for path, found in latencies.items():
        found.sort()
        p50_ms = round(1000 * found[len(found) // 2], 1)
        p99_s = found[min(int(0.99 * len(found)), len(found) - 1)]
        report.below(f"{path}: p99, s", round(p99_s, 4), MOST_P99_S, p50_ms=p50_ms, probes=len(found))
    report.equal("submissions that failed", submitted.total() - submitted[201], 0, submissions=submitted.total())
    report.at_most("processes that compute", processes, max(1, len(os.sched_getaffinity(0)) // 2))
    report.at_most("growth of the gateway's memory, MiB", round(growth_mib, 1), MOST_GROWTH_MIB)


def _memory_bytes(*processes: psutil.Process) -> int:
    return sum(int(process.memory_info().rss) for process in processes)


async def _insist(url: str, number: int, answers: Counter[int]) -> None:
    """Ask for the heaviest query again and again, from an address of one's own."""
    transport = httpx.AsyncHTTPTransport(local_address=f"127.0.1.{number + 1}")
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, transport=transport) as client:
        while True:
            answers[(await client.get("/v1/plan/throughput", params=HEAVIEST)).status_code] += 1


async def _probe(http: httpx.AsyncClient, path: str, until: float, latencies: list[float]) -> None:
    async def ask(due: float) -> None:
        await http.get(path)
        latencies.append(time.perf_counter() - due)

    async with asyncio.TaskGroup() as group:
        due = time.perf_counter()
        while due < until:
            group.create_task(ask(due))
            due += 1 / PROBES_PER_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def _submit(http: httpx.AsyncClient, until: float, statuses: Counter[int]) -> None:
    number = 0
    while time.perf_counter() < until:
        spec = {
            "name": f"task-{number}",
            "model": {"layers": 2, "hidden": 32, "heads": 2, "sequence_length": 16},
            "batch": {"global": 8, "micro": 1},
            "steps": 100,
            "data": "/data/corpus.txt",
        }
        statuses[(await http.post("/v1/tasks", json=spec)).status_code] += 1
        number += 1
        await asyncio.sleep(1.0)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=at_least(5), default=60)
    parser.add_argument("--clients", type=at_least(1), default=20)
    parser.add_argument("--viewers", type=at_least(1), default=20)
    parser.add_argument("--events-per-s", type=at_least(1), default=10)
    parser.add_argument("--log", type=at_least(50_000), default=1_000_000, help="events of the log beforehand")
    parser.add_argument("--only", choices=["clients", "viewers", "output"])
    parser.add_argument("--output-bytes-per-s", type=at_least(1_000), default=10_000_000)
    given = parser.parse_args()

    async def whole(report: Report) -> None:
        load = viewers.Load(given.viewers, given.log, given.events_per_s, given.seconds)
        if given.only in (None, "clients"):
            await measure(report, given.clients, given.seconds)
        if given.only in (None, "viewers"):
            await viewers.measure(report, load)
        if given.only in (None, "output"):
            await viewers.measure(report, dataclasses.replace(load, output_bytes_per_s=given.output_bytes_per_s))

    return run(whole)


if __name__ == "__main__":
    sys.exit(main())
