"""One rank of ``benchmarks.checkpoints``: it trains by the schedule, then reads the state back from each source.

``benchmarks/ranks.py`` starts it, with the folder of the run and the schedule's pairs and cycles as arguments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_schedule import MEMORY, PERSISTENT, PERSISTENT_EVERY, Row, Schedule

RESTORES = 7
"""Restores from each source."""


def train(folder: Path, schedule: Schedule) -> None:
    """Train, then restore; write what was measured."""
    import torch

    from unicron.checkpoint import reader
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
    rank = int(os.environ["RANK"])

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
        memory_every=1,
    )
    rows = []
    for step in run.steps():
        if step.number == task.steps:
            rows += restores(run, reader, folder)
        # A copy is taken at the end of a step, and made beside the next one.
        run.snapshots.every = 1 if schedule.kind(step.number + 1) == MEMORY else 0
        run.checkpoint_every = PERSISTENT_EVERY if schedule.kind(step.number) == PERSISTENT else 0
        began, cpu = time.perf_counter(), time.process_time()
        with step:
            for k in step.micro_batches():
                ids = samples.ids(step.number, k)
                batches = [(k, samples.batch(ids))]

                def done(k: int, loss: float | None, ids: list[int] = ids, step: Step = step) -> None:
                    step.commit(k, loss, ids)

                forward_backward(task, run.rank_state.model, run.rank_state.model.reseeds, step.number, batches, done)
            step.reduce()
            run.rank_state.optimizer.step()
        cpu_s, stored = time.process_time() - cpu, run.snapshots.stored == step.number - 1
        rows.append({"step": step.number, "began": began, "cpu_s": cpu_s, "stored": stored})
    (folder / f"rank-{rank}.json").write_text(json.dumps(rows))


def restores(run: Any, checkpoint: Any, folder: Path) -> list[Row]:
    """Read the state back, in turns from a peer's memory and from disk; return the times in seconds."""
    import torch.distributed as dist

    from unicron.checkpoint import archive

    run.snapshots.every = 1
    named = archive.published(str(folder / "checkpoints" / "step-0"))[0]
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
                checkpoint.restore(run.rank_state, named)
                took = source
            else:
                settled = run.snapshots.agree(run.rank_state, 2, 0)
                run.rank_state.receive(settled, run.link.wait)
                took = settled.source(dist.get_rank())
            dist.barrier()
            rows.append({"restore": source, "took": took, "s": time.perf_counter() - began})
    # The state of the last restore may be an older step's: the run ends here.
    run.rank_state.set_version(run.total_steps - 1, run.rank_state.digest)
    mine = [k for k in range(run.micro_batches) if k % dist.get_world_size() == dist.get_rank()]
    run.rank_state.begin(run.total_steps, mine, run.configure.generation)
    return rows


if __name__ == "__main__":
    folder, pairs, cycles = sys.argv[1:]
    train(Path(folder), Schedule(int(pairs), int(cycles)))
