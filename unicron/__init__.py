"""Unicron inside a training process: keep this process training through failures.

The only package of the project that enters a user's process. It imports none of the others and, until a trainer is
used, nothing beyond the standard library.

    run = unicron.attach(steps=1000, micro_batches=16, build=build)
    for step in run.steps():
        with step:
            for k in step.micro_batches():
                ids = sample_ids(step.number, k)
                loss = forward_backward(run.model, batch(ids), scale=1 / 16)
                step.commit(k, loss, ids)
            step.reduce()
            run.optimizer.step()

See ``unicron.loop`` for what a step does and ``unicron.train`` for the built-in trainer, written on the same interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unicron.loop import Run

__all__ = ["attach"]


def attach(
    *,
    steps: int,
    micro_batches: int,
    build: Callable[[int, int], tuple[Any, Any]],
    initialise: Callable[[Any], None] | None = None,
    checkpoint_every: int | None = None,
    checkpoint_directory: str | None = None,
    checkpoint_keep: int | None = None,
    memory_every: int | None = None,
    exact: bool | None = None,
    directory: str = "unicron-run",
) -> Run:
    """Attach this process to its node agent, or let it stand alone (also as one of torchrun's processes).

    Args:
        steps: updates to apply.
        micro_batches: how many make one update, over all replicas. The loop scales each one's loss by 1 over this.
        build: ``build(tensor, pipeline)`` returns model and optimizer: Megatron's DistributedDataParallel (without
            overlapped gradient reduction) and optimizer, or a plain module and torch optimizer. It is called in
            Megatron's process groups and must not wait for other ranks.
        initialise: sets the parameters when a task begins, the same on every rank; without it rank 0's are used.
        checkpoint_every: steps between checkpoints; 0: only when the task is stopped.
        checkpoint_directory: where they go; empty: where the agent says.
        checkpoint_keep: how many published checkpoints to leave; at least 2.
        memory_every: steps between in-memory copies (under an agent, which says where they go); 0: none.
        exact: whether gradients are added up so that the result is the same to the last bit whatever fails and however
            many replicas there are; 16 bytes for each parameter, and micro-batches are committed one at a time.
        directory: where checkpoints and results go without an agent.

    What is None is as the task's specification says, whose defaults also hold without an agent; there checkpoints are
    written only where ``checkpoint_every`` says so.

    Returns:
        The run; iterate over its ``steps()``.

    Raises:
        OSError: the agent cannot be reached.
        InvalidSpec: ``steps`` or ``micro_batches`` are not those of the task's specification, which the planner reads.
    """
    from unicron import device, generation, loop, megatron_cpu, runtime, spec

    link = runtime.from_environment(generation.alone(directory))
    task = spec.of_environment() if link.supervised else None
    if task is not None:
        task.check_script(steps=steps, micro_batches=micro_batches)
    else:
        device.take_local()
    megatron_cpu.enable()
    megatron_cpu.write_checkpoints_in_process()
    told = {
        "checkpoint_every": checkpoint_every,
        "checkpoint_directory": checkpoint_directory,
        "checkpoint_keep": checkpoint_keep,
        "memory_every": memory_every,
        "exact": exact,
    }
    specified = {name: getattr(task, name) for name in told} if task is not None else {}
    return loop.Run(
        link,
        steps=steps,
        micro_batches=micro_batches,
        build=build,
        initialise=initialise,
        **(specified | {name: value for name, value in told.items() if value is not None}),
    )
