"""The demo's course: what is started, broken and waited for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from rich.console import Console

from cli.demo_report import Check, Report, TaskComparison, compare_parameters
from cli.demo_view import View
from cli.stack import Stack
from services.planner.replay import verify
from shared.errors import Unavailable
from shared.log import EventLog

NODES = 4
WORKERS_PER_NODE = 2

WAIT_S = 90.0
"""Longest wait for any one thing; each takes a few seconds on two cores."""

Record = dict[str, Any]

STEPS = {"gpt-large": 130, "gpt-small": 480}
"""Enough for every fault to strike the first task while it trains; the second then trains on with all workers."""

CORES = 2
"""Of the machine on which the numbers of steps were chosen; more cores train faster and get more steps."""


def examples_directory() -> Path:
    """Return the folder of the example specifications: the repository's, or where an installation puts them."""
    beside = Path(__file__).resolve().parents[1] / "examples"
    return beside if beside.is_dir() else Path(sys.prefix) / "share" / "unicron" / "examples"


def demo_specs(corpus: Path, seed: int) -> list[Record]:
    """Return the example tasks on the demo's own text, with fewer steps and open to injected faults."""
    specs = []
    faster = max(1.0, min(NODES * WORKERS_PER_NODE, os.cpu_count() or 1) / CORES)
    for name, steps in STEPS.items():
        spec: Record = yaml.safe_load((examples_directory() / f"{name}.yaml").read_text())
        specs.append(
            {
                **spec,
                # Names of its own: the examples can be submitted to a stack that goes on in the same folder.
                "name": f"demo-{name}",
                "data": str(corpus),
                "seed": seed,
                "steps": round(steps * faster),
                "env": {"UNICRON_FAULT_SIGNALS": "1"},
            }
        )
    return specs


class DemoRun:
    """One run of the demo in a fresh folder."""

    def __init__(self, run_dir: Path, seed: int, console: Console) -> None:
        self._run_dir = run_dir
        self._seed = seed
        self._view = View(console)
        self._report = Report()
        self._client = httpx.AsyncClient(timeout=10.0, trust_env=False)
        self._processes: dict[int, float] = {}

    async def run(self) -> Report:
        """Run the course and return what was seen."""
        corpus = self._run_dir / "corpus.txt"
        await self._python("unicron.corpus", str(corpus), "--seed", str(self._seed))
        specs = demo_specs(corpus, self._seed)
        self._view.say(f"starting {NODES} nodes with {WORKERS_PER_NODE} workers each")
        # The live view needs the API; it runs beside the course and ends with it.
        async with Stack(self._run_dir, nodes=NODES, workers_per_node=WORKERS_PER_NODE) as stack:
            self._client.base_url = httpx.URL(stack.url)
            view = asyncio.create_task(self._view.follow(stack.url))
            try:
                await self._course(stack, specs)
                await self._collect()
            finally:
                view.cancel()
                await asyncio.gather(view, return_exceptions=True)
                self._remember_processes()
        await self._client.aclose()
        self._check_leftovers()
        self._check_replay()
        await self._compare(specs)
        return self._report

    async def _course(self, stack: Stack, specs: list[Record]) -> None:
        large, small = (s["name"] for s in specs)
        for spec in specs:
            (self._run_dir / f"{spec['name']}.json").write_text(json.dumps(spec))
            (await self._client.post("/v1/tasks", json=spec)).raise_for_status()
        await self._training(large, 4, "both tasks train")
        await self._training(small, 4, "both tasks train")
        self._remember_processes()

        before = {r["worker"]: r["pid"] for r in (await self._task(large))["ranks"]}
        killed = await self._break(large, signal.SIGKILL, "kills rank 1 of", "process-exit")
        after = {r["worker"]: r["pid"] for r in (await self._task(large))["ranks"]}
        kept = {w for w in before if before[w] == after.get(w)}
        self._check(
            "survivors keep their processes",
            len(kept) == len(before) - 1 and killed["worker"] not in kept,
            f"{len(kept)} of {len(before) - 1} survivors kept their pids",
        )
        self._check(
            "no step is recomputed", killed["steps_recomputed"] == 0, f"{killed['steps_recomputed']} recomputed"
        )
        await self._break(small, signal.SIGUSR1, "raises an exception in rank 1 of", "exception")
        await self._break(large, signal.SIGSTOP, "stops (hangs) rank 1 of", "hang")

        node = await self._node_of_both(large, small)
        self._view.say(f"kills node {node} with everything on it")
        await stack.kill_node(node)
        lost = await self._incident("node-lost", node=node)
        self._view.say(
            f"node {node} lost: found after {_seconds(lost, 'occurred_at', 'detected_at'):.2f} s, re-planned"
        )

        self._view.say(f"brings node {node} back")
        await stack.start_node(node)
        await self._until(lambda: self._used(node, (large, small)), f"the workers of {node} are used again")
        self._remember_processes()
        have = await self._workers_until_end(large, small)
        self._view.say(f"{large} has finished; its workers go to {small}")
        await self._until(lambda: self._more_workers(small, have), f"{small} has more workers than before")
        grown = (await self._task(small))["workers"]
        self._check("the finished task's workers go to the other", grown > have, f"{have} -> {grown} workers")
        await self._until(lambda: self._state(small, "succeeded"), f"{small} finishes", 4 * WAIT_S)

    async def _break(self, task: str, number: signal.Signals, words: str, kind: str) -> Record:
        """Send a signal to rank 1 and wait until the task is whole again; return the incident."""
        known = {i["id"] for i in await self._items("/v1/incidents")}
        rank = next(r for r in (await self._task(task))["ranks"] if r["rank"] == 1)
        self._view.say(f"{words} {task} (worker {rank['worker']}, pid {rank['pid']})")
        psutil.Process(rank["pid"]).send_signal(number)
        incident = await self._incident(kind, known=known)
        step = (await self._task(task))["step"]
        await self._training(task, step + 3, f"{task} goes on after {kind}")
        return incident

    async def _incident(self, kind: str, *, node: str | None = None, known: set[str] | None = None) -> Record:
        """Return the new incident of this kind once everything is back at planned strength."""
        found: list[Record] = []

        async def restored() -> bool:
            found[:] = [
                i
                for i in await self._items("/v1/incidents")
                if i["kind"] == kind and i["id"] not in (known or set()) and node in (None, i["node"])
            ]
            return bool(found) and found[0]["restored_at"] is not None

        await self._until(restored, f"the {kind} is healed")
        return found[0]

    async def _node_of_both(self, large: str, small: str) -> str:
        """Return a node that hosts both tasks, if there is one, and not the heavier task's rank 0."""
        ranks = {t: (await self._task(t))["ranks"] for t in (large, small)}
        nodes = {t: {r["node"] for r in ranks[t]} for t in ranks}
        shared = sorted(nodes[large] & nodes[small]) or sorted(nodes[large])
        node: str = shared[-1]
        return node

    async def _training(self, task: str, step: int, what: str) -> None:
        async def reached() -> bool:
            now = await self._task(task)
            return now["state"] in ("running", "succeeded") and now["step"] >= step

        await self._until(reached, what)

    async def _used(self, node: str, tasks: tuple[str, ...]) -> bool:
        states = [(await self._task(t))["state"] for t in tasks]
        workers = next(n["workers"] for n in await self._items("/v1/nodes") if n["name"] == node)
        return all(w["task"] for w in workers) and all(s in ("running", "succeeded") for s in states)

    async def _workers_until_end(self, ending: str, other: str) -> int:
        """Wait until ``ending`` has finished; return how many workers ``other`` had while it still trained."""
        have = 0

        async def ended() -> bool:
            nonlocal have
            workers = (await self._task(other))["workers"]
            if await self._state(ending, "succeeded"):
                return True
            have = workers
            return False

        await self._until(ended, f"{ending} finishes", 4 * WAIT_S)
        return have

    async def _more_workers(self, task: str, have: int) -> bool:
        now = await self._task(task)
        return bool(now["workers"] > have and now["state"] in ("running", "succeeded"))

    async def _state(self, task: str, state: str) -> bool:
        now = await self._task(task)
        if now["state"] == "failed":
            raise Unavailable(f"{task} failed: {now['reason']}")
        return bool(now["state"] == state)

    async def _task(self, name: str) -> Record:
        answer = await self._client.get(f"/v1/tasks/{name}")
        answer.raise_for_status()
        task: Record = answer.json()
        return task

    async def _items(self, path: str) -> list[Record]:
        answer = await self._client.get(path, params={"limit": 1000})
        answer.raise_for_status()
        items: list[Record] = answer.json()["items"]
        return items

    async def _until(self, holds: Callable[[], Awaitable[bool]], what: str, limit_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not await holds():
            if time.monotonic() > deadline:
                raise Unavailable(f"waited {limit_s:.0f} s in vain: {what}; see {self._run_dir}/services and tasks")
            await asyncio.sleep(0.1)
        self._view.say(f"  {what}")

    async def _collect(self) -> None:
        self._report.incidents = await self._items("/v1/incidents")
        self._report.tasks = await self._items("/v1/tasks")
        costs = await self._client.get("/v1/costs")
        self._report.costs = costs.raise_for_status().json()
        expected = {"process-exit", "exception", "hang", "node-lost"}
        seen = [i["kind"] for i in self._report.incidents]
        self._check(
            "each fault is one incident",
            sorted(seen) == sorted(expected),
            f"seen {', '.join(seen)}",
        )

    def _check(self, name: str, ok: bool, detail: str) -> None:
        self._report.checks.append(Check(name, ok, detail))

    def _remember_processes(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                self._processes[process.pid] = process.create_time()

    def _check_leftovers(self) -> None:
        left = []
        for pid, created in self._processes.items():
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).create_time() == created:
                    left.append(pid)
        self._check("no process is left", not left, f"{len(self._processes)} processes seen, left: {left or 'none'}")

    def _check_replay(self) -> None:
        log = EventLog(f"sqlite:///{self._run_dir / 'log.db'}", read_only=True)
        try:
            result = verify(log)
        finally:
            log.close()
        self._report.replay_verified = result.ok
        self._check(
            "every plan is decided again, byte for byte",
            result.ok,
            f"{result.verified} of {result.plans} plans verified",
        )

    async def _compare(self, specs: list[Record]) -> None:
        """Train each task alone, in one process and without failures, and compare."""
        self._view.say("trains both tasks again without failures, to compare")
        await asyncio.gather(*(self._reference(s) for s in specs))
        for spec in specs:
            name = spec["name"]
            task = next(t for t in self._report.tasks if t["name"] == name)
            result = task["result"] or {}
            reference = self._run_dir / "reference" / name
            difference = compare_parameters(
                Path(result["parameters_path"]), reference / "result" / "parameters.safetensors"
            )
            summary = json.loads((reference / "result" / "summary.json").read_text())
            samples = summary["samples_sha256"] == result["samples_sha256"]
            comparison = TaskComparison(name, result["steps"], difference, samples)
            self._report.comparisons.append(comparison)
            self._check(
                f"{name} ends as without failures",
                comparison.holds and result["steps"] == spec["steps"],
                f"largest parameter difference {difference:.2e}, samples identical: {samples}, steps {result['steps']}",
            )

    async def _reference(self, spec: Record) -> None:
        directory = self._run_dir / "reference" / spec["name"]
        directory.mkdir(parents=True)
        path = self._run_dir / f"{spec['name']}.json"
        await self._python("unicron.train", "--spec", str(path), "--directory", str(directory))

    async def _python(self, module: str, *arguments: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            module,
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise Unavailable(f"{module} ended with {process.returncode}:\n{output.decode(errors='replace')[-2000:]}")


def _seconds(record: Record, start: str, end: str) -> float:
    return (datetime.fromisoformat(record[end]) - datetime.fromisoformat(record[start])).total_seconds()
