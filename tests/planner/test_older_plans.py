"""Plans of another decider: an honest older log passes, deciders never fall, a newer decider is refused.

The program is taken to be one decider further than it is, so that the plans it makes here are older ones.
"""

from __future__ import annotations

import pytest

from services.planner import decide
from services.planner.decide import DECIDER
from services.planner.replay.log_fold import Fold
from services.planner.replay.replay import Replayer, verify_records
from shared.events.union import PlanDecided, Recorded, StateMoved, derived_id
from tests.planner.kit import World, answers_to, recorded_answers, running
from tests.planner.test_replay import changed, course

# ---- honest logs


def test_an_honest_log_passes_as_older() -> None:
    records = course().records
    report = Replayer(records, decider=DECIDER + 1).verify()
    assert report.mismatches == []
    assert (report.verified, report.older, report.ok) == (0, 11, True)


def test_a_log_that_two_deciders_wrote_is_verified_in_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    world = running()
    plans = world.state.plans
    monkeypatch.setattr(decide, "DECIDER", DECIDER + 1)
    world.complete(world.lose("n1"))
    report = Replayer(world.records, decider=DECIDER + 1).verify()
    assert report.mismatches == []
    assert (report.verified, report.older, report.ok) == (1, plans, True)


def continued(records: list[Recorded]) -> World:
    """A world that goes on where the records end."""
    world = World()
    world.records, world.fold = list(records), Fold()
    answers = recorded_answers(records)
    for record in records:
        if world.fold.take(record):
            world.fold.answer(record, [answer.event for answer in answers_to(record, answers)])
    return world


def test_the_fold_goes_on_with_the_recorded_plan_of_an_older_decider(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older planner gave the ranks to the workers in the reverse order: what follows is decided in that state."""
    world = World()
    world.join("n0")
    world.join("n1")
    world.submit("a")
    plan = world.records[-1].event.model_dump(mode="json")
    members = plan["changes"][0]["target"]["members"]
    for member, other in zip(members, reversed([dict(member) for member in members]), strict=True):
        member |= {"worker": other["worker"], "node": other["node"]}
    world.records[-1] = changed(world.records[-1], changes=plan["changes"])

    monkeypatch.setattr(decide, "DECIDER", DECIDER + 1)
    world = continued(world.records)
    recorded = world.records[-1].event
    assert isinstance(recorded, PlanDecided)
    world.complete(recorded)
    answer = world.exit("n1/1")
    assert answer.changes[0].survivors == ["n0/1", "n1/0", "n0/0"]
    report = Replayer(world.records, decider=DECIDER + 1).verify()
    assert report.mismatches == []
    assert (report.verified, report.older) == (1, 3)


def test_an_older_planner_may_leave_unanswered_what_this_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    world = course()
    last = [i for i, r in enumerate(world.records) if isinstance(r.event, PlanDecided)][-1]
    cause = world.records.pop(last - 1)
    plan = world.records.pop(last - 1)
    assert isinstance(plan.event, PlanDecided)
    assert plan.event.cause == cause.event.event_id
    name = plan.event.plan
    records = [r for r in world.records if not (isinstance(r.event, StateMoved) and r.event.plan == name)]
    assert Replayer(records, decider=DECIDER + 1).verify().ok


# ---- the order of deciders


def numbered(records: list[Recorded], numbers: list[int]) -> list[Recorded]:
    """The records with these deciders at the plans, the last one for the rest."""
    plans = [i for i, r in enumerate(records) if isinstance(r.event, PlanDecided)]
    records = list(records)
    for number, at in enumerate(plans):
        records[at] = changed(records[at], decider=numbers[min(number, len(numbers) - 1)])
    return records


def test_a_decider_never_falls() -> None:
    numbers = [DECIDER, DECIDER + 1, DECIDER]
    report = Replayer(numbered(course().records, numbers), decider=DECIDER + 2).verify()
    assert not report.ok
    assert any(f"decider {DECIDER} after a plan of decider {DECIDER + 1}" in m.problem for m in report.mismatches)


def test_a_newer_decider_is_refused_with_both_numbers() -> None:
    report = verify_records(numbered(course().records, [DECIDER, DECIDER + 1]))
    assert (report.ok, report.verified, report.older) == (False, 1, 0)
    assert len(report.mismatches) == report.plans - 1
    assert f"decider {DECIDER + 1} is newer than this program's, {DECIDER}" in report.mismatches[0].problem


# ---- forged records beside the plan


def judged(records: list[Recorded]) -> list[str]:
    """What the verification by a program of the next decider complains of."""
    report = Replayer(records, decider=DECIDER + 1).verify()
    assert report.ok == (not report.mismatches)
    return [mismatch.problem for mismatch in report.mismatches]


def test_a_task_stops_at_its_newest_checkpoint_only() -> None:
    records = course().records
    at = next(i for i, r in enumerate(records) if r.event.type == "task.stopped")
    records[at] = changed(records[at], step=77)
    assert any("stops elsewhere than at its newest checkpoint" in problem for problem in judged(records))


def test_only_tasks_that_are_stopping_stop_beside_a_plan() -> None:
    records = course().records
    at = next(i for i, r in enumerate(records) if r.event.type == "task.stopped")
    records[at] = changed(records[at], task="a")
    assert any("of no task that is stopping" in problem for problem in judged(records))


@pytest.mark.parametrize(
    ("index", "problem"), [(1, "beside the plan, of no task"), (7, "nothing in the log calls for it")]
)
def test_a_cause_has_one_plan(index: int, problem: str) -> None:
    records = course().records
    last = next(r for r in reversed(records) if isinstance(r.event, PlanDecided))
    assert isinstance(last.event, PlanDecided)
    second = changed(last, event_id=derived_id(last.event.cause, "planner", index), plan="p99")
    records.append(second.model_copy(update={"position": len(records) + 1}))
    assert any(problem in text for text in judged(records))


def test_a_plan_comes_after_its_cause() -> None:
    records = running().records
    at = next(i for i, r in enumerate(records) if isinstance(r.event, PlanDecided))
    cause, plan = records[at - 1], records[at]
    records[at - 1] = plan.model_copy(update={"position": cause.position})
    records[at] = cause.model_copy(update={"position": plan.position})
    assert any("recorded before its cause" in problem for problem in judged(records))
