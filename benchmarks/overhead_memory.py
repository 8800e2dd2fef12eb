"""The part of ``benchmarks.overhead`` about memory: the largest resident memory of ranks, stock Megatron's and ours.

As a program it is one rank: ``benchmarks/ranks.py`` starts it with the folder of the run as argument.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.overhead_model import Workload, our_step, stock, stock_step
from benchmarks.overhead_rank import Plan, attach
from benchmarks.ranks import run_ranks
from benchmarks.report import Report

BOUND = 1.02
"""Required of the ratio of the largest resident memory; where reductions overlap, 1/DP of the gradients more, into
which they are received."""

GRADIENT_BYTES = 4
"""Of each parameter, in float32."""

SHAPE: dict[str, Any] = {"layers": 8, "hidden": 1024, "heads": 8, "sequence_length": 32, "micro_batches": 1}
"""101 million parameters, with which a rank is large beside what it imports (0.3 GB). Few tokens: the memory of
activations is free again when gradients are reduced, and would hide what the reduction takes."""

STEPS = 2
"""The optimizer's state is allocated in the first; the second has everything."""

PARAMETERS = SHAPE["layers"] * 12 * SHAPE["hidden"] ** 2
"""Of the layers' products: all but half a percent."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Environment of all ranks, stock and ours: glibc returns blocks of 1 MiB and more to the system when they are free
(mallopt(3)). By default the size from which it does so grows while a process runs, up to 32 MiB, and how much of the
free memory is resident is chance: two ranks of one stock run differed by 2.5%, with this by 0.01%."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2-overlap": {"distributed_optimizer": True, "overlap": True, "bucket": 8 << 20},
}


def measure(folder: Path, report: Report) -> None:
    """Run the ranks of stock Megatron and then ours, for each layout; print what they took."""
    for name, fields in LAYOUTS.items():
        plan = Plan(work=Workload(**SHAPE, **fields))
        largest: dict[str, float] = {}
        for way in ("stock", "ours"):
            place = folder / f"{name}-{way}"
            place.mkdir()
            plan.write(place)
            ranks = run_ranks(
                "benchmarks.overhead_memory",
                [str(place), way],
                place,
                plan.work.ranks,
                environment=lambda rank: ALLOCATOR,
            )
            largest[way] = max(rank["bytes"] for rank in ranks)
        ratio, bound = largest["ours"] / largest["stock"], BOUND
        if plan.work.overlap:
            bound += GRADIENT_BYTES * PARAMETERS / plan.work.ranks / largest["stock"]
        gib = {f"{way}_gib": round(value / 2**30, 3) for way, value in largest.items()}
        report.at_most(f"memory-{name}: ratio of largest resident memory", round(ratio, 4), round(bound, 4), **gib)


def train(folder: Path, way: str) -> int:
    """Train as one rank; return the largest resident memory, in bytes."""
    import torch

    torch.set_num_threads(1)
    plan = Plan.read(folder)
    if way == "stock":
        _train_stock(plan.work, folder)
    else:
        steps = attach(plan, folder)
        for step in steps.steps():
            our_step(plan.work, steps, step)
            if step.number == STEPS:
                break
    return largest_resident_bytes()


def _train_stock(work: Workload, folder: Path) -> None:
    """Train with stock Megatron, in groups that this library makes, which is imported for that."""
    from unicron.join import groups
    from unicron.link import agent_link
    from unicron.link.torchrun import standalone_generation
    from unicron.megatron import cpu

    cpu.enable()
    link = agent_link.from_environment(standalone_generation(str(folder), tensor=work.tensor, pipeline=work.pipeline))
    generation = link.next_generation(0)
    assert generation is not None
    groups.make(generation, link, interleave=work.interleave)
    step = partial(stock_step, work, *stock(work))
    for number in range(1, STEPS + 1):
        step(number)


def largest_resident_bytes() -> int:
    """Return the largest resident memory of this process so far (``VmHWM``, proc(5))."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    place = Path(sys.argv[1])
    peak = train(place, sys.argv[2])
    (place / f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"bytes": peak}))
    os._exit(0)  # the run has not come to its last step
