"""The demo's course: two tasks train, faults strike them one after the other, both train to their end.

``cli/demo/run.py`` trains them again without failures; ``cli/demo/report.py`` has what the demo prints.

The live view has tasks with steps, loss and WAF, workers, and incidents with how far each is handled. At the end each
task is trained once more by one process, without failures, and compared with its result.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.demo.postmortem import write_pages
from cli.demo.report import Check, Report, TaskComparison, compare_parameters
from cli.demo.straggler import SLOWDOWN, straggle
from cli.stack.devices import Division
from cli.stack.processes import SeenProcesses, run_module
from cli.stack.run_directory import RunDirectory
from cli.stack.stack import Stack
from cli.waiting import AT_STRENGTH, Record, WaitingClient
from services.agent.machine.hardware import VISIBLE_VARIABLE
from services.planner.replay.replay import verify
from shared.bus.cancellation import cancelled
from shared.errors import TimedOut, UnicronError
from shared.events.plans import Trigger
from shared.log.log import EventLog

NODES = 4
WORKERS_PER_NODE = 2

WAIT_S = 90.0
"""Longest wait for any one condition; each comes true within seconds on two cores."""

STEPS = {"gpt-large": 170, "gpt-small": 580}
"""Steps of each task: every fault strikes while the first trains; the second then still trains on all workers."""

CORES = 2
"""Cores of the machine on which the numbers of steps were chosen. Machines with more cores get more steps."""


REFRESH_S = 0.5
"""Twice a second suffices for the eye, and is little work for the API."""


class View:
    """Prints what happens; on a terminal, with a table of the present state below."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        self._console.print(f"{time.monotonic() - self._started:6.1f} s  {text}", highlight=False)

    async def follow(self, client: WaitingClient) -> None:
        """Show the state of the stack until cancelled; return at once where the output is no terminal."""
        if not self._console.is_terminal:
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                with suppress(UnicronError):
                    tasks, nodes = await client.items("/v1/tasks"), await client.items("/v1/nodes")
                    state = Group(_tasks(tasks), _nodes(nodes), _incidents(await client.incidents()))
                    live.update(state, refresh=True)
                await asyncio.sleep(REFRESH_S)


def _tasks(tasks: list[dict[str, Any]]) -> Table:
    table = Table(title="tasks", title_justify="left")
    for name in ("task", "state", "step", "workers", "generation", "loss", "GFLOP/s", "WAF"):
        table.add_column(name)
    for t in tasks:
        table.add_row(
            t["name"],
            t["state"],
            f"{t['step']}/{t['steps']}",
            str(t["workers"]),
            str(t["generation"]),
            "-" if t["loss"] is None else f"{t['loss']:.4f}",
            f"{(t['throughput_flop_per_s'] or 0) / 1e9:.2f}",
            f"{(t['waf_flop_per_s'] or 0) / 1e9:.2f}",
        )
    return table


def _nodes(nodes: list[dict[str, Any]]) -> Text:
    text = Text()
    for node in nodes:
        cells = " ".join(
            f"[{w['task'] or '-'}{'' if w['rank'] is None else ':' + str(w['rank'])}]" for w in node["workers"]
        )
        text.append(f"{node['name']} {node['state']:9s} {cells}\n", style="" if node["state"] == "ready" else "red")
    return text


def _incidents(incidents: list[dict[str, Any]]) -> Text:
    text = Text()
    for i in incidents:
        times = {"restored": "restored_at", "over": "closed_at", "resumed": "resumed_at"}
        state = next((word for word, name in times.items() if i[name]), "being handled")
        text.append(f"{i['severity']} {i['kind']} on {i['worker'] or i['node']}: {state}\n", style="yellow")
    return text


async def compare(
    specs: list[Record], tasks: list[Record], run_dir: Path, devices: Sequence[str] = ()
) -> list[TaskComparison]:
    """Train every specification without failures; return how the tasks' results compare.

    The stack has ended by then. The folder stays locked until the comparison is done: another demo would empty it.

    Args:
        specs: of the demo's tasks; each lies in ``<run_dir>/<name>.json`` too.
        tasks: as the interface shows them after their end.
        run_dir: the demo's folder; references go below ``reference/``.
        devices: ``CUDA_VISIBLE_DEVICES`` of each node of the demo; empty: it trained on the CPU.

    Raises:
        Conflict: another process uses the folder.
        Unavailable: a reference could not be trained.
    """
    by_name = {task["name"]: task for task in tasks}
    with RunDirectory(run_dir):
        shown = devices or [""] * len(specs)
        await asyncio.gather(*(_train(s["name"], run_dir, its) for s, its in zip(specs, shown, strict=False)))
        return [_comparison(spec, by_name[spec["name"]]["result"] or {}, run_dir) for spec in specs]


def _comparison(spec: Record, result: Record, run_dir: Path) -> TaskComparison:
    reference = run_dir / "reference" / spec["name"] / "result"
    difference = compare_parameters(Path(result["parameters_path"]), reference / "parameters.safetensors")
    summary = json.loads((reference / "summary.json").read_text())
    return TaskComparison(
        name=spec["name"],
        steps=result["steps"],
        expected_steps=spec["steps"],
        max_abs_parameter_difference=difference,
        samples_identical=summary["samples_sha256"] == result["samples_sha256"],
    )


async def _train(name: str, run_dir: Path, device: str) -> None:
    directory = run_dir / "reference" / name
    directory.mkdir(parents=True)
    arguments = ("--spec", str(run_dir / f"{name}.json"), "--directory", str(directory))
    await run_module("unicron.train", *arguments, **{VISIBLE_VARIABLE: device})


def examples_directory() -> Path:
    """Return the folder of the example specifications: the repository's, or where an installation puts them."""
    beside = Path(__file__).resolve().parents[2] / "examples"
    return beside if beside.is_dir() else Path(sys.prefix) / "share" / "unicron" / "examples"


def command() -> str:
    """Return how this command was called, for lines that are to be copied."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "unicron" else "unicron"


def demo_specs(corpus: Path, seed: int) -> list[Record]:
    """Return the example tasks with the demo's own text and fewer steps."""
    specs = []
    faster = max(1.0, min(NODES * WORKERS_PER_NODE, os.cpu_count() or 1) / CORES)
    for name, steps in STEPS.items():
        spec: Record = yaml.safe_load((examples_directory() / f"{name}.yaml").read_text())
        specs.append(
            {
                **spec,
                # Not the examples' names: the examples can later be submitted to a stack in the same folder.
                "name": f"demo-{name}",
                "data": str(corpus),
                "seed": seed,
                "steps": round(steps * faster),
            }
        )
    return specs


class DemoRun:
    """One run of the demo in a fresh folder."""

    def __init__(self, run_dir: Path, seed: int, console: Console, division: Division) -> None:
        self._run_dir = run_dir
        self._division = division
        self._seed = seed
        self._view = View(console)
        self._report = Report()
        self._processes = SeenProcesses()

    async def run(self) -> Report:
        """Run the course; return the incidents, the checks and the costs."""
        corpus = self._run_dir / "corpus.txt"
        await run_module("unicron.trainer.corpus", str(corpus), "--seed", str(self._seed))
        specs = demo_specs(corpus, self._seed)
        if self._division.said:
            self._view.say(self._division.said)
        self._view.say(f"starting {NODES} nodes with {WORKERS_PER_NODE} workers each")
        environment = {"UNICRON_FAULT_INJECTION": "1"}
        async with Stack(
            self._run_dir,
            nodes=NODES,
            workers_per_node=WORKERS_PER_NODE,
            devices=self._division.shown,
            environment=environment,
        ) as stack:
            self._view.say(f"live page until both tasks have ended: {stack.url}/")
            self._view.say(f"  from another machine, or as another user: {command()} open --server {stack.url}")
            async with WaitingClient(stack.url) as self._client:
                # The live view runs beside the course, and ends with it.
                view = asyncio.create_task(self._view.follow(self._client))
                try:
                    await self._course(stack, specs)
                    await self._collect()
                    self._report.postmortems = await asyncio.to_thread(
                        write_pages,
                        stack.url,
                        self._report.incidents,
                        self._report.stragglers,
                        self._run_dir,
                    )
                except TimedOut as err:
                    raise TimedOut(f"{err.detail}; see {self._run_dir}/services and tasks") from err
                finally:
                    await cancelled(view)
                    self._processes.look()
        self._check_leftovers()
        self._check_replay()
        self._view.say("trains both tasks again without failures, to compare")
        for comparison in await compare(specs, self._report.tasks, self._run_dir, self._division.shown):
            self._report.comparisons.append(comparison)
            self._check(
                f"{comparison.name} ends as without failures",
                comparison.holds and comparison.steps == comparison.expected_steps,
                f"largest parameter difference {comparison.max_abs_parameter_difference:.2e}, "
                f"samples identical: {comparison.samples_identical}, steps {comparison.steps}",
            )
        return self._report

    async def _course(self, stack: Stack, specs: list[Record]) -> None:
        large, small = (s["name"] for s in specs)
        for spec in specs:
            (self._run_dir / f"{spec['name']}.json").write_text(json.dumps(spec))
            await self._client.submit(spec)
        await self._training(large, 4, "both tasks train")
        await self._training(small, 4, "both tasks train")
        self._processes.look()

        before = {r["worker"]: r["pid"] for r in (await self._client.task(large))["ranks"]}
        killed = await self._break(large, "kill", "kills rank 1 of", "process-exit")
        after = {r["worker"]: r["pid"] for r in (await self._client.task(large))["ranks"]}
        kept = {w for w in before if before[w] == after.get(w)}
        self._check(
            "survivors keep their processes",
            len(kept) == len(before) - 1 and killed["worker"] not in kept,
            f"{len(kept)} of {len(before) - 1} survivors kept their pids",
        )
        self._check(
            "no step is recomputed", killed["steps_recomputed"] == 0, f"{killed['steps_recomputed']} recomputed"
        )
        await self._break(small, "exception", "raises an exception in rank 1 of", "exception")
        await self._break(large, "hang", "stops (hangs) rank 1 of", "hang")

        node = await self._node_of_both(large, small)
        self._view.say(f"kills node {node} with everything on it")
        await stack.kill_node(node)
        lost = await self._incident("node-lost", node=node)
        self._view.say(
            f"node {node} lost: found after {_seconds(lost, 'occurred_at', 'detected_at'):.2f} s, re-planned"
        )

        self._view.say(f"brings node {node} back")
        known = await self._plans(Trigger.NODE_JOINED)
        await stack.start_node(node)
        # How many of its workers help depends on what was measured: here all workers share the cores of one machine.
        await self._until(
            lambda: self._planned_anew(Trigger.NODE_JOINED, known, (large, small)),
            f"a plan has answered the return of {node}",
        )
        self._processes.look()

        # The last fault: the slow worker stays out of use.
        await self._straggle(large)

        known_ends = await self._plans(Trigger.TASK_ENDED)
        have = await self._workers_until_end(large, small)
        self._view.say(f"{large} has finished; its workers are free for {small}")
        ended = Trigger.TASK_ENDED
        await self._until(lambda: self._planned_anew(ended, known_ends, (small,)), "a plan has divided them anew")
        grown = (await self._client.task(small))["workers"]
        self._check("the finished task's workers are divided anew", grown >= have, f"{have} -> {grown} workers")
        await self._until(lambda: self._state(small, "succeeded"), f"{small} finishes", 4 * WAIT_S)

    async def _break(self, task: str, fault: str, words: str, kind: str) -> Record:
        """Inject a fault into rank 1 and wait until the task is at full strength again; return the incident."""
        known = await self._client.known_incidents()
        rank = next(r for r in (await self._client.task(task))["ranks"] if r["rank"] == 1)
        self._view.say(f"{words} {task} (worker {rank['worker']}, pid {rank['pid']})")
        await self._client.post(f"/v1/tasks/{task}/faults", {"fault": fault, "rank": 1})
        incident = await self._incident(kind, known=known)
        step = (await self._client.task(task))["step"]
        await self._training(task, step + 3, f"{task} goes on after {kind}")
        return incident

    async def _straggle(self, task: str) -> None:
        """Slow rank 1 down, and wait until a plan has given its work to others."""
        self._view.say(f"slows rank 1 of {task} down, {SLOWDOWN:g} times")
        straggler = await straggle(self._client, task, 1)
        self._report.stragglers.append(straggler)
        self._view.say(f"  {straggler.worker} found after {straggler.found_s:.2f} s, its work moved")
        self._check(
            "the slow worker is left out",
            straggler.left,
            f"{straggler.worker}, {straggler.slowdown:.2f} times as slow, found after {straggler.found_s:.2f} s, moved "
            f"after {straggler.moved_s:.2f} s",
        )

    async def _incident(self, kind: str, *, node: str | None = None, known: frozenset[str] = frozenset()) -> Record:
        """Return the new incident of this kind once everything is back at planned strength."""
        incident = await self._client.until_restored(kind, WAIT_S, known=known, node=node)
        self._view.say(f"  the {kind} is healed")
        return incident

    async def _node_of_both(self, large: str, small: str) -> str:
        """Return a node that hosts both tasks, if there is one, and not the heavier task's rank 0."""
        ranks = {t: (await self._client.task(t))["ranks"] for t in (large, small)}
        nodes = {t: {r["node"] for r in ranks[t]} for t in ranks}
        shared = sorted(nodes[large] & nodes[small]) or sorted(nodes[large])
        node: str = shared[-1]
        return node

    async def _training(self, task: str, step: int, what: str) -> None:
        await self._client.until_step(task, step, WAIT_S)
        self._view.say(f"  {what}")

    async def _plans(self, trigger: Trigger) -> int:
        """Return how many plans have this trigger."""
        return sum(plan["trigger"] == trigger for plan in await self._client.items("/v1/plans"))

    async def _planned_anew(self, trigger: Trigger, known: int, tasks: tuple[str, ...]) -> bool:
        """Return whether there are more plans of a trigger than were known, and tasks have what these give them."""
        states = [(await self._client.task(t))["state"] for t in tasks]
        return await self._plans(trigger) > known and all(s in AT_STRENGTH for s in states)

    async def _workers_until_end(self, ending: str, other: str) -> int:
        """Wait until ``ending`` has finished; return how many workers ``other`` had while it still trained."""
        have = 0

        async def ended() -> bool:
            nonlocal have
            workers = (await self._client.task(other))["workers"]
            if await self._state(ending, "succeeded"):
                return True
            have = workers
            return False

        await self._until(ended, f"{ending} finishes", 4 * WAIT_S)
        return have

    async def _state(self, task: str, state: str) -> bool:
        return bool((await self._client.living_task(task))["state"] == state)

    async def _until(self, holds: Callable[[], Awaitable[bool]], what: str, limit_s: float = WAIT_S) -> None:
        await self._client.until(what, holds, limit_s)
        self._view.say(f"  {what}")

    async def _collect(self) -> None:
        self._report.incidents = await self._client.incidents()
        self._report.tasks = await self._client.items("/v1/tasks")
        self._report.costs = await self._client.get("/v1/costs")
        expected = {"process-exit", "exception", "hang", "node-lost"}
        seen = [i["kind"] for i in self._report.incidents]
        self._check(
            "each fault is one incident",
            sorted(seen) == sorted(expected),
            f"seen {', '.join(seen)}",
        )

    def _check(self, name: str, ok: bool, detail: str) -> None:
        self._report.checks.append(Check(name, ok, detail))

    def _check_leftovers(self) -> None:
        left = self._processes.living()
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


def _seconds(record: Record, start: str, end: str) -> float:
    return (datetime.fromisoformat(record[end]) - datetime.fromisoformat(record[start])).total_seconds()
