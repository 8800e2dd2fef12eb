"""How long the command line takes, with the start of its process. JSON lines; exit status 1 if a bound is missed.

    .venv/bin/python -m benchmarks.cli [--runs 10] [--tasks 20]

The gateway and the planner are the real ones, over a bus of their own; ``ps`` lists tasks that wait for nodes. Each
value is the median of the runs, after one that is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from benchmarks.embedded import small_task
from benchmarks.report import Report, at_least, run
from cli.stack.child import Child
from shared.nats.nats_server import NatsServer
from shared.service.joining import CREDENTIAL

BOUNDS_S = {("--version",): 0.25, ("ps",): 0.5}
"""A person waits for each; below these one notices no wait that would be worth a thought."""

OTHERS = (("--help",), ("show", "task-0"), ("ps", "-o", "json"))
"""Measured for comparison, without a bound."""

SERVICES = ("planner", "api")


async def measure(report: Report, runs: int, tasks: int) -> None:
    """Start a gateway with some tasks, and run the verbs."""
    async with AsyncExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unicron-cli-")))
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
            await child.start()
        url = f"http://127.0.0.1:{int((run_dir / 'services' / 'api.port').read_text())}"
        corpus = run_dir / "corpus.txt"
        corpus.write_text("the dog ran\n")
        async with httpx.AsyncClient(base_url=url) as http:
            for number in range(tasks):
                (await http.post("/v1/tasks", json=small_task(f"task-{number}", corpus))).raise_for_status()
        for verb, bound_s in BOUNDS_S.items():
            times_s = _times_s(verb, url, runs)
            name = f"unicron {' '.join(verb)}: median, s"
            report.at_most(name, _rounded(statistics.median(times_s)), bound_s, **_spread(times_s), tasks=tasks)
        for other in OTHERS:
            times_s = _times_s(other, url, runs)
            report.line("verb", verb=" ".join(other), median_s=_rounded(statistics.median(times_s)), **_spread(times_s))


def _times_s(verb: tuple[str, ...], url: str, runs: int) -> list[float]:
    """Return how long each run of a verb took."""
    times_s = []
    for _ in range(runs + 1):
        begun_s = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "cli.main", *verb],
            env={**os.environ, "UNICRON_SERVER": url},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        times_s.append(time.perf_counter() - begun_s)
    return times_s[1:]


def _spread(times_s: list[float]) -> dict[str, float]:
    return {"least_s": _rounded(min(times_s)), "most_s": _rounded(max(times_s))}


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(description="How long the command line takes.")
    parser.add_argument("--runs", type=at_least(3), default=10)
    parser.add_argument("--tasks", type=at_least(1), default=20)
    given = parser.parse_args()
    return run(lambda report: measure(report, given.runs, given.tasks))


if __name__ == "__main__":
    sys.exit(main())
