"""Search of the parallelism configurations of a model on a number of workers for the fastest that fits.

Configurations are enumerated in a fixed order and compared by time, then by that order, so equal searches have equal
answers. Everything that does not depend on the data-parallel size (products, collectives of the tensor group, the ramp
of the pipeline) is computed once for all counts of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from shared.planning.performance.calibration import Calibration, stack
from shared.planning.performance.device_memory import DeviceMemory, device_memory
from shared.planning.performance.gpt import Shape, model_flop
from shared.planning.performance.hardware import Hardware
from shared.planning.performance.iteration import (
    Breakdown,
    Pass,
    compose,
    heaviest_parameters,
    iteration,
    micro_batch_pass,
    stages,
    update_s,
)
from shared.planning.performance.parallel_config import RECOMPUTES, ParallelConfig, Recompute, Sizes

MAX_MICRO_BATCH = 16
"""Greatest micro-batch that is tried. Products of any realistic model are saturated far below it."""

MAX_INTERLEAVE = 8
"""Greatest interleaving that is tried. More chunks send more than they save; published Megatron runs use up to 5."""


class Pins(NamedTuple):
    """Choices that the user fixed; None is searched. ``even_stages``: only stages of equally many layers.

    ``overlap``: as in ``ParallelConfig``; it is never searched.
    """

    tensor: int | None = None
    pipeline: int | None = None
    micro_batch: int | None = None
    interleave: int | None = None
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None
    distributed_optimizer: bool | None = None
    even_stages: bool = False
    overlap: bool = True


class Estimate(NamedTuple):
    """Time and memory of one configuration."""

    config: ParallelConfig
    breakdown: Breakdown
    memory: DeviceMemory
    stage_layers: tuple[int, ...]

    @property
    def iteration_s(self) -> float:
        """Seconds of one update."""
        return self.breakdown.iteration_s


def estimate(
    shape: Shape, global_batch: int, config: ParallelConfig, hardware: Hardware, constants: Calibration
) -> Estimate:
    """Return time and memory of one configuration."""
    counts = stages(shape, config, hardware, constants)
    return Estimate(
        config,
        iteration(shape, global_batch, config, hardware, constants),
        device_memory(shape, global_batch, config, counts, hardware, constants),
        counts,
    )


class ReplicaEstimate(NamedTuple):
    """One data-parallel replica's configuration (``data`` is 1), and what all data-parallel sizes have in common.

    ``parameters``: those of the heaviest worker. ``intra``, ``inter``: the times of a micro-batch if all workers are in
    one node, and if they are not.
    """

    config: ParallelConfig
    stage_layers: tuple[int, ...]
    memory: DeviceMemory
    parameters: float
    intra: Pass
    inter: Pass


def divisors(number: int, limit: int) -> list[int]:
    """Return the divisors of ``number`` up to ``limit``, ascending."""
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


def _tensors(shape: Shape, hardware: Hardware, pins: Pins, workers: int) -> list[int]:
    """Return the tensor sizes to try, ascending."""
    if pins.tensor is not None:
        return [pins.tensor]
    limit = min(hardware.workers_per_node, workers)
    # Powers of two, as every published run: a group inside the node that divides heads and the node.
    return [t for t in (1, 2, 4, 8, 16) if t <= limit and shape.heads % t == 0 and hardware.workers_per_node % t == 0]


def _pipelines(shape: Shape, pins: Pins, limit: int) -> list[int]:
    """Return the pipeline sizes whose longest stage is shorter than with one stage less; others only cost workers."""
    if pins.pipeline is not None:
        return [pins.pipeline]
    if pins.even_stages:
        return [p for p in divisors(shape.layers, limit) if shape.layers % (p * (pins.interleave or 1)) == 0]
    sizes = range(1, min(shape.layers, limit) + 1)
    return [p for p in sizes if p == 1 or -(-shape.layers // p) < -(-shape.layers // (p - 1))]


def _interleaves(shape: Shape, pipeline: int, pins: Pins) -> list[int]:
    """Return the interleavings to try."""
    if pins.interleave is not None:
        return [pins.interleave]
    if pipeline == 1:
        return [1]
    if shape.layers % pipeline:
        return [v for v in (1, 2, 4) if pipeline * v <= shape.layers]
    return divisors(shape.layers // pipeline, MAX_INTERLEAVE)


def _micro_batches(global_batch: int, pins: Pins) -> list[int]:
    """Return the micro-batches to try."""
    if pins.micro_batch is not None:
        return [pins.micro_batch]
    return divisors(global_batch, MAX_MICRO_BATCH)


def replica_configs(
    shape: Shape, global_batch: int, hardware: Hardware, pins: Pins, workers: int
) -> Iterator[ParallelConfig]:
    """Yield the configurations of one replica (``data`` is 1) on at most ``workers`` workers, in a fixed order.

    Pinned values are taken as they are. Sequence parallelism is always chosen together with tensor parallelism unless
    it is pinned: it moves as many bytes and saves memory and work (Korthikanti et al.).
    """
    recomputes = RECOMPUTES if pins.recompute is None else (pins.recompute,)
    choices = list(product(_micro_batches(global_batch, pins), recomputes))
    for t in _tensors(shape, hardware, pins, workers):
        sequence = pins.sequence_parallel if pins.sequence_parallel is not None else t > 1
        for p in _pipelines(shape, pins, workers // t):
            for v in _interleaves(shape, p, pins):
                one = ParallelConfig(t, p, 1, 1, v, sequence_parallel=sequence, overlap=pins.overlap)
                yield from (one._replace(micro_batch=b, recompute=recompute) for b, recompute in choices)


@lru_cache(maxsize=256)
def replica_estimates(
    shape: Shape, global_batch: int, hardware: Hardware, pins: Pins, workers: int
) -> tuple[ReplicaEstimate, ...]:
    """Return the estimate of every replica configuration. The memory is that without a distributed optimizer."""
    constants = stack(hardware.stack)
    found = []
    for config in replica_configs(shape, global_batch, hardware, pins, workers):
        counts = stages(shape, config, hardware, constants)
        need = device_memory(shape, global_batch, config, counts, hardware, constants)
        parameters = heaviest_parameters(shape, config, counts)
        intra = micro_batch_pass(shape, config, counts, False, hardware, constants)
        inter = intra
        if config.pipeline > 1:
            inter = micro_batch_pass(shape, config, counts, True, hardware, constants)
        found.append(ReplicaEstimate(config, counts, need, parameters, intra, inter))
    return tuple(found)


def _possible(config: ParallelConfig, micro_batches: int, load: int, pins: Pins) -> bool:
    """Return whether the schedule exists: every replica has work, and interleaving distributes whole rounds."""
    if config.data > micro_batches:
        return False
    return config.interleave == 1 or pins.interleave is not None or load % config.pipeline == 0


def _repeated(
    shape: Shape, replica: ReplicaEstimate, data: int, global_batch: int, hardware: Hardware, pins: Pins
) -> Iterator[tuple[ParallelConfig, Breakdown, DeviceMemory]]:
    """Yield the replica repeated ``data`` times, with and without the distributed optimizer."""
    constants = stack(hardware.stack)
    micro_batches = global_batch // replica.config.micro_batch
    load = -(-micro_batches // data)
    base = replica.config._replace(data=data)
    if not _possible(base, micro_batches, load, pins):
        return
    one = replica.inter if base.workers > hardware.workers_per_node else replica.intra
    if pins.distributed_optimizer is not None:
        choices: tuple[bool, ...] = (pins.distributed_optimizer,)
    else:
        choices = (False, True) if data > 1 else (False,)
    for sharded in choices:
        config = base._replace(distributed_optimizer=sharded)
        comm, step = update_s(shape, config, replica.parameters, one, load, hardware, constants)
        need = replica.memory
        if sharded:
            need = need._replace(optimizer_bytes=need.optimizer_bytes / data)
        yield config, compose(one, load, comm, step), need


def best(
    shape: Shape, global_batch: int, workers: int, hardware: Hardware, pins: Pins
) -> tuple[Estimate | None, Estimate | None]:
    """Return the fastest configuration on exactly ``workers`` that fits, and the one that needs the least memory.

    Both are None only where no configuration divides model and workers at all.
    """
    fastest: Estimate | None = None
    smallest: Estimate | None = None
    for replica in replica_estimates(shape, global_batch, hardware, pins, workers):
        size = replica.config.workers
        if workers % size:
            continue
        for config, time, need in _repeated(shape, replica, workers // size, global_batch, hardware, pins):
            found = Estimate(config, time, need, replica.stage_layers)
            fits = need.total_bytes <= hardware.memory_bytes
            if fits and (fastest is None or found.iteration_s < fastest.iteration_s):
                fastest = found
            if smallest is None or need.total_bytes < smallest.memory.total_bytes:
                smallest = found
    return fastest, smallest


def useful_data_sizes(micro_batches: int, limit: int, first: int = 1) -> Iterator[int]:
    """Yield ``first``, and the larger data-parallel sizes at which the most loaded replica has less to do."""
    d = first
    while d <= min(limit, micro_batches):
        yield d
        load = -(-micro_batches // d)
        if load == 1:
            return
        d = -(-micro_batches // (load - 1))


class Timed(NamedTuple):
    """A configuration that fits, and the seconds of one update in it."""

    config: ParallelConfig
    iteration_s: float


def table(
    shape: Shape, global_batch: int, max_workers: int, hardware: Hardware, pins: Pins | None = None
) -> dict[int, float]:
    """Return T(x), FLOP/s: aggregate model FLOP/s of the best fitting configuration on exactly x workers, for useful x.

    A count is left out where no configuration on it fits; where a smaller count is at least as good, because a plan
    does better to leave the difference to another task; or where the most loaded replica has no less to do than with
    one replica less, because then only the distributed optimizer gains, far less than a percent.
    """
    flop = model_flop(shape, global_batch)
    found = best_layouts(shape, global_batch, max_workers, hardware, pins or Pins())
    return {workers: flop / timed.iteration_s for workers, timed in found.items()}


def best_layouts(shape: Shape, global_batch: int, max_workers: int, hardware: Hardware, pins: Pins) -> dict[int, Timed]:
    """Return the configuration behind each entry of ``table``, with its time; counts ascend."""
    fastest: dict[int, Timed] = {}

    def hopeless(workers: int, at_least_s: float) -> bool:
        return workers in fastest and at_least_s >= fastest[workers].iteration_s

    for timed in _timed(shape, global_batch, max_workers, hardware, pins, 1, hopeless):
        if not hopeless(timed.config.workers, timed.iteration_s):
            fastest[timed.config.workers] = timed
    useful: dict[int, Timed] = {}
    shortest_s = float("inf")
    for workers in sorted(fastest):
        if fastest[workers].iteration_s < shortest_s:
            useful[workers] = fastest[workers]
            shortest_s = fastest[workers].iteration_s
    return useful


def sized(
    shape: Shape, global_batch: int, max_workers: int, hardware: Hardware, pins: Pins, least: int = 1
) -> tuple[Timed, ...]:
    """Return the fastest configuration of every tensor x pipeline x data that fits.

    It uses ``least`` to ``max_workers`` workers. The configurations are in the order of the search. Data-parallel sizes
    are the useful ones, from the smallest that reaches ``least`` on. This is for callers that weigh configurations by
    more than the modelled time, so it has not only the best of each count.
    """
    fastest: dict[Sizes, Timed] = {}
    for timed in _timed(shape, global_batch, max_workers, hardware, pins, least, lambda workers, at_least_s: False):
        size = timed.config.sizes
        if size not in fastest or timed.iteration_s < fastest[size].iteration_s:
            fastest[size] = timed
    return tuple(fastest.values())


def _timed(
    shape: Shape,
    global_batch: int,
    max_workers: int,
    hardware: Hardware,
    pins: Pins,
    least: int,
    hopeless: Callable[[int, float], bool],
) -> Iterator[Timed]:
    """Yield every configuration that fits at the useful data-parallel sizes, except those that are too slow.

    ``hopeless``: returns whether a lower bound of the time, seconds, is too slow for that number of workers.
    """
    for replica in _least_recomputing(
        replica_estimates(shape, global_batch, hardware, pins, max_workers), hardware, pins
    ):
        size = replica.config.workers
        micro_batches = global_batch // replica.config.micro_batch
        for d in useful_data_sizes(micro_batches, max_workers // size, -(-least // size)):
            load = -(-micro_batches // d)
            if hopeless(size * d, load * replica.intra.steady_s):
                continue
            for config, time, need in _repeated(shape, replica, d, global_batch, hardware, pins):
                if need.total_bytes <= hardware.memory_bytes:
                    yield Timed(config, time.iteration_s)


def _least_recomputing(found: tuple[ReplicaEstimate, ...], hardware: Hardware, pins: Pins) -> Iterator[ReplicaEstimate]:
    """Yield replicas that can fit, without those that recompute more than another that fits at every data size."""
    settled: ParallelConfig | None = None
    for replica in found:
        alike = replica.config._replace(recompute="none")
        if alike == settled:
            continue
        least = replica.memory.total_bytes
        if pins.distributed_optimizer is not False:
            least -= replica.memory.optimizer_bytes
        if least > hardware.memory_bytes:
            continue
        if replica.memory.total_bytes <= hardware.memory_bytes:
            settled = alike
        yield replica
