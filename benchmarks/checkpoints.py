"""What checkpoints cost a training step, and how fast state comes back from them.

    .venv/bin/python -m benchmarks.checkpoints [--ranks 2] [--pairs 600] [--cycles 12] [--hidden 128]

A small GPT trains on data-parallel ranks, each on a node of its own. First, steps beside which an in-memory copy of the
state is made and stored on two nodes take turns with steps without, in the order with, without, without, with: on a
shared machine the speed of a core changes by tens of percent within seconds, which only neighbouring steps share. Then
blocks of steps with and without asynchronous persistent checkpoints take turns. Then the state is taken back, in turns,
from a peer's memory (one node's copies are hidden) and from disk (whose pages are still cached: disk's best case).

JSON lines on stdout: step times and CPU-seconds (all ranks) by kind, ratios against none with a 95% confidence interval
over parts of the run, how many copies were stored before their step's end, restore times, and the requirements. Exit
status 0 if they hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scipy.stats

Row = dict[str, Any]

NONE, MEMORY, PERSISTENT = "none", "memory", "persistent"
WARM_UP_STEPS = 20
"""Compiling, first copies, first pages."""

BLOCK_STEPS = 10
SETTLING_STEPS = 2
"""Of each block, not counted: what the block before has begun may still be under way."""

PERSISTENT_EVERY = 5
MEMORY_RATIO = 1.02
"""Required: the step time with an in-memory copy each step over that without."""

RESTORES = 7
PARTS = 30
"""Of the pairs of steps, for the confidence interval: each about as long as a change of the machine's speed lasts."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is on in each step, from 1: warm-up, ``pairs`` of steps with and without a copy, ``cycles`` of blocks."""

    pairs: int
    cycles: int

    @property
    def steps(self) -> int:
        """The steps in all; the last ones are for what begins at the end of a step."""
        return WARM_UP_STEPS + 2 * self.pairs + 2 * BLOCK_STEPS * self.cycles + 3

    def kind(self, step: int) -> str:
        """Return what is on beside a step."""
        return self._place(step)[1]

    def counted(self, step: int) -> tuple[str, int] | None:
        """Return the comparison that a step counts in, and which pair or cycle of it; None if it does not count."""
        return self._place(step)[0]

    def _place(self, step: int) -> tuple[tuple[str, int] | None, str]:
        at = step - 1 - WARM_UP_STEPS
        if at < 0:
            return None, MEMORY
        if at < 2 * self.pairs:
            pair, second = divmod(at, 2)
            return (MEMORY, pair), NONE if second != pair % 2 else MEMORY
        cycle, at = divmod(at - 2 * self.pairs, 2 * BLOCK_STEPS)
        if cycle >= self.cycles:
            return None, NONE
        block, at = divmod(at, BLOCK_STEPS)
        counts = (PERSISTENT, cycle) if at >= SETTLING_STEPS else None
        return counts, NONE if block != cycle % 2 else PERSISTENT


def train(folder: Path, schedule: Schedule) -> None:
    """Be one rank: train, then restore; write what was measured."""
    import torch

    from unicron import checkpoint, generation, loop, megatron_cpu, model, runtime, spec
    from unicron.data import Samples
    from unicron.step import Step

    megatron_cpu.enable()
    megatron_cpu.write_checkpoints_in_process()
    torch.set_num_threads(1)
    task = spec.load(folder / "spec.json")
    samples = Samples(task, folder / "data")
    rank = int(os.environ["RANK"])

    def build(tensor: int, pipeline: int) -> tuple[Any, Any]:
        built, optimizer = model.build(task, tensor, pipeline)
        built.reseeds = model.Dropout(task, built)
        return built, optimizer

    run = loop.Run(
        runtime.from_environment(generation.alone(str(folder))),
        steps=task.steps,
        micro_batches=task.micro_batches,
        build=build,
        initialise=lambda built: model.initialise(task, built),
        memory_every=1,
    )
    rows = []
    for step in run.steps():
        if step.number == task.steps:
            rows += restores(run, checkpoint, folder)
        # A copy is taken at the end of a step, and made beside the next one.
        run.memory.every = 1 if schedule.kind(step.number + 1) == MEMORY else 0
        run.checkpoint_every = PERSISTENT_EVERY if schedule.kind(step.number) == PERSISTENT else 0
        began, cpu = time.perf_counter(), time.process_time()
        with step:
            for k in step.micro_batches():
                ids = samples.ids(step.number, k)
                batches = [(k, samples.batch(ids))]

                def done(k: int, loss: float | None, ids: list[int] = ids, step: Step = step) -> None:
                    step.commit(k, loss, ids)

                model.forward_backward(task, run.model, run.model.reseeds, step.number, batches, done)
            step.reduce()
            run.optimizer.step()
        cpu_s, stored = time.process_time() - cpu, run.memory.stored == step.number - 1
        rows.append({"step": step.number, "began": began, "cpu_s": cpu_s, "stored": stored})
    (folder / f"rank-{rank}.json").write_text(json.dumps(rows))


def restores(run: Any, checkpoint: Any, folder: Path) -> list[Row]:
    """Take the state back in turns from a peer's memory and from disk."""
    import torch.distributed as dist

    from unicron import archive

    run.memory.every = 1
    named = archive.published(folder / "checkpoints" / "step-0")[0]
    own = Path(os.environ["UNICRON_MEMORY"])
    rows: list[Row] = []
    if dist.get_rank() == 0:
        own.rename(own.with_name("hidden"))
        own.mkdir()
    for turn in range(RESTORES):
        for source in ("peer-memory", "disk") if turn % 2 else ("disk", "peer-memory"):
            dist.barrier()
            began = time.perf_counter()
            if source == "disk":
                checkpoint.restore(run.replica, named)
                took = source
            else:
                settled = run.memory.settle(run.replica, 2, 0)
                run.replica.take(settled, run.runtime.wait)
                took = settled.source(dist.get_rank())
            dist.barrier()
            rows.append({"restore": source, "took": took, "s": time.perf_counter() - began})
    # The state of the last restore may be an older step's: the run ends here.
    run.replica.hold(run.total - 1, run.replica.digest)
    mine = [k for k in range(run.micro_batches) if k % dist.get_world_size() == dist.get_rank()]
    run.replica.begin(run.total, mine, run.configure.generation)
    return rows


def launch(folder: Path, ranks: int, schedule: Schedule) -> list[list[Row]]:
    """Run the ranks to their end; return what each measured."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    memory = Path("/dev/shm") / f"unicron-benchmark-{os.getpid()}"
    try:
        for rank in range(ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
                "UNICRON_MEMORY": str(memory / f"n{rank}" / "job"),
                "UNICRON_NODE": f"n{rank}",
                "UNICRON_DOMAIN": f"n{rank}",
                "UNICRON_SPEC": str(folder / "spec.json"),
            }
            command = [sys.executable, "-m", "benchmarks.checkpoints", "--rank-of", str(folder)]
            command += ["--pairs", str(schedule.pairs), "--cycles", str(schedule.cycles)]
            children.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        if any([child.wait() for child in children]):
            raise SystemExit("a rank failed")
    finally:
        for child in children:
            child.kill()
            child.wait()
        shutil.rmtree(memory, ignore_errors=True)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of at least two ratios and its 95% confidence interval, over their logarithms."""
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    t = scipy.stats.t.ppf(0.975, len(logs) - 1)
    half = float(t) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def compare(measured: list[list[Row]], schedule: Schedule, kind: str) -> float:
    """Print the figures of steps of a kind and of the steps without that are their neighbours; return their ratio."""
    steps = {row["step"]: row for row in measured[0] if "step" in row}
    cpu = {n: sum(row["cpu_s"] for rows in measured for row in rows if row.get("step") == n) for n in steps}
    # From one step's beginning to the next: what lies between steps counts too.
    wall = {n: steps[n + 1]["began"] - steps[n]["began"] for n in steps if n + 1 in steps}
    repetitions = schedule.pairs if kind == MEMORY else schedule.cycles
    parts = min(PARTS, repetitions)
    found: dict[str, list[list[int]]] = {of: [[] for _ in range(parts)] for of in (NONE, kind)}
    for n in wall:
        counted = schedule.counted(n)
        if counted is not None and counted[0] == kind:
            found[schedule.kind(n)][counted[1] * parts // repetitions].append(n)
    for of in found:
        mine = list(itertools.chain.from_iterable(found[of]))
        line: Row = {
            "compared": kind,
            "kind": of,
            "steps": len(mine),
            "step_s_median": round(statistics.median(wall[n] for n in mine), 5),
            "cpu_s_per_step": round(statistics.fmean(cpu[n] for n in mine), 5),
        }
        if of == MEMORY:
            line["stored"] = sum(steps[n]["stored"] for n in mine)
        if of == kind:
            for name, seconds in (("ratio", wall), ("cpu_ratio", cpu)):
                parted = zip(found[kind], found[NONE], strict=True)
                mean, low, high = interval([sum(seconds[n] for n in a) / sum(seconds[n] for n in b) for a, b in parted])
                line |= {name: round(mean, 4), f"{name}_95": [round(low, 4), round(high, 4)]}
        print(json.dumps(line), flush=True)
    return float(line["ratio"])


def restored(measured: list[list[Row]]) -> dict[str, float]:
    """Print how long restoring took from each source, in seconds; return the medians."""
    times: dict[str, list[float]] = {}
    for row in itertools.chain.from_iterable(measured):
        if "restore" in row:
            times.setdefault(row["restore"], []).append(row["s"])
            assert row["took"] in (row["restore"], "memory"), row  # the other ranks have their own
    medians = {source: statistics.median(found) for source, found in times.items()}
    for source, found in times.items():
        print(json.dumps({"restore": source, "s_median": round(medians[source], 4), "s_max": round(max(found), 4)}))
    return medians


def report(measured: list[list[Row]], schedule: Schedule) -> bool:
    """Print the figures; return whether the requirements hold."""
    ratios = {kind: compare(measured, schedule, kind) for kind in (MEMORY, PERSISTENT)}
    medians = restored(measured)
    required = {
        f"in-memory copy each step: ratio <= {MEMORY_RATIO}": ratios[MEMORY] <= MEMORY_RATIO,
        "restore from a peer's memory faster than from disk": medians["peer-memory"] < medians["disk"],
    }
    for what, holds in required.items():
        print(json.dumps({"required": what, "holds": holds}), flush=True)
    return all(required.values())


def at_least_two(text: str) -> int:
    """Parse a number of repetitions: an interval takes two."""
    if not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 2, not {text!r}")
    return int(text)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=at_least_two, default=600, help="of steps with and without an in-memory copy")
    parser.add_argument("--cycles", type=at_least_two, default=12, help="of blocks with and without persistent ones")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="samples in one update")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    schedule = Schedule(options.pairs, options.cycles)
    if options.rank_of:
        train(options.rank_of, schedule)
        return 0
    from unicron import corpus

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus.write(folder / "corpus.txt", size_bytes=400_000)
        model = {"layers": 4, "hidden": options.hidden, "heads": 4, "sequence_length": 128}
        spec = {"name": "b", "model": model, "batch": {"global": options.batch}, "steps": schedule.steps}
        (folder / "spec.json").write_text(json.dumps(spec | {"data": str(folder / "corpus.txt")}))
        return 0 if report(launch(folder, options.ranks, schedule), schedule) else 1


if __name__ == "__main__":
    sys.exit(main())
