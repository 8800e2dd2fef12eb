"""The job under Unicron: the loop of the built-in trainer, with the fault and the notes of this comparison."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.peers.job import BEFORE_REDUCTION, Job
from unicron import generation, loop, model, runtime


def main() -> None:
    """Train to the end."""
    job = Job()
    spec = job.spec
    link = runtime.from_environment(generation.alone(str(job.folder)))

    def build(tensor: int, pipeline: int) -> tuple[Any, Any]:
        built, optimizer = model.build(spec, tensor, pipeline)
        built.reseeds = model.Dropout(spec, built)
        return built, optimizer

    run = loop.Run(
        link,
        steps=spec.steps,
        micro_batches=spec.micro_batches,
        build=build,
        initialise=lambda built: model.initialise(spec, built),
    )
    for step in run.steps():
        rank, ranks = run.configure.rank, run.configure.world_size
        with step:
            for index, k in enumerate(step.micro_batches()):
                job.fault(rank, step.number, str(index), ranks)
                ids = job.samples.ids(step.number, k)
                commit = partial(step.commit, ids=ids)
                batches = [(k, job.samples.batch(ids))]
                model.forward_backward(spec, run.model, run.model.reseeds, step.number, batches, commit)
            job.fault(rank, step.number, BEFORE_REDUCTION, ranks)
            step.reduce()
            run.optimizer.step()
        if step.completed:
            job.note("done", rank=rank, step=step.number, ranks=ranks)


if __name__ == "__main__":
    main()
