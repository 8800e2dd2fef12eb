"""Plans whose layouts the planner chooses: by count, by memory, by measurement; and how a task changes its layout."""

from __future__ import annotations

from services.planner.lookahead.table import LookAhead
from services.planner.problem.problem import Solve
from services.planner.replay.replay import Replayer, verify_records
from services.planner.state.cluster import HardwareLayout, node_of
from services.planner.throughput.model import flop_per_step, hardware_of, modelled_flop_per_s
from services.planner.throughput.tables import layout_of, table_of
from shared.events.plans import Stage, TaskChange
from shared.events.union import PlanDecided
from shared.planning.performance import profile
from shared.planning.performance import throughput as predict
from shared.planning.solver import solve_with_alternatives
from tests.planner.kit import World, change_of

BIG = {"layers": 48, "hidden": 7168, "heads": 56, "sequence_length": 2048, "vocabulary": 51200}
"""30 billion parameters: no less than 8 workers of 80 GB without a sharded optimizer."""

NARROW = {"layers": 4, "hidden": 128, "heads": 4, "sequence_length": 32}
"""Data-parallel by choice; split over two CPU workers each where there are twice as many as micro-batches."""


def gpus(nodes: int, solve: Solve = solve_with_alternatives) -> World:
    """A large task on nodes of 8 GPUs; it takes all of them."""
    world = World(solve)
    for index in range(nodes):
        world.join(f"n{index}", 8, hardware="h100")
    world.complete(world.submit("a", model=BIG, batch={"global": 96}, workers={"min": 8}))
    return world


def target(change: TaskChange) -> Stage:
    assert change.target is not None
    return change.target


def measure(world: World, ratio: float, step: int = 8) -> None:
    """Report steps of the present layout that reach ``ratio`` times what the model says."""
    task = world.task()
    size = task.trained[task.generation]
    modelled = modelled_flop_per_s(task.spec, size, hardware_of(world.state, size.hardware))
    world.progress("a", step, flop_per_step(task.spec) / (modelled * ratio))


def replayed(world: World) -> None:
    report = verify_records(world.records)
    assert report.mismatches == []
    assert report.verified == report.plans
    assert Replayer(world.records).state_at() == world.state


def test_a_large_model_gets_a_layout_that_fits_with_its_tensor_groups_inside_nodes() -> None:
    world = gpus(4)
    task = world.task()
    layout = task.layout
    assert layout is not None
    assert layout.tensor > 1
    assert layout.pipeline > 1
    assert layout.world_size == len(task.members)
    predicted = predict(
        task.spec.model,
        global_batch=96,
        workers=layout.world_size,
        hardware="h100",
        **layout.model_dump(exclude={"data"}),
        interleave=1,
        recompute="none",
        sequence_parallel=False,
        distributed_optimizer=False,
        overlap=False,
    )
    assert predicted["fits"]
    assert predicted["memory_bytes"] <= profile("h100").memory_bytes
    for first in range(0, len(task.members), layout.tensor):
        assert len({node_of(worker) for worker in task.members[first : first + layout.tensor]}) == 1
    replayed(world)


def test_growth_that_changes_the_layout_moves_the_live_state() -> None:
    world = gpus(1)
    world.checkpoint(step=40)
    before = world.task()
    assert before.layout is not None
    plan = world.join("n1", 8, hardware="h100")
    change = change_of(plan)
    after = target(change).layout
    assert (after.tensor, after.pipeline) != (before.layout.tensor, before.layout.pipeline)
    assert after == layout_of(world.state, world.task(), 16)
    assert {m.worker for m in target(change).members if m.source == "live"} == set(before.members)
    assert {m.source for m in target(change).members} == {"live", "take"}
    assert change.survivors == list(before.members)
    assert not change.hold
    assert change.interrupted is None
    world.complete(plan)
    assert world.task().layout == after
    assert world.task().owners == world.task().members
    replayed(world)


def test_a_restart_keeps_the_layout() -> None:
    world = gpus(3)
    layout = world.task().layout
    # The present layout is measured slow; it stays until the count changes.
    measure(world, 0.5)
    assert target(change_of(world.exit(world.task().members[3]))).layout == layout


def test_a_task_that_stays_data_parallel_moves_in_place() -> None:
    world = World()
    world.join("n0", 2)
    world.complete(world.submit("a"))
    change = change_of(world.join("n1", 2))
    assert [m.source for m in target(change).members] == ["live", "live", "take", "take"]
    assert target(change).layout.data == 4


def test_measurements_of_two_layouts_change_what_a_count_gets() -> None:
    def course(slow: float) -> tuple[World, PlanDecided]:
        world = gpus(3)
        measure(world, slow)
        world.complete(world.lose("n2"))
        measure(world, 1.0, step=20)
        return world, world.join("n2", 8, hardware="h100")

    usual, plan = course(1.0)
    chosen = target(change_of(plan)).layout
    slow, plan = course(0.5)
    other = target(change_of(plan)).layout
    assert chosen.world_size == other.world_size == 24
    assert (other.tensor, other.pipeline) != (chosen.tensor, chosen.pipeline)
    # Seen again, it is chosen again: the measurement of this layout alone spoke against it.
    size = HardwareLayout("h100", chosen.tensor, chosen.pipeline, chosen.data)
    assert slow.task().measured[size] == -7
    assert usual.task().measured[size] == 0
    replayed(slow)
    replayed(usual)


def test_from_shards_to_one_whole_model_a_worker() -> None:
    """The replica that is left finishes the step as it is, and becomes two whole models."""
    world = World()
    world.join("n0", 2)
    world.join("n1", 2)
    world.complete(world.submit("a", model=NARROW, batch={"global": 2}))
    assert world.task().layout == layout_of(world.state, world.task(), 4)
    assert world.task().replica_size == 2
    change = change_of(world.lose("n1"))
    assert change.interrupted is not None
    assert change.interrupted.layout.world_size == 2
    assert target(change).layout.tensor * target(change).layout.pipeline == 1
    assert {m.source for m in target(change).members} == {"live"}
    assert (change.survivors, change.prepare, change.hold) == (["n0/0", "n0/1"], [], True)
    # A fault before that stage has formed: one worker has half of a model, and a snapshot has the other half.
    again = change_of(world.exit("n0/1"))
    assert again.interrupted is None
    assert {m.source for m in target(again).members} == {"live", "take"}
    assert not target(again).complete
    replayed(world)


def test_from_whole_models_to_shards_and_a_fault_on_the_way() -> None:
    world = World()
    world.join("n0", 2)
    world.complete(world.submit("a", model=NARROW, batch={"global": 2}))
    world.checkpoint(step=5)
    assert world.task().replica_size == 1
    world.join("n1", 2)
    assert world.task().replica_size == 2
    change = change_of(world.exit("n0/1"))
    assert change.interrupted is not None
    assert change.interrupted.layout.world_size == 1
    assert change.survivors == ["n0/0"]
    assert [m.worker for m in target(change).members if m.source == "live"] == ["n0/0"]
    assert target(change).layout.world_size == 4
    world.complete(world.lose("n1"))
    assert world.task().replica_size == 1
    assert world.task().owners == ("n0/0", "n0/1")
    replayed(world)


def test_a_paused_task_comes_back_in_whatever_layout_is_best() -> None:
    world = gpus(2)
    world.complete(world.lose("n0"))
    plan = world.lose("n1")
    assert change_of(plan).action == "pause"
    world.complete(plan)
    for name in ("n0", "n1", "n2"):
        plan = world.join(name, 8, hardware="h100")
        stage = target(change_of(plan))
        world.complete(plan)
    free = world.task().model_copy(update={"members": ()})
    assert stage.layout.world_size == 24
    assert table_of(world.state, free).layouts[24].world_size == 24
    replayed(world)


def test_what_comes_next_is_known_also_where_layouts_change() -> None:
    table = LookAhead()
    world = gpus(4, table.solve)
    measure(world, 0.8)
    misses = table.misses
    table.rebuild(world.state, world.now)
    first = world.lose("n3")
    assert target(change_of(first)).layout.world_size == 24
    world.lose("n0")
    assert (table.hits, table.misses) == (2, misses)
    replayed(world)
