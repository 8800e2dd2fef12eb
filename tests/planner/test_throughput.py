"""T(t, x) as modelled: what is fixed by the specification, and what the workers can do."""

from __future__ import annotations

import pytest

from services.planner.state.cluster import HardwareLayout
from services.planner.throughput.model import expected_kind, flop_per_step, hardware_of, modelled_flop_per_s, pins_of
from shared.planning.performance import Pins, profile
from tests.planner.kit import World, running, spec


def test_flop_of_a_step_is_that_of_the_model() -> None:
    a = spec()
    assert flop_per_step(a) == pytest.approx(72 * 32 * 2 * 32 * 32 * (1 + 32 / (6 * 32) + 257 / (12 * 2 * 32)) * 24)


def test_what_is_fixed_for_a_tasks_life_is_pinned() -> None:
    pins = pins_of(spec(batch={"global": 24, "micro": 3}))
    assert pins == Pins(None, None, 3, 1, "none", False, False, True, overlap=False)
    parallel = {"tensor": 2, "recompute": "full", "sequence_parallel": True, "distributed_optimizer": True}
    pins = pins_of(spec(parallel=parallel, script="own.py"))
    assert pins == Pins(2, None, 1, 1, "full", True, True, True, overlap=False)


def test_a_cpu_worker_has_the_configured_rate_and_others_that_of_their_profile() -> None:
    world = World()
    world.join("n0", 3)
    world.join("g0", 4, hardware="h100")
    assert hardware_of(world.state, "cpu") == profile("cpu")._replace(peak_flop_per_s=5e9, workers_per_node=3)
    assert hardware_of(world.state, "h100") == profile("h100")._replace(workers_per_node=4)
    assert hardware_of(world.state, "a100-40") == profile("a100-40")
    unknown = hardware_of(world.state, "of nobody's making")
    assert (unknown.name, unknown.peak_flop_per_s) == ("cpu", 5e9)


def test_most_nodes_say_how_many_workers_a_node_has() -> None:
    world = World()
    for index, workers in enumerate((8, 8, 4, 0)):
        world.join(f"n{index}", workers, hardware="h100")
    assert hardware_of(world.state, "h100").workers_per_node == 8
    # A lost node still counts, so that no table changes with it; one that comes back smaller does not.
    world.lose("n0")
    assert world.state.kinds == {"h100": {8: 2, 4: 1, 0: 1}}
    world.join("n0", 4, hardware="h100")
    assert world.state.kinds == {"h100": {8: 1, 4: 2, 0: 1}}
    assert hardware_of(world.state, "h100").workers_per_node == 4
    world.join("n0", 4, hardware="cpu")
    assert world.state.kinds == {"h100": {8: 1, 4: 1, 0: 1}, "cpu": {4: 1}}


def test_a_task_is_of_the_kind_of_its_workers_or_of_the_usual_one() -> None:
    world = World()
    assert expected_kind(world.state, running().task()) == "cpu"
    world.join("n0", 2)
    world.complete(world.submit("a"))
    for index in range(2):
        world.join(f"g{index}", 2, hardware="h100")
    world.submit("b", workers={"min": 20})
    assert (
        expected_kind(world.state, world.task("a"))
        == world.state.nodes[world.task("a").members[0].split("/")[0]].hardware
    )
    assert expected_kind(world.state, world.task("b")) == "h100"


def test_data_parallel_steps_last_as_long_as_the_most_loaded_replica() -> None:
    """12 micro-batches: 5 replicas do 3 rounds, as 4 do, and reduce over more."""
    a, cpu = spec(batch={"global": 12}), profile("cpu")
    rates = [modelled_flop_per_s(a, HardwareLayout("cpu", 1, 1, d), cpu) for d in (4, 5, 6)]
    assert rates[1] < rates[0] < rates[2]
