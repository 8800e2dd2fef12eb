"""The job under Unicron: the loop of the built-in trainer, with the fault and the notes of this comparison."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.peers.job import BEFORE_REDUCTION, Job
from unicron.link import agent_link
from unicron.link.torchrun import standalone_generation
from unicron.trainer import model
from unicron.trainer.dropout import Dropout
from unicron.trainer.passes import forward_backward
from unicron.training.generations import Training
from unicron.training.run import Run


def main() -> None:
    """Train to the end."""
    job = Job()
    spec = job.spec
    link = agent_link.from_environment(standalone_generation(str(job.folder)))

    def build(tensor: int, pipeline: int) -> tuple[Any, Any]:
        built, optimizer = model.build(spec, tensor, pipeline)
        built.reseeds = Dropout(spec, built)
        return built, optimizer

    training = Training(
        link,
        steps=spec.steps,
        micro_batches=spec.micro_batches,
        build=build,
        initialise=lambda built: model.initialise(spec, built),
    )
    run = Run(training)
    for step in run.steps():
        rank, ranks = run.generation.rank, run.generation.world_size
        with step:
            for index, k in enumerate(step.micro_batches()):
                job.fault(rank, step.number, str(index), ranks)
                ids = job.samples.ids(step.number, k)
                commit = partial(step.commit, ids=ids)
                batches = [(k, job.samples.batch(ids))]
                forward_backward(spec, run.model, run.model.reseeds, step.number, batches, commit)
            job.fault(rank, step.number, BEFORE_REDUCTION, ranks)
            step.reduce()
            run.optimizer.step()
        if step.completed:
            job.note("done", rank=rank, step=step.number, ranks=ranks)


if __name__ == "__main__":
    main()
