"""What each way to accumulate gradients costs a training step, in time, memory and traffic.

    .venv/bin/python -m benchmarks.gradients [--ranks 2] [--cycles 12] [--hidden 128] [--sequence 64]

A small GPT trains on data-parallel ranks. Steps with each accumulator take turns in one run, so that what else the
machine does falls on all alike:

    in-place   the default of large data-parallel tasks: the buffers of the backward passes are the sum, in float32
    apart      that of large tensor- and pipeline-parallel tasks: a float32 sum beside the buffers
    float64    the same in float64, the default of small models: results to the bit in practice, not by construction
    exact      exact mode: two float64 that hold integers

One JSON line for each: step time and CPU-seconds (all ranks), the ratio of step times to the first with a 95%
confidence interval over the cycles, bytes held and sent for each parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import interval

KINDS = ("in-place", "apart", "float64", "exact")
BLOCK_STEPS = 4
SETTLING_STEPS = 1
"""Of each block, not counted: caches hold the accumulator of the block before."""


def kind_of(step: int) -> str:
    """Return the accumulator of a step (from 1); the order turns round with each cycle, so that drifts cancel."""
    cycle, place = divmod((step - 1) // BLOCK_STEPS, len(KINDS))
    return KINDS[place] if cycle % 2 == 0 else KINDS[-1 - place]


def accumulators(replica: Any, micro_batches: int) -> dict[str, Any]:
    """Return one of each kind over a replica's gradients."""
    import torch

    from unicron import fixed_point, gradients, model

    tensors = replica.sums.tensors
    tied = model.tied_weight(replica.model)
    shared = next(i for i, parameter in enumerate(replica.model.parameters()) if parameter is tied)
    # Exact mode keeps the gradients of the shared weight's two uses apart.
    leaves = [(shared, torch.zeros_like(tensors[shared]))]
    return {
        "in-place": gradients.InPlace(tensors),
        "apart": gradients.Apart(tensors),
        "float64": gradients.Apart(tensors, dtype=torch.float64),
        "exact": fixed_point.FixedPoint(tensors, micro_batches=micro_batches, leaves=leaves),
    }


def train(folder: Path) -> None:
    """Be one rank; write what was measured."""
    import torch

    from unicron import generation, loop, megatron_cpu, model, runtime, spec
    from unicron.data import Samples
    from unicron.step import Step

    megatron_cpu.enable()
    torch.set_num_threads(1)
    task = spec.load(folder / "spec.json")
    samples = Samples(task, folder / "data")

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
    )
    ways: dict[str, Any] = {}
    rows = []
    for step in run.steps():
        ways = ways or accumulators(run.replica, task.micro_batches)
        began, cpu = time.perf_counter(), time.process_time()
        with step:
            for k in step.micro_batches():
                ids = samples.ids(step.number, k)

                def done(k: int, loss: float | None, ids: list[int] = ids, step: Step = step) -> None:
                    step.commit(k, loss, ids)

                batches = [(k, samples.batch(ids))]
                model.forward_backward(task, run.model, run.model.reseeds, step.number, batches, done)
            step.reduce()
            run.optimizer.step()
        rows.append({"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu})
        run.replica.sums = ways[kind_of(step.number + 1)]
    parameters = sum(tensor.numel() for tensor in ways["in-place"].tensors)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"rows": rows, "parameters": parameters}))


def launch(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Run the ranks to their end; return what each measured."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    try:
        for rank in range(ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
            }
            command = [sys.executable, "-m", "benchmarks.gradients", "--rank-of", str(folder)]
            children.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        if any([child.wait() for child in children]):
            raise SystemExit("a rank failed")
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def report(measured: list[dict[str, Any]], cycles: int) -> None:
    """Print the figures."""
    held = {"in-place": 0, "apart": 4, "float64": 8, "exact": 16}
    sent = held | {"in-place": 4}
    rows = [one["rows"] for one in measured]
    blocks: dict[tuple[int, str], list[int]] = {}
    for i in range(len(rows[0])):
        cycle = i // (BLOCK_STEPS * len(KINDS))
        if i % BLOCK_STEPS >= SETTLING_STEPS and cycle > 0:
            blocks.setdefault((cycle, kind_of(i + 1)), []).append(i)
    for kind in KINDS:
        mine = [i for cycle in range(1, cycles + 1) for i in blocks[cycle, kind]]
        line = {
            "kind": kind,
            "parameters": measured[0]["parameters"],
            "held_bytes_per_parameter": held[kind],
            "sent_bytes_per_parameter": sent[kind],
            "step_s_median": round(statistics.median(rows[0][i]["s"] for i in mine), 5),
            "cpu_s_per_step": round(sum(rank[i]["cpu_s"] for rank in rows for i in mine) / len(mine), 5),
            "steps": len(mine),
        }
        if kind != KINDS[0]:
            ratios = [
                statistics.median(rows[0][i]["s"] for i in blocks[cycle, kind])
                / statistics.median(rows[0][i]["s"] for i in blocks[cycle, KINDS[0]])
                for cycle in range(1, cycles + 1)
            ]
            line["step_time_ratio"], *ends = (round(x, 4) for x in interval(ratios))
            line["step_time_ratio_95"] = ends
            cpu = [
                sum(rank[i]["cpu_s"] for rank in rows for i in blocks[cycle, kind])
                / sum(rank[i]["cpu_s"] for rank in rows for i in blocks[cycle, KINDS[0]])
                for cycle in range(1, cycles + 1)
            ]
            line["cpu_ratio"], *ends = (round(x, 4) for x in interval(cpu))
            line["cpu_ratio_95"] = ends
        print(json.dumps(line), flush=True)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gradients", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        train(options.rank_of)
        return 0
    from unicron import corpus

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = {
            "name": "gradients",
            "model": {"layers": 3, "hidden": options.hidden, "heads": 4, "sequence_length": options.sequence},
            "batch": {"global": 8},
            "steps": (options.cycles + 1) * BLOCK_STEPS * len(KINDS),
            "data": str(corpus.write(folder / "corpus.txt")),
            "checkpoint": {"every": 0},
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        report(launch(folder, options.ranks), options.cycles)
    return 0


if __name__ == "__main__":
    sys.exit(main())
