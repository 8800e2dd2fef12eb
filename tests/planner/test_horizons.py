"""D_running: the expected time to the next failure, and the bound by a task's remaining work."""

from __future__ import annotations

from services.planner.problem.problem import horizons_s
from services.planner.state.cluster import node_of
from shared.events.union import FaultInjected
from tests.planner.kit import World, running


def test_little_remaining_work_is_not_worth_a_move() -> None:
    world = running(nodes=2, steps=100)
    world.complete(world.lose("n1"))
    world.progress("a", step=99, step_s=0.01)
    assert world.join("n1").changes == []
    other = running(nodes=2)
    other.complete(other.lose("n1"))
    assert other.join("n1").changes != []


def test_what_a_move_may_cost_is_bounded_by_the_remaining_work() -> None:
    """Five minutes from its end, a task's D_running is five minutes, not the hours until the next failure."""
    world = running(nodes=1, steps=10_000)
    world.progress("a", step=1000, step_s=1.0)
    long = world.join("n1").problem
    world.progress("a", step=9700, step_s=1.0)
    short = world.join("n2").problem
    assert long is not None
    assert short is not None
    # The correction, and so the rate, is known to a power of 1.1; times lie on a grid of 1.1.
    assert 300 / 1.1**2 < short.tasks[0].running_s < 300 * 1.1
    assert 9000 / 1.1**2 < long.tasks[0].running_s < 9000 * 1.1
    assert horizons_s(world.state, world.now)["cpu"] > 200_000


def test_failures_seen_shorten_the_expected_time_between_them() -> None:
    world = running(nodes=4, steps=1_000_000, model={"layers": 9, "hidden": 999, "heads": 9, "sequence_length": 999})
    before = world.join("n4").problem
    after = world.lose("n4").problem
    assert before is not None
    assert after is not None
    # One failure more than the prior's one halves the mean; four nodes in place of five.
    assert 0.6 < after.tasks[0].running_s / before.tasks[0].running_s < 0.63


def test_faults_that_a_user_asks_for_are_no_failures_of_the_node() -> None:
    w = World(mtbf_node_s=1e6)
    for node in ("n0", "n1"):
        w.join(node, workers=2)
    w.complete(w.submit("a", steps=10**9, workers={"min": 1}))
    w.log(FaultInjected(**w.base(), fault="kill", task="a", rank=len(w.task().members) - 1))
    w.complete(w.lose(node_of(w.task().members[-1])))
    w.log(FaultInjected(**w.base(), fault="disconnect", node="n0"))
    w.wait(20.0)
    assert w.state.losses == 0
    lost = next(node for node in w.state.nodes.values() if not node.usable)
    w.complete(w.join(lost.name, workers=2))
    # Later losses are the node's own.
    w.wait(3600.0)
    w.complete(w.lose(lost.name))
    assert w.state.losses == 1
