"""What counts by a task's weight counts by the weight that it had: FLOP, service level, shortfalls."""

from __future__ import annotations

import pytest

from shared.events.plans import Problem, Response, Solution, TaskChange, Term, Trigger
from shared.events.union import TaskChanged, TaskFinished, TaskStopped, TaskSubmitted
from shared.tasks.specification import TaskState
from shared.views.documents import SpanKind, SpanView, TaskView, Views
from shared.views.task_parts import Weighting, weighted_steps
from tests.api.kit import Story, cost_report, spec, stage


def changed(story: Story, **fields: object) -> None:
    present = {"weight": 1.0, "min_workers": 1, "max_workers": None, "requested_by": "uid/0"}
    story.add(TaskChanged, task="gpt", **{**present, **fields})


def progress(views: Views) -> list[SpanView]:
    return [span for span in views.spans.values() if span.kind is SpanKind.PROGRESS]


def flop_per_step(task: TaskView) -> float:
    return task.update_flop


@pytest.mark.parametrize(
    ("weightings", "first", "last", "wanted"),
    [
        ([], 0, 10, 20.0),
        ([(0, 1.0), (4, 3.0)], 0, 10, 4 + 18.0),
        ([(0, 1.0), (4, 3.0)], 0, 3, 3.0),  # back to a checkpoint
        ([(0, 1.0), (6, 3.0), (4, 5.0)], 0, 10, 4 + 30.0),  # changed again after it went back
        ([(5, 1.0), (6, 3.0)], 5, 5, 0.0),
    ],
)
def test_steps_count_by_the_weight_that_they_had(
    weightings: list[tuple[int, float]], first: int, last: int, wanted: float
) -> None:
    known = [Weighting(step=step, weight=weight) for step, weight in weightings]
    assert weighted_steps(known, first, last, 2.0) == wanted


def test_flop_before_and_after_a_change_have_their_weights(story: Story) -> None:
    story.running()
    story.at(50)
    changed(story, weight=4.0)
    story.at(70).progress("gpt", 21, 1.0)
    views = story.views()
    task = views.tasks["gpt"]
    assert (task.spec.weight, task.step) == (4.0, 21)
    assert task.weighted_flop(21) == flop_per_step(task) * (11 + 10 * 4)
    assert task.flop(21) == flop_per_step(task) * 21
    row = cost_report(views, story.time(70)).tasks[0]
    assert row.weighted_flop == task.weighted_flop(21)
    first, second = progress(views)
    assert (first.first_step, first.last_step, first.end) == (0, 11, story.time(50))
    assert (second.first_step, second.start) == (11, story.time(50))
    assert second.flop_per_step == 4 * first.flop_per_step
    report = cost_report(views, story.time(70))
    assert report.service.achieved_flop == pytest.approx(task.weighted_flop(21))
    assert report.sum_check.ok


def test_a_later_submission_keeps_the_weights_of_the_earlier_one(story: Story) -> None:
    story.running()
    story.at(50)
    changed(story, weight=4.0)
    story.at(70).progress("gpt", 21, 1.0)
    story.at(80).add(TaskStopped, task="gpt", generation=1, step=21, path="/c")
    before = story.views().tasks["gpt"].weighted_flop(21)
    story.at(90).add(TaskSubmitted, task="gpt", spec=spec(weight=2.0), checkpoint="/c", step=21)
    task = story.views().tasks["gpt"]
    assert task.weighted_flop(31) == before + 10 * 2 * flop_per_step(task)
    assert task.attempt == 2
    assert [one.last_step for one in story.views().attempts.values()] == [21]


def test_the_healthy_line_follows_while_a_node_is_away(story: Story) -> None:
    """The greatest part that a plan has given the task counts then: at its present weight."""
    story.running()
    term = Term(name="gpt", workers=4, waf_flop_per_s=100.0, reward=1, penalty=0, objective=1)
    best = Solution(label="best", assignment={"gpt": 4}, objective=1.0, terms=[term])
    story.at(30).plan("p", trigger=Trigger.NODE_JOINED, problem=Problem(workers=4, tasks=[]), solution=best)
    story.at(50)
    changed(story, weight=0.5)
    views = story.views()
    lines = [span for span in views.spans.values() if span.kind is SpanKind.HEALTHY]
    assert [line.waf for line in lines] == [{"gpt": 100.0}, {"gpt": 50.0}]
    assert (lines[0].end, lines[1].end) == (story.time(50), None)


def test_a_shortfall_counts_by_the_new_weight_from_the_change_on(story: Story) -> None:
    story.running()
    left = ["n0/0", "n0/1"]
    story.at(100).error("i1", 99, node="n1")
    change = TaskChange(
        task="gpt",
        reason="lost",
        action="move",
        from_generation=1,
        survivors=left,
        failed=["n1/0", "n1/1"],
        hold=True,
        target=stage(2, left),
    )
    story.at(101).plan("p1", change, trigger=Trigger.ERROR, response=Response.RECONFIGURE, incident="i1")
    story.at(110)
    changed(story, weight=3.0)
    views = story.views()
    first, second = [span for span in views.spans.values() if span.kind is SpanKind.SHORTFALL]
    assert (first.end, second.start, second.end) == (story.time(110), story.time(110), None)
    assert (first.weight, second.weight) == (1.0, 3.0)
    assert second.flop_per_worker_s == pytest.approx(3 * first.flop_per_worker_s)
    assert views.tasks["gpt"].shortfalls == views.incidents["i1"].shortfalls == [second.id]
    story.at(120)
    changed(story, weight=3.0, max_workers=2)  # what it lacks it may not have any more
    views = story.views()
    assert views.tasks["gpt"].shortfalls == views.incidents["i1"].shortfalls == []
    assert cost_report(views, story.time(130)).sum_check.ok


def test_a_change_of_limits_changes_the_demand(story: Story) -> None:
    story.running()
    assert story.views().tasks["gpt"].demand != ""
    story.at(50)
    changed(story, max_workers=4)
    assert story.views().tasks["gpt"].demand == ""


def test_an_ended_task_is_not_changed_by_a_late_event(story: Story) -> None:
    story.running()
    story.at(50).add(TaskFinished, task="gpt", generation=1, step=100, samples_sha256="s", parameters_path="/p")
    changed(story, weight=9.0)
    task = story.views().tasks["gpt"]
    assert (task.state, task.spec.weight, task.weightings) == (TaskState.SUCCEEDED, 1.0, [])
