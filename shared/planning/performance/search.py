"""Every layout of a model on a number of workers, and the fastest that fits.

Layouts are enumerated in a fixed order and compared by time, then by that order, so the answer is always the same.
What can be told from a layout without its data-parallel size (products, collectives of the tensor group, the ramp of
the pipeline) is computed once for all counts of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from shared.planning.performance.calibration import Calibration, stack
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
from shared.planning.performance.layout import RECOMPUTES, Layout, Recompute
from shared.planning.performance.memory import Memory, memory

MAX_MICRO_BATCH = 16
"""Products of any model this planner knows are saturated well below this many sequences."""

MAX_INTERLEAVE = 8
"""More model chunks a worker send more often than they save; Megatron's published runs use up to 5."""


class Pins(NamedTuple):
    """What the user fixed; None is searched. ``even_stages``: only pipelines whose stages have equally many layers."""

    tensor: int | None = None
    pipeline: int | None = None
    micro_batch: int | None = None
    interleave: int | None = None
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None
    distributed_optimizer: bool | None = None
    even_stages: bool = False


class Estimate(NamedTuple):
    """One layout's time and memory."""

    layout: Layout
    breakdown: Breakdown
    memory: Memory
    stage_layers: tuple[int, ...]

    @property
    def iteration_s(self) -> float:
        """Seconds of one update."""
        return self.breakdown.iteration_s


def estimate(shape: Shape, global_batch: int, layout: Layout, hardware: Hardware, constants: Calibration) -> Estimate:
    """Time and memory of one layout."""
    counts = stages(shape, layout, hardware, constants)
    return Estimate(
        layout,
        iteration(shape, global_batch, layout, hardware, constants),
        memory(shape, global_batch, layout, counts, hardware, constants),
        counts,
    )


class Replica(NamedTuple):
    """One replica's layout (``data`` is 1) and what all its data-parallel sizes share."""

    layout: Layout
    stage_layers: tuple[int, ...]
    memory: Memory
    parameters: float
    intra: Pass
    inter: Pass


def divisors(number: int, limit: int) -> list[int]:
    """Divisors of ``number`` up to ``limit``, ascending."""
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


def _tensors(shape: Shape, hardware: Hardware, pins: Pins, workers: int) -> list[int]:
    if pins.tensor is not None:
        return [pins.tensor]
    limit = min(hardware.workers_per_node, workers)
    # Powers of two, as every published run: a group inside the node that divides heads and the node.
    return [t for t in (1, 2, 4, 8, 16) if t <= limit and shape.heads % t == 0 and hardware.workers_per_node % t == 0]


def _pipelines(shape: Shape, pins: Pins, limit: int) -> list[int]:
    """Pipeline sizes whose longest stage is shorter than with one stage less; others only cost workers."""
    if pins.pipeline is not None:
        return [pins.pipeline]
    if pins.even_stages:
        return [p for p in divisors(shape.layers, limit) if shape.layers % (p * (pins.interleave or 1)) == 0]
    sizes = range(1, min(shape.layers, limit) + 1)
    return [p for p in sizes if p == 1 or -(-shape.layers // p) < -(-shape.layers // (p - 1))]


def _interleaves(shape: Shape, pipeline: int, pins: Pins) -> list[int]:
    if pins.interleave is not None:
        return [pins.interleave]
    if pipeline == 1:
        return [1]
    if shape.layers % pipeline:
        return [v for v in (1, 2, 4) if pipeline * v <= shape.layers]
    return divisors(shape.layers // pipeline, MAX_INTERLEAVE)


def _micro_batches(global_batch: int, pins: Pins) -> list[int]:
    if pins.micro_batch is not None:
        return [pins.micro_batch]
    return divisors(global_batch, MAX_MICRO_BATCH)


def templates(shape: Shape, global_batch: int, hardware: Hardware, pins: Pins, workers: int) -> Iterator[Layout]:
    """Layouts of one replica (``data`` is 1) on at most ``workers``, in a fixed order.

    Pinned values are taken as they are. Sequence parallelism is always chosen with tensor parallelism where it is not
    pinned: it moves as many bytes and saves memory and work (Korthikanti et al.).
    """
    for t in _tensors(shape, hardware, pins, workers):
        sequence = pins.sequence_parallel if pins.sequence_parallel is not None else t > 1
        for p in _pipelines(shape, pins, workers // t):
            for v in _interleaves(shape, p, pins):
                for b in _micro_batches(global_batch, pins):
                    for recompute in RECOMPUTES if pins.recompute is None else (pins.recompute,):
                        yield Layout(t, p, 1, b, v, recompute, sequence, False)


@lru_cache(maxsize=256)
def replicas(shape: Shape, global_batch: int, hardware: Hardware, pins: Pins, workers: int) -> tuple[Replica, ...]:
    """Every template with its time and memory. Memory is that of one replica with the optimizer not divided."""
    constants = stack(hardware.stack)
    found = []
    for layout in templates(shape, global_batch, hardware, pins, workers):
        counts = stages(shape, layout, hardware, constants)
        need = memory(shape, global_batch, layout, counts, hardware, constants)
        parameters = heaviest_parameters(shape, layout, counts)
        intra = micro_batch_pass(shape, layout, counts, False, hardware, constants)
        inter = intra
        if layout.pipeline > 1:
            inter = micro_batch_pass(shape, layout, counts, True, hardware, constants)
        found.append(Replica(layout, counts, need, parameters, intra, inter))
    return tuple(found)


def _possible(layout: Layout, micro_batches: int, load: int, pins: Pins) -> bool:
    """Whether the schedule exists: every replica has work, and interleaving deals whole rounds."""
    if layout.data > micro_batches:
        return False
    return layout.interleave == 1 or pins.interleave is not None or load % layout.pipeline == 0


def _variants(
    shape: Shape, replica: Replica, data: int, global_batch: int, hardware: Hardware, pins: Pins
) -> Iterator[tuple[Layout, Breakdown, Memory]]:
    """The replica repeated ``data`` times, with and without the distributed optimizer."""
    constants = stack(hardware.stack)
    micro_batches = global_batch // replica.layout.micro_batch
    load = -(-micro_batches // data)
    base = replica.layout._replace(data=data)
    if not _possible(base, micro_batches, load, pins):
        return
    one = replica.inter if base.workers > hardware.workers_per_node else replica.intra
    if pins.distributed_optimizer is not None:
        choices: tuple[bool, ...] = (pins.distributed_optimizer,)
    else:
        choices = (False, True) if data > 1 else (False,)
    for sharded in choices:
        layout = base._replace(distributed_optimizer=sharded)
        comm, step = update_s(shape, layout, replica.parameters, one, load, hardware, constants)
        need = replica.memory
        if sharded:
            need = need._replace(optimizer_bytes=need.optimizer_bytes / data)
        yield layout, compose(one, load, comm, step), need


def best(
    shape: Shape, global_batch: int, workers: int, hardware: Hardware, pins: Pins
) -> tuple[Estimate | None, Estimate | None]:
    """The fastest layout on exactly ``workers`` that fits, and the one that needs the least memory.

    Both are None only where no layout divides model and workers at all.
    """
    fastest: Estimate | None = None
    smallest: Estimate | None = None
    for replica in replicas(shape, global_batch, hardware, pins, workers):
        size = replica.layout.workers
        if workers % size:
            continue
        for layout, time, need in _variants(shape, replica, workers // size, global_batch, hardware, pins):
            found = Estimate(layout, time, need, replica.stage_layers)
            fits = need.total_bytes <= hardware.memory_bytes
            if fits and (fastest is None or found.iteration_s < fastest.iteration_s):
                fastest = found
            if smallest is None or need.total_bytes < smallest.memory.total_bytes:
                smallest = found
    return fastest, smallest


def useful_data_sizes(micro_batches: int, limit: int, first: int = 1) -> Iterator[int]:
    """``first``, and the larger data-parallel sizes whose most loaded replica has less to do than with one less."""
    d = first
    while d <= min(limit, micro_batches):
        yield d
        load = -(-micro_batches // d)
        if load == 1:
            return
        d = -(-micro_batches // (load - 1))


class Timed(NamedTuple):
    """A layout that fits, and the time of one update in it."""

    layout: Layout
    iteration_s: float


def table(
    shape: Shape, global_batch: int, max_workers: int, hardware: Hardware, pins: Pins | None = None
) -> dict[int, float]:
    """T(x): aggregate model FLOP/s of the best fitting layout on exactly x workers, for the useful counts.

    A count is left out where no layout on it fits, where a smaller count is at least as good (a plan is better off
    leaving the difference to another task), or where the most loaded replica has no less to do than with one replica
    less: then only the distributed optimizer gains, far less than a percent.
    """
    flop = model_flop(shape, global_batch)
    found = best_layouts(shape, global_batch, max_workers, hardware, pins or Pins())
    return {workers: flop / timed.iteration_s for workers, timed in found.items()}


def best_layouts(shape: Shape, global_batch: int, max_workers: int, hardware: Hardware, pins: Pins) -> dict[int, Timed]:
    """The layout behind each entry of ``table``, with its time; counts ascend."""
    fastest: dict[int, Timed] = {}

    def hopeless(workers: int, at_least_s: float) -> bool:
        return workers in fastest and at_least_s >= fastest[workers].iteration_s

    for timed in _timed(shape, global_batch, max_workers, hardware, pins, 1, hopeless):
        if not hopeless(timed.layout.workers, timed.iteration_s):
            fastest[timed.layout.workers] = timed
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
    """For every tensor x pipeline x data that fits, on ``least`` to ``max_workers`` workers, its fastest layout.

    In the order of the search. Data-parallel sizes are the useful ones, from the smallest that reaches ``least`` on.
    For whoever weighs layouts by more than the modelled time: all of them, not only the best of each count.
    """
    fastest: dict[tuple[int, int, int], Timed] = {}
    for timed in _timed(shape, global_batch, max_workers, hardware, pins, least, lambda workers, at_least_s: False):
        size = timed.layout[:3]
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
    """Every layout that fits at the useful data-parallel sizes, less those that ``hopeless`` says are too slow.

    ``hopeless`` is told the workers and a time that the layout cannot beat.
    """
    for replica in _least_recomputing(replicas(shape, global_batch, hardware, pins, max_workers), hardware, pins):
        size = replica.layout.workers
        micro_batches = global_batch // replica.layout.micro_batch
        for d in useful_data_sizes(micro_batches, max_workers // size, -(-least // size)):
            load = -(-micro_batches // d)
            if hopeless(size * d, load * replica.intra.steady_s):
                continue
            for layout, time, need in _variants(shape, replica, d, global_batch, hardware, pins):
                if need.total_bytes <= hardware.memory_bytes:
                    yield Timed(layout, time.iteration_s)


def _least_recomputing(found: tuple[Replica, ...], hardware: Hardware, pins: Pins) -> Iterator[Replica]:
    """Skip what can never fit, and what recomputes more than a layout that fits at every data-parallel size."""
    settled: Layout | None = None
    for replica in found:
        alike = replica.layout._replace(recompute="none")
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
