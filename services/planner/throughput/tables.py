"""Throughput tables: T(t, x) of a task at every useful count, corrected by measurements, with the layout of each count.

A table depends on the task, its kind of hardware and its corrections, and not on the number of workers that are left:
it is made once, up to the most workers that the cluster ever had, and cut off. Problems of the same moment share the
cut tables, which the solver keeps as arrays (``shared.planning.instance.TableCache``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from services.planner.state.cluster import HardwareLayout, State, Task, node_of
from services.planner.throughput.corrections import correction, exponent_of
from services.planner.throughput.model import (
    RATED_STACK,
    assumed_flop_per_s,
    expected_kind,
    flop_per_step,
    hardware_of,
    modelled_flop_per_s,
    pins_of,
    unmodelled_flop_per_s,
)
from shared.events.plans import Layout, LoggedTable, Problem
from shared.events.union import PlanDecided
from shared.planning.performance import Hardware, Pins
from shared.planning.performance.gpt import Shape
from shared.planning.performance.parallel_config import ParallelConfig, Sizes
from shared.planning.performance.search import Timed, sized
from shared.tasks.specification import TaskSpec

STAYING = 1.05
"""Other tensor and pipeline sizes must be faster by this factor to replace the present ones: the model's own error is
of that size, and all of the state moves for another layout. A task without a layout is data-parallel by the same rule,
because a fault of a data-parallel task breaks the least.
"""

DATA_PARALLEL = (1, 1)
"""Tensor and pipeline sizes of a data-parallel layout."""

MAX_TENSOR = 8
"""Greatest tensor size of the built-in trainer, which pads the vocabulary for tensor groups of up to so many
workers."""

UNMODELLED_GROWTH = 2
"""How many times as many workers as were measured a task may get of whose model nothing is known: what more of them
would bring is a guess, and a wrong one ends with the next measurement."""

_MAX_TABLES = 4096
"""Tables that are remembered: more than one planning problem and its look-ahead need."""


class ThroughputTable(NamedTuple):
    """T(t, x) in FLOP/s, and the layout behind it, at the useful counts.

    Attributes:
        counts: the useful counts, ascending.
        throughput: FLOP/s by count.
        layouts: the layout by count.
        exponent: the task's general correction, as an exponent of 1.1.
        reloading: counts whose layout has other tensor and pipeline sizes than the present one. Their transition is
            priced as if the state went through storage, which is an upper bound.
        sha256: digest of the table as the log has it (``logged``).
        cuts: the tables that ``throughput_of`` has returned, by what they depend on.
    """

    counts: list[int]
    throughput: dict[int, float]
    layouts: dict[int, Layout]
    exponent: int
    reloading: frozenset[int]
    sha256: str
    cuts: dict[tuple[int, int, float], dict[int, float]]

    def logged(self) -> LoggedTable:
        """Return the table as the log has it."""
        return LoggedTable.model_construct(throughput=self.throughput, reloading=sorted(self.reloading))


def table_of(state: State, task: Task) -> ThroughputTable:
    """Return the task's table; the same object while nothing changes on which it depends."""
    kind = expected_kind(state, task)
    hardware = hardware_of(state, kind)
    exponent = exponent_of(state, task, kind)
    present = _present(state, task)
    sizes = (present.tensor, present.pipeline) if present is not None else None
    most = _largest(state, task, kind)
    measured = frozenset((_sizes(layout), e) for layout, e in task.measured.items() if layout.hardware == kind)
    key = (id(task.spec), hardware, most, exponent, measured, sizes)
    found = _tables.get(key)
    if found is None or found[0] is not task.spec:
        if len(_tables) >= _MAX_TABLES:
            _tables.clear()
        made = _made(task.spec, hardware, most, exponent, dict(measured), sizes)
        found = _tables[key] = task.spec, made
    return found[1]


_tables: dict[tuple[object, ...], tuple[TaskSpec, ThroughputTable]] = {}


def throughput_of(state: State, task: Task, workers: int, table: ThroughputTable | None = None) -> dict[int, float]:
    """Return T(t, x), FLOP/s, for the useful x up to ``workers`` and for the present count of the task.

    The present count may exceed the workers that are left, or be no better than a smaller count; its rate still
    determines the cost of a transition. Equal answers are the same object. ``table``: the task's, if it is at hand.
    """
    table = table or table_of(state, task)
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


def allowed_layouts(spec: TaskSpec, hardware: Hardware, most: int) -> dict[int, list[Timed]]:
    """Return all layouts that the specification allows on up to ``most`` workers: by count, the fastest first.

    At no count does the task run faster than the first of them, as modelled: its table prefers layouts that it has, or
    that break the least (``STAYING``).
    """
    return _choice(spec, hardware, most).at


def layout_of(state: State, task: Task, count: int) -> Layout:
    """Return the layout of the task on ``count`` workers: the present one at the present count, else that of the table.

    A count that is not in the table gets the present tensor and pipeline sizes, or those of the specification.
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
    """Return the layout in which the task runs or is about to run; None without workers of the kind it is to have."""
    node = state.nodes.get(node_of(task.members[0])) if task.members else None
    elsewhere = node is not None and task.pool not in ("", node.hardware)
    return task.layout if task.members and not elsewhere else None


def _present_flop_per_s(state: State, task: Task, table: ThroughputTable) -> float | None:
    """Return T of the task in its present layout, FLOP/s; None if it has none."""
    present = _present(state, task)
    if present is None:
        return None
    kind = expected_kind(state, task)
    layout = HardwareLayout(kind, present.tensor, present.pipeline, present.data)
    factor = correction(task.measured.get(layout, table.exponent))
    return modelled_flop_per_s(task.spec, layout, hardware_of(state, kind)) * factor


def _largest(state: State, task: Task, kind: str) -> int:
    """Return the greatest count of the table: all workers of that kind ever seen, rounded up to a power of two.

    Because of the rounding, a node more seldom makes another table.
    """
    seen = sum(workers * nodes for workers, nodes in state.kinds.get(kind, {}).items())
    most = 1 << (max(seen, len(task.members), 1) - 1).bit_length()
    if not task.spec.model_known:
        measured = max((layout.data for layout in task.measured if layout.hardware == kind), default=0)
        most = min(most, max(task.spec.workers.min, UNMODELLED_GROWTH * measured))
    return most if task.spec.workers.max is None else min(most, task.spec.workers.max)


def _sizes(layout: HardwareLayout) -> Sizes:
    return Sizes(layout.tensor, layout.pipeline, layout.data)


def _layout(config: ParallelConfig) -> Layout:
    """Return the part of the configuration that a plan states."""
    return Layout(tensor=config.tensor, pipeline=config.pipeline, data=config.data, micro_batch=config.micro_batch)


class _Choice(NamedTuple):
    """All layouts that a task may have.

    ``at``: layouts by count, ascending, the fastest as modelled first. ``of``: layouts by sizes.
    """

    at: dict[int, list[Timed]]
    of: dict[Sizes, Timed]


def _made(
    spec: TaskSpec,
    hardware: Hardware,
    most: int,
    exponent: int,
    measured: dict[Sizes, int],
    present: tuple[int, int] | None,
) -> ThroughputTable:
    """Return the table: at each count the fastest layout, or the preferred layout if it is nearly as fast.

    Counts that are no better than a smaller count are left out. ``measured``: exponents by sizes. ``present``: the
    present tensor and pipeline sizes.
    """
    tensor, pipeline = present or DATA_PARALLEL
    choice, flop = _choice(spec, hardware, most), flop_per_step(spec)
    known: dict[int, list[Timed]] = {}
    for size in sorted(measured):
        if size in choice.of:
            known.setdefault(choice.of[size].config.workers, []).append(choice.of[size])

    def rate(timed: Timed) -> float:
        return flop / timed.iteration_s * correction(measured.get(timed.config.sizes, exponent))

    table = ThroughputTable([], {}, {}, exponent, frozenset(), "", {})
    highest, general = 0.0, correction(exponent)
    for count, fastest in choice.at.items():
        if count in known:
            # The first layout without measurement is the fastest of the layouts without one.
            first = next((timed for timed in fastest if timed.config.sizes not in measured), None)
            best = max((*([first] if first else []), *known[count]), key=rate)
            best_rate = rate(best)
        else:
            best = fastest[0]
            best_rate = flop / best.iteration_s * general
        data, rest = divmod(count, tensor * pipeline)
        staying = choice.of.get(Sizes(tensor, pipeline, data)) if rest == 0 else None
        if staying is not None and (staying_rate := rate(staying)) * STAYING >= best_rate:
            best, best_rate = staying, staying_rate
        if best_rate > highest:
            highest = best_rate
            table.counts.append(count)
            table.throughput[count] = highest
            table.layouts[count] = _layout(best.config)
    if present is not None:
        others = (x for x, found in table.layouts.items() if (found.tensor, found.pipeline) != present)
        table = table._replace(reloading=frozenset(others))
    return table._replace(sha256=table.logged().sha256())


def _choice(spec: TaskSpec, hardware: Hardware, most: int) -> _Choice:
    """Return the layouts that the specification allows on up to ``most`` workers."""
    if spec.restarts_whole:
        return _alone(spec, hardware, most)
    if not spec.model_known:
        return _unmodelled(spec, hardware, most)
    shape, pins = Shape.of(spec.model), pins_of(spec)
    limit = MAX_TENSOR if spec.script is None and pins.tensor is None else most
    if hardware.stack == RATED_STACK and pins.tensor is not None and pins.pipeline is not None:
        # The memory of a CPU process is only an allowance by which a layout is chosen; pinned sizes ignore it.
        hardware = hardware._replace(memory_bytes=float("inf"))
    if spec.script is not None:
        # A script may ignore its sizes, as plain PyTorch does, so it gets 1 and 1 where the model fits on one worker.
        alone = pins._replace(tensor=pins.tensor or 1, pipeline=pins.pipeline or 1)
        found = _sorted(shape, spec.batch.global_, most, hardware, alone, spec.workers.min, limit)
        if found.of:
            return found
    return _sorted(shape, spec.batch.global_, most, hardware, pins, spec.workers.min, limit)


def _alone(spec: TaskSpec, hardware: Hardware, most: int) -> _Choice:
    """Return the one choice of a script that divides its work itself: all of its workers, in a layout of its own."""
    workers = spec.workers.min
    if workers > most:
        return _Choice({}, {})
    config = ParallelConfig(tensor=1, pipeline=1, data=workers, micro_batch=spec.batch.micro)
    timed = Timed(config, flop_per_step(spec) / (workers * assumed_flop_per_s(hardware)))
    return _Choice({workers: [timed]}, {config.sizes: timed})


def _unmodelled(spec: TaskSpec, hardware: Hardware, most: int) -> _Choice:
    """Return the data-parallel layouts of a task of whose model nothing is known."""
    at: dict[int, list[Timed]] = {}
    for count in range(spec.workers.min, min(most, spec.batch.micro_batches) + 1):
        config = ParallelConfig(tensor=1, pipeline=1, data=count, micro_batch=spec.batch.micro)
        at[count] = [Timed(config, flop_per_step(spec) / unmodelled_flop_per_s(spec, count, hardware))]
    return _Choice(at, {timed.config.sizes: timed for (timed,) in at.values()})


@lru_cache(maxsize=512)  # a table is made anew after a measurement, from the same layouts
def _sorted(
    shape: Shape, global_batch: int, most: int, hardware: Hardware, pins: Pins, least: int, most_tensor: int
) -> _Choice:
    at: dict[int, list[Timed]] = {}
    for timed in sized(shape, global_batch, most, hardware, pins, least):
        if timed.config.tensor <= most_tensor:
            at.setdefault(timed.config.workers, []).append(timed)
    for alike in at.values():
        alike.sort(key=lambda timed: timed.iteration_s)
    return _Choice(
        {count: at[count] for count in sorted(at)},
        {timed.config.sizes: timed for alike in at.values() for timed in alike},
    )


def unlogged_tables(state: State, problem: Problem) -> dict[str, LoggedTable]:
    """Return, by digest, the tables of the problem, posed in this state, that are not remembered."""
    found = {}
    for posed in problem.tasks:
        if posed.table not in state.tables and posed.table not in found:
            table = table_of(state, state.tasks[posed.name].model_copy(update={"pool": posed.pool}))
            found[table.sha256] = table.logged()
    return found


def remembered_tables(known: Mapping[str, LoggedTable], plan: PlanDecided) -> Mapping[str, LoggedTable]:
    """Return the tables that are remembered after a plan; ``known`` itself if they are the same."""
    if plan.problem is None:
        return known
    named = {task.table for task in plan.problem.tasks}
    if not plan.tables and named == known.keys():
        return known
    return {digest: table for digest, table in {**known, **plan.tables}.items() if digest in named}


def table_problems(known: Mapping[str, LoggedTable], plan: PlanDecided) -> Iterator[str]:
    """Yield what is wrong with a plan's tables: a table that does not have its digest, or that is nowhere in the log.

    Args:
        known: the tables that are remembered before the plan.
        plan: the plan.
    """
    for digest, table in plan.tables.items():
        if table.sha256() != digest:
            yield f"its throughput table {digest} has other contents than its digest says"
    for task in plan.problem.tasks if plan.problem is not None else ():
        if task.table and task.table not in known and task.table not in plan.tables:
            yield f"the throughput table {task.table} of task {task.name} is in no plan before it, nor in this one"
