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
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from cli.demo_report import TOLERANCE, compare_parameters
from cli.stack import SERVICES, Stack
from services.planner.replay import verify
from shared.errors import Unavailable
from shared.log import EventLog

Record = dict[str, Any]

RANK_FAULTS = {"kill": signal.SIGKILL, "exception": signal.SIGUSR1, "hang": signal.SIGSTOP}
KINDS = (*RANK_FAULTS, "two", "node", "service", "nats")

FOUND_AS = {
    "kill": ("process-exit", "transition-failed"),
    "two": ("process-exit", "transition-failed"),
    # A process that has not yet learned to raise is killed by the signal.
    "exception": ("exception", "process-exit", "transition-failed"),
    "hang": ("hang", "transition-failed"),
    "node": ("node-lost", "transition-failed"),
}
"""Kinds of incidents that a fault may become. What hits services and the NATS server must not become any."""

LONGEST_DETECTION_S = 15.0
"""A stopped rank of a task that has just begun is judged by the limit for first steps."""

LONGEST_DELAY_S = 3.0
"""Between two faults: healing takes about a second, so that about every third fault hits a transition."""

LONGEST_ABSENCE_S = 6.0
"""A killed node is back within this: sometimes before it is missed, sometimes long after."""

RESTARTS_A_SERVICE = 4
"""The stack gives a service up that dies more than five times in a minute."""

END_LIMIT_S = 150.0
"""Longest wait for the tasks' end after the last fault."""

READY_LIMIT_S = 60.0
"""An agent that starts imports torch and Megatron in its fork server first: 5-10 s, more on a busy machine."""

SLOW_S = 8.0
"""From detection to full strength: about a second of transition, several times that on a busy machine."""

FURTHER_FAULT_S = 4.0
"""What a further fault in the midst of healing may add: its detection (3 s for a hang) and another transition."""

QUIET_S = 10.0
"""How long processes of tasks that have ended may take to go."""


@dataclass(frozen=True)
class Rank:
    """A living process of a task."""

    pid: int
    task: str
    worker: str


@dataclass
class Injected:
    """One fault: what was drawn, when it hit (Unix seconds) and whom. ``targets``: workers, nodes or services."""

    number: int
    kind: str
    at: float = 0.0
    targets: list[str] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    """What the tasks were doing."""


def tasks(corpus: Path, steps: int, workers: int) -> list[Record]:
    """Return the specifications of the two tasks."""
    common: Record = {
        "model": {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": 32},
        "batch": {"global": 12, "micro": 1},
        "steps": steps,
        "data": str(corpus),
        "workers": {"min": 1, "max": max(1, workers - 1)},
        "checkpoint": {"every": 25},
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
        self._problems: list[str] = []
        self._background: set[asyncio.Task[None]] = set()
        self._restarts: dict[str, int] = {}
        self._down: set[str] = set()

    async def run(self) -> bool:
        """Run everything; return whether every check held."""
        started_s = time.monotonic()
        corpus = self._directory / "corpus.txt"
        await python("unicron.corpus", str(corpus), "--seed", "1")
        specs = tasks(corpus, self._options.steps, self._options.nodes * self._options.workers_per_node)
        references = [await self._reference(corpus, spec) for spec in specs]
        results: list[Record] = []
        try:
            async with self._stack:
                results = await self._course(specs)
        finally:
            await self._client.aclose()
            self._expect("no process is left", not processes_of(self._run_dir), f"{processes_of(self._run_dir)}")
        self._check_log()
        for spec, result, reference in zip(specs, results, references, strict=False):
            self._compare(spec, result, reference)
        ok = not self._problems
        summary = {
            "ok": ok,
            "seed": self._options.seed,
            "faults": len(self._injected),
            "incidents": len(self._incidents),
            "problems": self._problems,
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
            if self._stack.failed.done():
                break
            fault = Injected(number, kind)
            await self._inject(fault, dice)
            if fault.targets:
                self._injected.append(fault)
            say("fault", **asdict(fault))
        ended = await self._until("both succeed", lambda: self._all_ended(specs), END_LIMIT_S)
        failed = self._stack.failed
        self._expect("the stack keeps running", not failed.done(), f"{failed}")
        await asyncio.gather(*self._background)
        if ended:
            await self._until("ended tasks leave no rank", self._no_ranks, QUIET_S)
            await self._readmit()
            await self._until("all nodes are ready", self._all_ready, READY_LIMIT_S)
            await self._use_everything(specs[0])
        self._incidents = [i for i in await self._items("/v1/incidents") if i["task"] != "after"]
        self._check_incidents()
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
                self._restarts[name] = self._restarts.get(name, 0) + 1
                if self._restarts[name] <= RESTARTS_A_SERVICE and self._stack.kill_service(name) is not None:
                    fault.targets.append(name)
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
            self._expect(f"{node} comes back", False, err.detail)
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
            if node["state"] == "isolated":
                say("note", what=f"{node['name']} is isolated: {node['reason']}")
                at = await self._stack.kill_node(node["name"])
                self._injected.append(Injected(len(self._injected), "node", at, [node["name"]]))
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
                self._expect(what, False, f"not within {limit_s:.0f} s; {states}; ranks {self._ranks()}")
                return False
            await asyncio.sleep(0.1)
        return True

    # ---- checks

    def _expect(self, what: str, holds: bool, detail: str) -> None:
        if not holds:
            self._problems.append(what)
            say("problem", what=what, detail=detail)

    def _check_incidents(self) -> None:
        """Every incident has a fault behind it, one of its own, and was healed soon."""
        unexplained = [i for i in self._incidents if not self._causes(i)]
        seen: dict[tuple[int, str], int] = {}
        for incident in self._incidents:
            line = {k: incident[k] for k in ("kind", "severity", "task", "worker", "node", "step", "response")}
            line |= {k: incident[k][11:23] if incident[k] else None for k in ("occurred_at", "detected_at")}
            line |= {
                "id": incident["id"][:8],
                "detection_s": between(incident, "occurred_at", "detected_at"),
                "resumed_s": between(incident, "detected_at", "resumed_at"),
                "restored_s": between(incident, "detected_at", "restored_at"),
                "recomputed": incident["steps_recomputed"],
                "escalations": len(incident["evidence"].get("escalations", [])),
                "faults": [f.number for f in self._causes(incident)],
            }
            say("incident", **line)
            name = f"incident {incident['id'][:8]} ({incident['kind']} of {incident['worker'] or incident['node']})"
            self._expect(f"{name} is closed", incident["restored_at"] is not None, "")
            took_s = line["restored_s"]
            limit_s = SLOW_S + FURTHER_FAULT_S * self._further(incident)
            self._expect(f"{name} is healed soon", took_s is None or took_s <= limit_s, f"{took_s} s, not {limit_s}")
            self._expect(f"{name} is no false alarm", incident not in unexplained, f"{incident}")
            for fault in self._causes(incident):
                key = (fault.number, incident["worker"] or incident["node"] or "")
                seen[key] = seen.get(key, 0) + 1
        for fault in self._injected:
            count = seen.get((fault.number, fault.targets[0]), 0)
            if fault.kind == "node":
                self._expect(f"fault {fault.number} (node {fault.targets[0]}) is found", count > 0, f"{fault}")
            if count > 1:
                say("note", what=f"{count} incidents may stem from fault {fault.number}")

    def _further(self, incident: Record) -> int:
        """Return how many faults hit while an incident was being healed."""
        start = datetime.fromisoformat(incident["detected_at"]).timestamp()
        end = datetime.fromisoformat(incident["restored_at"] or incident["detected_at"]).timestamp()
        return sum(start < fault.at < end for fault in self._injected)

    def _causes(self, incident: Record) -> list[Injected]:
        """Return the faults that may be behind an incident: of its worker or its node, not long before."""
        at = datetime.fromisoformat(incident["detected_at"]).timestamp()
        kind = incident["kind"]
        found = []
        for fault in self._injected:
            if kind not in FOUND_AS.get(fault.kind, ()) or not -0.5 <= at - fault.at <= LONGEST_DETECTION_S:
                continue
            if incident["worker" if fault.kind in (*RANK_FAULTS, "two") else "node"] in fault.targets:
                found.append(fault)
        return found

    def _check_log(self) -> None:
        log = EventLog(f"sqlite:///{self._run_dir / 'log.db'}", read_only=True)
        try:
            report = verify(log)
        finally:
            log.close()
        self._expect("the log replays", report.ok, f"{report}")

    def _compare(self, spec: Record, task: Record, reference: Path) -> None:
        name, result = spec["name"], task["result"]
        self._expect(f"{name} succeeds", task["state"] == "succeeded", f"{task['state']}: {task['reason']}")
        if result is None:
            return
        summary = json.loads((reference / "summary.json").read_text())
        self._expect(f"{name}: same steps", result["steps"] == spec["steps"], f"{result['steps']}")
        same = summary["samples_sha256"] == result["samples_sha256"]
        self._expect(f"{name}: same samples", same, f"{result['samples_sha256']}")
        difference = compare_parameters(Path(result["parameters_path"]), reference / "parameters.safetensors")
        self._expect(f"{name}: same parameters", difference <= TOLERANCE, f"{difference:.2e}")

    # ---- the rest

    async def _reference(self, corpus: Path, spec: Record) -> Path:
        """Return the result of a run without failures: kept for the next run with the same specification."""
        relevant = {k: v for k, v in spec.items() if k not in ("data", "env", "workers", "max_restarts")}
        # The corpus is generated, always the same.
        digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]
        directory = Path(tempfile.gettempdir()) / "unicron-chaos-references" / digest
        result = directory / "result"
        if not (result / "summary.json").exists():
            directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"{spec['name']}.json"
            path.write_text(json.dumps(spec))
            await python("unicron.train", "--spec", str(path), "--directory", str(directory))
        return result

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


def between(record: Record, start: str, end: str) -> float | None:
    """Return the seconds between two fields; None if one is missing."""
    if not record[start] or not record[end]:
        return None
    seconds = (datetime.fromisoformat(record[end]) - datetime.fromisoformat(record[start])).total_seconds()
    return round(seconds, 3)


def processes_of(run_dir: Path) -> list[int]:
    """Return the pids of all processes that belong to a run directory."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.environ().get("UNICRON_RUN_DIR", "").startswith(str(run_dir)):
                found.append(process.pid)
    return found


async def python(module: str, *arguments: str) -> None:
    """Run a module.

    Raises:
        Unavailable: it failed.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise Unavailable(f"{module} ended with {process.returncode}:\n{output.decode(errors='replace')[-2000:]}")


def say(line: str, **fields: Any) -> None:
    """Print one JSON line."""
    now = datetime.fromtimestamp(time.time()).strftime("%H:%M:%S.%f")[:-3]
    print(json.dumps({"line": line, "time": now, **fields}), flush=True)


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
