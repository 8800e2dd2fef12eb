"""Random faults against the whole system, in a seeded order: ``python -m benchmarks.chaos --seed N --faults K``.

Two data-parallel tasks train on an embedded stack while ranks, nodes, services and the NATS server are killed, stopped
and made to raise, also during the transitions that earlier faults caused. In the end the results must be those of runs
without failures, the log must replay, every incident must be closed and nothing may be left behind.

JSON lines on stdout: one for each fault, each incident and each check (``benchmarks/chaos_checks.py``), and a summary.
Exit status 0 if every check holds. The same seed draws the same faults; when they strike depends on the machine. The
folder of a run with a check that does not hold stays, and the summary names it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos_checks import RANK_FAULTS, Checks, Injected, reference_of
from benchmarks.chaos_ranks import Rank, living_ranks
from benchmarks.report import Report, at_least, run
from cli.stack.children import SERVICES, STANDBYS
from cli.stack.processes import processes_of, run_module
from cli.stack.stack import Stack
from cli.waiting import Record, WaitingClient
from shared.errors import TimedOut, Unavailable

KINDS = (*RANK_FAULTS, "two", "node", "service", "nats")

WITH_STANDBYS = ("agent", "suspension")
"""Further kinds, with ``--standby``: an agent is killed; a service, an agent or NATS is suspended for a while."""

LONGEST_SUSPENSION_S = 6.0
"""A stopped service goes on within this: sometimes before its standby has taken over, mostly after."""

LONGEST_DELAY_S = 3.0
"""Between two faults: healing takes about a second, so that about every third fault strikes during a transition."""

LONGEST_ABSENCE_S = 6.0
"""A killed node is back within this: sometimes before its loss is detected, sometimes long after."""

RESTARTS_A_SERVICE = 4
"""In a minute: the stack gives up a service that ends more than five times in a minute."""

AGENT_APART_S = 15.0
"""Between two ends of one agent: a successor that is killed before it works leaves its node silent, and a node that is
silent for three time-outs is given up where a task waits for it, which would be no false alarm."""

END_LIMIT_S = 150.0
"""Longest wait for the tasks' end after the last fault, beside that for the steps that are left."""

SLOW_STEP_S = 0.5
"""A step takes a tenth of this on a quiet machine."""

READY_LIMIT_S = 60.0
"""An agent that starts imports torch and Megatron in its fork server first: 5-10 s, more on a busy machine."""

FAULTS_A_ROUND = 10
"""Faults between two rounds of the operator, who starts isolated nodes anew."""

QUIET_S = 10.0
"""Longest time that processes of ended tasks may take to end."""

PATIENCE_S = 30.0
"""Longest time that the api may be away: a killed one is back within seconds."""


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


class Chaos:
    """One run: the stack, the drawn faults, and the conditions between them."""

    def __init__(self, options: argparse.Namespace, directory: Path, report: Report) -> None:
        self._options = options
        self._report = report
        self._random = random.Random(options.seed)
        self._directory = directory
        self._run_dir = directory / "run"
        self._stack = Stack(
            self._run_dir,
            nodes=options.nodes,
            workers_per_node=options.workers_per_node,
            standby=options.standby,
            environment={"UNICRON_NODE_TIMEOUT_S": str(options.node_timeout_s)},
        )
        self._injected: list[Injected] = []
        self._incidents: list[Record] = []
        self._checks = Checks(report)
        self._background: set[asyncio.Task[None]] = set()
        self._restarts: dict[str, list[float]] = {}
        self._down: set[str] = set()

    async def run(self) -> None:
        """Run everything; print faults, incidents, checks and the summary."""
        started_s = time.monotonic()
        corpus = self._directory / "corpus.txt"
        await run_module("unicron.trainer.corpus", str(corpus), "--seed", "1")
        specs = tasks(corpus, self._options.steps, self._options.nodes * self._options.workers_per_node)
        references = [await reference_of(spec, self._directory) for spec in specs]
        async with self._stack, WaitingClient(self._stack.url, patience_s=PATIENCE_S) as self._client:
            try:
                results = await self._course(specs)
            finally:
                ends_at = time.time()
                # Otherwise a node could be brought back while the stack stops.
                for task in self._background:
                    task.cancel()
                await asyncio.gather(*self._background, return_exceptions=True)
        left = processes_of(self._run_dir)
        self._checks.expect("no process is left", not left, f"{left}")
        self._checks.log(self._run_dir)
        takeovers = self._checks.takeovers(self._run_dir, self._injected, ends_at)
        for spec, result, reference in zip(specs, results, references, strict=True):
            self._checks.result(spec, result, reference)
        self._report.line(
            "summary",
            ok=not self._report.missed,
            seed=self._options.seed,
            faults=len(self._injected),
            incidents=len(self._incidents),
            takeovers=takeovers,
            problems=self._report.missed,
            wall_s=round(time.monotonic() - started_s, 1),
            run_dir=str(self._run_dir) if self._report.missed or self._options.directory else None,
        )

    # ---- the course

    async def _course(self, specs: list[Record]) -> list[Record]:
        for spec in specs:
            await self._client.submit(spec)
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
            self._report.line("fault", **asdict(fault))
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
        self._incidents = [i for i in await self._client.incidents() if i["task"] != "after"]
        self._checks.incidents(self._incidents, self._injected, self._run_dir)
        return [await self._client.task(spec["name"]) for spec in specs]

    async def _inject(self, fault: Injected, dice: list[float]) -> None:
        with suppress(Unavailable):  # the api may just be starting again; the fault does not wait
            async with WaitingClient(self._stack.url) as client:
                for task in await client.items("/v1/tasks"):
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
                name = pick(self._services(), dice[0])
                if self._may_end(name, fault.at) and self._stack.kill_service(name) is not None:
                    fault.targets.append(name)
            case "agent":
                self._signal_agent(fault, dice, signal.SIGKILL)
            case "suspension":
                self._suspend(fault, dice)
            case "nats":
                await self._stack.nats.kill()
                fault.targets.append("nats")
                await asyncio.sleep(dice[0])
                await self._stack.nats.start()
            case kind:
                ranks = self._ranks()
                if ranks:
                    send(fault, pick(ranks, dice[0]), RANK_FAULTS[kind])

    def _services(self) -> list[str]:
        return sorted([*SERVICES, *(STANDBYS if self._options.standby else ())])

    def _may_end(self, name: str, at: float, apart_s: float = 0.0) -> bool:
        """Take note that a process ends, and return True; False if it has ended too often of late.

        ``apart_s``: least time since it has ended last.
        """
        recent = [each for each in self._restarts.get(name, []) if at - each < 60.0]
        may_end = len(recent) < RESTARTS_A_SERVICE and not any(at - each < apart_s for each in recent)
        self._restarts[name] = [*recent, at] if may_end else recent
        return may_end

    def _suspend(self, fault: Injected, dice: list[float]) -> None:
        """Stop a service, an agent or NATS. A service that goes on may have lost its lease, and then ends."""
        name = pick([*self._services(), "nats", "agent"], dice[0])
        if name == "agent":
            # One that says nothing for longer counts as lost, and its node with it.
            for_s = dice[2] * self._options.node_timeout_s / 2
            if (pid := self._signal_agent(fault, dice, signal.SIGSTOP)) is None:
                return
        else:
            for_s = dice[2] * LONGEST_SUSPENSION_S
            pid = self._stack.nats.pid if name == "nats" else self._stack.service_pid(name)
            if pid is None or not self._may_end(name, fault.at):
                return
            os.kill(pid, signal.SIGSTOP)
            fault.targets.append(name)
        self._spawn(go_on(pid, for_s))

    def _signal_agent(self, fault: Injected, dice: list[float], number: signal.Signals) -> int | None:
        """Send a signal to the agent of a node alone; return its pid, None if there is none to signal."""
        up = [name for name in self._stack.node_names if name not in self._down]
        node = pick(up, dice[1])
        agents = [process for process in self._stack.node_processes(node) if is_agent(process)]
        if not agents or not self._may_end(f"agent {node}", fault.at, AGENT_APART_S):
            return None
        os.kill(agents[0].pid, number)
        fault.targets.append(f"agent {node}")
        return agents[0].pid

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
        return living_ranks(self._stack)

    async def _readmit(self) -> None:
        """Start isolated nodes anew, as an operator does after restarts on them have failed."""
        for node in await self._client.items("/v1/nodes"):
            if node["state"] == "isolated" and node["name"] not in self._down:
                self._report.line("note", what=f"{node['name']} is isolated: {node['reason']}")
                at = await self._stack.kill_node(node["name"])
                number = self._options.faults + len(self._injected)
                self._injected.append(Injected(number, "node", at, [node["name"]]))
                await self._stack.start_node(node["name"])

    async def _use_everything(self, spec: Record) -> None:
        """Run a task that needs every worker."""
        workers = self._options.nodes * self._options.workers_per_node
        last = {**spec, "name": "after", "steps": 3, "workers": {"min": workers, "max": workers}}
        await self._client.submit(last)
        await self._until("a task on every worker succeeds", lambda: self._all_ended([last]), 30.0)

    # ---- conditions

    async def _all_reached(self, specs: list[Record], step: int) -> bool:
        return all([(await self._client.task(s["name"]))["step"] >= step for s in specs])

    async def _steps_left(self, specs: list[Record]) -> int:
        return max([int(s["steps"]) - int((await self._client.task(s["name"]))["step"]) for s in specs])

    async def _all_ended(self, specs: list[Record]) -> bool:
        return all([(await self._client.task(s["name"]))["state"] in ("succeeded", "failed") for s in specs])

    async def _no_ranks(self) -> bool:
        return not self._ranks()

    async def _all_ready(self) -> bool:
        return {n["state"] for n in await self._client.items("/v1/nodes")} == {"ready"}

    async def _until(self, what: str, holds: Callable[[], Awaitable[bool]], limit_s: float) -> bool:
        """Wait until a condition holds, as a check that fails at the limit. Return whether it holds."""
        try:
            await self._client.until(what, holds, limit_s)
        except TimedOut as err:
            names = ("name", "state", "reason", "step", "workers")
            states = [[task[name] for name in names] for task in await self._client.items("/v1/tasks")]
            self._checks.expect(what, False, f"{err.detail}; {states}; ranks {self._ranks()}")
            return False
        self._checks.expect(what, True)
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def send(fault: Injected, rank: Rank, number: signal.Signals) -> None:
    """Send a signal to a rank, and note the rank as a target if its process still lives."""
    with suppress(ProcessLookupError):
        os.kill(rank.pid, number)
        fault.targets.append(rank.worker)


async def go_on(pid: int, after_s: float) -> None:
    """Let a stopped process go on after a while."""
    try:
        await asyncio.sleep(after_s)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_agent(process: psutil.Process) -> bool:
    """Return whether a process of a node is its agent, and not what starts it or trains."""
    with suppress(psutil.NoSuchProcess):
        return "services.agent.agent_process" in process.cmdline()
    return False


def pick(items: list[Any], dice: float) -> Any:
    """Return the item that a number in [0, 1) falls on."""
    return items[int(dice * len(items))]


async def in_directory(options: argparse.Namespace, report: Report) -> None:
    """Run in the folder of the command line, or in a temporary one, which stays only if a check does not hold."""
    directory = options.directory or Path(tempfile.mkdtemp(prefix="unicron-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    stays = options.directory is not None
    try:
        await Chaos(options, directory, report).run()
        stays = stays or bool(report.missed)
    finally:
        if not stays:
            shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.chaos", description="Random faults against the whole system.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=at_least(0), default=10)
    parser.add_argument("--nodes", type=at_least(1), default=4)
    parser.add_argument("--workers-per-node", type=at_least(1), default=1)
    parser.add_argument("--steps", type=at_least(4), default=250, help="of each task")
    parser.add_argument(
        "--node-timeout-s", type=float, default=1.5, help="raise it where other work keeps the cores busy"
    )
    parser.add_argument("--standby", action="store_true", help="two of each service that decides, and further kinds")
    parser.add_argument("--kinds", nargs="+", choices=KINDS + WITH_STANDBYS, help="faults to draw from; default: all")
    parser.add_argument("--directory", type=Path, help="folder for what the run writes, which stays")
    options = parser.parse_args()
    options.kinds = options.kinds or [*KINDS, *(WITH_STANDBYS if options.standby else ())]
    return run(partial(in_directory, options))


if __name__ == "__main__":
    sys.exit(main())
