"""The ledger: each allocated worker-second has one kind, on histories worked out by hand."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from shared.costs.counterfactuals import other_answers_to
from shared.costs.report import NO_COST
from shared.events.plans import Problem, Response, Solution, TaskChange, TaskProblem, Term, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import (
    NodeCordoned,
    NodeDrained,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeReturned,
    TaskCheckpointed,
    TaskFinished,
)
from shared.interface.costs import Costs, Counterfactual
from tests.api.kit import PRICE, Story, cost_of, cost_report, other_answers, stage

HOUR_S = 3600.0
ALL = ["n0/0", "n0/1", "n1/0", "n1/1"]


def lose_n1(story: Story, after: list[str], incident: str = "i1", **fields: Any) -> None:
    """Node n1 is dead from second 100 on: detected at 102; the survivors go on at 104, the new stage at 110."""
    lost = {"node": "n1", "kind": ErrorKind.NODE_LOST, "severity": Severity.SEV1, "method": Method.NODE_HEALTH}
    story.at(102).error(incident, 100, **lost)
    change = TaskChange(
        task="gpt",
        reason="a node is lost",
        action="move" if after else "pause",
        from_generation=1,
        survivors=ALL[:2],
        failed=ALL[2:],
        hold=True,
        interrupted=stage(2, ALL[:2], kind="interrupted") if after else None,
        target=stage(3, after) if after else None,
    )
    story.at(102).plan("p1", change, trigger=Trigger.ERROR, response=Response.RECONFIGURE, incident=incident, **fields)
    if after:
        story.at(104).moved("p1", "gpt", "resumed", 2, incident=incident, step=91)
        story.at(108).moved("p1", "gpt", "drained", 2, incident=incident, step=92)
        story.at(110).moved("p1", "gpt", "restored", 3, incident=incident, step=93, complete=True)
    else:
        story.at(110).moved("p1", "gpt", "ended", 2, incident=incident, step=91, complete=True)


def kinds(report: Costs) -> dict[str, float]:
    """Return the kinds that have any time."""
    assert report.sum_check.ok
    assert sum(report.categories.values()) == pytest.approx(report.allocated_worker_s, abs=1e-6)
    return {kind: seconds for kind, seconds in report.categories.items() if seconds}


def test_a_node_that_is_dead_for_eight_hours_costs_eight_hours(story: Story) -> None:
    lose_n1(story.running(), ALL[:2])
    views = story.views()
    for hours in (1, 8):
        (row,) = cost_report(views, story.time(100 + hours * HOUR_S)).incidents
        assert row.detection_worker_s == 4 * 2
        assert row.transition_worker_s == 4 * 2 + 2 * 2
        assert row.sub_healthy_worker_s == row.lost_worker_s == pytest.approx(2 * (hours * HOUR_S - 4))
        of_node = 2 * hours * HOUR_S  # n1's two workers, through all kinds
        assert row.money == row.failure_money == pytest.approx((of_node + 2 * (2 + 2) + 2 * 2) * PRICE / 3600)
    end_s = 100 + 8 * HOUR_S
    report = cost_report(views, story.time(end_s))
    training_s = 4 * 90 + 2 * (108 - 104) + 2 * (end_s - 110)
    expected = {
        "detection": 8,
        "transition_incident": 12,
        "transition_planned": 4 * 8,
        "lost": 2 * (8 * HOUR_S - 4),
        "unscheduled": 4 * 1,
        "idle": 4 * 1,
        "useful": training_s,
    }
    assert kinds(report) == pytest.approx(expected)
    (task,) = report.tasks
    assert task.lost_worker_s == task.sub_healthy_worker_s == pytest.approx(2 * (8 * HOUR_S - 4))
    assert task.worker_s == pytest.approx(4 * (end_s - 2))


def test_a_node_stops_being_lost_when_it_joins_again(story: Story) -> None:
    lose_n1(story.running(), ALL[:2])
    story.at(1100).node("n1")
    (row,) = cost_report(story.views(), story.time(5000)).incidents
    assert row.lost_worker_s == pytest.approx(2 * (1100 - 104))


def test_an_isolated_node_is_lost_until_it_is_returned_and_a_lost_one_that_leaves_is_allocated_no_more(
    story: Story,
) -> None:
    story.running()
    n2 = story.at(30).node("n2").event
    n3 = story.node("n3").event
    assert isinstance(n2, NodeJoined)
    assert isinstance(n3, NodeJoined)
    isolated = {"kind": ErrorKind.BROKEN_LINK, "severity": Severity.SEV1, "method": Method.NODE_HEALTH}
    story.at(50).error("i2", 48, node="n2", **isolated)
    story.at(50).error("i3", 45, node="n3", **isolated | {"kind": ErrorKind.NODE_LOST})
    story.at(250).add(NodeReturned, node="n2", incarnation=n2.incarnation)
    story.at(350).add(NodeLeft, node="n3", incarnation=n3.incarnation, reason="removed")
    report = cost_report(story.views(), story.time(1000))
    i2, i3 = report.incidents
    assert (i2.detection_worker_s, i2.lost_worker_s) == (2 * 2, 2 * 200)
    assert (i3.detection_worker_s, i3.lost_worker_s) == (2 * 5, 2 * 300)
    assert report.allocated_worker_s == 4 * 1000 + 2 * 970 + 2 * 320
    # No task had them, so no task pays; in the totals they are.
    assert all(task.lost_worker_s == 0 for task in report.tasks)
    assert report.totals.sub_healthy_worker_s == 1000
    assert report.sum_check.ok


def test_present_workers_that_an_incident_leaves_unused_are_sub_healthy(story: Story) -> None:
    lose_n1(story.running(), [])
    report = cost_report(story.views(), story.time(1000))
    (row,) = report.incidents
    assert row.lost_worker_s == pytest.approx(2 * (1000 - 110))
    assert row.sub_healthy_worker_s == pytest.approx(4 * (1000 - 110))
    assert kinds(report)["sub_healthy"] == pytest.approx(2 * (1000 - 110))
    story.at(500).add(TaskFinished, task="gpt", generation=2, step=91, samples_sha256="s", parameters_path="/p")
    later = cost_report(story.views(), story.time(1000))
    # The task is gone: nothing would use the present workers, and the node is as lost as before.
    assert kinds(later)["sub_healthy"] == pytest.approx(2 * (500 - 110))
    assert later.incidents[0].lost_worker_s == pytest.approx(2 * (1000 - 110))
    assert later.tasks[0].lost_worker_s == pytest.approx(2 * (500 - 110))


@pytest.mark.parametrize(("weight", "kind"), [(0.5, "sub_healthy"), (2.0, "useful")])
def test_workers_that_an_incident_gives_to_a_task_of_lower_weight_are_sub_healthy(
    story: Story, weight: float, kind: str
) -> None:
    lose_n1(story.running(), [])
    story.at(120).submit("other", weight=weight, workers={"max": 2})
    target = stage(1, ALL[:2], source="initial")
    change = TaskChange(
        task="other", reason="submitted", action="move", from_generation=0, prepare=ALL[:2], target=target
    )
    story.at(120).plan("p2", change)
    before = cost_report(story.views(), story.time(120)).categories
    story.at(125).moved("p2", "other", "restored", 1, step=1, complete=True)
    after = cost_report(story.views(), story.time(1000))
    assert kinds(after)[kind] == pytest.approx(before[kind] + 2 * (1000 - 125))
    assert after.categories["transition_planned"] == before["transition_planned"] + 2 * 5


def test_free_workers_are_idle_while_a_task_could_use_more_and_unscheduled_otherwise(story: Story) -> None:
    story.running()
    joined = story.at(30).node("n2").event
    assert isinstance(joined, NodeJoined)
    story.at(40).add(NodeCordoned, node="n2", reason="firmware")
    story.at(60).add(NodeReturned, node="n2", incarnation=joined.incarnation)
    story.at(70).add(NodeDraining, node="n2", by="user", timeout_s=60.0)
    story.at(75).add(NodeDrained, node="n2")
    story.at(80).add(NodeDraining, node="n2", by="agent", timeout_s=60.0)  # it is drained already
    drained = kinds(cost_report(story.views(), story.time(1000)))
    # gpt could use eight workers. Free before 2: unscheduled until it is submitted at 1, then idle.
    assert drained["idle"] == 4 * 1 + 2 * (10 + 10)
    assert drained["unscheduled"] == 4 * 1 + 2 * (20 + 5)
    story.at(1000).add(TaskFinished, task="gpt", generation=1, step=91, samples_sha256="s", parameters_path="/p")
    ended = cost_report(story.views(), story.time(1500))
    assert kinds(ended)["unscheduled"] == drained["unscheduled"] + 4 * 500
    assert ended.allocated_worker_s == 4 * 1500 + 2 * 45
    assert ended.allocated_money == pytest.approx(ended.allocated_worker_s * PRICE / 3600)


def test_what_workers_of_another_kind_could_do_leaves_a_free_worker_unscheduled(story: Story) -> None:
    story.running()
    joined = {"incarnation": "x", "agent_pid": 1, "domain": "d", "workers": ["g0/0"], "hardware": "h100"}
    story.at(50).add(NodeJoined, node="g0", **joined)
    report = cost_report(story.views(), story.time(150))
    shares = {share.key: share for share in report.breakdowns["hardware"]}
    assert shares["h100"].categories["unscheduled"] == shares["h100"].allocated_worker_s == 100
    assert shares["cpu"].allocated_worker_s == 4 * 150


def test_breakdowns_name_node_task_cause_and_incident(story: Story) -> None:
    lose_n1(story.running(), ALL[:2])
    report = cost_report(story.views(), story.time(200))
    shares = {name: {share.key: share for share in part} for name, part in report.breakdowns.items()}
    assert shares["node"]["n1"].categories["lost"] == 2 * (200 - 104)
    assert shares["node"]["n0"].allocated_worker_s == 400
    assert shares["cause"]["node-lost"].categories["detection"] == 8
    assert shares["cause"]["task-submitted"].categories["transition_planned"] == 32
    assert shares["incident"].keys() == {"", "i1"}
    assert shares["task"]["gpt"].money == pytest.approx(4 * 198 * PRICE / 3600)


def test_a_window_and_its_days_and_weeks_have_the_time_that_lies_in_them(story: Story) -> None:
    lose_n1(story.running(), ALL[:2])
    views = story.views()
    day_s = 24 * HOUR_S
    report = cost_report(views, story.time(3 * day_s), period="day")  # the story begins at noon, on a Saturday
    assert [bucket.key for bucket in report.buckets] == ["2025-03-01", "2025-03-02", "2025-03-03", "2025-03-04"]
    assert [bucket.allocated_worker_s for bucket in report.buckets] == [4 * day_s / 2, 4 * day_s, 4 * day_s, 2 * day_s]
    assert report.buckets[1].categories["lost"] == 2 * day_s
    weeks = cost_report(views, story.time(3 * day_s), period="week").buckets
    assert [(week.key, week.allocated_worker_s) for week in weeks] == [
        ("2025-02-24", 4 * 1.5 * day_s),
        ("2025-03-03", 4 * 1.5 * day_s),
    ]
    hour = cost_report(views, story.time(3 * day_s), start=story.time(day_s), end=story.time(day_s + HOUR_S))
    assert kinds(hour) == {"lost": 2 * HOUR_S, "useful": 2 * HOUR_S}
    assert hour.incidents[0].money == pytest.approx(2 * PRICE)


def test_the_sum_check_fails_if_the_kinds_do_not_have_all_allocated_time(story: Story) -> None:
    lose_n1(story.running(), ALL[:2])
    views = story.views()
    (key,) = (key for key, span in views.spans.items() if span.node == "n0")
    views.spans[key] = views.spans[key].model_copy(update={"start": story.time(0) + timedelta(seconds=1)})
    check = cost_report(views, story.time(200)).sum_check
    assert check.allocated_worker_s == 800
    assert check.categories_worker_s == 798
    assert not check.ok


def test_the_loss_rate_is_a_robust_mean(story: Story) -> None:
    story.running(step_s=1.0)
    for second, step_s in ((30, 1.0), (40, 1.1), (50, 0.4)):  # the newest is 2.5 times too fast
        story.at(second).progress("gpt", second, step_s)
    lose_n1(story, ALL[:2])
    views = story.views()
    update = views.tasks["gpt"].update_flop
    assert views.plans["p1"].impacts["gpt"].waf_flop_per_s == pytest.approx(update / 1.0)
    (row,) = cost_report(views, story.time(1000)).incidents
    lost = row.detection_worker_s + row.transition_worker_s + row.sub_healthy_worker_s
    assert row.lost_flop == pytest.approx(lost * update / 4)


def test_the_loss_rate_of_a_count_that_was_not_measured_is_the_models(story: Story) -> None:
    story.running()
    problem = Problem(
        workers=4,
        tasks=[
            TaskProblem(
                name="gpt", weight=1, necessary=1, maximum=8, current=4, transition_s=1, running_s=1,
                throughput={2: 60.0, 4: 100.0}, correction=2.0,
            )
        ],
    )  # fmt: skip
    change = TaskChange(task="gpt", reason="r", action="move", from_generation=1, survivors=ALL, target=stage(2, ALL))
    story.at(30).plan("p0", change, problem=problem)
    story.at(31).moved("p0", "gpt", "restored", 2, step=20, complete=True)
    story.at(40).progress("gpt", 30, 1.0, generation=2)
    lose_n1(story, ALL[:2], problem=problem)
    third = TaskChange(task="gpt", reason="r", action="move", from_generation=3, survivors=ALL[:2], hold=True,
                       target=stage(4, ALL[:1]))  # fmt: skip
    story.at(150).error("i2", 149, node="n0", worker="n0/1", task="gpt")
    story.at(150).plan("p2", third, trigger=Trigger.ERROR, incident="i2")
    views = story.views()
    rate = views.plans["p1"].impacts["gpt"].waf_flop_per_s
    assert views.plans["p2"].impacts["gpt"].waf_flop_per_s == pytest.approx(rate * 60 / 100)


def solution(**waf: float) -> Solution:
    terms = [
        Term(name=name, workers=1, waf_flop_per_s=rate, reward=0, penalty=0, objective=0) for name, rate in waf.items()
    ]
    return Solution(label="best", assignment=dict.fromkeys(waf, 1), objective=0, terms=terms)


def test_what_is_achieved_is_measured_by_the_best_plan_on_all_allocated_workers(story: Story) -> None:
    story.running()
    story.at(25).plan("p0", solution=solution(gpt=100.0))
    story.at(95).progress("gpt", 90, 1.0)
    lose_n1(story, ALL[:2], solution=solution(gpt=60.0))  # the line stays: the node is allocated
    story.at(200).progress("gpt", 103, 1.0, generation=3)
    views = story.views()
    report = cost_report(views, story.time(210))
    step = views.tasks["gpt"].update_flop
    assert report.service.healthy_flop == pytest.approx(100.0 * (210 - 25))
    assert report.service.achieved_flop == pytest.approx(103 * step)
    assert report.service.waf_fraction == pytest.approx(103 * step / (100.0 * (210 - 25)))
    assert report.service.availability == pytest.approx(1 - 2 * (210 - 104) / 840)
    assert report.service.goodput_fraction == report.categories["useful"] / 840
    # From 10 to 102 it went from its first step to 90; from 110 to 210 from 93 to 103.
    last = cost_report(views, story.time(210), start=story.time(160))
    assert last.service.achieved_flop == pytest.approx(5 * step)
    assert last.service.healthy_flop == 100.0 * 50
    # It trained from 10 to 100, from 104 to 108 and from 110 on.
    assert report.tasks[0].ettr == pytest.approx((90 + 4 + 100) / (210 - 1))
    story.at(300).add(TaskFinished, task="gpt", generation=3, step=110, samples_sha256="s", parameters_path="/p")
    ended = cost_report(story.views(), story.time(500), period="day")
    assert ended.service.healthy_flop == 100.0 * (300 - 25)
    assert ended.buckets[0].service == ended.service


def test_counterfactuals_are_models_of_other_answers(story: Story) -> None:
    story.running()
    story.at(60).add(TaskCheckpointed, task="gpt", generation=1, step=50, path="/c50")
    story.at(95).progress("gpt", 90, 1.0)
    shrunk = solution(gpt=45.0, other=10.0).model_copy(update={"label": "only-faulted-shrinks"})
    lose_n1(story, ALL[:2], solution=solution(gpt=60.0, other=5.0), alternatives=[shrunk])
    views = story.views()

    def answers(now: float) -> dict[str, Counterfactual]:
        cost = cost_of(story.views(), story.time(now), "i1")
        made = other_answers(story.views(), story.time(now), "i1", cost)
        return {one.answer: one for one in made}

    restart = answers(200)["plain-restart"]
    # Found after 2 s; the start from nothing took 8 s; 40 steps of a second are not in the checkpoint.
    assert restart.worker_s == pytest.approx(4 * (2 + 8 + 40))
    assert restart.lost_flop == pytest.approx(views.tasks["gpt"].update_flop * (2 + 8 + 40))
    cost = cost_of(views, story.time(200), "i1")
    assert answers(200)["only-failed-task-shrinks"].lost_flop == pytest.approx(cost.lost_flop + (65 - 55) * (200 - 102))
    story.at(300).plan("p2", solution=solution(gpt=60.0))
    later = cost_of(story.views(), story.time(500), "i1")
    shrinks = answers(500)["only-failed-task-shrinks"]
    assert shrinks.lost_flop == pytest.approx(later.lost_flop + (65 - 55) * (300 - 102))
    assert shrinks.worker_s is None
    assert shrinks.assumptions


def test_to_wait_for_a_node_costs_until_it_is_back(story: Story) -> None:
    story.running()
    lose_n1(story, ALL[:2])

    def lost_s(now: float) -> float:
        found = {one.answer: one for one in other_answers(story.views(), story.time(now), "i1", NO_COST)}
        wait, restart = found["wait-for-the-node"], found["plain-restart"]
        still_s = ((wait.worker_s or 0.0) - (restart.worker_s or 0.0)) / len(ALL)
        update_flop = story.views().tasks["gpt"].update_flop  # of a second
        assert wait.lost_flop - restart.lost_flop == pytest.approx(update_flop * still_s)
        return still_s

    assert lost_s(200) == pytest.approx(200 - 102)
    story.at(250).node("n1")
    assert lost_s(300) == pytest.approx(250 - 102)
    story.at(400).node("n1")
    assert lost_s(500) == pytest.approx(250 - 102)


def test_there_is_no_counterfactual_where_the_log_says_too_little(story: Story) -> None:
    story.running().process_exit().process_restored()
    views = story.views()
    assert [one.answer for one in other_answers(views, story.time(), "i1", NO_COST)] == ["plain-restart"]
    plan = views.plans["p1"]
    unknown = plan.impacts["gpt"].model_copy(update={"start_s": 0.0})
    plan = plan.model_copy(update={"impacts": {"gpt": unknown}})
    others = other_answers_to(views.incidents["i1"], [plan])
    views.incidents["i1"] = views.incidents["i1"].model_copy(update={"other_answers": others})
    assert other_answers(views, story.time(), "i1", NO_COST) == []


def test_flop_is_shown_weighted_as_lost_flop_is(story: Story) -> None:
    story.at(0).cluster()
    story.submit("gpt", weight=4.0)
    story.progress("gpt", 10, 1.0)
    report = cost_report(story.views(), story.time(10))
    assert report.tasks[0].weighted_flop == report.totals.weighted_flop == 4.0 * report.tasks[0].flop > 0
