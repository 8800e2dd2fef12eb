"""Plans that are compared in futures of the cluster: what pays when nodes come back, and when they do not."""

from __future__ import annotations

from typing import Any

import pytest

from services.api.plan_text import explain
from services.planner.courses import Course
from services.planner.decide import DECIDER, decide
from services.planner.futures import Future, Prospect, Step, prospect
from services.planner.lookahead import LookAhead
from services.planner.replay import Replayer
from services.planner.rollouts import is_sure
from services.planner.state import node_of
from services.planner.transition_costs import on_grid, transition_cost
from shared.events import FaultInjected, NodeJoined, PlanDecided
from shared.planning.solver import evaluate
from shared.plans import Problem, TaskProblem
from tests.planner.kit import World

ENDLESS = 10**9
"""Steps of tasks that outlast all futures."""


def world(outage_s: float, **parameters: Any) -> World:
    """Node n1 has been away three times; a heavy task a on n0 and n1, a light one b on n2 and n3.

    A transition takes ten minutes. Per second, a worker achieves 1.1 times as much weighted FLOP for a as for b.
    """
    w = World(**{"rollouts": 64, "transition_prior_s": 600.0, "mtbf_node_s": 1e6, **parameters})
    for node in ("n0", "n1"):
        w.join(node, workers=4)
    for _ in range(3):
        w.lose("n1")
        w.wait(outage_s)
        w.join("n1", workers=4)
        w.wait(1e5)
    w.complete(w.submit("a", weight=1.1, steps=ENDLESS, workers={"min": 1, "max": 8}))
    for node in ("n2", "n3"):
        w.join(node, workers=4)
    w.complete(w.submit("b", weight=1.0, steps=ENDLESS, workers={"min": 1, "max": 8}))
    w.wait(1e4)
    return w


def assigned(plan: PlanDecided) -> dict[str, int]:
    assert plan.solution is not None
    return plan.solution.assignment


def test_a_node_that_is_soon_back_is_waited_for() -> None:
    plan = world(300.0).lose("n1")
    assert assigned(plan) == {"a": 4, "b": 8}
    assert plan.outlook is not None
    assert plan.outlook.choices[0].label == "only-faulted-shrinks"
    assert is_sure(plan.outlook.choices[0])
    assert plan.outlook.returns_s["n1"] < 7200.0
    assert plan.alternatives[0].label == "best"


def test_a_node_that_stays_away_is_not_waited_for() -> None:
    plan = world(3e5).lose("n1")
    assert assigned(plan) == {"a": 8, "b": 4}
    assert plan.outlook is not None
    assert plan.outlook.choices[0].label == "best"
    assert plan.outlook.returns_s["n1"] > 86_400.0


def test_without_futures_a_plan_follows_the_objective_up_to_the_next_failure() -> None:
    w = world(300.0, rollouts=0)
    plan = w.lose("n1")
    assert assigned(plan) == {"a": 8, "b": 4}
    assert plan.outlook is None
    assert "outlook" not in plan.canonical()


def test_an_outage_that_lasts_longer_than_all_before_is_over_for_good() -> None:
    w = world(300.0)
    w.complete(w.lose("n1"))
    w.wait(6 * 3600.0)
    plan = w.lose("n0")
    assert plan.outlook is not None
    # One of four outages is known to be long now, so n0 may stay away, too; n1 is known to.
    assert 2.0 * plan.outlook.returns_s["n0"] < plan.outlook.returns_s["n1"]


def test_a_node_that_left_in_order_is_not_expected() -> None:
    w = world(300.0)
    plan = w.leave("n1")
    assert plan.outlook is not None
    assert plan.outlook.returns_s == {}


def test_plans_are_replayed_byte_for_byte() -> None:
    w = world(300.0)
    plan = w.lose("n1")
    report = Replayer(w.records).verify()
    assert report.ok, report.mismatches
    again = world(300.0).lose("n1")
    assert again.canonical() == plan.canonical()


def test_futures_follow_from_the_cause() -> None:
    w = world(300.0)
    plan = w.lose("n1")
    cause = next(r for r in w.records if r.event.event_id == plan.cause)
    other = cause.event.model_copy(update={"event_id": "another"})
    (decided,) = decide(_before(w, plan), other, cause.recorded_at)
    assert isinstance(decided, PlanDecided)
    assert decided.outlook is not None
    assert plan.outlook is not None
    assert decided.outlook.seed != plan.outlook.seed
    assert decided.outlook.choices != plan.outlook.choices
    # The decision does not hang on which futures were drawn.
    assert assigned(decided) == assigned(plan)


def _before(w: World, plan: PlanDecided) -> Any:
    """The state in which a plan, the last event of the log, was made."""
    records = w.records[: next(i for i, r in enumerate(w.records) if r.event.event_id == plan.event_id)]
    return Replayer(records).state_at()


def test_a_later_decider_accepts_the_plans_and_finds_forged_ones() -> None:
    w = world(300.0)
    plan = w.lose("n1")
    assert Replayer(w.records, decider=DECIDER + 1).verify().ok
    assert plan.outlook is not None
    taken, *others = plan.outlook.choices
    for forged, said in (
        ([taken.model_copy(update={"gain": -1.0}), *others], "may be chance"),
        ([others[0], taken], "by its futures the solution is"),
    ):
        outlook = plan.outlook.model_copy(update={"choices": forged})
        records = [
            r.model_copy(update={"event": plan.model_copy(update={"outlook": outlook})})
            if r.event.event_id == plan.event_id
            else r
            for r in w.records
        ]
        report = Replayer(records, decider=DECIDER + 1).verify()
        assert any(said in mismatch.problem for mismatch in report.mismatches), report.mismatches


def test_all_answers_are_solved_ahead() -> None:
    table = LookAhead()
    w = world(300.0)
    w.fold._solve = table.solve
    table.rebuild(w.state, w.now)
    misses = table.misses
    plan = w.lose("n1")
    assert plan.outlook is not None
    assert table.misses == misses
    assert plan.canonical() == world(300.0).lose("n1").canonical()
    w.wait(300.0)
    table.rebuild(w.state, w.now)
    w.join("n1", workers=4)
    assert table.misses == misses


@pytest.mark.parametrize(("losses", "suspects"), [(2, 0), (3, 1)])
def test_a_node_that_fails_three_times_soon_after_it_joins_is_suspect(losses: int, suspects: int) -> None:
    w = World(rollouts=64, mtbf_node_s=1e7)
    for node in ("n0", "n1"):
        w.join(node, workers=4)
    w.wait(1e7)
    w.join("n2", workers=4)
    w.complete(w.submit("a", steps=ENDLESS, workers={"min": 1}))
    for _ in range(losses):
        w.wait(200.0)
        w.complete(w.lose("n2"))
        w.complete(w.join("n2", workers=4))
    trusted, suspect = w.state.nodes["n0"], w.state.nodes["n2"]
    assert trusted.lives is None
    assert suspect.lives is not None
    assert sum(suspect.lives.ends) == losses
    known = prospect(w.state, "cpu", w.now)
    assert known is not None
    assert (known.nodes, len(known.suspects)) == (3 - suspects, suspects)
    # Once it has lasted, it counts as the others.
    w.wait(86_400.0)
    later = prospect(w.state, "cpu", w.now)
    assert later is not None
    assert (later.nodes, later.suspects) == (3, ())


def test_losses_within_a_minute_do_not_keep_a_task_from_growing_back() -> None:
    w = World(rollouts=32, transition_prior_s=30.0)
    for node in ("n0", "n1", "n2", "n3"):
        w.join(node, workers=1)
    w.complete(w.submit("a", steps=ENDLESS, workers={"min": 1, "max": 4}))
    for _ in range(6):
        w.wait(5.0)
        assert assigned(w.complete(w.lose("n3"))) == {"a": 3}
        w.wait(5.0)
        assert assigned(w.complete(w.join("n3", workers=1))) == {"a": 4}


def test_a_task_that_ends_soon_gets_all_that_it_can_use() -> None:
    # Its end is seconds away, futures reach over weeks: no loss on the way costs it anything.
    w = World(rollouts=32)
    for node in ("n0", "n1", "n2", "n3"):
        w.join(node, workers=1)
    assert assigned(w.submit("a", steps=60, workers={"min": 1, "max": 4})) == {"a": 4}


def test_faults_that_a_user_asks_for_are_no_failures_of_the_node() -> None:
    w = World(rollouts=4, mtbf_node_s=1e6)
    for node in ("n0", "n1"):
        w.join(node, workers=2)
    w.complete(w.submit("a", steps=ENDLESS, workers={"min": 1}))
    before = w.state
    w.log(FaultInjected(**w.base(), fault="kill", task="a", rank=len(w.task().members) - 1))
    w.complete(w.lose(node_of(w.task().members[-1])))
    w.log(FaultInjected(**w.base(), fault="disconnect", node="n0"))
    w.wait(20.0)
    assert w.state.losses == before.losses == 0
    lost = next(node for node in w.state.nodes.values() if not node.usable)
    w.complete(w.join(lost.name, workers=2))
    assert w.state.repairs == before.repairs
    # Later losses are the node's own.
    w.wait(3600.0)
    w.complete(w.lose(lost.name))
    assert w.state.losses == 1
    w.join(lost.name, workers=2)
    assert sum(w.state.repairs.ends) == 1


@pytest.mark.parametrize(("most", "labels"), [(0, set()), (1, {"spare-nodes-1"})])
def test_spare_nodes_are_weighed_as_far_as_allowed(most: int, labels: set[str]) -> None:
    w = World(rollouts=8, spare_nodes_max=most)
    for node in ("n0", "n1", "n2", "n3"):
        w.join(node, workers=4)
    w.submit("a", steps=ENDLESS, workers={"min": 1})
    plan = w.submit("b", steps=ENDLESS, workers={"min": 1})
    found = {other.label for other in plan.alternatives if other.label.startswith("spare")}
    assert found == labels


def task(name: str, rate: float, **fields: Any) -> TaskProblem:
    given: dict[str, Any] = {
        "name": name,
        "weight": 1.0,
        "necessary": 1,
        "maximum": 4,
        "current": 2,
        "staying": 2,
        "transition_s": 10.0,
        "newcomers_s": 5.0,
        "running_s": 1000.0,
        "throughput": {1: rate, 2: 2.0 * rate, 3: 3.0 * rate},
    }
    return TaskProblem(**{**given, **fields})


def test_the_value_of_a_future_by_hand() -> None:
    # Two nodes of one worker are lost to a: it had 3 workers of 5, one is left. b has 2.
    problem = Problem(workers=3, tasks=[task("a", 1.0, current=3, faulted=True, staying=1), task("b", 1.0)])
    keep = evaluate(problem, {"a": 1, "b": 2}, "keep")
    best = evaluate(problem, {"a": 2, "b": 1}, "best")
    known = Prospect(3, 1, 1e-3 / 3, (), (), (), running_s=1000.0, horizon_s=1000.0)
    course = Course(problem, known, 1000.0, [best, keep], [])
    nothing = Future([], [])
    # 3 FLOP/s for 1000 s; a pays 3 FLOP/s x 10 s, or 15 s with a newcomer, b 2 FLOP/s x 10 s.
    assert course.value(course.candidates[0], nothing) == 3000.0 - 3.0 * 15.0 - 2.0 * 10.0
    assert course.value(course.candidates[1], nothing) == 3000.0 - 3.0 * 10.0
    # At 400 s both nodes are back, and counts are as before: a grows, and b where it had shrunk. Then 5 FLOP/s.
    back = Future([Step(400.0, 2, 0.5)], [])
    first = 3.0 * 400.0 + 5.0 * 600.0
    assert course.value(course.candidates[0], back) == first - 65.0 - 2.0 * 15.0 - 1.0 * 15.0
    assert course.value(course.candidates[1], back) == first - 30.0 - 1.0 * 15.0


def test_a_task_achieves_and_costs_nothing_after_its_end() -> None:
    # a ends after 400 s, before the next failure is expected; b outlasts the future.
    problem = Problem(workers=5, tasks=[task("a", 1.0, current=3, running_s=400.0), task("b", 1.0)])
    best = evaluate(problem, {"a": 3, "b": 2}, "best")
    known = Prospect(5, 1, 1e-3 / 5, (), (), (), running_s=1000.0, horizon_s=1000.0)
    course = Course(problem, known, 1000.0, [best], [])
    earned = 3.0 * 400.0 + 2.0 * 1000.0
    assert course.value(0, Future([], [])) == earned
    # One of the two nodes that b has then is lost: half of its replicas, if it stays; a is no more.
    assert course.value(0, Future([Step(500.0, -1, 0.39)], [])) == earned - 2.0 * 15.0
    # One of the three others is lost.
    assert course.value(0, Future([Step(500.0, -1, 0.41)], [])) == earned
    # While a lasts, it pays as well: each is hit with the part of the nodes that it is on, and goes on as it is.
    both = course.value(0, Future([Step(300.0, -1, 0.5), Step(300.0, 1, 0.5)], []))
    assert both < earned


def test_a_free_node_that_is_lost_costs_nothing_and_one_in_use_a_replacement() -> None:
    problem = Problem(workers=4, tasks=[task("a", 1.0, current=3)])
    spare = evaluate(problem, {"a": 3}, "best")
    known = Prospect(4, 1, 1e-3 / 4, (), (), (), running_s=1000.0, horizon_s=1000.0)
    course = Course(problem, known, 1000.0, [spare], [])
    assert course.value(0, Future([Step(500.0, -1, 0.76)], [])) == 3000.0
    # One of three nodes in use is lost: a stays on 3 workers, a third of it is new; it stands still as a whole.
    assert course.value(0, Future([Step(500.0, -1, 0.74)], [])) == 3000.0 - 3.0 * 15.0
    assert course.value(0, Future([Step(500.0, -1, 0.76), Step(600.0, -1, 0.5), Step(700.0, 1, 0.5)], [])) == (
        3.0 * 600.0 - 3.0 * 10.0 + 3.0 * 300.0
    )


def test_a_plan_says_what_its_futures_are_and_what_they_say() -> None:
    text = explain(world(300.0).lose("n1"))
    assert "In the mean of 64 futures of" in text
    assert "node n1 is back after" in text
    assert "chosen: only-faulted-shrinks:" in text
    assert "more than best (+-" in text
    assert "best up to the next failure (a 8, b 4)" in text


def test_a_replica_over_several_workers_moves_by_memory_where_it_has_copies() -> None:
    def transition_s(**parameters: Any) -> float:
        w = World(storage_bytes_per_s=1e3, **parameters)
        w.join("n0", workers=4)
        w.complete(w.submit("a", steps=ENDLESS, parallel={"tensor": 2}, workers={"min": 2}))
        w.checkpoint("a", 5)
        w.progress("a", 100, 3.0)
        return w.solved(w.join("n1", workers=4)).tasks[0].transition_s

    # 95 steps since the checkpoint, 3 s each, and its state from slow storage.
    assert transition_s() > 95 * 3.0
    assert transition_s(memory_copies=True) <= 2.0


@pytest.mark.parametrize("divided", [False, True])
def test_a_fault_costs_half_the_interval_between_copies_where_only_they_complete_the_state(divided: bool) -> None:
    def transition_s(memory_every: int | None) -> float:
        w = World(transition_prior_s=2.0, memory_copies=True)
        for node in ("n0", "n1"):
            w.join(node, workers=2)
        parallel = {"tensor": 2, "distributed_optimizer": divided}
        w.complete(w.submit("a", steps=ENDLESS, parallel=parallel, workers={"min": 2}))
        w.progress("a", 100, 3.0, memory_every=memory_every)
        assert w.task().memory_every == memory_every
        before = transition_cost(w.state, w.task()).transition_s
        assert before <= 2.0, "nothing is lost where a healthy task moves"
        return w.solved(w.lose("n1")).tasks[0].transition_s

    assert transition_s(None) == transition_s(1) <= 2.0
    # Copies lie every 21 steps of 3 s; the other replica has all of a state that is not divided.
    assert transition_s(21) == (on_grid(2.0 + 30.0) if divided else transition_s(1))


def test_joins_are_valued_too() -> None:
    w = world(300.0)
    w.complete(w.lose("n1"))
    w.wait(300.0)
    plan = w.join("n1", workers=4)
    assert isinstance(w.records[-2].event, NodeJoined)
    assert plan.outlook is not None
    assert assigned(plan) == {"a": 8, "b": 8}
