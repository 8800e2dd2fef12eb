"""The T tables of tasks: every layout of a task, corrected by what was measured, and the best one for each count.

A table depends on the task, its kind of hardware and its corrections, not on how many workers are left: it is made
once, up to the most workers the cluster has ever had, and cut off. Problems of the same moment share the cuts, which
the solver remembers as arrays (``shared.planning.instance.Tables``).
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

from services.planner.corrections import correction, exponent_of
from services.planner.state import Size, State, Task, node_of
from services.planner.throughput import (
    RATED_STACK,
    flop_per_step,
    hardware_of,
    kind_of,
    modelled_flop_per_s,
    pins_of,
)
from shared.planning.performance import Hardware, Pins
from shared.planning.performance.gpt import Shape
from shared.planning.performance.search import Timed, sized
from shared.plans import Layout
from shared.tasks import TaskSpec

STAYING = 1.05
"""A task keeps its tensor and pipeline sizes unless others are faster by this factor: the model's own error is of that
size, and all of the state moves for another layout. A task that has none yet is data-parallel by the same rule: then a
fault breaks the least."""

DATA_PARALLEL = (1, 1)
"""Tensor and pipeline sizes."""

MAX_TENSOR = 8
"""The built-in trainer pads the vocabulary so that it splits over up to so many workers (``unicron.model``)."""

_MAX_TABLES = 4096
"""Tables remembered; more than one planning problem and what follows from it can have."""


class Table(NamedTuple):
    """T(t, x), FLOP/s, and the layout behind it, at the useful counts, ascending.

    ``exponent``: the general correction. ``reloading``: counts whose layout is not of the task's present tensor and
    pipeline sizes, priced as if its state went through storage: an upper bound.
    """

    counts: list[int]
    throughput: dict[int, float]
    layouts: dict[int, Layout]
    exponent: int
    reloading: frozenset[int]
    cuts: dict[tuple[int, int, float], dict[int, float]]


def table_of(state: State, task: Task) -> Table:
    """Return the task's table, the same object while nothing it depends on has changed."""
    kind = kind_of(state, task)
    hardware = hardware_of(state, kind)
    exponent = exponent_of(state, task, kind)
    present = _present(state, task)
    replica = (present.tensor, present.pipeline) if present is not None else None
    most = _largest(state, task, kind)
    measured = frozenset((size[1:], e) for size, e in task.measured.items() if size.hardware == kind)
    key = (id(task.spec), hardware, most, exponent, measured, replica)
    found = _tables.get(key)
    if found is None or found[0] is not task.spec:
        if len(_tables) >= _MAX_TABLES:
            _tables.clear()
        made = _made(task.spec, hardware, most, exponent, dict(measured), replica)
        found = _tables[key] = task.spec, made
    return found[1]


_tables: dict[tuple[object, ...], tuple[TaskSpec, Table]] = {}


def throughput_of(state: State, task: Task, workers: int) -> dict[int, float]:
    """Return T(t, x) for the useful x up to ``workers``, and for the count that the task has now.

    The latter may be more than is left, or no better than a smaller one; its rate still says what a transition costs.
    The same object for the same answer.
    """
    table = table_of(state, task)
    cut = bisect_right(table.counts, workers)
    count, rate = len(task.members), _present_flop_per_s(state, task, table)
    if rate == (table.throughput.get(count) if count <= workers else None):
        count, rate = 0, None
    if rate is None and cut == len(table.counts):
        return table.throughput
    key = (cut, count, rate or 0.0)
    found = table.cuts.get(key)
    if found is None:
        entries = {x: table.throughput[x] for x in table.counts[:cut]}
        if rate is not None:
            entries[count] = rate
        found = table.cuts[key] = {x: entries[x] for x in sorted(entries)}
    return found


def layout_of(state: State, task: Task, count: int) -> Layout:
    """Return the layout of the task on ``count`` workers: its present one at its present count, else the table's.

    A count that is in no table has the present tensor and pipeline sizes, or those of the specification.
    """
    present = _present(state, task)
    if present is None or count != present.world_size:
        found = table_of(state, task).layouts.get(count)
        if found is not None:
            return found
    tensor, pipeline = (present.tensor, present.pipeline) if present else (task.spec.tensor, task.spec.pipeline)
    data = max(1, count // (tensor * pipeline))
    return Layout(tensor=tensor, pipeline=pipeline, data=data, micro_batch=task.spec.batch.micro)


def _present(state: State, task: Task) -> Layout | None:
    """Return the layout in which the task runs, or is about to; None if it has no workers, or none of its kind."""
    node = state.nodes.get(node_of(task.members[0])) if task.members else None
    elsewhere = node is not None and task.pool not in ("", node.hardware)
    return task.layout if task.members and not elsewhere else None


def _present_flop_per_s(state: State, task: Task, table: Table) -> float | None:
    present = _present(state, task)
    if present is None:
        return None
    kind = kind_of(state, task)
    size = Size(kind, present.tensor, present.pipeline, present.data)
    factor = correction(task.measured.get(size, table.exponent))
    return modelled_flop_per_s(task.spec, size, hardware_of(state, kind)) * factor


def _largest(state: State, task: Task, kind: str) -> int:
    """Return the most workers its table has to reach: all of that kind ever seen, rounded up to a power of two.

    Rounded, a node more rarely makes another table.
    """
    seen = sum(workers * nodes for workers, nodes in state.kinds.get(kind, {}).items())
    most = 1 << (max(seen, len(task.members), 1) - 1).bit_length()
    return most if task.spec.workers.max is None else min(most, task.spec.workers.max)


class _Choice(NamedTuple):
    """Every layout a task may have: at each count, ascending, the fastest as modelled first; and all by their sizes."""

    at: dict[int, list[Timed]]
    of: dict[tuple[int, int, int], Timed]


def _made(
    spec: TaskSpec,
    hardware: Hardware,
    most: int,
    exponent: int,
    measured: dict[tuple[int, int, int], int],
    replica: tuple[int, int] | None,
) -> Table:
    """Return the table: at each count the fastest layout, or the preferred one if it is nearly as fast.

    ``measured``: exponents by tensor, pipeline and data. ``replica``: the present tensor and pipeline sizes. Counts
    that are no better than a smaller one are left out.
    """
    tensor, pipeline = replica or DATA_PARALLEL
    choice, flop = _choice(spec, hardware, most), flop_per_step(spec)
    known: dict[int, list[Timed]] = {}
    for size in sorted(measured):
        if size in choice.of:
            known.setdefault(choice.of[size].layout.workers, []).append(choice.of[size])

    def rate(timed: Timed) -> float:
        return flop / timed.iteration_s * correction(measured.get(timed.layout[:3], exponent))

    table = Table([], {}, {}, exponent, frozenset(), {})
    highest = 0.0
    for count, fastest in choice.at.items():
        # Of those that were not measured the first is the fastest.
        first = next((timed for timed in fastest if timed.layout[:3] not in measured), None)
        best = max((*([first] if first else []), *known.get(count, [])), key=rate)
        staying = choice.of.get((tensor, pipeline, count // (tensor * pipeline)))
        if staying is not None and staying.layout.workers == count and rate(staying) * STAYING >= rate(best):
            best = staying
        if rate(best) > highest:
            highest = rate(best)
            table.counts.append(count)
            table.throughput[count] = highest
            t, p, d, b = best.layout[:4]
            table.layouts[count] = Layout(tensor=t, pipeline=p, data=d, micro_batch=b)
    if replica is None:
        return table
    reloading = frozenset(x for x, found in table.layouts.items() if (found.tensor, found.pipeline) != replica)
    return table._replace(reloading=reloading)


def _choice(spec: TaskSpec, hardware: Hardware, most: int) -> _Choice:
    shape, pins = Shape.of(spec.model), pins_of(spec)
    limit = MAX_TENSOR if spec.script is None and pins.tensor is None else most
    if hardware.stack == RATED_STACK and pins.tensor is not None and pins.pipeline is not None:
        # The memory of a CPU process is an allowance, by which layouts are chosen; a choice already made stands.
        hardware = hardware._replace(memory_bytes=float("inf"))
    if spec.script is not None:
        # A script may ignore the sizes it is given, as plain PyTorch does: it gets 1 and 1 where that fits.
        alone = pins._replace(tensor=pins.tensor or 1, pipeline=pins.pipeline or 1)
        found = _sorted(shape, spec.batch.global_, most, hardware, alone, spec.workers.min, limit)
        if found.of:
            return found
    return _sorted(shape, spec.batch.global_, most, hardware, pins, spec.workers.min, limit)


@lru_cache(maxsize=512)
def _sorted(
    shape: Shape, global_batch: int, most: int, hardware: Hardware, pins: Pins, least: int, most_tensor: int
) -> _Choice:
    at: dict[int, list[Timed]] = {}
    for timed in sized(shape, global_batch, most, hardware, pins, least):
        if timed.layout.tensor <= most_tensor:
            at.setdefault(timed.layout.workers, []).append(timed)
    for alike in at.values():
        alike.sort(key=lambda timed: timed.iteration_s)
    return _Choice(
        {count: at[count] for count in sorted(at)},
        {timed.layout[:3]: timed for alike in at.values() for timed in alike},
    )
