"""What the control plane takes with many nodes, and how soon it answers. JSON lines; exit status 1 for a missed bound.

    python -m benchmarks.fleet [--nodes 40,250] [--workers 8] [--exits 5]

nats-server and services are the real ones; the nodes are simulated (``benchmarks.fleet.nodes``). For each number of
nodes: all ask for admission at once; they rest; one task trains on all workers; ranks end, one after the other; NATS is
killed and starts again; a tenth of the nodes ends at once. ``interval_s`` says how often they send heartbeats.

Processor time binds: the bounds on cores are those of 2,000 nodes. Wall times count where 0.3 of a core was idle
meanwhile (``idle_cores`` in each line), since the simulator takes its part of the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Report, at_least, run
from cli.stack.children import SERVICES
from cli.stack.stack import Stack
from cli.waiting import WaitingClient
from shared.bus.identities import node_identity
from shared.errors import Unavailable
from shared.events.plans import Trigger
from shared.events.severities import ErrorKind
from shared.events.union import ErrorDetected, Event, NodeJoined, PlanDecided, Recorded, StateMoved
from shared.log.log import EventLog

MOST_JOIN_S = 15.0
MOST_CORES = {"detector": 0.5, "nats": 0.5, "api, planner, transition": 0.3}
MOST_ERROR_S, MOST_PLAN_S, MOST_COMMAND_S = 0.1, 0.3, 0.8
MOST_LOSS_COMMANDS_S = 3.0
MOST_BACK_S = 10.0

HEARTBEATS_PER_S = 1000.0
"""Of all nodes together: with more nodes than 250 each sends them less often, and a loss is found later."""

LEAST_INTERVAL_S = 0.25

TIMEOUT_INTERVALS = 6.0
"""``UNICRON_NODE_TIMEOUT_S`` as a multiple of the interval, as of the defaults."""

REST_S = 10.0
LIMIT_S = 180.0
"""For one course. Each takes seconds."""

LOOK_S = 0.1


def interval_s(nodes: int) -> float:
    """Return the interval of heartbeats for a number of nodes."""
    return max(LEAST_INTERVAL_S, nodes / HEARTBEATS_PER_S)


class _ControlPlane(Stack):
    """The stack without agents: the fleet comes later, so the api is not ready before."""

    async def _wait_for_nodes(self) -> None:
        """Wait for none."""


class _Simulator:
    """The process that simulates the nodes."""

    def __init__(self, stack: Stack, nodes: int, workers: int) -> None:
        keys = str(stack.nats.keys.path)
        self._arguments = [keys, stack.nats.url, str(nodes), str(workers), str(interval_s(nodes))]

    async def start(self) -> None:
        """Start it, and have all nodes connect."""
        command = [sys.executable, "-m", "benchmarks.fleet.nodes", *self._arguments]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20)
        await self.ask("connect")

    async def stop(self) -> None:
        """End it, and all nodes with it."""
        self._process.kill()
        await self._process.wait()

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Return the answer to a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
        async with asyncio.timeout(LIMIT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise Unavailable("the simulator has ended")
        found: dict[str, Any] = json.loads(line)
        return found


class _Used:
    """Processor time and memory of the control plane, from now on."""

    def __init__(self) -> None:
        self._processes: dict[str, psutil.Process] = {}
        for process in psutil.Process().children(recursive=True):
            command = process.cmdline()
            name = next((name for name, module in SERVICES.items() if module in command), "")
            if command and Path(command[0]).name == "nats-server":
                name = "nats"
            elif "benchmarks.fleet.nodes" in command:
                name = "simulator"
            if name:
                self._processes[name] = process
        self._before, self._at_s, self._idle = self._seconds(), time.monotonic(), psutil.cpu_times().idle

    def _seconds(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}

    def fields(self) -> dict[str, Any]:
        """Return the processor seconds, what they are of a core, the memory, and the idle part of the machine."""
        seconds = {name: now - self._before[name] for name, now in self._seconds().items()}
        wall_s = time.monotonic() - self._at_s
        idle = (psutil.cpu_times().idle - self._idle) / wall_s
        return {
            "wall_s": round(wall_s, 2),
            "idle_cores": round(idle, 2),
            "cpu_s": {name: round(one, 2) for name, one in seconds.items()},
            "cores": {name: round(one / wall_s, 3) for name, one in seconds.items()},
            "mib": {name: round(one.memory_info().rss / 2**20) for name, one in self._processes.items()},
        }


class Lab:
    """The control plane and the fleet of one size."""

    def __init__(self, report: Report, stack: Stack, simulator: _Simulator, log: EventLog, nodes: int) -> None:
        self.report, self.stack, self.simulator, self.log, self.nodes = report, stack, simulator, log, nodes
        self.expected: list[str] = []
        """Incidents that the benchmark itself has caused."""
        self._records: list[Recorded] = []
        """The log as far as it was read: a look at a fleet's log each tenth of a second would load the machine."""

    def end(self) -> int:
        """Return the position of the newest event."""
        return self.log.last_position()

    def since(self, position: int, kind: type[Event] | Any = None) -> list[Recorded]:
        """Return the records behind a position, of one kind."""
        self._records += self.log.read(after=len(self._records), limit=100_000)
        found = self._records[position:]  # positions are gapless
        return [record for record in found if kind is None or isinstance(record.event, kind)]

    async def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait until a condition holds, and return its value.

        Raises:
            Unavailable: it does not within ``LIMIT_S``.
        """
        deadline_s = time.monotonic() + LIMIT_S
        while not (value := condition()):
            if time.monotonic() > deadline_s:
                raise Unavailable(f"in vain: {what}")
            await asyncio.sleep(LOOK_S)
        return value

    def line(self, course: str, **fields: Any) -> None:
        """Report what a course has shown."""
        self.report.line(course, nodes=self.nodes, **fields)

    def at_most(self, name: str, value: float | None, bound: float) -> None:
        """Require a bound."""
        rounded = None if value is None else round(value, 3)
        self.report.at_most(f"{name}, {self.nodes} nodes", rounded, bound)


async def _join(lab: Lab) -> None:
    used, position, began_s = _Used(), lab.end(), time.monotonic()
    answer = await lab.simulator.ask("join")
    await lab.until("all nodes have joined", lambda: len(lab.since(position, NodeJoined)) == lab.nodes)
    seconds = time.monotonic() - began_s
    lab.line("join", admitted_s=round(answer["seconds"], 2), joined_s=round(seconds, 2), **used.fields())
    lab.at_most("join: seconds until all have joined", seconds, MOST_JOIN_S)


async def _rest(lab: Lab, what: str) -> None:
    await lab.simulator.ask("states")
    used = _Used()
    await asyncio.sleep(REST_S)
    found = used.fields()
    simulator = await lab.simulator.ask("states")
    lab.line("rest", what=what, late_s=round(simulator["late_s"], 3), states=simulator["states"], **found)
    for name, bound in MOST_CORES.items():
        cores = sum(found["cores"][one] for one in name.split(", "))
        lab.at_most(f"cores of {name}, {what}", cores, bound)


def _complete(lab: Lab, position: int) -> Recorded | None:
    found = [each for each in lab.since(position, StateMoved) if each.event.complete]  # type: ignore[union-attr]
    return found[-1] if found else None


def task_spec(workers: int, corpus: str) -> dict[str, Any]:
    """Return the task that trains on all workers."""
    return {
        "name": "all",
        "model": {"layers": 2, "hidden": 64, "heads": 4, "sequence_length": 64},
        "batch": {"global": 32_768, "micro": 1},
        "parallel": {"tensor": 4, "pipeline": 1},
        "steps": 1_000_000,
        "data": corpus,
        "workers": {"min": 4, "max": workers},
        "checkpoint": {"every": 0},
    }


async def _submit(lab: Lab, client: WaitingClient, corpus: Path, workers: int) -> None:
    used, position, began = _Used(), lab.end(), time.time()
    await client.submit(task_spec(workers, str(corpus)))
    done = await lab.until("the task trains", lambda: _complete(lab, position))
    decided = lab.since(position, PlanDecided)
    plan = next(one for one in decided if getattr(one.event, "trigger", None) is Trigger.TASK_SUBMITTED)
    lab.line(
        "submission",
        plan_s=round(plan.recorded_at.timestamp() - began, 3),
        trains_s=round(done.recorded_at.timestamp() - began, 3),
        commands=(await lab.simulator.ask("states"))["sent"],
        **used.fields(),
    )


async def _exit(lab: Lab, number: int) -> tuple[float, float, float]:
    """Have a rank end; return the seconds to its error, to the plan, and to the last command to hold."""
    await lab.simulator.ask("states")
    used, position = _Used(), lab.end()
    answer = await lab.simulator.ask("exit", node=f"n{(17 + 31 * number) % lab.nodes:04d}", slot=3)
    done = await lab.until("the rank is back", lambda: _complete(lab, position))
    error = lab.since(position, ErrorDetected)[0]
    plan = lab.since(position, PlanDecided)[0]
    sent = (await lab.simulator.ask("states"))["sent"]
    times = {
        "error_s": error.recorded_at.timestamp() - answer["sent_at"],
        "plan_s": plan.recorded_at.timestamp() - answer["sent_at"],
        "held_s": sent["hold"]["last_at"] - answer["sent_at"],
        "restored_s": done.recorded_at.timestamp() - answer["sent_at"],
    }
    sizes = {kind: {"nodes": one["nodes"], "bytes": one["bytes"]} for kind, one in sent.items()}
    error_bytes = len(error.event.model_dump_json())
    rounded = {name: round(seconds, 3) for name, seconds in times.items()}
    lab.line("exit", **rounded, error_bytes=error_bytes, commands=sizes, **used.fields())
    lab.expected.append(error.event.event_id)
    return times["error_s"], times["plan_s"], times["held_s"]


async def _exits(lab: Lab, count: int) -> None:
    found = [await _exit(lab, number) for number in range(count)]
    bounds = (("error", MOST_ERROR_S), ("plan", MOST_PLAN_S), ("last command of the hold", MOST_COMMAND_S))
    for (name, bound), times in zip(bounds, zip(*found, strict=True), strict=True):
        lab.at_most(f"exit of a rank: seconds to its {name}, median of {count}", statistics.median(times), bound)


def _connections(lab: Lab) -> int:
    """Return how many connections the nats-server of the lab's stack has."""
    connections = psutil.Process(lab.stack.nats.pid).net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED for one in connections)


async def _restart_nats(lab: Lab) -> None:
    position = lab.end()
    await lab.stack.nats.kill()
    await lab.stack.nats.start()
    began_s = time.monotonic()
    await lab.until("all are back at NATS", lambda: _connections(lab) >= lab.nodes + len(SERVICES))
    seconds = time.monotonic() - began_s
    await asyncio.sleep(2 * TIMEOUT_INTERVALS * interval_s(lab.nodes))
    incidents = len(lab.since(position, ErrorDetected))
    lab.line("NATS restarted", back_s=round(seconds, 2), incidents=incidents)
    lab.at_most("NATS restarted: seconds until all are back", seconds, MOST_BACK_S)
    lab.report.equal(f"NATS restarted: incidents, {lab.nodes} nodes", incidents, 0)


async def _lose(lab: Lab) -> None:
    """Have a tenth of the nodes end at once."""
    await lab.simulator.ask("states")
    used, position = _Used(), lab.end()
    first = lab.nodes // 2
    names = [f"n{number:04d}" for number in range(first, first + max(1, lab.nodes // 10))]
    at = (await lab.simulator.ask("end", nodes=names))["at"]

    def lost() -> list[Recorded]:
        found = lab.since(position, ErrorDetected)
        return found if len(found) >= len(names) else []

    errors = await lab.until("all losses are found", lost)
    newest = errors[-1].position
    await lab.until("the task trains again", lambda: _complete(lab, newest))
    errors, plans = lab.since(position, ErrorDetected), lab.since(position, PlanDecided)
    sent = (await lab.simulator.ask("states"))["sent"]
    found_s = [record.recorded_at.timestamp() - at for record in errors]
    last_s = max(one["last_at"] for one in sent.values()) - at
    lab.expected += [one.event.event_id for one in errors if getattr(one.event, "node", "") in names]
    lab.line(
        "loss of a tenth",
        lost=len(names),
        first_found_s=round(min(found_s), 2),
        last_found_s=round(max(found_s), 2),
        plans=len(plans),
        last_command_s=round(last_s, 2),
        **used.fields(),
    )
    lab.report.equal(f"loss of a tenth: decisions, {lab.nodes} nodes", len(plans), 1)
    lab.at_most(
        "loss of a tenth: seconds from the last error to the last command", last_s - max(found_s), MOST_LOSS_COMMANDS_S
    )


def _false(lab: Lab) -> None:
    errors = [record.event for record in lab.since(0, ErrorDetected)]
    unexpected = [event for event in errors if event.event_id not in lab.expected]
    for event in unexpected:
        assert isinstance(event, ErrorDetected)
        lab.line("false", kind=event.kind, where=event.worker or event.node, severity=event.severity)
    lost = sum(isinstance(one, ErrorDetected) and one.kind is ErrorKind.NODE_LOST for one in unexpected)
    lab.report.equal(f"nodes lost falsely, {lab.nodes} nodes", lost, 0)
    lab.report.equal(f"incidents without a cause, {lab.nodes} nodes", len(unexpected), 0)


async def measure_size(nodes: int, workers: int, exits: int, report: Report, *, rests: bool = True) -> None:
    """Go through all courses with a number of nodes; ``rests``: also measure what they take while nothing happens."""
    seconds = interval_s(nodes)
    environment = {
        "UNICRON_HEARTBEAT_INTERVAL_S": str(seconds),
        "UNICRON_NODE_TIMEOUT_S": str(TIMEOUT_INTERVALS * seconds),
        # Many faults strike one task within minutes: none of them is a sign of anything.
        "UNICRON_CAUSE_TASK_LIMIT": "0",
    }
    report.line("size", nodes=nodes, workers=nodes * workers, interval_s=seconds, node_timeout_s=6 * seconds)
    async with AsyncExitStack() as stacked:
        folder = Path(stacked.enter_context(tempfile.TemporaryDirectory(prefix="unicron-fleet-")))
        corpus = folder / "corpus.txt"
        corpus.write_text("the quick brown fox jumps over the lazy dog " * 3000)
        stack = _ControlPlane(folder / "run", nodes=0, workers_per_node=workers, environment=environment)
        stack.nats.directory.mkdir(parents=True, exist_ok=True)
        stack.nats.keys.make(more=[node_identity(f"n{number:04d}") for number in range(nodes)])
        await stacked.enter_async_context(stack)
        simulator = _Simulator(stack, nodes, workers)
        await simulator.start()
        stacked.push_async_callback(simulator.stop)
        client = await stacked.enter_async_context(WaitingClient(stack.url, poll_s=LOOK_S))
        log = stacked.enter_context(closing(EventLog(f"sqlite:///{stack.run_dir / 'log.db'}", read_only=True)))
        lab = Lab(report, stack, simulator, log, nodes)
        await _join(lab)
        if rests:
            await _rest(lab, "idle")
        await _submit(lab, client, corpus, nodes * workers)
        if rests:
            await _rest(lab, "training")
        await _exits(lab, exits)
        await _restart_nats(lab)
        await _lose(lab)
        _false(lab)


async def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure each size."""
    for nodes in options.nodes:
        await measure_size(nodes, options.workers, options.exits, report)


def sizes(text: str) -> Sequence[int]:
    """Return the numbers of nodes in an argument."""
    return [at_least(1)(part) for part in text.split(",")]


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--nodes", type=sizes, default=[40, 250])
    parser.add_argument("--workers", type=at_least(4), default=8)
    parser.add_argument("--exits", type=at_least(1), default=5)
    return run(partial(measure, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
