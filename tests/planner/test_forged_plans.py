"""A forged plan does not pass as one of an older decider: each check of ``planner.invariants`` finds its forgery.

Each forgery changes one plan of a golden log in place, with a hash chain that is intact. The program is taken to be one
decider further, so that every plan of the log is older.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.planner.decide import DECIDER
from services.planner.replay.replay import Replayer
from services.planner.replay.verification import Report
from shared.events.plans import LoggedTable, Problem
from shared.events.union import EVENT, OLDEST_DECIDER
from shared.log.log import EventLog
from shared.planning.solver import evaluate
from tests.logs.kit import forge, golden_log, read_rows, restore

Event = dict[str, Any]
Forgery = Callable[[Event], None]

ROWS = read_rows(golden_log("every-event"))


def in_full(event: Event) -> Event:
    """Return a plan with each worker by itself, which is read as well as the runs of the log."""
    return EVENT.validate_python(event).model_dump(mode="json", by_alias=True)


PLANS = [in_full(json.loads(row["data"])) for row in ROWS if row["type"] == "plan.decided"]
TABLES = {digest: LoggedTable.model_validate(each) for plan in PLANS for digest, each in plan["tables"].items()}


def older(path: Path) -> Report:
    """The verification by a program of the next decider; the chain of the log must be intact."""
    log = EventLog(f"sqlite:///{path}", read_only=True)
    assert log.verify().ok
    records = list(log.read_all())
    log.close()
    return Replayer(records, decider=DECIDER + 1).verify()


def forged(tmp_path: Path, plan: Event, forgery: Forgery) -> Path:
    def change(event: Event) -> None:
        if event["event_id"] == plan["event_id"]:
            event |= in_full(event)
            forgery(event)

    return restore(forge(ROWS, change), tmp_path / "log.db")


def first(**fields: Any) -> Event:
    """The first plan of the log with these fields."""
    return next(plan for plan in PLANS if all(plan[name] == value for name, value in fields.items()))


def moving(source: str) -> Event:
    """The first plan that moves a task of which a member has its state from ``source``."""
    return next(
        plan
        for plan in PLANS
        if any(m["source"] == source for c in plan["changes"] if c["target"] for m in c["target"]["members"])
    )


def submitting(task: str) -> Event:
    """The first plan that changes this task."""
    return next(plan for plan in PLANS if plan["changes"] and plan["changes"][0]["task"] == task)


def target(plan: Event) -> Event:
    stage: Event = next(change["target"] for change in plan["changes"] if change["target"])
    return stage


def other_assignment(plan: Event) -> None:
    """Half the workers, with a solution that is worth what it says."""
    problem = Problem.model_validate(plan["problem"]).with_tables(TABLES)
    name = plan["changes"][0]["task"]
    solution = evaluate(problem, {**plan["solution"]["assignment"], name: 2}, "best")
    stage = target(plan)
    plan["solution"] = solution.model_dump(mode="json")
    stage["members"] = stage["members"][:2]
    stage["layout"]["data"] = 2
    plan["changes"][0]["prepare"] = [member["worker"] for member in stage["members"]]


def other_problem(plan: Event) -> None:
    """A problem in which half the workers are the best, with the digest of that problem."""
    problem = plan["problem"]
    posed = problem["tasks"][0]
    posed |= {"throughput": {"2": 9e12}, "table": "", "current_flop_per_s": None, "reload_s": None}
    plan["inputs_sha256"] = Problem.model_validate(problem).sha256()
    solution = evaluate(Problem.model_validate(problem), {posed["name"]: 4}, "best")
    plan["solution"] = solution.model_dump(mode="json")


def other_members(plan: Event) -> None:
    """A free worker in place of the one that the task ran on."""
    stage = target(plan)
    (member,) = stage["members"]
    node, slot = member["worker"].split("/")
    member["worker"] = f"{node}/{1 - int(slot)}"
    plan["changes"][0]["prepare"] = [member["worker"]]


def twice(plan: Event) -> None:
    stage = target(plan)
    stage["members"][1] |= {name: stage["members"][0][name] for name in ("worker", "node")}
    plan["changes"][0]["prepare"] = sorted({member["worker"] for member in stage["members"]})


def no_such_worker(plan: Event) -> None:
    stage = target(plan)
    stage["members"][0] |= {"worker": "n0/7", "node": "n0"}
    plan["changes"][0]["prepare"] = [member["worker"] for member in stage["members"]]


def no_such_node(plan: Event) -> None:
    stage = target(plan)
    stage["members"][0] |= {"worker": "n7/0", "node": "n7"}
    plan["changes"][0]["prepare"] = [member["worker"] for member in stage["members"]]


def old_generation(plan: Event) -> None:
    target(plan)["generation"] = plan["changes"][0]["from_generation"]


def other_generation(plan: Event) -> None:
    plan["changes"][0]["from_generation"] += 1
    target(plan)["generation"] += 1


def false_survivor(plan: Event) -> None:
    change = plan["changes"][0]
    change["survivors"] = [*change["survivors"], *change["prepare"]]
    change["prepare"] = []
    for member in target(plan)["members"]:
        member["source"] = "live"


def unsolved(plan: Event) -> None:
    plan |= {"problem": None, "solution": None, "alternatives": [], "inputs_sha256": ""}


def better_alternative(plan: Event) -> None:
    for name in ("objective", "reward"):
        plan["solution"]["terms"][0][name] *= 1.5
    plan["solution"]["objective"] *= 1.5


def in_stage(**fields: Any) -> Forgery:
    """Fields of the first target stage in place of those recorded."""
    return lambda plan: target(plan).update(fields)


def in_member(rank: int, /, **fields: Any) -> Forgery:
    """Fields of one member of the first target stage in place of those recorded."""
    return lambda plan: target(plan)["members"][rank].update(fields)


def in_problem(**fields: Any) -> Forgery:
    """Fields of the problem in place of those recorded."""
    return lambda plan: plan["problem"].update(fields)


def others_worker(plan: Event) -> None:
    """A worker of the task that runs beside the forged one."""
    neighbour = next(p for p in reversed(PLANS[: number(plan)]) if p["changes"] and p["changes"][0]["target"])
    taken = target(neighbour)["members"][0]
    in_member(0, worker=taken["worker"], node=taken["node"])(plan)


def number(plan: Event) -> int:
    """The plan's place among the plans, from 0."""
    return next(i for i, other in enumerate(PLANS) if other["event_id"] == plan["event_id"])


def of_pools() -> Event:
    """The first plan that moves a task where there are two kinds of hardware."""
    return next(p for p in PLANS if p["changes"] and p["problem"] and p["problem"]["pools"])


def all_take(plan: Event) -> None:
    for member in target(plan)["members"]:
        member["source"] = "take"


FORGERIES: dict[str, tuple[Event, Forgery, str]] = {
    "other assignment": (moving("initial"), other_assignment, "solved again, the objective is"),
    "other problem": (moving("initial"), other_problem, "solved again, the objective is"),
    "other members": (
        submitting("failing"),
        other_members,
        "contradicts it",
    ),
    "a worker twice": (moving("initial"), twice, "twice"),
    "a worker that its node does not have": (moving("initial"), no_such_worker, "no usable node has the workers n0/7"),
    "a node that never joined": (moving("initial"), no_such_node, "cannot be folded"),
    "a generation that does not rise": (moving("take"), old_generation, "do not rise"),
    "a generation left out": (moving("take"), other_generation, "from generation"),
    "a survivor without state": (moving("take"), false_survivor, "survivors that do not have its state"),
    "no problem": (moving("initial"), unsolved, "without a solution"),
    "a claimed objective": (moving("initial"), better_alternative, "is worth"),
    "another cause": (PLANS[2], lambda plan: plan.update(cause=PLANS[1]["cause"]), "its cause is"),
    "another trigger": (PLANS[2], lambda plan: plan.update(trigger="node-joined"), "its trigger is"),
    "another time": (
        PLANS[2],
        lambda plan: plan.update(occurred_at="2026-01-01T00:00:00Z"),
        "at the time of its cause",
    ),
    "another name": (PLANS[2], lambda plan: plan.update(plan="p77"), "the plan number"),
    "another incident": (first(trigger="error"), lambda plan: plan.update(incident="none"), "its incident is"),
    "no response": (first(trigger="error"), lambda plan: plan.update(response="none"), "its response is"),
    "a task forgotten": (
        next(p for p in PLANS if p["queued"]),
        lambda plan: plan.update(queued={}),
        "without workers are",
    ),
    "a worker of another task": (submitting("failing"), others_worker, "two tasks have the workers"),
    "a worker of another kind": (of_pools(), in_member(0, worker="n0/0", node="n0"), "of pool a100-80, on"),
    "another node": (moving("initial"), in_member(0, node="n1"), "not on the node of its worker"),
    "other ranks": (moving("initial"), in_member(0, rank=3), "its ranks are not"),
    "another layout": (
        moving("initial"),
        in_stage(layout={"tensor": 1, "pipeline": 1, "data": 3, "micro_batch": 1}),
        "4 members in a layout of 3",
    ),
    "state from nobody": (moving("initial"), all_take, "take state from nobody"),
    "more workers than there are": (moving("initial"), in_problem(workers=9), "its problem has 9 workers"),
    "a heavier task": (
        moving("initial"),
        lambda plan: plan["problem"]["tasks"][0].update(weight=7.0),
        "another task steady than the log",
    ),
    "an unknown task in the problem": (
        moving("initial"),
        lambda plan: plan["problem"]["tasks"][0].update(name="nobody"),
        "task nobody, which is not active",
    ),
    "an unknown task": (
        moving("initial"),
        lambda plan: plan["changes"][0].update(task="nobody"),
        "which was never submitted",
    ),
    "another action": (moving("initial"), lambda plan: plan["changes"][0].update(action="none"), "with a target stage"),
    "other processes": (moving("initial"), lambda plan: plan["changes"][0].update(prepare=[]), "prepared are not"),
    "another digest": (moving("initial"), lambda plan: plan.update(inputs_sha256="0"), "not the digest of its problem"),
    "half a solution": (moving("initial"), lambda plan: plan.update(solution=None), "a problem without a solution"),
    "a plan superseded that was done": (PLANS[2], lambda plan: plan.update(supersedes=["p1"]), "it supersedes"),
}


def test_the_log_passes_before_it_is_forged(tmp_path: Path) -> None:
    report = older(restore(forge(ROWS, lambda event: None), tmp_path / "log.db"))
    assert (report.ok, report.older) == (True, len(PLANS))


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_plan_does_not_pass_as_older(tmp_path: Path, name: str) -> None:
    plan, forgery, problem = FORGERIES[name]
    report = older(forged(tmp_path, plan, forgery))
    assert not report.ok
    assert report.older < report.plans
    assert any(problem in m.problem for m in report.mismatches), report.mismatches


def test_there_is_no_decider_before_the_first(tmp_path: Path) -> None:
    path = forged(tmp_path, PLANS[3], lambda plan: plan.update(decider=0))
    report = Replayer.of_file(path).verify()
    assert not report.ok
    assert report.problem is not None
    assert f"decider: Input should be greater than or equal to {OLDEST_DECIDER}" in report.problem.what
