"""A live run on CPU workers and its simulation: the same faults, the same work done? JSON lines with a bound.

    .venv/bin/python -m benchmarks.simulated_live [--horizon 75]

Two nodes of one worker train a small GPT. First nothing fails, and the rate of steps is measured: all that the
simulation is calibrated with. Then each rank is killed once, and a node is killed and started again. The simulation
gets the faults at the times at which they happened, and the node's return at the time at which it joined. Compared is
the accumulated WAF: updates applied, times the model FLOP of one, times the weight. The ranks keep the pace of a device
(``simulated_live_rank.py``): ranks that compute as fast as the processors allow are as fast as other load lets them be,
and its changes between the two phases, of 8.9 and 6.0 steps/s on one machine, were all of the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.embedded import Embedded, embedded, small_task
from benchmarks.report import Report, at_least, run
from cli.waiting import AT_STRENGTH, Record
from services.planner.state.cluster import HardwareLayout
from services.planner.throughput.model import flop_per_step, modelled_flop_per_s
from shared.events.union import NodeJoined
from shared.log.log import EventLog
from shared.planning.performance import measured, profile
from shared.tasks.specification import TaskSpec, parse_spec
from simulator.outcome import Outcome
from simulator.policies import POLICIES
from simulator.policies.parameters import value
from simulator.policies.timing import Detection, LiveTiming
from simulator.policy import Policy
from simulator.run.engine import simulate
from simulator.workloads.trace import Occurrence, Trace
from simulator.workloads.workload import Workload

BOUND = 0.10
"""Required: the relative difference of accumulated WAF."""

NODES = ("n0", "n1")

LIMIT_S = 60.0
"""For a wait of the live run, which takes seconds; a longer time ends the benchmark with an error."""

WARM_STEPS = 20
"""Steps before anything is measured: the first ones allocate and connect."""

CALM_S = 15.0
"""Length of the failure-free phase: some 40 steps."""

SCRIPT = Path(__file__).with_name("simulated_live_rank.py")
"""What the ranks run."""

FIRST_KILL_S, SECOND_KILL_S, NODE_LOSS_S, NODE_AWAY_S = 8.0, 20.0, 34.0, 10.0
"""When faults are injected, seconds from the end of the calm phase: far enough apart that each is healed."""

LEAST_HORIZON_S = 60
"""The node is back after some 50 s."""

NODE_DROPPED_S = 0.4
"""Detection of a node whose connection drops, as of one that is killed (docs/detector.md)."""

FORK_S = 0.7
"""Start of a process from a warm one on CPUs (benchmarks.recovery)."""

SAMPLE_S = 1.0
"""Between two looks at how far the task is. A look takes the services some milliseconds."""

HARDWARE = "cpu"


class Progress(NamedTuple):
    """How far the task is. ``at_s``: Unix seconds."""

    at_s: float
    step: int


class Live(NamedTuple):
    """What the live run did.

    ``steps_per_s``: of the calm phase; ``steps``: applied from then up to the horizon. ``course``: how far the task was
    at times in between, from the end of the calm phase on; it tells in which phase a difference arises.
    """

    spec: TaskSpec
    steps_per_s: float
    steps: int
    horizon_s: float
    occurrences: tuple[Occurrence, ...]
    course: tuple[Progress, ...]


def on_cpus() -> Policy:
    """Return the project's own policy with its times on CPUs, as the documentation has them."""
    unicron = POLICIES["unicron"]
    timing = LiveTiming(
        detection=Detection(
            node_s=NODE_DROPPED_S,
            process_s=value("unicron", "process_detection_s"),
            exception_s=value("unicron", "exception_detection_s"),
            hang_s=0.0,  # no hang is injected
        ),
        checkpoint_every_s=value("unicron", "checkpoint_every_s"),
        pause_s=value("unicron", "hold_s"),
        start_s=FORK_S,
        lost="nothing",
        has_copies=True,
    )
    return replace(unicron, timing=timing)


def worker_flop_per_s(spec: TaskSpec, steps_per_s: float, workers: int) -> float:
    """Return the rate of one worker at which the throughput model has the measured rate of steps, by bisection."""
    layout = HardwareLayout(HARDWARE, 1, 1, workers)

    def rate(worker: float) -> float:
        one = measured(profile(HARDWARE)._replace(workers_per_node=1), peak_flop_per_s=worker)
        return modelled_flop_per_s(spec, layout, one) / flop_per_step(spec)

    low, high = 1e6, 1e15  # beyond any processor
    for _ in range(200):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if rate(middle) < steps_per_s else (low, middle)
    return high


async def progress(system: Embedded, name: str) -> Progress:
    """Return the task's step as soon as it has changed: its time is then known to the poll."""
    before = (await system.client.task(name))["step"]

    async def changed() -> Progress | None:
        step = (await system.client.task(name))["step"]
        return Progress(time.time(), step) if step > before else None

    return await system.client.until(f"{name} makes a step", changed, LIMIT_S)


async def at_strength(system: Embedded, name: str) -> Record:
    """Wait until the task trains on all workers; return it."""

    async def found() -> Record | None:
        task = await system.client.task(name)
        return task if task["state"] in AT_STRENGTH and len(task["ranks"]) == len(NODES) else None

    return await system.client.until(f"{name} is at strength", found, LIMIT_S)


async def until(start_s: float, after_s: float) -> None:
    """Wait until a time after the start: this is when the course has a fault happen, and no condition stands for it."""
    await asyncio.sleep(max(0.0, start_s + after_s - time.time()))


async def sample(system: Embedded, name: str, found: list[Progress]) -> None:
    """Note how far the task is, until cancelled."""
    while True:
        found.append(Progress(time.time(), (await system.client.task(name))["step"]))
        await asyncio.sleep(SAMPLE_S)


async def kill_rank(system: Embedded, name: str, rank: int) -> tuple[float, str]:
    """Kill a rank; return when, in Unix seconds, and on which node."""
    task = await at_strength(system, name)
    victim = next(each for each in task["ranks"] if each["rank"] == rank)
    at_s = time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    return at_s, str(victim["node"])


async def live_run(horizon_s: float) -> Live:
    """Train, measure the calm phase, inject the faults; return what was done."""
    async with embedded(len(NODES), 1) as system:
        document = small_task("compared", system.corpus, workers={"min": 1, "max": len(NODES)}, script=str(SCRIPT))
        spec = parse_spec(document)
        await system.client.submit(document)
        await system.client.until_step(spec.name, WARM_STEPS, LIMIT_S)
        await at_strength(system, spec.name)
        calm = await progress(system, spec.name)
        await until(calm.at_s, CALM_S)
        begin = await progress(system, spec.name)
        course: list[Progress] = []
        sampling = asyncio.create_task(sample(system, spec.name, course))
        found = []
        for after_s, rank in ((FIRST_KILL_S, 1), (SECOND_KILL_S, 0)):
            await until(begin.at_s, after_s)
            at_s, node = await kill_rank(system, spec.name, rank)
            found.append(Occurrence(at_s - begin.at_s, node, "error", "process-exit"))
        await until(begin.at_s, NODE_LOSS_S)
        await at_strength(system, spec.name)
        lost_at_s = await system.stack.kill_node(NODES[1])
        found.append(Occurrence(lost_at_s - begin.at_s, NODES[1], "down"))
        await until(lost_at_s, NODE_AWAY_S)
        await system.stack.start_node(NODES[1])
        await until(begin.at_s, horizon_s)
        end = await progress(system, spec.name)
        sampling.cancel()
        with closing(EventLog(f"sqlite:///{system.stack.run_dir / 'log.db'}", read_only=True)) as log:
            joins = [record.event.occurred_at.timestamp() for record in log.read_all() if _joins(record.event)]
    found.append(Occurrence(joins[-1] - begin.at_s, NODES[1], "up"))
    rate = (begin.step - calm.step) / (begin.at_s - calm.at_s)
    seen = tuple(Progress(each.at_s - begin.at_s, each.step - begin.step) for each in course)
    return Live(spec, rate, end.step - begin.step, end.at_s - begin.at_s, tuple(found), seen)


def _joins(event: object) -> bool:
    return isinstance(event, NodeJoined) and event.node == NODES[1]


def simulated(live: Live) -> Outcome:
    """Return the simulation of the live run, calibrated with its calm phase."""
    parameters = {"worker_flop_per_s": worker_flop_per_s(live.spec, live.steps_per_s, len(NODES))}
    trace = Trace("live", NODES, len(NODES), live.occurrences, live.horizon_s)
    workload = Workload("live", trace, (live.spec,), HARDWARE, 1, parameters)
    return simulate(workload, on_cpus(), costs=False)


async def measure(horizon_s: float, report: Report) -> None:
    """Measure and print."""
    live = await live_run(horizon_s)
    each = flop_per_step(live.spec) * live.spec.weight
    calm_flop = live.steps_per_s * live.horizon_s * each
    report.line(
        "live",
        calm_steps_per_s=round(live.steps_per_s, 3),
        horizon_s=round(live.horizon_s, 3),
        faults=[[round(at.at_s, 3), at.node, at.change, at.kind] for at in live.occurrences],
        steps=live.steps,
        course=[[round(each.at_s, 1), each.step] for each in live.course],
        accumulated_waf_flop=live.steps * each,
        of_failure_free=round(live.steps * each / calm_flop, 4),
    )
    outcome = simulated(live)
    found = outcome.accumulated_waf_flop
    report.line(
        "simulated",
        accumulated_waf_flop=found,
        of_failure_free=round(found / calm_flop, 4),
        recovery_s=[round(seconds, 3) for seconds in outcome.recovery_s],
        waf=[[round(point.at_s, 2), round(point.waf_flop_per_s / each, 3)] for point in outcome.waf],
    )
    report.at_most("simulated against live, relative", abs(found / (live.steps * each) - 1), BOUND)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.simulated_live", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--horizon", type=at_least(LEAST_HORIZON_S), default=75, help="seconds from the first fault on")
    options = parser.parse_args()
    return run(partial(measure, float(options.horizon)))


if __name__ == "__main__":
    sys.exit(main())
