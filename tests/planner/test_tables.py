"""Throughput tables: the best layout of every count, and cuts to the workers that are left."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.problem.problem import build_problem
from services.planner.state.cluster import HardwareLayout, State, Task
from services.planner.throughput.corrections import correction
from services.planner.throughput.model import expected_kind, flop_per_step, hardware_of, modelled_flop_per_s, pins_of
from services.planner.throughput.tables import STAYING, layout_of, table_of, throughput_of
from shared.planning.performance.calibration import stack
from shared.planning.performance.gpt import Shape
from shared.planning.performance.parallel_config import ParallelConfig, Sizes
from shared.planning.performance.search import Timed, estimate, sized
from tests.examples import examples
from tests.planner.kit import World, running

BIG = {"layers": 48, "hidden": 7168, "heads": 56, "sequence_length": 2048, "vocabulary": 51200}
"""30 billion parameters: no less than 8 workers of 80 GB without a sharded optimizer."""

LARGE = {"layers": 8, "hidden": 1536, "heads": 8, "sequence_length": 32}
"""230 million parameters: two CPU workers by their allowance of memory."""


def cluster(nodes: int, per_node: int, hardware: str = "cpu", /, **fields: Any) -> World:
    """Nodes of so many workers, and task ``a``."""
    world = World()
    for index in range(nodes):
        world.join(f"n{index}", per_node, hardware=hardware)
    world.submit("a", **fields)
    return world


def candidates(state: State, task: Task) -> list[Timed]:
    """Every layout of the task on the workers there are."""
    hardware = hardware_of(state, expected_kind(state, task))
    workers = len(state.usable_workers())
    return list(sized(Shape.of(task.spec.model), task.spec.batch.global_, workers, hardware, pins_of(task.spec)))


TASKS = st.fixed_dictionaries(
    {
        "model": st.sampled_from([BIG, LARGE, {"layers": 4, "hidden": 64, "heads": 4, "sequence_length": 64}]),
        "batch": st.sampled_from([{"global": g, "micro": b} for g, b in ((4, 1), (12, 2), (30, 1), (64, 4))]),
        "parallel": st.sampled_from([{}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 4}]),
    }
)


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(TASKS, st.integers(1, 5), st.sampled_from([1, 2, 6, 8]), st.sampled_from(["cpu", "h100"]), st.integers(1, 12))
def test_every_entry_is_a_layout_that_fits_and_pays(
    fields: dict[str, Any], nodes: int, workers: int, kind: str, least: int
) -> None:
    sizes = fields["parallel"]
    least = min(least, fields["batch"]["global"] // fields["batch"]["micro"])
    world = cluster(nodes, workers, kind, **fields, workers={"min": least, "max": 40})
    task, hardware = world.task(), hardware_of(world.state, kind)
    table = table_of(world.state, task)
    assert table.counts == sorted(table.layouts) == sorted(table.throughput)
    assert all(table.throughput[a] < table.throughput[b] for a, b in pairwise(table.counts))
    shape, batch = Shape.of(task.spec.model), task.spec.batch
    pinned = task.spec.parallel.tensor != "auto" and task.spec.parallel.pipeline != "auto"
    for count, found in table.layouts.items():
        assert count == found.world_size
        assert least <= count <= 40
        assert found.micro_batch == batch.micro
        assert found.data <= batch.micro_batches
        assert shape.heads % found.tensor == shape.layers % found.pipeline == 0
        assert sizes.get("tensor", found.tensor) == found.tensor
        assert sizes.get("pipeline", found.pipeline) == found.pipeline
        assert "tensor" in sizes or found.tensor <= workers
        layout = ParallelConfig(
            found.tensor, found.pipeline, found.data, found.micro_batch, overlap=task.spec.parallel.overlap
        )
        estimated = estimate(shape, batch.global_, layout, hardware, stack(hardware.stack))
        assert estimated.memory.total_bytes <= hardware.memory_bytes or (kind == "cpu" and pinned)
        if not task.members:
            assert table.throughput[count] == flop_per_step(task.spec) / estimated.iteration_s
    for timed in candidates(world.state, task):
        if least <= timed.config.workers and timed.config.tensor <= 8:
            rate = flop_per_step(task.spec) / timed.iteration_s
            best = max((r for x, r in table.throughput.items() if x <= timed.config.workers), default=0.0)
            assert best * STAYING >= rate


@settings(derandomize=True, deadline=None, max_examples=examples(40))
@given(TASKS, st.integers(0, 40))
def test_fewer_workers_only_cut_the_table(fields: dict[str, Any], workers: int) -> None:
    world = cluster(4, 8, "h100", **fields)
    task = world.task().model_copy(update={"members": ()})
    whole = table_of(world.state, task).throughput
    cut = throughput_of(world.state, task, workers)
    assert cut == {x: rate for x, rate in whole.items() if x <= workers}
    assert throughput_of(world.state, task, workers) is cut
    assert list(cut) == sorted(cut)


def test_a_lost_node_leaves_the_tables_as_they_are() -> None:
    world = cluster(4, 2, batch={"global": 12})
    world.complete(world.lose("n3"))
    table = table_of(world.state, world.task())
    world.lose("n2")
    assert table_of(world.state, world.task()) is table
    world.progress("a", step=3, step_s=0.0)
    first, second = build_problem(world.state, world.now), build_problem(world.state, world.now)
    assert first.tasks[0].throughput is second.tasks[0].throughput


def test_a_bound_in_the_way_of_no_useful_count_is_reached_all_the_same() -> None:
    """7 of 24 micro-batches' replicas do no less than 6, but it is what the task may have."""
    world = cluster(4, 2, workers={"min": 7, "max": 7})
    assert table_of(world.state, world.task()).counts == [7]
    assert len(world.task().members) == 7


def test_the_present_count_has_its_rate_even_if_a_smaller_one_is_as_good() -> None:
    """After a change of its minimum's meaning, say: 5 replicas of 12 micro-batches do no less than 4."""
    world = cluster(4, 2, batch={"global": 12})
    task = world.task()
    assert task.layout is not None
    five = task.model_copy(update={"members": task.members[:5], "layout": task.layout.model_copy(update={"data": 5})})
    table = throughput_of(world.state, five, 6)
    assert sorted(table) == [1, 2, 3, 4, 5, 6]
    assert table[5] < table[4]
    assert sorted(throughput_of(world.state, five, 3)) == [1, 2, 3, 5]
    assert layout_of(world.state, five, 5) == five.layout


def test_small_models_are_data_parallel_and_large_ones_are_not() -> None:
    small = table_of(cluster(4, 2).state, cluster(4, 2).task())
    assert {(x.tensor, x.pipeline) for x in small.layouts.values()} == {(1, 1)}
    world = cluster(4, 2, model=LARGE)
    large = table_of(world.state, world.task())
    assert min(large.layouts) > 1
    assert all(x.tensor * x.pipeline > 1 for x in large.layouts.values())


def test_a_script_is_data_parallel_unless_that_does_not_fit() -> None:
    fields: dict[str, Any] = {"batch": {"global": 4}, "script": "own.py"}
    wide = {"layers": 4, "hidden": 1024, "heads": 8, "sequence_length": 256}
    world = cluster(8, 2, model=wide, **fields)
    assert {(x.tensor, x.pipeline) for x in table_of(world.state, world.task()).layouts.values()} == {(1, 1)}
    searched = cluster(8, 2, model=wide, batch={"global": 4})
    assert len({(x.tensor, x.pipeline) for x in table_of(searched.state, searched.task()).layouts.values()}) > 1
    world = cluster(8, 2, model=LARGE, **fields)
    assert table_of(world.state, world.task()).counts


def test_what_is_pinned_in_full_runs_on_cpu_whatever_its_memory() -> None:
    world = cluster(2, 2, model=LARGE, parallel={"tensor": 1, "pipeline": 1})
    assert table_of(world.state, world.task()).counts == [1, 2, 3, 4]
    world = cluster(2, 2, "h100", model=BIG, parallel={"tensor": 1, "pipeline": 1})
    assert world.submit("b").queued["a"] == "no layout of it runs on 4 workers"


@pytest.mark.parametrize("nodes", [3, 4, 6])
def test_a_task_keeps_its_sizes_unless_others_are_clearly_faster(nodes: int) -> None:
    world = cluster(nodes, 8, "h100", model=BIG, batch={"global": 96})
    task, workers = world.task(), 8 * nodes
    at = {timed.config.sizes: timed for timed in candidates(world.state, task) if timed.config.workers == workers}
    fastest_s = min(timed.iteration_s for timed in at.values())
    stayed = set()
    for (tensor, pipeline, data), timed in at.items():
        if tensor * pipeline * 2 > workers:
            continue
        # As if it ran on one replica less.
        layout = layout_of(world.state, task, workers).model_copy(
            update={"tensor": tensor, "pipeline": pipeline, "data": data - 1}
        )
        before = task.model_copy(update={"layout": layout, "members": task.members[: layout.world_size]})
        after = layout_of(world.state, before, workers)
        near = fastest_s * STAYING >= timed.iteration_s
        assert near == ((after.tensor, after.pipeline) == (tensor, pipeline))
        assert near == (workers not in table_of(world.state, before).reloading)
        stayed.add(near)
    assert stayed == {True, False}


def test_a_layout_measured_slow_gives_way_to_one_that_was_not() -> None:
    world = cluster(3, 8, "h100", model=BIG, batch={"global": 96})
    task = world.task().model_copy(update={"members": ()})
    first = layout_of(world.state, task, 24)
    size = HardwareLayout("h100", first.tensor, first.pipeline, first.data)
    slow = task.model_copy(update={"measured": {size: -7, HardwareLayout("h100", 1, 1, 1): 0}})
    other = layout_of(world.state, slow, 24)
    assert (other.tensor, other.pipeline) != (first.tensor, first.pipeline)
    factor = correction(table_of(world.state, slow).exponent)
    seconds = {timed.config.sizes: timed.iteration_s for timed in candidates(world.state, task)}
    expected = flop_per_step(task.spec) / seconds[Sizes(other.tensor, other.pipeline, other.data)] * factor
    assert table_of(world.state, slow).throughput[24] == expected
    # Measured fast, one that the model does not choose is chosen.
    unlikely = max((size for size in seconds if size[0] * size[1] * size[2] == 24), key=lambda size: seconds[size])
    fast = task.model_copy(
        update={"measured": {HardwareLayout("h100", *unlikely): 40, HardwareLayout("h100", 1, 1, 1): -40}}
    )
    chosen = layout_of(world.state, fast, 24)
    assert (chosen.tensor, chosen.pipeline, chosen.data) == unlikely


def test_a_count_that_is_in_no_table_has_the_present_sizes() -> None:
    world = running(parallel={"tensor": 2})
    assert layout_of(world.state, world.task(), 10**6).model_dump() == {
        "tensor": 2, "pipeline": 1, "data": 500_000, "micro_batch": 1,
    }  # fmt: skip
    queued = cluster(0, 2, parallel={"pipeline": 2})
    assert layout_of(queued.state, queued.task(), 2).pipeline == 2


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_task_is_predicted_as_the_runtime_trains_it(tensor: int, overlap: bool) -> None:
    """Data-parallel communication overlaps where the task asks for it."""
    model = {"layers": 24, "hidden": 2048, "heads": 16, "sequence_length": 2048, "vocabulary": 51200}
    parallel = {"tensor": tensor, "pipeline": 1, "distributed_optimizer": True, "overlap": overlap}
    world = cluster(4, 8, "h100", model=model, parallel=parallel)
    task, hardware = world.task("a"), hardware_of(world.state, "h100")
    layout = HardwareLayout("h100", tensor, 1, 4)
    config = ParallelConfig(tensor, 1, 4, 1, distributed_optimizer=True, overlap=overlap)
    found = estimate(Shape.of(task.spec.model), task.spec.batch.global_, config, hardware, stack(hardware.stack))
    assert modelled_flop_per_s(task.spec, layout, hardware) == flop_per_step(task.spec) / found.iteration_s
    timed = next(timed for timed in candidates(world.state, task) if timed.config.sizes == (tensor, 1, 4))
    assert timed.iteration_s == found.iteration_s
