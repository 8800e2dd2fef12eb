"""Slow workers, against brute force and by properties: exact, never better for being slower, replayed the same."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.placement.changes import keeps_state
from services.planner.problem.problem import build_problem
from services.planner.problem.slow_choices import MARGIN, Ranking, ranking
from services.planner.replay.replay import verify_records
from services.planner.state.cluster import Arrangement, State, node_of
from services.planner.state.deals_by_speed import deal_by_speed, equal_deal, slowdown_of_deal
from services.planner.state.slow_workers import slow_worker
from shared.events.union import WorkerSlowed
from shared.planning.solver import evaluate, solve_with_alternatives
from tests.examples import examples
from tests.planner.kit import World

SLOWDOWNS = [1.05, 1.2, 1.5, 2.0, 4.0]


def random_world(drawn: random.Random) -> World:
    """Two or three tasks on four to seven workers; some workers may be free."""
    world = World(mtbf_node_s=drawn.choice([3e2, 1e4, 1e6]))
    for index in range(drawn.randint(4, 7)):
        world.join(f"n{index}", 1)
    for name in "abc"[: drawn.randint(1, 3)]:
        limits = {"min": drawn.randint(1, 2), "max": drawn.choice([2, 3, 5])}
        world.complete(world.submit(name, weight=drawn.choice([1.0, 1.0, 3.0]), workers=limits))
    return world


def with_slow(world: World, slowdowns: dict[str, float]) -> State:
    """The world's state in which these workers are slow, before anything was done about it."""
    state = world.state
    for worker, slowdown in slowdowns.items():
        event = WorkerSlowed(
            **world.base(), node=node_of(worker), worker=worker, slowdown=slowdown, task="a", generation=1
        )
        state = slow_worker(state, event, world.now)
    return state


def members(world: World) -> list[str]:
    return [worker for name in sorted(world.state.tasks) for worker in world.state.tasks[name].members]


def ranked(world: World, state: State) -> Ranking:
    return ranking(state, world.now, solve_with_alternatives)


def brute_force(world: World, state: State, slowdowns: dict[str, float]) -> float:
    """The greatest objective over all sets of slow members that tasks leave out, each with the best of all counts."""
    best = float("-inf")
    tasks = {w: name for name, task in state.tasks.items() for w in task.members}
    for size in range(len(slowdowns) + 1):
        for left in combinations(slowdowns, size):
            used = {w: "" if w in left else tasks[w] for w in slowdowns}
            losing = [task for task in state.tasks.values() if set(left) & set(task.members)]
            if not all(keeps_state(task, set(task.live_owners) - set(left)) for task in losing):
                continue
            problem = build_problem(state.model_copy(update={"arrangement": Arrangement(used=used)}), world.now)
            of_way = float("-inf"), False
            ranges = [range(problem.workers + 1) for _ in problem.tasks]
            for counts in product(*ranges):
                if sum(counts) > problem.workers:
                    continue
                assignment = dict(zip((t.name for t in problem.tasks), counts, strict=True))
                kept = {t.name: sum(used[w] == t.name for w in used) for t in problem.tasks}
                healthy = problem.workers - sum(kept.values())
                goes = sum(max(0, assignment[name] - kept[name]) for name in assignment) <= healthy
                found = evaluate(problem, assignment, "")
                for posed, term in zip(problem.tasks, found.terms, strict=True):
                    allowed = term.workers <= posed.maximum
                    if not allowed or (posed.required and term.waf_flop_per_s <= 0.0):
                        break
                else:
                    of_way = max(of_way, (found.objective, goes))
            best = max(best, of_way[0] if of_way[1] else best)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_best_way_to_leave_out_members_is_that_of_brute_force(seed: int) -> None:
    """Sets of slow members between two limits are never better, so it is enough to weigh the limits."""
    drawn = random.Random(seed)
    world = random_world(drawn)
    chosen = drawn.sample(sorted(members(world)), min(drawn.randint(1, 3), len(members(world))))
    slowdowns = {worker: drawn.choice(SLOWDOWNS) for worker in chosen}
    state = with_slow(world, slowdowns)
    ways = ranked(world, state).choices
    choices = [c for c in ways if c.label != "last-resort" and not c.arrangement.dealt]
    assert max(c.solution.objective for c in choices) == brute_force(world, state, slowdowns)


@settings(deadline=None, derandomize=True, max_examples=examples(25))
@given(st.integers(0, 1 << 30))
def test_no_way_to_use_a_worker_is_worth_more_if_the_worker_is_slower(seed: int) -> None:
    """The best value of each way, and the WAF of any counts in it, never rise with a slowdown."""
    drawn = random.Random(seed)
    world = random_world(drawn)
    chosen = drawn.sample(sorted(members(world)), min(drawn.randint(1, 2), len(members(world))))
    other = {worker: drawn.choice(SLOWDOWNS) for worker in chosen[1:]}
    used = {worker: drawn.choice([*sorted(world.state.tasks), ""]) for worker in chosen}
    values, wafs = [], []
    counts: dict[str, int] = {}
    for slowdown in SLOWDOWNS:
        state = with_slow(world, {**dict.fromkeys(chosen[:1], slowdown), **other})
        problem = build_problem(state.model_copy(update={"arrangement": Arrangement(used=used)}), world.now)
        best, _ = solve_with_alternatives(problem)
        counts = counts or best.assignment
        values.append(best.objective)
        wafs.append(evaluate(problem, counts, "").total_waf_flop_per_s)
    assert values == sorted(values, reverse=True)
    assert wafs == sorted(wafs, reverse=True)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_taken_is_the_best_or_within_the_margin(seed: int) -> None:
    drawn = random.Random(seed)
    world = random_world(drawn)
    slow = drawn.sample(sorted(members(world)), min(2, len(members(world))))
    found = ranked(world, with_slow(world, {worker: drawn.choice(SLOWDOWNS) for worker in slow}))
    first = found.choices[0].solution
    best = max(choice.solution.objective for choice in found.choices)
    assert best - first.objective <= MARGIN * sum(term.reward for term in first.terms) * (1 + 1e-12)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([1.0, *SLOWDOWNS]), min_size=1, max_size=4), st.integers(0, 8))
def test_a_deal_by_speed_is_the_best_of_all(slowdowns: list[float], more: int) -> None:
    micro_batches, replicas = len(slowdowns) + more, len(slowdowns)
    shares = deal_by_speed(micro_batches, slowdowns)
    assert (len(shares), sum(shares), min(shares) >= 1) == (replicas, micro_batches, True)
    every = (s for s in product(range(1, more + 2), repeat=replicas) if sum(s) == micro_batches)
    assert slowdown_of_deal(shares, slowdowns) == min(slowdown_of_deal(s, slowdowns) for s in every)
    assert slowdown_of_deal(shares, slowdowns) >= 1.0
    assert deal_by_speed(micro_batches, [1.0] * replicas) == equal_deal(micro_batches, replicas)


@pytest.mark.parametrize("seed", range(6))
def test_random_courses_are_replayed_the_same(seed: int) -> None:
    """Slow workers come and go amid losses, joins and drains; no worker has two tasks, and replay agrees."""
    drawn = random.Random(seed)
    world = random_world(drawn)
    for _ in range(14):
        nodes = sorted(world.state.nodes)
        node = drawn.choice(nodes)
        usable = world.state.nodes[node].usable
        match drawn.randrange(8):
            case 0 if usable:
                world.complete(world.lose(node))
            case 1 | 2 if not usable:
                world.complete(world.join(node, 1))
            case 3 if usable:
                world.complete(world.drain(node))
            case 4:
                plan = world.slow(f"{node}/0", 1.0)
                world.complete(plan) if plan is not None else None
            case 5 if any(slow.trial for slow in world.state.slow.values()):
                world.complete(world.end_trial())
            case _:
                plan = world.slow(f"{node}/0", drawn.choice(SLOWDOWNS))
                if plan is not None and drawn.random() < 0.8:
                    world.complete(plan)
        given_out = members(world)
        assert len(given_out) == len(set(given_out))
    report = verify_records(world.records)
    assert (report.mismatches, report.problems) == ([], [])
