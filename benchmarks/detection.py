"""How soon each class of faults is detected, beside the figures of the Unicron paper (section 4.1, table 2).

    .venv/bin/python -m benchmarks.detection [--classes kill exception ...] [--ranks 2] [--scale 1.0]
    .venv/bin/python -m benchmarks.detection --soak [--minutes 30]

Faults are injected (``unicron inject``) into a small GPT that trains in an embedded stack; those of nodes are the end
and the stop of all processes of a node. A time is that from the fault, which the rank notes right before it, to the
append of the event that names it (``error.detected``, ``worker.slowed``, ``anomaly.observed``); both by the clock of
this machine.

One JSON line for each class with n, p50, p99 and the paper's figure, and its bound; exit status 1 if one is missed. For
hangs the bound is one for each injection, 2x the p99 step of the recent past of all ranks, never below the floor:
values and bound are parts of that. ``--scale`` scales the numbers of injections; bounds are on the p99 all the same.
``--soak`` is the other course: no alarm where nothing is wrong (``benchmarks.detection_soak``).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from benchmarks import detection_nodes, detection_soak
from benchmarks.detection_hangs import HANGS
from benchmarks.detection_hangs import course as hang_course
from benchmarks.detection_lab import TASK, Lab, Struck, laboratory, unix_s
from benchmarks.detection_measures import Measures
from benchmarks.report import Report, at_least, run
from benchmarks.simulated_steps import LATEST, LATEST_OF_TWO
from cli.waiting import Record
from shared.errors import TimedOut

SPECIFICATION: Record = {
    "model": {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": 32},
    "batch": {"global": 8, "micro": 1},
    "steps": 1_000_000,
    "checkpoint": {"every": 0},
    # Faults here are the benchmark's, however often they strike at the same step.
    "max_restarts": 1000,
}
"""Steps of some 30 ms: a fault's step is soon there, and the machine is as busy as training makes it."""

LONG_STEPS: Record = {
    **SPECIFICATION,
    "model": {"layers": 4, "hidden": 128, "heads": 4, "sequence_length": 128},
    "batch": {"global": 16, "micro": 1},
}
"""Steps of 0.1 to 0.3 s for stragglers: heartbeats report every step that takes 40 ms. In a micro-batch of less than a
millisecond the noise of the machine's scheduler is larger than 1.3, and real ones take a second."""

IN_REPLICAS: Record = {**LONG_STEPS, "batch": {"global": 24, "micro": 6}, "parallel": {"tensor": 2, "pipeline": 2}}
"""Each rank computes for 0.1 s a step. A replica has two micro-batches, of which no deal by speed is better than the
equal one: nothing but the slow rank changes. A slow rank computes more here, on the same cores as all others, so only
the time of its own thread tells who it is."""

MANY, SOME = 200, 30
"""Injections of a class: of kill and exception, of the others."""

SAME_STEP = 0
"""Bound on the steps after the fault's at which a value that is not finite, or a spike, is found."""

STRAGGLER = 1.3
SLOW_S = 180.0
"""Longest wait for a slow worker to be found: some dozens of steps, with a new deal of micro-batches between."""
SPIKE = 10.0
PARAMETER = "decoder.layers.1.mlp.linear_fc1.weight"
"""Whose gradient a ``nan`` strikes: in the middle of the model, so that only a search finds it."""

PAST_STEPS = 25
"""Steps between a spike and the next, and before the first straggler: more than the past without which neither is
found."""


async def killed(lab: Lab, measures: Measures, ranks: int, fault: str, kind: str) -> None:
    """End ranks: each fault in the next rank, once the last is healed."""
    for number in measures.numbers():
        await lab.forget()
        struck = await lab.strike(fault, number % ranks)
        error = await lab.event(f"{kind} of rank {struck.rank}", partial(is_error, struck, kind))
        event = error["event"]
        measures.add(
            unix_s(error["recorded_at"]) - struck.at_s,
            right=event["rank"] == struck.rank,
            noticed_s=round(unix_s(event["occurred_at"]) - struck.at_s, 4),
            detected_s=round(unix_s(event["detected_at"]) - struck.at_s, 4),
        )
        await lab.healed(error)


async def non_finite(lab: Lab, measures: Measures, ranks: int) -> None:
    """Spoil a gradient: found in the same step, and its parameter is named."""
    for number in measures.numbers():
        await lab.forget()
        struck = await lab.strike(f"nan={PARAMETER}", number % ranks)
        error = await lab.event("non-finite", partial(is_error, struck, "non-finite"))
        event = error["event"]
        named = str(event["evidence"].get("parameter", ""))
        # An error's step is that of the updates applied before it.
        measures.add(
            event["step"] + 1 - struck.step,
            right=event["rank"] == struck.rank and named.endswith(PARAMETER),
            named=named,
            seconds=unix_s(error["recorded_at"]) - struck.at_s,
        )
        await lab.healed(error)


async def spikes(lab: Lab, measures: Measures, ranks: int) -> None:
    """Multiply the loss that a rank reports of a step."""
    for number in measures.numbers():
        await lab.client.until_step(TASK, (await lab.client.task(TASK))["step"] + PAST_STEPS, 60.0)
        await lab.forget()
        struck = await lab.strike(f"spike={SPIKE:g}", number % ranks)

        def is_spike(record: Record) -> bool:
            event = record["event"]
            found = record["type"] == "anomaly.observed" and event["kind"] == "loss-spike"
            return bool(found and not event["ended"])

        record = await lab.event("a loss spike", is_spike)
        measures.add(record["event"]["step"] - struck.step, seconds=unix_s(record["recorded_at"]) - struck.at_s)


async def stragglers(lab: Lab, measures: Measures, ranks: int) -> None:
    """Slow a rank down until it is found; then let it be as fast as the others again.

    The first one comes when the ranks have a past: a rank that has been slow from the beginning is not judged beside a
    single peer. Each of the others comes as soon as the last one is known to be over. Of two ranks the one peer is as
    noisy as the rank itself, so they have the wider bound, as in ``benchmarks.simulated_steps``.
    """
    measures.bound = LATEST_OF_TWO if ranks == 2 else LATEST
    await lab.client.until_step(TASK, PAST_STEPS + (await lab.client.task(TASK))["step"], SLOW_S)
    for number in measures.numbers():
        await lab.forget()
        struck = await lab.strike(f"slow={STRAGGLER}", number % ranks)
        slowed = await lab.event("a slow worker", partial(is_slow, struck), SLOW_S)
        event = slowed["event"]
        measures.add(
            event["step"] - struck.step + 1,
            right=event["worker"] == struck.worker,
            slowdown=event["slowdown"],
            seconds=unix_s(slowed["recorded_at"]) - struck.at_s,
        )
        await lab.forget()
        await lab.strike("slow=1", struck.rank)

        def is_over(record: Record, worker: str = struck.worker) -> bool:
            event = record["event"]
            found = record["type"] == "worker.slowed" and event["worker"] == worker
            return bool(found and event["slowdown"] == 1.0 and event.get("ends") is None)

        await lab.event("the worker is as fast as the others", is_over, SLOW_S)


def is_slow(struck: Struck, record: Record) -> bool:
    """Return whether a record says that a worker has become slow since a fault."""
    event = record["event"]
    return bool(record["type"] == "worker.slowed" and event["slowdown"] > 1.0 and event["step"] >= struck.step)


def is_error(struck: Struck, kind: str, record: Record) -> bool:
    """Return whether a record is the error of a fault, of this kind."""
    event = record["event"]
    return bool(record["type"] == "error.detected" and event["kind"] == kind and event["task"] == TASK)


Course = Callable[[Lab, Measures, int], Awaitable[None]]

RANKS: dict[str, tuple[Course, Measures]] = {
    "kill": (
        partial(killed, fault="kill", kind="process-exit"),
        Measures("process killed", MANY, bound=0.05, unit="s", paper="1.8 s"),
    ),
    "exception": (
        partial(killed, fault="exception", kind="exception"),
        Measures("exception raised", MANY, bound=0.05, unit="s", paper="0.3 s"),
    ),
    "nan": (non_finite, Measures("non-finite gradient", SOME, bound=SAME_STEP, unit="steps", paper="not covered")),
    "spike": (spikes, Measures("loss spike", SOME, bound=SAME_STEP, unit="steps", paper="not covered")),
}
"""Class -> its course on the task of short steps, and its measures."""

OF_LONG_STEPS: dict[str, tuple[Course, Measures]] = {
    "straggler": (
        stragglers,
        Measures("straggler 1.3x", SOME, bound=LATEST, unit="steps", paper="not covered"),
    ),
}
"""The same on the task of longer steps."""

OF_REPLICAS: dict[str, tuple[Course, Measures]] = {
    "straggler-in-replica": (
        stragglers,
        Measures("straggler 1.3x in TP2 x PP2 x DP2", SOME, bound=LATEST, unit="steps", paper="not covered"),
    ),
}
"""The same on a task of two replicas of four ranks each, whatever ``--ranks`` says."""

REPLICA_RANKS, WORKERS_PER_NODE = 8, 2
"""Ranks of that task, and how many of them are on a node."""

NODES = ("node-dropped", "node-silent", "xid")
CLASSES = (*RANKS, *OF_LONG_STEPS, *OF_REPLICAS, *HANGS, *NODES)


async def measure(options: argparse.Namespace, report: Report) -> None:
    """Run the classes of the command line."""
    began_s = time.monotonic()
    if options.soak:
        await detection_soak.course(options.minutes, report)
        return
    chosen: Sequence[str] = options.classes
    for names, of_course in (
        ([name for name in chosen if name in RANKS], partial(ranks_course, RANKS, SPECIFICATION)),
        ([name for name in chosen if name in OF_LONG_STEPS], partial(ranks_course, OF_LONG_STEPS, LONG_STEPS)),
        ([name for name in chosen if name in OF_REPLICAS], replicas_course),
        ([name for name in chosen if name in HANGS], hang_course),
        ([name for name in chosen if name in NODES], detection_nodes.course),
    ):
        if names:
            await of_course(names, options.ranks, options.scale, report)
    report.line("summary", seconds=round(time.monotonic() - began_s, 1), missed=report.missed)


async def ranks_course(
    courses: Mapping[str, tuple[Course, Measures]],
    specification: Record,
    names: Sequence[str],
    ranks: int,
    scale: float,
    report: Report,
    *,
    workers_per_node: int = 1,
) -> None:
    """Run classes of faults that strike a rank of a task."""
    async with laboratory(ranks // workers_per_node, workers_per_node) as lab:
        await lab.train(**specification, workers={"min": ranks, "max": ranks})
        for name in names:
            course, measures = courses[name]
            measures.scale(scale)
            try:
                await course(lab, measures, ranks)
            except TimedOut as err:
                measures.give_up(err.detail)
            measures.judge(report)
        await lab.stop()


async def replicas_course(names: Sequence[str], ranks: int, scale: float, report: Report) -> None:
    """Run classes of faults that strike a rank of a replica of several."""
    course = partial(ranks_course, OF_REPLICAS, IN_REPLICAS, workers_per_node=WORKERS_PER_NODE)
    await course(names, REPLICA_RANKS, scale, report)


def positive(text: str) -> float:
    """Return a factor above 0, for ``argparse``."""
    number = float(text)
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.detection", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--ranks", type=at_least(2, "one survives"), default=2, help="of the task")
    parser.add_argument("--scale", type=positive, default=1.0, help="factor on the numbers of injections")
    parser.add_argument("--soak", action="store_true", help="instead: no false alarm under load, and in simulated time")
    parser.add_argument("--minutes", type=positive, default=30.0, help="of the soak")
    return run(partial(measure, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
