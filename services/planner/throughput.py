"""T(t, x) as modelled: a task's model in one layout on one kind of hardware (``shared.planning.performance``)."""

from __future__ import annotations

from functools import lru_cache

from services.planner import pools
from services.planner.state import DEFAULT_HARDWARE, Size, State, Task
from shared.planning.performance import Hardware, Pins, measured, names, profile
from shared.planning.performance.calibration import stack
from shared.planning.performance.gpt import Shape
from shared.planning.performance.layout import Layout
from shared.planning.performance.search import estimate
from shared.tasks import TaskSpec

RATED_STACK = "cpu"
"""Training software of workers that no data sheet describes: their rate is the setting ``worker_flop_per_s``."""


def flop_per_step(spec: TaskSpec) -> float:
    """Return the model FLOP of one update."""
    return spec.model.flop_per_sample() * spec.batch.global_


def kind_of(state: State, task: Task) -> str:
    """Return the kind of workers the task runs on, or is to run on; of one without any, that of most nodes."""
    return pools.kind_of(state, task) or min(
        state.kinds, key=lambda kind: (-sum(state.kinds[kind].values()), kind), default=DEFAULT_HARDWARE
    )


def hardware_of(state: State, kind: str) -> Hardware:
    """Return what workers of that kind can do, in nodes of the size that most of them have."""
    sizes = {workers: nodes for workers, nodes in state.kinds.get(kind, {}).items() if workers > 0}
    usual = min(sizes, key=lambda workers: (-sizes[workers], workers), default=0)
    return _hardware(kind, usual, state.parameter("worker_flop_per_s"))


@lru_cache(maxsize=256)
def _hardware(kind: str, workers_per_node: int, worker_flop_per_s: float) -> Hardware:
    found = profile_of(kind)
    if workers_per_node:
        found = found._replace(workers_per_node=workers_per_node)
    return measured(found, peak_flop_per_s=worker_flop_per_s) if is_rated(kind) else found


def profile_of(kind: str) -> Hardware:
    """Return the profile of a kind of workers; one that nobody has described is taken as CPU processes."""
    return profile(kind if kind in names() else DEFAULT_HARDWARE)


def is_rated(kind: str) -> bool:
    """Return whether the rate of such workers is the setting's."""
    return profile_of(kind).stack == RATED_STACK


def pins_of(spec: TaskSpec) -> Pins:
    """Return what the specification fixes. The runtime splits layers evenly."""
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
    )


def modelled_flop_per_s(spec: TaskSpec, size: Size, hardware: Hardware) -> float:
    """Return T(t, x) before correction in one layout, whether or not it is a good one and fits."""
    pins = pins_of(spec)
    return flop_per_step(spec) / _iteration_s(
        Shape.of(spec.model), spec.batch.global_, pins, size.tensor, size.pipeline, size.data, hardware
    )


@lru_cache(maxsize=4096)
def _iteration_s(
    shape: Shape, global_batch: int, pins: Pins, tensor: int, pipeline: int, data: int, hardware: Hardware
) -> float:
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        micro_batch=pins.micro_batch or 1,
        interleave=pins.interleave or 1,
        recompute=pins.recompute or "none",
        sequence_parallel=bool(pins.sequence_parallel),
        distributed_optimizer=bool(pins.distributed_optimizer),
    )
    return estimate(shape, global_batch, layout, hardware, stack(hardware.stack)).iteration_s
