"""Random faults against the whole system, in a seeded order: ``python -m benchmarks.chaos --seed N --faults K``.

Two data-parallel tasks train on an embedded stack while ranks, nodes, services and the NATS server are killed, stopped
and made to raise, also in the midst of what the faults before them set off. In the end the results must be those of
runs without failures, the log must replay, every incident must be closed and nothing may be left behind.

JSON lines on stdout: one for each fault, one for each incident, one for each check that failed, and a summary. Exit
status 0 if every check held. What is drawn is the same for the same seed; when it hits depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.chaos_checks import RANK_FAULTS, Checks, Injected, Record, python, reference_of, say
from cli.stack import SERVICES, Stack
from shared.errors import Unavailable

KINDS = (*RANK_FAULTS, "two", "node", "service", "nats")

LONGEST_DELAY_S = 3.0
"""Between two faults: healing takes about a second, so that about every third fault hits a transition."""

LONGEST_ABSENCE_S = 6.0
"""A killed node is back within this: sometimes before it is missed, sometimes long after."""

RESTARTS_A_SERVICE = 4
"""In a minute: the stack gives a service up that dies more than five times in one."""

END_LIMIT_S = 150.0
"""Longest wait for the tasks' end after the last fault, beside that for the steps that are left."""

SLOW_STEP_S = 0.5
"""A step takes a tenth of this on a quiet machine."""

READY_LIMIT_S = 60.0
"""An agent that starts imports torch and Megatron in its fork server first: 5-10 s, more on a busy machine."""

FAULTS_A_ROUND = 10
"""Faults between two rounds of the operator, who starts isolated nodes anew."""

QUIET_S = 10.0
"""How long processes of tasks that have ended may take to go."""


@dataclass(frozen=True)
class Rank:
    """A living process of a task."""

    pid: int
    task: str
    worker: str


def tasks(corpus: Path, steps: int, workers: int) -> list[Record]:
    """Return the specifications of the two tasks."""
    common: Record = {
        "model": {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": 32},
        "batch": {"global": 12, "micro": 1},
        "steps": steps,
        "data": str(corpus),
        "workers": {"min": 1, "max": max(1, workers - 1)},
        "checkpoint": {"every": 25},
        "exact": True,
        # Faults here are the cluster's, however often they strike at the same step.
        "max_restarts": 1000,
        "env": {"UNICRON_FAULT_SIGNALS": "1"},
    }
    return [{**common, "name": "alpha", "weight": 2.0, "seed": 1}, {**common, "name": "beta", "weight": 1.0, "seed": 2}]


def rank_of(pid: int, run_dir: Path) -> Rank | None:
    """Return which rank a process is, by the file its output goes to; None if it is no rank."""
    try:
        path = Path(os.readlink(f"/proc/{pid}/fd/1"))
    except OSError:
        return None
    if path.parent.name != "output" or not path.is_relative_to(run_dir / "tasks"):
        return None
    _, node, slot = path.stem.rsplit("-", 2)
    return None if node == "store" else Rank(pid, path.parent.parent.name, f"{node}/{slot}")


class Chaos:
    """One run."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        self._directory = directory
        self._run_dir = directory / "run"
        self._stack = Stack(
            self._run_dir,
            nodes=options.nodes,
            workers_per_node=options.workers_per_node,
            environment={"UNICRON_NODE_TIMEOUT_S": str(options.node_timeout_s)},
        )
        self._client = httpx.AsyncClient(timeout=10.0)
        self._injected: list[Injected] = []
        self._incidents: list[Record] = []
        self._checks = Checks()
        self._background: set[asyncio.Task[None]] = set()
        self._restarts: dict[str, list[float]] = {}
        self._down: set[str] = set()

    async def run(self) -> bool:
        """Run everything; return whether every check held."""
        started_s = time.monotonic()
        corpus = self._directory / "corpus.txt"
        await python("unicron.corpus", str(corpus), "--seed", "1")
        specs = tasks(corpus, self._options.steps, self._options.nodes * self._options.workers_per_node)
        references = [await reference_of(spec, self._directory) for spec in specs]
        results: list[Record] = []
        try:
            async with self._stack:
                results = await self._course(specs)
        finally:
            await self._client.aclose()
            self._checks.expect("no process is left", not processes_of(self._run_dir), f"{processes_of(self._run_dir)}")
        self._checks.log(self._run_dir)
        for spec, result, reference in zip(specs, results, references, strict=False):
            self._checks.result(spec, result, reference)
        ok = not self._checks.problems
        summary = {
            "ok": ok,
            "seed": self._options.seed,
            "faults": len(self._injected),
            "incidents": len(self._incidents),
            "problems": self._checks.problems,
            "wall_s": round(time.monotonic() - started_s, 1),
            "run_dir": str(self._run_dir),
        }
        say("summary", **summary)
        return ok

    # ---- the course

    async def _course(self, specs: list[Record]) -> list[Record]:
        self._client.base_url = httpx.URL(self._stack.url)
        for spec in specs:
            (await self._client.post("/v1/tasks", json=spec)).raise_for_status()
        await self._until("both train", lambda: self._all_reached(specs, 3), END_LIMIT_S)
        for number in range(self._options.faults):
            kind = self._random.choice(self._options.kinds)
            delay_s = self._random.uniform(0.0, LONGEST_DELAY_S)
            dice = [self._random.random() for _ in range(4)]
            await asyncio.sleep(delay_s)
            if self._stack.failed.done() or await self._all_ended(specs):
                break
            fault = Injected(number, kind)
            await self._inject(fault, dice)
            if fault.targets:
                self._injected.append(fault)
            say("fault", **asdict(fault))
            if number % FAULTS_A_ROUND == FAULTS_A_ROUND - 1:
                await self._readmit()
        limit_s = END_LIMIT_S + SLOW_STEP_S * await self._steps_left(specs)
        ended = await self._until("both succeed", lambda: self._all_ended(specs), limit_s)
        failed = self._stack.failed
        self._checks.expect("the stack keeps running", not failed.done(), f"{failed}")
        await asyncio.gather(*self._background)
        if ended:
            await self._until("ended tasks leave no rank", self._no_ranks, QUIET_S)
            await self._readmit()
            await self._until("all nodes are ready", self._all_ready, READY_LIMIT_S)
            await self._use_everything(specs[0])
        self._incidents = [i for i in await self._items("/v1/incidents") if i["task"] != "after"]
        self._checks.incidents(self._incidents, self._injected)
        return [await self._task(spec["name"]) for spec in specs]

    async def _inject(self, fault: Injected, dice: list[float]) -> None:
        for task in await self._items("/v1/tasks", patient=False):
            fault.states[task["name"]] = f"{task['state']} {task['step']}"
        fault.at = time.time()
        match fault.kind:
            case "two":
                ranks = self._ranks()
                chosen = [pick(ranks, dice[0]), pick(ranks, dice[1])] if ranks else []
                for rank in dict.fromkeys(chosen):
                    send(fault, rank, signal.SIGKILL)
            case "node":
                await self._kill_node(fault, dice)
            case "service":
                name = pick(sorted(SERVICES), dice[0])
                recent = [at for at in self._restarts.get(name, []) if fault.at - at < 60.0]
                if len(recent) < RESTARTS_A_SERVICE and self._stack.kill_service(name) is not None:
                    fault.targets.append(name)
                    recent.append(fault.at)
                self._restarts[name] = recent
            case "nats":
                await self._stack.nats.kill()
                fault.targets.append("nats")
                await asyncio.sleep(dice[0])
                await self._stack.nats.start()
            case kind:
                ranks = self._ranks()
                if ranks:
                    send(fault, pick(ranks, dice[0]), RANK_FAULTS[kind])

    async def _kill_node(self, fault: Injected, dice: list[float]) -> None:
        up = [n for n in self._stack.node_names if n not in self._down]
        if len(up) < 3:
            return
        node = pick(up, dice[0])
        self._down.add(node)
        fault.targets.append(node)
        fault.at = await self._stack.kill_node(node)
        self._spawn(self._bring_back(node, dice[1] * LONGEST_ABSENCE_S))

    async def _bring_back(self, node: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        try:
            await self._stack.start_node(node)
        except Unavailable as err:
            self._checks.expect(f"{node} comes back", False, err.detail)
        self._down.discard(node)

    def _ranks(self) -> list[Rank]:
        """Return the ranks that live, in the order of their workers."""
        found = []
        for node in self._stack.node_names:
            with suppress(psutil.NoSuchProcess):
                found += [rank_of(p.pid, self._run_dir) for p in self._stack.node_processes(node)]
        return sorted((r for r in found if r is not None), key=lambda r: (r.worker, r.pid))

    async def _readmit(self) -> None:
        """Do what an operator does with a node that was isolated because restarts on it failed: start it anew."""
        for node in await self._items("/v1/nodes"):
            if node["state"] == "isolated" and node["name"] not in self._down:
                say("note", what=f"{node['name']} is isolated: {node['reason']}")
                at = await self._stack.kill_node(node["name"])
                number = self._options.faults + len(self._injected)
                self._injected.append(Injected(number, "node", at, [node["name"]]))
                await self._stack.start_node(node["name"])

    async def _use_everything(self, spec: Record) -> None:
        """A task that needs every worker gets every worker."""
        workers = self._options.nodes * self._options.workers_per_node
        last = {**spec, "name": "after", "steps": 3, "workers": {"min": workers, "max": workers}}
        (await self._client.post("/v1/tasks", json=last)).raise_for_status()
        await self._until("a task on every worker succeeds", lambda: self._all_ended([last]), 30.0)

    # ---- asking

    async def _items(self, path: str, *, patient: bool = True) -> list[Record]:
        """Return a list of the API; while that restarts, wait for it or (not ``patient``) return nothing."""
        deadline = time.monotonic() + 30.0
        while True:
            try:
                answer = await self._client.get(path, params={"limit": 1000})
                answer.raise_for_status()
                items: list[Record] = answer.json()["items"]
                return items
            except httpx.HTTPError:
                if not patient:
                    return []
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def _task(self, name: str) -> Record:
        return next(t for t in await self._items("/v1/tasks") if t["name"] == name)

    async def _all_reached(self, specs: list[Record], step: int) -> bool:
        return all([(await self._task(s["name"]))["step"] >= step for s in specs])

    async def _steps_left(self, specs: list[Record]) -> int:
        return max([int(s["steps"]) - int((await self._task(s["name"]))["step"]) for s in specs])

    async def _all_ended(self, specs: list[Record]) -> bool:
        return all([(await self._task(s["name"]))["state"] in ("succeeded", "failed") for s in specs])

    async def _no_ranks(self) -> bool:
        return not self._ranks()

    async def _all_ready(self) -> bool:
        return {n["state"] for n in await self._items("/v1/nodes")} == {"ready"}

    async def _until(self, what: str, holds: Callable[[], Awaitable[bool]], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not await holds():
            if time.monotonic() > deadline:
                states = [
                    (t["name"], t["state"], t["reason"], t["step"], t["workers"])
                    for t in await self._items("/v1/tasks")
                ]
                self._checks.expect(what, False, f"not within {limit_s:.0f} s; {states}; ranks {self._ranks()}")
                return False
            await asyncio.sleep(0.1)
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def send(fault: Injected, rank: Rank, number: signal.Signals) -> None:
    """Send a signal to a rank, and note it if that is still there."""
    with suppress(ProcessLookupError):
        os.kill(rank.pid, number)
        fault.targets.append(rank.worker)


def pick(items: list[Any], dice: float) -> Any:
    """Return the item that a number in [0, 1) falls on."""
    return items[int(dice * len(items))]


def processes_of(run_dir: Path) -> list[int]:
    """Return the pids of all processes that belong to a run directory."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.environ().get("UNICRON_RUN_DIR", "").startswith(str(run_dir)):
                found.append(process.pid)
    return found


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="benchmarks.chaos", description="Random faults against the whole system.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--workers-per-node", type=int, default=1)
    parser.add_argument("--steps", type=int, default=250, help="of each task")
    parser.add_argument(
        "--node-timeout-s", type=float, default=1.5, help="raise it where other work keeps the cores busy"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="faults to draw from")
    parser.add_argument("--directory", type=Path, help="where to write; a new temporary folder if not given")
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="unicron-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    return 0 if asyncio.run(Chaos(options, directory).run()) else 1


if __name__ == "__main__":
    sys.exit(main())
