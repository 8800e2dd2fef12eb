"""What checkpoints cost a training step, and how fast state comes back from them.

    .venv/bin/python -m benchmarks.checkpoints [--ranks 2] [--cycles 12] [--hidden 128]

A small GPT trains on data-parallel ranks, each on a node of its own. Blocks of steps without checkpoints, with an
in-memory copy each step (own and a peer's node) and with asynchronous persistent ones take turns in one run, so that
what else the machine does falls on all alike. Then the state is taken back, in turns, from a peer's memory (one node's
copies are hidden) and from disk (whose pages are still cached: disk's best case).

JSON lines on stdout: step times and CPU-seconds (all ranks) by kind, ratios against none with a 95% confidence interval
over the cycles, restore times, and the requirements. Exit status 0 if they hold.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any

KINDS = ("none", "memory", "persistent")
BLOCK_STEPS = 10
SETTLING_STEPS = 2
"""Of each block, not counted: what the block before has begun may still be under way."""

PERSISTENT_EVERY = 5
MEMORY_RATIO = 1.02
"""Required: the step time with an in-memory copy each step over that without."""

RESTORES = 7
T_95 = {n: t for n, t in zip(range(1, 31), (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04), strict=True)}  # fmt: skip  # noqa: E501
"""Student's t, two-sided 95%, by degrees of freedom."""


def kind_of(step: int) -> str:
    """Return what is on in a step (from 1); the order turns round with each cycle, so that drifts cancel."""
    block = (step - 1) // BLOCK_STEPS
    cycle, place = divmod(block, len(KINDS))
    return KINDS[place] if cycle % 2 == 0 else KINDS[-1 - place]


def counted(step: int) -> bool:
    """Return whether a step's time counts."""
    return (step - 1) % BLOCK_STEPS >= SETTLING_STEPS and step > BLOCK_STEPS * len(KINDS)


def train(folder: Path) -> None:
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
        kind = kind_of(step.number)
        run.memory.every = 1 if kind == "memory" else 0
        run.checkpoint_every = PERSISTENT_EVERY if kind == "persistent" else 0
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
        rows.append(
            {"step": step.number, "s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "began": began}
        )
    (folder / f"rank-{rank}.json").write_text(json.dumps(rows))


def restores(run: Any, checkpoint: Any, folder: Path) -> list[dict[str, Any]]:
    """Take the state back in turns from a peer's memory and from disk."""
    import torch.distributed as dist

    from unicron import archive

    run.memory.every = 1
    named = archive.published(folder / "checkpoints" / "step-0")[0]
    own = Path(os.environ["UNICRON_MEMORY"])
    rows: list[dict[str, Any]] = []
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


def launch(folder: Path, ranks: int) -> list[list[dict[str, Any]]]:
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
    """Return the mean of ratios and its 95% confidence interval, over their logarithms."""
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    half = T_95[min(len(logs) - 1, 30)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def report(measured: list[list[dict[str, Any]]], cycles: int) -> bool:
    """Print the figures; return whether the requirements hold."""
    steps = {row["step"]: row for row in measured[0] if "step" in row}
    cpu = {n: sum(row["cpu_s"] for rows in measured for row in rows if row.get("step") == n) for n in steps}
    # From one step's beginning to the next: what lies between steps counts too.
    wall = {n: steps[n + 1]["began"] - steps[n]["began"] for n in steps if n + 1 in steps}
    blocks: dict[tuple[int, str], list[int]] = {}
    for n in wall:
        if counted(n) and n + 1 in steps and n < max(steps) - 1:
            blocks.setdefault(((n - 1) // (BLOCK_STEPS * len(KINDS)), kind_of(n)), []).append(n)
    whole = [c for c in range(1, cycles + 1) if all((c, kind) in blocks for kind in KINDS)]
    ratios = {}
    for kind in KINDS:
        mine = [n for c in whole for n in blocks[c, kind]]
        line = {
            "kind": kind,
            "step_s_median": round(statistics.median(wall[n] for n in mine), 5),
            "cpu_s_per_step": round(statistics.fmean(cpu[n] for n in mine), 5),
            "steps": len(mine),
        }
        if kind != "none":
            for name, of in (("ratio", wall), ("cpu_ratio", cpu)):
                pairs = [
                    statistics.fmean(of[n] for n in blocks[c, kind])
                    / statistics.fmean(of[n] for n in blocks[c, "none"])
                    for c in whole
                ]
                mean, low, high = interval(pairs)
                line |= {name: round(mean, 4), f"{name}_95": [round(low, 4), round(high, 4)]}
            ratios[kind] = line["ratio"]
        print(json.dumps(line), flush=True)
    times: dict[str, list[float]] = {}
    for rows in measured:
        for row in rows:
            if "restore" in row:
                times.setdefault(row["restore"], []).append(row["s"])
                assert row["took"] in (row["restore"], "memory"), row  # the other ranks have their own
    medians = {source: statistics.median(found) for source, found in times.items()}
    for source, found in times.items():
        print(json.dumps({"restore": source, "s_median": round(medians[source], 4), "s_max": round(max(found), 4)}))
    required = {
        f"in-memory copy each step: ratio <= {MEMORY_RATIO}": ratios["memory"] <= MEMORY_RATIO,
        "restore from a peer's memory faster than from disk": medians["peer-memory"] < medians["disk"],
    }
    for what, holds in required.items():
        print(json.dumps({"required": what, "holds": holds}), flush=True)
    return all(required.values())


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=12, help="of one block of each kind; one more warms up")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="samples in one update")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        train(options.rank_of)
        return 0
    from unicron import corpus

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus.write(folder / "corpus.txt", size_bytes=400_000)
        steps = (options.cycles + 1) * BLOCK_STEPS * len(KINDS) + 3
        model = {"layers": 4, "hidden": options.hidden, "heads": 4, "sequence_length": 128}
        spec = {"name": "b", "model": model, "batch": {"global": options.batch}, "steps": steps}
        (folder / "spec.json").write_text(json.dumps(spec | {"data": str(folder / "corpus.txt")}))
        return 0 if report(launch(folder, options.ranks), options.cycles) else 1


if __name__ == "__main__":
    sys.exit(main())
