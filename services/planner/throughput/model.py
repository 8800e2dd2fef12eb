"""T(t, x) as modelled: the throughput of a task in one layout on one kind of hardware.

The model itself is ``shared.planning.performance``. ``tables.py`` makes tables of all counts from it, and
``corrections.py`` compares it with measurements.
"""

from __future__ import annotations

from functools import lru_cache

from services.planner.state.cluster import DEFAULT_HARDWARE, HardwareLayout, State, Task
from services.planner.state.pools import present_kind
from services.planner.state.usable_nodes import ObjectKey
from shared.planning.performance import Hardware, Pins, measured, names, profile
from shared.planning.performance.calibration import stack
from shared.planning.performance.gpt import Shape
from shared.planning.performance.parallel_config import ParallelConfig
from shared.planning.performance.search import estimate
from shared.tasks.specification import TaskSpec

RATED_STACK = "cpu"
"""Training software of workers that no data sheet describes. The setting ``worker_flop_per_s`` is their rate."""

ASSUMED_UTILISATION = 0.4
"""Part of a worker's peak that a training with an unknown layout is taken to use. Megatron's runs of 1.7B to 1T
parameters used 43 to 52%, a quarter of it for activations that are computed again (SC'21, table 1)."""


def flop_per_step(spec: TaskSpec) -> float:
    """Return the FLOP of one update by the model's formula."""
    return spec.model.flop_per_sample() * spec.batch.global_


def expected_kind(state: State, task: Task) -> str:
    """Return the kind of workers the task has or is to have; for a task without either, the kind of most nodes."""
    return present_kind(state, task) or min(
        state.kinds, key=lambda kind: (-sum(state.kinds[kind].values()), kind), default=DEFAULT_HARDWARE
    )


def hardware_of(state: State, kind: str) -> Hardware:
    """Return the profile of the workers of that kind, in nodes of the size that most of their nodes have."""
    sizes = state.kinds.get(kind, {})
    usual = next(iter(sizes), 0)
    if len(sizes) > 1:
        usual = min((workers for workers in sizes if workers > 0), key=lambda workers: (-sizes[workers], workers))
    return hardware_in_nodes(kind, usual, state.parameter("worker_flop_per_s"))


def hardware_in_nodes(kind: str, workers_per_node: int, worker_flop_per_s: float) -> Hardware:
    """Return the profile of workers of that kind in nodes of that size; 0: as the profile has it.

    ``worker_flop_per_s``: the rate of workers that no data sheet describes.
    """
    found = profile_of(kind)
    if workers_per_node:
        found = found._replace(workers_per_node=workers_per_node)
    return measured(found, peak_flop_per_s=worker_flop_per_s) if is_rated(kind) else found


def profile_of(kind: str) -> Hardware:
    """Return the profile of a kind of workers; for an unknown kind, that of CPU processes."""
    return profile(kind if kind in names() else DEFAULT_HARDWARE)


def is_rated(kind: str) -> bool:
    """Return whether the rate of workers of that kind is the setting ``worker_flop_per_s``."""
    return profile_of(kind).stack == RATED_STACK


def pins_of(spec: TaskSpec) -> Pins:
    """Return the choices that the specification fixes, and those of the runtime.

    The runtime splits the layers evenly over the stages. Data-parallel communication overlaps where the specification
    asks for it. Otherwise the runtime reduces gradients after the last backward pass, by all-reduce also where the
    optimizer is distributed, and gathers parameters before the next forward pass.
    """
    parallel = spec.parallel
    return Pins(
        tensor=None if parallel.tensor == "auto" else parallel.tensor,
        pipeline=None if parallel.pipeline == "auto" else parallel.pipeline,
        micro_batch=spec.batch.micro,
        interleave=parallel.interleave,
        recompute=parallel.recompute,
        sequence_parallel=parallel.sequence_parallel,
        distributed_optimizer=parallel.distributed_optimizer,
        even_stages=True,
        overlap=parallel.overlap,
    )


def assumed_flop_per_s(hardware: Hardware) -> float:
    """Return the rate at which a worker is taken to compute where only the script knows its layout, FLOP/s."""
    return hardware.peak_flop_per_s * (1.0 if hardware.stack == RATED_STACK else ASSUMED_UTILISATION)


def unmodelled_flop_per_s(spec: TaskSpec, replicas: int, hardware: Hardware) -> float:
    """Return the rate of a data-parallel task of whose model nothing is known, FLOP/s.

    The replicas take the micro-batches in turns, and each turn takes as long, be it full or not.
    """
    turns = -(-spec.batch.micro_batches // replicas)
    return assumed_flop_per_s(hardware) * spec.batch.micro_batches / turns


def modelled_flop_per_s(spec: TaskSpec, layout: HardwareLayout, hardware: Hardware) -> float:
    """Return T(t, x) before correction in one layout, whether the layout fits into memory or not."""
    return _modelled_flop_per_s(ObjectKey(spec), layout, hardware)


@lru_cache(maxsize=4096)  # without the cache ``benchmarks.planner`` takes a quarter more processor time
def _modelled_flop_per_s(same: ObjectKey[TaskSpec], layout: HardwareLayout, hardware: Hardware) -> float:
    spec = same.value
    if spec.restarts_whole:
        return layout.data * assumed_flop_per_s(hardware)
    if not spec.model_known:
        return unmodelled_flop_per_s(spec, layout.data, hardware)
    return flop_per_step(spec) / _iteration_s(
        Shape.of(spec.model), spec.batch.global_, pins_of(spec), layout.tensor, layout.pipeline, layout.data, hardware
    )


def _iteration_s(
    shape: Shape, global_batch: int, pins: Pins, tensor: int, pipeline: int, data: int, hardware: Hardware
) -> float:
    config = ParallelConfig(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        micro_batch=pins.micro_batch or 1,
        interleave=pins.interleave or 1,
        recompute=pins.recompute or "none",
        sequence_parallel=bool(pins.sequence_parallel),
        distributed_optimizer=bool(pins.distributed_optimizer),
        overlap=pins.overlap,
    )
    return estimate(shape, global_batch, config, hardware, stack(hardware.stack)).iteration_s
