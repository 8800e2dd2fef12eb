"""The built-in GPT trainer: ``python -P -m unicron.train --spec spec.json --directory DIR``.

Under a node agent (environment of ``unicron.forkserver``) it heals; without one it runs to its end as one process, or
as one of several in torchrun's environment. It is written on the same interface that a user's own loop uses.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unicron import megatron_cpu, spec

DATA_VARIABLE = "UNICRON_DATA_DIRECTORY"
"""Environment variable: where text is tokenised to and dataset indices are kept; default: ``data`` beside the spec."""


def train(spec_path: Path, *, directory: str = "", resume: str = "", data_directory: Path | None = None) -> None:
    """Train the task of a specification to its end.

    Args:
        spec_path: the specification as JSON.
        directory: where checkpoints and results go without an agent (an agent says where).
        resume: a checkpoint to start from, without an agent.
        data_directory: where text is tokenised to; default: beside the specification.
    """
    import torch

    from unicron import clipping, generation, loop, model, runtime
    from unicron.data import Samples
    from unicron.step import Step

    task = spec.load(spec_path)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    cache = Path(os.environ.get(DATA_VARIABLE) or data_directory or spec_path.resolve().parent / "data")
    # Before the agent hears of this process, so that a process that waits to join has nothing slow left to do.
    samples = Samples(task, cache)
    link = runtime.from_environment(
        generation.alone(directory, tensor=task.tensor, pipeline=task.pipeline, resume=resume)
    )

    def build(tensor: int, pipeline: int) -> tuple[Any, Any]:
        built, optimizer = model.build(task, tensor, pipeline)
        # With the model: the one built last is not in use if its state could not be taken.
        built.reseeds = model.Dropout(task, built)
        return built, optimizer

    run = loop.Run(
        link,
        steps=task.steps,
        micro_batches=task.micro_batches,
        build=build,
        initialise=lambda built: model.initialise(task, built),
        checkpoint_every=task.checkpoint_every,
        checkpoint_directory=task.checkpoint_directory,
        checkpoint_keep=task.checkpoint_keep,
        memory_every=task.memory_every,
        exact=task.exact,
    )

    def compute(step: Step, ks: list[int]) -> None:
        ids = {k: samples.ids(step.number, k) for k in ks}
        batches = [(k, samples.batch(ids[k])) for k in ks]

        def done(k: int, loss: float | None) -> None:
            step.commit(k, loss, ids[k])

        model.forward_backward(task, run.model, run.model.reseeds, step.number, batches, done)

    for step in run.steps():
        with step:
            if run.configure.pipeline > 1:
                # A pipeline is full only with all micro-batches in one schedule.
                ks = step.all_micro_batches()
                if ks:
                    compute(step, ks)
            else:
                for k in step.micro_batches():
                    compute(step, [k])
            step.reduce()
            if task.exact and task.clip > 0.0:
                clipping.clip(run.model, task.clip, run.runtime.wait)
            run.optimizer.step()


def run_script(script: str) -> None:
    """Run a user's training script as ``python script`` would: its folder first on the path, named ``__main__``."""
    path = str(Path(script).resolve())
    sys.argv = [path]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def imports() -> None:
    """Import what training takes seconds to import: for a process that forks others."""
    import megatron.core.datasets.gpt_dataset
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
    import safetensors.torch  # noqa: F401

    from unicron import data, loop, model, runtime  # noqa: F401


def child() -> int:
    """Train the task that the environment names, in a process an agent has had forked; return the exit code.

    An error outside of a step is reported like one inside; before there is a generation to join, as generation 0's.
    """
    from unicron import failures, generation, runtime

    megatron_cpu.enable()
    megatron_cpu.write_checkpoints_in_process()
    path = Path(os.environ[spec.VARIABLE])
    try:
        script = spec.load(path).script
        if script:
            run_script(script)
        else:
            train(path)
    except Exception as error:
        link = runtime.current() or runtime.from_environment(generation.alone(""))
        failures.report(link, error, step=0)
        link.exit(1)
    attached = runtime.current()
    if attached is not None:
        # At once: no destructor of a group may wait for peers that are about to leave too.
        attached.exit(0)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(prog="unicron.train", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--spec", type=Path, default=os.environ.get(spec.VARIABLE), help="task specification (JSON)")
    parser.add_argument("--directory", default="", help="where checkpoints and results go")
    parser.add_argument("--checkpoint", default="", help="checkpoint to start from")
    options = parser.parse_args(arguments)
    if options.spec is None:
        parser.error(f"--spec is needed (or {spec.VARIABLE})")
    megatron_cpu.enable()
    megatron_cpu.write_checkpoints_in_process()
    cache = Path(options.directory) / "data" if options.directory else None
    train(Path(options.spec), directory=options.directory or ".", resume=options.checkpoint, data_directory=cache)
    return 0


if __name__ == "__main__":
    sys.exit(main())
