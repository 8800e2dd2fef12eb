"""Costs: the formulas on cases worked out by hand, and the laws that hold for all."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.costs.charges import Charge, money, settle
from shared.costs.claims import (
    Claim,
    IncidentTimes,
    Part,
    failure_claims,
    planned_claims,
    start_claims,
    training_claims,
)
from shared.costs.intervals import union
from shared.costs.report import incident_cost
from shared.costs.settlement import PARTS, Amounts, add_worker_s, failure_worker_s, no_amounts
from shared.costs.span_claims import held_worker_s
from shared.events.plans import TaskChange, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import TaskFailed, TaskStopped, TaskSubmitted
from shared.tasks.specification import TaskState
from shared.views.documents import Impact, SpanKind
from tests.api.kit import START, Story, cost_of, cost_report, spec, stage

WORKERS = ["n0/0", "n0/1", "n1/0", "n1/1"]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


FAULT = IncidentTimes("i1", at(100), at(101))


def charge(claims: list[Claim]) -> dict[Part, float]:
    amounts = amounts_of(settle(claims))
    return {part: amounts[PARTS[part]] for part in Part}


def amounts_of(charges: Iterable[Charge]) -> Amounts:
    amounts = no_amounts()
    for one in charges:
        add_worker_s(amounts, one.claim, one.worker_s)
    return amounts


def test_a_restarted_worker_pays_until_restored_and_survivors_until_resumed() -> None:
    impact = Impact(
        task="gpt",
        before=WORKERS,
        after=WORKERS,
        survivors=WORKERS[:3],
        faulted=True,
        planned_at=at(102),
        resumed_at=at(105),
        drained_at=at(110),
        restored_at=at(112),
        closed_at=at(112),
        waf_flop_per_s=400.0,
    )
    claims = failure_claims(impact, FAULT, first=True, as_of=at(200))
    parts = charge(claims)
    assert parts[Part.DETECTION] == 4 * 1
    assert parts[Part.TRANSITION] == 3 * 4 + 1 * 11 + 3 * 2
    assert parts[Part.SUB_HEALTHY] == parts[Part.RECOMPUTE] == 0
    amounts = amounts_of(settle(claims))
    lost_s = failure_worker_s(amounts)
    assert amounts["lost_flop"] == pytest.approx(100.0 * lost_s)
    assert incident_cost(amounts, 3600.0).money == pytest.approx(lost_s)


def test_a_worker_the_plan_does_without_is_sub_healthy_from_resumed_to_restored() -> None:
    impact = Impact(
        task="gpt",
        before=WORKERS,
        after=WORKERS[:2],
        survivors=WORKERS[:3],
        faulted=True,
        planned_at=at(102),
        resumed_at=at(105),
        drained_at=at(110),
        restored_at=at(112),
        closed_at=at(112),
    )
    parts = charge(failure_claims(impact, FAULT, first=True, as_of=at(200)))
    assert parts[Part.SUB_HEALTHY] == 7
    assert parts[Part.TRANSITION] == 4 * 4 + 3 * 2


def test_recomputed_steps_are_apart_and_the_first_is_not_also_transition() -> None:
    impact = Impact(
        task="gpt",
        before=WORKERS,
        after=WORKERS,
        faulted=True,
        planned_at=at(102),
        restored_at=at(110),
        closed_at=at(110),
        steps_recomputed=5,
        step_s=2.0,
    )
    parts = charge(failure_claims(impact, FAULT, first=True, as_of=at(200)))
    assert parts[Part.RECOMPUTE] == 4 * 5 * 2
    assert parts[Part.TRANSITION] == 4 * (110 - 101 - 2)
    assert charge(failure_claims(impact, FAULT, first=True, as_of=at(114)))[Part.RECOMPUTE] == 4 * (2 + 4)


def test_a_healthy_task_that_a_plan_moves_pays_only_its_pause() -> None:
    impact = Impact(
        task="other",
        before=WORKERS,
        after=[*WORKERS, "n2/0"],
        survivors=WORKERS,
        planned_at=at(102),
        drained_at=at(110),
        restored_at=at(112),
        closed_at=at(112),
    )
    assert charge(failure_claims(impact, FAULT, first=True, as_of=at(200)))[Part.TRANSITION] == 4 * 2
    assert charge(planned_claims(impact, at(200)))[Part.PLANNED] == 4 * 2
    assert charge(start_claims(impact, "", at(200)))[Part.PLANNED] == 10
    assert charge(training_claims(impact, at(200)))[Part.TRAINING] == 5 * (200 - 112)


def test_survivors_that_finish_a_step_before_their_task_pauses_train_until_then() -> None:
    impact = Impact(
        task="gpt",
        before=WORKERS,
        survivors=WORKERS[:3],
        faulted=True,
        planned_at=at(102),
        resumed_at=at(104),
        closed_at=at(109),
    )
    assert charge(training_claims(impact, at(200)))[Part.TRAINING] == 3 * 5
    later = impact.model_copy(update={"until": at(150)})  # when the task starts again
    assert charge(training_claims(later, at(200)))[Part.TRAINING] == 3 * 5


def test_what_is_not_over_counts_up_to_now() -> None:
    impact = Impact(task="gpt", before=WORKERS, after=WORKERS, survivors=WORKERS[:3], faulted=True, planned_at=at(102))
    assert charge(failure_claims(impact, FAULT, first=True, as_of=at(107)))[Part.TRANSITION] == 4 * 6


def test_money_is_worker_hours_times_the_price() -> None:
    assert money(7200.0, 2.5) == 5.0


def test_two_incidents_that_overlap_share_no_second(story: Story) -> None:
    story.running().process_exit()
    story.at(103.5).error("i2", 102.5, task="gpt", worker="n1/0", node="n1", kind=ErrorKind.EXCEPTION)
    survivors = ["n0/0", "n0/1"]
    change = TaskChange(
        task="gpt",
        reason="another process ended",
        action="move",
        from_generation=2,
        survivors=survivors,
        failed=["n1/0", "n1/1"],
        hold=True,
        interrupted=stage(4, survivors, kind="interrupted"),
        prepare=["n1/0", "n1/1"],
        target=stage(5, WORKERS),
    )
    story.at(104).plan("p2", change, trigger=Trigger.ERROR, incident="i2", supersedes=["p1"])
    story.at(106).moved("p2", "gpt", "resumed", 4, step=92)
    story.at(109).moved("p2", "gpt", "drained", 4, step=94)
    story.at(110).moved("p2", "gpt", "restored", 5, step=95, complete=True)
    views = story.views()
    first, second = (cost_of(views, story.time(120), incident) for incident in ("i1", "i2"))
    # From 100 to 110 there are 40 worker-seconds; only the last two survivors trained in them, from 106 to 109.
    lost = sum(
        cost.detection_worker_s + cost.transition_worker_s + cost.sub_healthy_worker_s for cost in (first, second)
    )
    assert lost == pytest.approx(40 - 2 * 3)
    # i2 occurred at 102.5: from then on its detection comes before the transition of i1.
    assert second.detection_worker_s == pytest.approx(4 * 1.0)
    costs = cost_report(views, story.time(120))
    assert costs.sum_check.ok
    # Everything from the first plan at 2 to 120 is accounted for, and before that the workers had no task.
    assert costs.totals.worker_s == pytest.approx(4 * (120 - 2))
    assert costs.allocated_worker_s == pytest.approx(4 * 120)


def test_all_workers_of_a_task_that_pauses_after_a_fault_wait_at_the_cost_of_the_incident(story: Story) -> None:
    story.running()
    story.at(101).error("i1", 100, task="gpt", worker="n1/0", node="n1")
    survivors = WORKERS[:2]
    change = TaskChange(
        task="gpt",
        reason="no layout for fewer",
        action="pause",
        from_generation=1,
        survivors=survivors,
        failed=WORKERS[2:],
        hold=True,
        interrupted=stage(2, survivors, kind="interrupted"),
        release=survivors,
    )
    queued = {"gpt": "no layout for fewer"}
    story.at(102).plan("p1", change, trigger=Trigger.ERROR, incident="i1", queued=queued)
    story.at(104).moved("p1", "gpt", "resumed", 2, step=92)
    story.at(109).moved("p1", "gpt", "ended", 2, complete=True)
    views = story.views()
    assert (views.tasks["gpt"].state, views.tasks["gpt"].planned) == (TaskState.QUEUED, [])
    cost = cost_of(views, story.time(200), "i1")
    assert cost.detection_worker_s == pytest.approx(4 * 1)
    assert cost.transition_worker_s == pytest.approx(4 * 3)
    assert cost.sub_healthy_worker_s == pytest.approx(2 * (200 - 104) + 2 * (200 - 109))
    again = TaskChange(
        task="gpt",
        reason="a node returned",
        action="move",
        from_generation=2,
        prepare=WORKERS,
        target=stage(3, WORKERS, source="checkpoint"),
    )
    story.at(200).plan("p2", again, trigger=Trigger.NODE_RETURNED)
    story.at(203).moved("p2", "gpt", "restored", 3, complete=True, step=92)
    views = story.views()
    assert cost_of(views, story.time(300), "i1").sub_healthy_worker_s == pytest.approx(cost.sub_healthy_worker_s)
    costs = cost_report(views, story.time(300))
    assert costs.sum_check.ok
    assert costs.categories["transition_planned"] == pytest.approx(4 * (10 - 2) + 4 * 3)


def test_a_worker_that_trains_elsewhere_until_it_is_released_costs_its_new_task_nothing(story: Story) -> None:
    story.running()
    story.at(50).submit("other")
    give = TaskChange(
        task="gpt",
        reason="another task",
        action="move",
        from_generation=1,
        survivors=WORKERS[:2],
        release=WORKERS[2:],
        target=stage(2, WORKERS[:2]),
    )
    take = TaskChange(
        task="other",
        reason="submitted",
        action="move",
        from_generation=0,
        prepare=WORKERS[2:],
        target=stage(1, WORKERS[2:], source="initial"),
    )
    story.at(60).plan("p2", give, take)
    story.at(62).moved("p2", "gpt", "drained", 1, step=60)
    story.at(63).moved("p2", "gpt", "released", 1, step=60)
    story.at(65).moved("p2", "gpt", "restored", 2, step=61, complete=True)
    story.at(70).moved("p2", "other", "restored", 1, step=1, complete=True)
    views = story.views()
    costs = cost_report(views, story.time(100))
    by_task = {cost.task: cost for cost in costs.tasks}
    assert by_task["gpt"].training_worker_s == pytest.approx(4 * (62 - 10) + 2 * (100 - 65))
    assert by_task["gpt"].planned_worker_s == pytest.approx(4 * 8 + 2 * (65 - 62))
    assert by_task["other"].planned_worker_s == pytest.approx(2 * (70 - 62))
    assert by_task["other"].training_worker_s == pytest.approx(2 * 30)
    assert costs.totals.worker_s == pytest.approx(4 * (100 - 2))
    assert costs.sum_check.ok


spans = st.tuples(st.integers(0, 50), st.integers(0, 50))
claims = st.builds(
    lambda workers, span, part: Claim(tuple(workers), float(span[0]), float(span[1]), part, "gpt", "i1"),
    st.sets(st.sampled_from("abc")),
    spans,
    st.sampled_from(list(Part)),
)


times = st.lists(spans.map(lambda span: (float(span[0]), float(span[1]))).filter(lambda span: span[0] < span[1]))
allocations = st.none() | st.dictionaries(st.sampled_from("abc"), times.map(union))
"""Of some workers; None: everything is allocated."""


def inside(allocated: dict[str, list[tuple[float, float]]] | None, worker: str, second: int) -> bool:
    return allocated is None or any(start <= second < end for start, end in allocated.get(worker, ()))


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(claims, max_size=30), allocations)
def test_every_second_is_charged_once_to_the_first_claim_on_it(
    given_claims: list[Claim], allocated: dict[str, list[tuple[float, float]]] | None
) -> None:
    expected: dict[tuple[int, str], set[int]] = {}
    taken: set[tuple[str, int]] = set()
    for index, claim in enumerate(given_claims):
        for worker in claim.workers:
            for second in range(int(claim.start_s), int(claim.end_s)):
                if inside(allocated, worker, second) and (worker, second) not in taken:
                    taken.add((worker, second))
                    expected.setdefault((index, worker), set()).add(second)
    numbered = [claim._replace(incident=str(index)) for index, claim in enumerate(given_claims)]
    found: dict[tuple[int, str], set[int]] = {}
    for charge in settle(numbered, allocated):
        seconds = {second for start, end in charge.intervals for second in range(int(start), int(end))}
        assert charge.worker_s == len(charge.workers) * len(seconds)
        for worker in charge.workers:
            key = int(charge.claim.incident), worker
            assert key not in found
            found[key] = seconds
    assert found == expected
    assert held_worker_s(given_claims, allocated) == len(taken)


moments = st.floats(0, 1e4, allow_nan=False).map(at)
maybe = st.none() | moments
some_workers = st.lists(st.sampled_from(WORKERS), unique=True)
impacts = st.builds(
    Impact,
    task=st.just("gpt"),
    before=some_workers,
    after=some_workers,
    survivors=some_workers,
    faulted=st.booleans(),
    planned_at=moments,
    drained_at=maybe,
    resumed_at=maybe,
    restored_at=maybe,
    closed_at=maybe,
    until=maybe,
    steps_recomputed=st.integers(0, 100),
    step_s=st.floats(0, 100),
    waf_flop_per_s=st.floats(0, 1e15),
)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.tuples(impacts, moments, moments), max_size=4), moments)
def test_no_part_is_negative_and_the_parts_add_up(
    plans: list[tuple[Impact, datetime, datetime]], as_of: datetime
) -> None:
    everything: list[Claim] = []
    for index, (impact, occurred, detected) in enumerate(plans):
        everything += failure_claims(impact, IncidentTimes(f"i{index}", occurred, detected), first=True, as_of=as_of)
        everything += [*training_claims(impact, as_of), *start_claims(impact, "", as_of)]
    charges = settle(everything)
    assert all(charge.worker_s >= 0 for charge in charges)
    whole = amounts_of(charges)
    assert sum(whole[name] for name in PARTS.values()) == pytest.approx(held_worker_s(everything), abs=1e-3)
    by_incident = [
        amounts_of(charge for charge in charges if charge.claim.incident == f"i{index}") for index in range(len(plans))
    ]
    assert sum(map(failure_worker_s, by_incident)) == pytest.approx(failure_worker_s(whole))
    assert sum(incident_cost(one, 2.0).money for one in by_incident) == pytest.approx(incident_cost(whole, 2.0).money)
    assert sum(one["lost_flop"] for one in by_incident) == pytest.approx(whole["lost_flop"])


def test_flop_of_a_task_that_goes_on_from_its_checkpoint_count_each_update_once(story: Story) -> None:
    story.running()
    story.at(50).add(TaskStopped, task="gpt", generation=1, step=40, path="/c40")
    story.at(60).add(TaskSubmitted, task="gpt", spec=spec("gpt"), checkpoint="/c40", step=40)
    task = story.views().tasks["gpt"]
    assert task.flop(60) == pytest.approx(60 * task.update_flop)
    story.at(70).add(TaskFailed, task="gpt", generation=2, step=55, reason="broken")
    story.at(80).add(TaskSubmitted, task="gpt", spec=spec("gpt", batch={"global": 16}), checkpoint="/c40", step=40)
    again = story.views().tasks["gpt"]
    assert again.update_flop == 2 * task.update_flop
    assert again.flop(50) == pytest.approx(60 * task.update_flop)


def test_nodes_lost_together_have_one_plan_and_each_what_it_took(story: Story) -> None:
    """The node that is back first ends what its own incident costs, and no other's."""
    story.at(0).cluster()
    workers = [f"n{node}/{slot}" for node in range(4) for slot in range(2)]
    for name in ("n0", "n1", "n2", "n3"):
        story.node(name)
    story.at(1).submit()
    begin = TaskChange(
        task="gpt", reason="new", action="move", from_generation=0, prepare=workers, target=stage(1, workers)
    )
    story.at(2).plan("start", begin)
    story.at(10).moved("start", "gpt", "restored", 1, step=1, complete=True)
    story.at(20).progress("gpt", 11, 1.0, workers=8)
    lost: dict[str, Any] = {"kind": ErrorKind.NODE_LOST, "severity": Severity.SEV1, "method": Method.NODE_HEALTH}
    story.at(101).error("i2", 100, event_id="e2", node="n2", answered_with="e3", **lost)
    story.error("i3", 100, event_id="e3", node="n3", **lost)
    left = workers[:4]
    change = TaskChange(
        task="gpt",
        reason="lost",
        action="move",
        from_generation=1,
        survivors=left,
        failed=workers[4:],
        hold=True,
        target=stage(2, left),
    )
    story.plan("p1", change, trigger=Trigger.ERROR, incident="i3", beside=["i2"])
    story.at(104).moved("p1", "gpt", "restored", 2, step=92, incident="i3", complete=True)
    views = story.views()
    assert views.plans["p1"].incidents == ["i3", "i2"]
    for incident in ("i2", "i3"):
        found = views.incidents[incident]
        assert (found.plans, found.response) == (["p1"], "reconfigure")
        assert (found.planned_at, found.restored_at) == (story.time(101), story.time(104))
    assert views.incidents["i2"].attempts[0].plan == "p1"
    short = {span.incident: span for span in views.spans.values() if span.kind is SpanKind.SHORTFALL}
    assert {incident: span.workers for incident, span in short.items()} == {"i2": workers[4:6], "i3": workers[6:]}
    assert cost_of(views, story.time(150), "i2").lost_worker_s == pytest.approx(2 * 46)
    assert cost_of(views, story.time(150), "i3").lost_worker_s == pytest.approx(2 * 46)
    assert cost_report(views, story.time(150)).sum_check.ok
    story.at(160).node("n2")
    views = story.views()
    assert views.incidents["i2"].shortfalls == []
    assert len(views.incidents["i3"].shortfalls) == 1
    assert cost_report(views, story.time(200)).sum_check.ok
