"""Unicron inside a training process: keep this process training through failures.

The only package of the project that enters a user's process. It imports no other package of the project and, until
``attach`` is called, nothing beyond the standard library.

    run = unicron.attach(steps=1000, micro_batches=16, build=build)
    for step in run.steps():
        with step:
            for k in step.micro_batches():
                ids = sample_ids(step.number, k)
                loss = forward_backward(run.model, batch(ids), scale=1 / 16)
                step.commit(k, loss, ids)
            step.reduce()
            run.optimizer.step()

``Run`` and ``Step`` describe what a loop gets; ``unicron.train`` is the built-in trainer, written on the same
interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from unicron.errors import (
    CommunicationFailed,
    DamagedCheckpoint,
    Interrupted,
    InvalidMetric,
    InvalidSpec,
    NonFiniteValue,
    SampleAccountingError,
    TornSnapshot,
    UnicronError,
    UnsupportedModel,
    UnsupportedState,
    WrongLoop,
)
from unicron.protocol.versions import __version__

if TYPE_CHECKING:
    from unicron.join.user_state import Origin
    from unicron.megatron.schedule import each_backward
    from unicron.training.run import Generation, Run
    from unicron.training.step import Step

__all__ = [
    "CommunicationFailed",
    "DamagedCheckpoint",
    "Generation",
    "Interrupted",
    "InvalidMetric",
    "InvalidSpec",
    "NonFiniteValue",
    "Run",
    "SampleAccountingError",
    "Step",
    "TornSnapshot",
    "UnicronError",
    "UnsupportedModel",
    "UnsupportedState",
    "WrongLoop",
    "__version__",
    "attach",
    "each_backward",
    "order_samples",
]

_LAZY = {
    "Generation": "unicron.training.run",
    "Run": "unicron.training.run",
    "Step": "unicron.training.step",
    "each_backward": "unicron.megatron.schedule",
}
"""Public names whose modules import torch: imported when they are first used."""


def __getattr__(name: str) -> Any:
    """Return a public name from its module."""
    if name not in _LAZY:
        raise AttributeError(f"module 'unicron' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def attach(
    *,
    steps: int,
    micro_batches: int,
    build: Callable[[int, int], tuple[Any, Any]],
    initialise: Callable[[Any], None] | None = None,
    checkpoint_every: int | None = None,
    checkpoint_directory: str | None = None,
    checkpoint_keep: int | None = None,
    memory_every: int | Literal["auto"] | None = None,
    exact: bool | None = None,
    deterministic_sums: bool | None = None,
    state: Mapping[str, Any] | None = None,
    interleave: int | None = None,
    origin: Origin | None = None,
    micro_batches_of: Callable[[int], int] | None = None,
    directory: str = "unicron-run",
    tensor: int = 1,
    pipeline: int = 1,
) -> Run:
    """Attach this process to its node agent, or let it train alone (also as one of torchrun's processes).

    Args:
        steps: updates to apply.
        micro_batches: M, in one update, over all replicas. The training loop scales the loss of each by 1/M, except
            with Megatron's schedules and ``calculate_per_token_loss=False``, the default: then the library does so.
            With True and losses that are sums over tokens, the library divides by the tokens.
        build: ``build(tensor, pipeline)`` returns model and optimizer: Megatron's DistributedDataParallel and
            optimizer, or a plain module and torch optimizer. It is called in Megatron's process groups and must not
            wait for other ranks.
        initialise: sets the parameters when a task begins, the same on every rank; without it rank 0's are used.
        checkpoint_every: steps between checkpoints; 0: only when the task is stopped.
        checkpoint_directory: where checkpoints are written: a directory or an fsspec URL; empty: the folder that the
            agent names.
        checkpoint_keep: how many published checkpoints are kept; at least 2.
        memory_every: steps between snapshots; 0: none; ``auto``: as often as they are worth, at no more than one
            percent of the time. Without an agent there are no snapshots.
        exact: whether gradients are added up so that the result is the same to the last bit whatever fails and however
            many replicas there are; 16 bytes for each parameter, and micro-batches are committed one at a time.
        deterministic_sums: whether gradients are added up in float64, with which the result is the same in practice; 8
            bytes for each parameter. The default is the precision of Megatron.
        state: what else belongs to the state, by name: objects with ``state_dict`` and ``load_state_dict``, or
            functions of model and optimizer that make one (a scheduler). ``run.state`` has the objects. Each changes
            once for every update, after ``run.optimizer.step()``; it is the same on every rank, except for tensors
            under the names and in the shapes of parameters (an average of the weights).
        interleave: model chunks of each rank where there are several pipeline stages (an interleaved pipeline).
            Megatron's ``parallel_state`` has the number as the virtual pipeline size when ``build`` is called, and
            ``build`` returns as many modules in a list.
        origin: a state that the task begins from in place of first parameters: a checkpoint that is not this library's.
            A checkpoint of the task's own is taken instead if it is as new or newer.
        micro_batches_of: a function of a step's number that returns how many micro-batches the step has, where the
            batch grows; ``micro_batches`` is then the largest number. When it is called, ``run.state`` has the objects
            as they are before that step.
        directory: where checkpoints and results go without an agent.
        tensor: tensor-parallel size without an agent, whose plan says it otherwise.
        pipeline: pipeline-parallel size without an agent.

    An argument that is None has the value of the task's specification or, without an agent, the default of
    ``Training``: no checkpoints except at a stop, and sums in float32.

    Returns:
        The run; iterate over its ``steps()``.

    Raises:
        OSError: the agent cannot be reached.
        UnsupportedState: an object of ``state`` has not these methods, or a value that cannot be saved.
        InvalidSpec: ``steps`` or ``micro_batches`` are not those of the task's specification, which the planner reads.
    """
    from unicron import device
    from unicron.gradients.precision import Precision
    from unicron.link import agent_link, torchrun
    from unicron.link.torchrun import standalone_generation
    from unicron.megatron import cpu
    from unicron.protocol import environment
    from unicron.trainer import spec
    from unicron.training.generations import Training
    from unicron.training.run import Run

    link = agent_link.from_environment(standalone_generation(directory, tensor=tensor, pipeline=pipeline))
    task = spec.of_environment() if link.supervised else None
    if task is not None:
        task.check_script(steps=steps, micro_batches=micro_batches)
    else:
        device.take(int(torchrun.value(environment.LOCAL_RANK, "0")))
    cpu.enable()
    given = {
        "checkpoint_every": checkpoint_every,
        "checkpoint_directory": checkpoint_directory,
        "checkpoint_keep": checkpoint_keep,
        "memory_every": memory_every,
        "exact": exact,
        "deterministic_sums": deterministic_sums,
        "interleave": interleave,
    }
    chosen: dict[str, Any] = {name: getattr(task, name) for name in given} if task is not None else {}
    chosen |= {name: value for name, value in given.items() if value is not None}
    precision = Precision.of_task(
        exact=chosen.pop("exact", False), deterministic_sums=chosen.pop("deterministic_sums", False)
    )
    training = Training(
        link,
        steps=steps,
        micro_batches=micro_batches,
        build=build,
        initialise=initialise,
        precision=precision,
        state=state,
        origin=origin,
        micro_batches_of=micro_batches_of,
        runs_script=True,
        **chosen,
    )
    return Run(training)


def order_samples(count: int) -> int:
    """Return the number of samples from which a script is to draw their order: that of the task's first start.

    A script needs it if its order depends on the number of samples of the whole training, as Megatron's datasets do.
    A task that goes on with other ``steps`` would apply other samples than without the interruption. The script draws
    from this number and appends epochs behind it.

    Args:
        count: the number of this start: steps times samples in an update; it is returned if the task began with it, or
            if there is no agent.

    Raises:
        InvalidSpec: the specification that the environment names cannot be read.
    """
    from unicron.trainer import spec

    task = spec.of_environment()
    return (task.order_samples if task is not None else 0) or count
