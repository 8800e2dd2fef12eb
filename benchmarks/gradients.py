"""What each way to accumulate gradients costs a training step, in time, memory and traffic.

    .venv/bin/python -m benchmarks.gradients [--ranks 2] [--cycles 12] [--hidden 128] [--sequence 64]

A small GPT trains on data-parallel ranks. Steps with each accumulator take turns in one run, so that what else the
machine does falls on all alike:

    in-place   the default: the buffers of the backward passes are the sum, in float32
    float64    a float64 sum beside the buffers (``deterministic_sums``): the same bits in practice, not by construction
    exact      exact mode: two float64 that contain integers

One JSON line for each: step time and CPU-seconds (all ranks), the ratio of step times to the first with a 95%
confidence interval over the cycles, bytes kept and sent for each parameter. There are no bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.intervals import LEAST_RATIOS, REASON, interval
from benchmarks.ranks import run_ranks
from benchmarks.report import Report, at_least, run

KINDS = ("in-place", "float64", "exact")
BLOCK_STEPS = 4
"""Steps in a row with the same accumulator."""

SETTLING_STEPS = 1
"""Steps at the beginning of each block that do not count: caches still contain the accumulator of the block before."""


def kind_of(step: int) -> str:
    """Return the accumulator of a step (from 1); every other cycle goes backwards, so that drifts cancel."""
    cycle, place = divmod((step - 1) // BLOCK_STEPS, len(KINDS))
    return KINDS[place] if cycle % 2 == 0 else KINDS[-1 - place]


def accumulators_of(rank_state: Any, micro_batches: int) -> dict[str, Any]:
    """Return one accumulator of each kind, over the gradients of a rank's state."""
    import torch

    from unicron.gradients import accumulators, fixed_point
    from unicron.megatron.tied_embedding import tied_weight

    tensors = rank_state.accumulator.tensors
    tied = tied_weight(rank_state.model)
    assert tied is not None
    shared = next(i for i, tensor in enumerate(tensors) if tensor is tied.main_grad)  # type: ignore[attr-defined]
    # Exact mode keeps the gradients of the shared weight's two uses apart.
    leaves = [(shared, torch.zeros_like(tensors[shared]))]
    return {
        "in-place": accumulators.InPlaceAccumulator(tensors),
        "float64": accumulators.SeparateAccumulator(tensors, dtype=torch.float64),
        "exact": fixed_point.FixedPointAccumulator(tensors, micro_batches=micro_batches, leaves=leaves),
    }


def train(folder: Path) -> None:
    """Train as one rank; write what was measured."""
    import torch

    from unicron.link import agent_link
    from unicron.link.torchrun import standalone_generation
    from unicron.megatron import cpu as megatron_cpu
    from unicron.trainer import model, spec
    from unicron.trainer.data import Samples
    from unicron.trainer.dropout import Dropout
    from unicron.trainer.passes import forward_backward
    from unicron.training.generations import Training
    from unicron.training.step import Step

    megatron_cpu.enable()
    torch.set_num_threads(1)
    task = spec.load(folder / "spec.json")
    samples = Samples(task, folder / "data")

    def build(tensor: int, pipeline: int) -> tuple[Any, Any]:
        built, optimizer = model.build(task, tensor, pipeline)
        built.reseeds = Dropout(task, built)
        return built, optimizer

    run = Training(
        agent_link.from_environment(standalone_generation(str(folder))),
        steps=task.steps,
        micro_batches=task.micro_batches,
        build=build,
        initialise=lambda built: model.initialise(task, built),
    )
    ways: dict[str, Any] = {}
    rows = []
    for step in run.steps():
        ways = ways or accumulators_of(run.rank_state, task.micro_batches)
        began, cpu = time.perf_counter(), time.process_time()
        with step:
            for k in step.micro_batches():
                ids = samples.ids(step.number, k)

                def done(k: int, loss: float | None, ids: list[int] = ids, step: Step = step) -> None:
                    step.commit(k, loss, ids)

                batches = [(k, samples.batch(ids))]
                forward_backward(task, run.rank_state.model, run.rank_state.model.reseeds, step.number, batches, done)
            step.reduce()
            run.rank_state.optimizer.step()
        rows.append({"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu})
        run.rank_state.accumulator = ways[kind_of(step.number + 1)]
    parameters = sum(tensor.numel() for tensor in ways["in-place"].tensors)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"rows": rows, "parameters": parameters}))


def figures(measured: list[dict[str, Any]], cycles: int, report: Report) -> None:
    """Print the figures of each accumulator."""
    held = {"in-place": 0, "float64": 8, "exact": 16}
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
        report.line("accumulator", **line)


def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure and print."""
    from unicron.trainer import corpus

    with tempfile.TemporaryDirectory(prefix="unicron-gradients-") as name:
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
        measured = run_ranks("benchmarks.gradients", ["--rank-of", str(folder)], folder, options.ranks)
        figures(measured, options.cycles, report)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.gradients", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=at_least(1), default=2)
    parser.add_argument("--cycles", type=at_least(LEAST_RATIOS, REASON), default=12, help="of blocks of each kind")
    parser.add_argument("--hidden", type=at_least(4), default=128)
    parser.add_argument("--sequence", type=at_least(1), default=64)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        train(options.rank_of)
        return 0
    return run(partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
