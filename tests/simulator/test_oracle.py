"""The oracle: against values by hand, against all divisions of a small cluster, and against policies that run."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.throughput.tables import STAYING, throughput_of
from shared.planning.performance import profile
from shared.tasks.specification import TaskSpec, Workers
from simulator.oracle import NAME, Bound, Capacity, capacities, oracle, task_rates
from simulator.policies import POLICIES
from simulator.run.engine import simulate
from simulator.workloads.paper_tasks import task
from simulator.workloads.paper_workloads import workload
from simulator.workloads.random_workloads import random_workload
from simulator.workloads.trace import Occurrence, Trace
from simulator.workloads.workload import Workload
from tests.examples import examples
from tests.planner.kit import World

HARDWARE = "a800-80"
NODES = ("n0", "n1", "n2")


def of(*occurrences: Occurrence, tasks: tuple[TaskSpec, ...] = (task("a", "1.3B"),), present: int = 3) -> Workload:
    trace = Trace("given", NODES, present, occurrences, 1000.0)
    return Workload("given", trace, tasks, HARDWARE)


def fastest(spec: TaskSpec, workers: int) -> float:
    """T of the fastest layout on up to so many workers."""
    rates = task_rates(spec, HARDWARE, 8, 5e9, 64).fastest
    return max(rate for count, rate in rates.items() if count <= workers)


def test_one_task_by_hand() -> None:
    """24 workers for 400 s, 16 for 500 s, 24 again."""
    found = oracle(of(Occurrence(400.0, "n1", "down"), Occurrence(500.0, "n0", "error"), Occurrence(900.0, "n1", "up")))
    whole, less = fastest(task("a", "1.3B"), 24), fastest(task("a", "1.3B"), 16)
    assert found.policy == NAME
    assert [(point.at_s, point.waf_flop_per_s) for point in found.waf] == [(0.0, whole), (400.0, less), (900.0, whole)]
    assert found.accumulated_waf_flop == pytest.approx(500 * whole + 500 * less)
    assert found.allocated_worker_s == 24 * 500 + 16 * 500


def test_the_oracle_that_admits_leaves_no_task_without_workers() -> None:
    """The heavy task would make more of all workers; the light one gets its least number first."""
    case = of(tasks=(task("heavy", "7B", weight=4.0), task("light", "7B", weight=0.1)), present=2)
    heavy, light = case.tasks
    assert oracle(case).waf[0].waf_flop_per_s == pytest.approx(4.0 * fastest(heavy, 16))
    both = 4.0 * fastest(heavy, 8) + 0.1 * fastest(light, 8)
    assert oracle(case, admits=True).waf[0].waf_flop_per_s == pytest.approx(both)
    alone = of(tasks=case.tasks, present=1)
    assert oracle(alone, admits=True).waf == oracle(alone).waf, "only one of the two fits, and that is the heavy one"


def test_what_is_there() -> None:
    found = capacities(
        of(
            Occurrence(1.0, "n2", "up"),
            Occurrence(2.0, "n0", "degraded", slowdown=2.0),
            Occurrence(3.0, "n1", "down"),
            Occurrence(3.0, "n1", "up"),
            Occurrence(4.0, "n0", "down"),
            Occurrence(5.0, "n0", "degraded", slowdown=2.0),
            present=2,
        )
    )
    assert found == [
        (0.0, Capacity(16, 16.0)),
        (1.0, Capacity(24, 24.0)),
        (2.0, Capacity(24, 20.0)),
        (4.0, Capacity(16, 16.0)),
    ]


@given(workers=st.integers(0, 24), weight=st.sampled_from([0.5, 1.0, 3.0]), least=st.sampled_from([1, 8, 16]))
@settings(max_examples=examples(25), derandomize=True)
def test_is_the_best_of_all_divisions(workers: int, weight: float, least: int) -> None:
    light = task("a", "1.3B")
    heavy = task("b", "7B", weight=weight).model_copy(update={"workers": Workers(min=least, max=20)})
    bound = Bound(of(tasks=(light, heavy)))
    rates = {spec.name: task_rates(spec, HARDWARE, 8, 5e9, 24).fastest for spec in (light, heavy)}

    def waf(spec: TaskSpec, count: int) -> float:
        return spec.weight * rates[spec.name].get(count, 0.0) if count >= spec.workers.min else 0.0

    divisions = ((a, b) for a, b in itertools.product(range(25), range(21)) if a + b <= workers)
    best = max(waf(light, a) + waf(heavy, b) for a, b in divisions)
    assert bound.waf_flop_per_s(Capacity(workers, float(workers))) == pytest.approx(best, rel=1e-12)


@given(slow=st.integers(0, 24), slowdown=st.sampled_from([1.01, 1.5, 4.0]))
@settings(max_examples=examples(40), derandomize=True)
def test_slow_workers_are_worth_less(slow: int, slowdown: float) -> None:
    """The bound lies between that without the slow workers and that with healthy ones, and bounds every equal deal."""
    tasks = (task("a", "1.3B"), task("b", "7B", weight=2.0))
    bound = Bound(of(tasks=tasks))
    found = bound.waf_flop_per_s(Capacity(24, 24 - slow + slow / slowdown))
    full = bound.waf_flop_per_s(Capacity(24, 24.0))
    assert bound.waf_flop_per_s(Capacity(24 - slow, 24.0 - slow)) <= found * (1 + 1e-12)
    assert found <= full
    assert full / slowdown <= found * (1 + 1e-12)


@pytest.mark.parametrize("size", ["1.3B", "7B", "13B"])
def test_no_table_of_the_planner_exceeds_the_rates(size: str) -> None:
    world = World()
    for index in range(8):
        world.join(f"n{index}", 8, hardware=HARDWARE)
    spec = task("a", size)
    world.complete(world.submit("a", **spec.model_dump(by_alias=True, exclude={"name"})))
    table = throughput_of(world.state, world.task(), 64)
    rates = task_rates(spec, HARDWARE, 8, 5e9, 64).fastest
    assert all(rates[count] / STAYING <= rate <= rates[count] * (1 + 1e-12) for count, rate in table.items())


RUNS = [
    *((name, seed) for seed, name in enumerate(POLICIES) if name != "unicron-paper"),
    ("unicron-paper", 6),
    *(pytest.param("unicron-paper", seed, marks=pytest.mark.slow) for seed in (3, 8, 10)),
]
"""Each policy once, and histories of slow nodes where no way to use them had room for all tasks."""


@pytest.mark.parametrize(("name", "seed"), RUNS)
def test_no_policy_is_above_the_oracle(name: str, seed: int) -> None:
    given_ = random_workload(seed)
    bound = oracle(given_).accumulated_waf_flop
    assert given_.endless
    assert simulate(given_, POLICIES[name], seed, costs=False).accumulated_waf_flop <= bound * (1 + 1e-9)


def test_the_paper_s_clusters() -> None:
    """No more than all GPUs at their peak, and more than a third of that: the model's rates for these tasks."""
    found = oracle(workload("trace-a", 0))
    peak = 128 * profile(HARDWARE).peak_flop_per_s * found.horizon_s
    assert 0.33 * peak < found.accumulated_waf_flop < peak
