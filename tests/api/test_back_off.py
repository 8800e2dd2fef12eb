"""What is shown of a task that waits after failures, and its resumption."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.api.live import LiveState
from services.api.plan_text import explain
from services.api.postmortem.standing import held_back as held_back_lines
from services.api.present import waits_for_storage
from services.api.troubles.causes import causes
from services.api.troubles.findings import read_findings
from shared.events.plans import Response, TaskChange, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, PlanDecided, TaskResultUnwritten, TaskResumeRequested
from shared.tasks.specification import TaskState
from shared.views.documents import TaskView
from shared.views.task_parts import TaskWait
from tests.api.kit import Server, Story, offline_gateway, restart, spec

UNTIL = datetime(2030, 1, 1, 12, tzinfo=UTC)
WHY = "it has failed 25 times without a new step"
TASK = "/v1/tasks/gpt"


def held_back() -> TaskChange:
    return restart().model_copy(update={"not_before": UNTIL, "reason": "restarted after 8 s"})


def task(story: Story) -> TaskView:
    return story.views().tasks["gpt"]


def test_a_wait_is_shown_until_the_processes_are_up(story: Story) -> None:
    story.running()
    story.at(20).error("i1", 20, task="gpt", worker="n0/0")
    story.plan("p1", held_back(), incident="i1", response=Response.RESTART)
    assert task(story).wait == TaskWait(reason="restarted after 8 s", until=UNTIL)
    story.at(21).moved("p1", "gpt", "resumed", 2, step=11)
    assert task(story).wait is not None
    story.at(30).moved("p1", "gpt", "prepared", 2)
    assert task(story).wait is None


def test_a_plan_says_until_when_it_waits(story: Story) -> None:
    plan = story.plan("p1", held_back(), trigger=Trigger.RESUME_REQUESTED).event
    assert isinstance(plan, PlanDecided)
    text = explain(plan)
    assert "starts processes on: n1/1, not before 12:00:00 UTC" in text
    assert text.startswith(
        "Plan p1 answers resume-requested, the request to try a task again that waits after failures"
    )


def test_a_newer_plan_has_a_wait_of_its_own(story: Story) -> None:
    story.running()
    story.plan("p1", held_back(), response=Response.RESTART)
    story.plan("p2", restart(), response=Response.RESTART)
    assert task(story).wait is None


def test_an_incident_whose_task_waits_says_what_to_do(story: Story) -> None:
    story.running()
    story.plan("p1", held_back(), response=Response.RESTART)
    assert held_back_lines([task(story)]) == [
        "gpt starts no process before 2030-01-01 12:00:00.000 UTC, since the same failure comes again: mend its cause; "
        "`unicron resume gpt` tries it at once."
    ]


def given_up(story: Story) -> None:
    story.running()
    story.at(20).error("i1", 20, task="gpt", worker="n0/0", evidence={"needs_operator": WHY})
    pause = TaskChange(task="gpt", reason="exception", action="pause", from_generation=1, failed=["n0/0", "n0/1"])
    story.plan("p1", pause, incident="i1", queued={"gpt": f"waits for its operator: {WHY}"})
    story.at(22).moved("p1", "gpt", "ended", 1, complete=True)


def test_a_task_that_is_given_up_is_queued_with_the_reason(story: Story) -> None:
    given_up(story)
    shown = task(story)
    assert (shown.state, shown.reason) == (TaskState.QUEUED, f"waits for its operator: {WHY}")
    assert shown.wait == TaskWait(reason=WHY, until=None)


def test_a_resumption_ends_a_wait(story: Story) -> None:
    given_up(story)
    story.at(30).add(TaskResumeRequested, task="gpt", actor="uid/0")
    assert task(story).wait is None


def lent(story: Story) -> None:
    story.running()
    about = {"task": "gpt", "generation": 1, "step": 100, "worker": "n0/0", "reason": "no room", "retry_at": UNTIL}
    story.at(20).add(TaskResultUnwritten, **about)
    pause = TaskChange(task="gpt", reason="cannot write", action="pause", from_generation=1, survivors=["n0/0"])
    story.plan("p1", pause, queued={"gpt": "waits for its storage: no room"}, trigger=Trigger.RESULT_UNWRITTEN)
    story.at(22).moved("p1", "gpt", "ended", 1, complete=True)


def test_a_task_whose_workers_are_lent_says_why_and_until_when(story: Story, tmp_path: Path) -> None:
    lent(story)
    shown = task(story)
    assert (shown.state, shown.reason) == (TaskState.QUEUED, "waits for its storage: no room")
    assert shown.wait == TaskWait(reason="waits for its storage: no room", until=UNTIL)
    assert waits_for_storage(shown, LiveState()) == "waits for its storage: no room"
    with offline_gateway(tmp_path, story.records) as gateway, gateway.store.reading() as views:
        (trouble,) = causes(read_findings(views, gateway.cluster(views), LiveState(), (), story.time()))
    assert (trouble.kind, trouble.grave, trouble.needs_somebody) == ("storage", True, True)
    assert trouble.what == "gpt waits for its storage: no room"
    assert (trouble.money_per_hour, trouble.cost_basis) == (0.0, "its workers are free for other tasks")


@pytest.mark.parametrize("by_operator", [False, True])
def test_its_time_to_try_again_ends_the_wait(by_operator: bool, story: Story) -> None:
    lent(story)
    if by_operator:
        story.at(30).add(TaskResumeRequested, task="gpt", actor="uid/0")
    else:
        about = {"task": "gpt", "generation": 1, "step": 100, "worker": "n0/0", "reason": "no room"}
        story.at(30).add(TaskResultUnwritten, retry_at=UNTIL, ended=True, **about)
    assert task(story).wait is None
    assert waits_for_storage(task(story), LiveState()) == ""


async def waiting(api: Server) -> None:
    """A task that waits for its operator, as the log says."""
    assert (await api.http.post("/v1/tasks", json=api.spec())).status_code == 201
    recorded = await api.append(
        ErrorDetected,
        task="gpt",
        incident="i1",
        kind=ErrorKind.EXCEPTION,
        severity=Severity.SEV2,
        method=Method.EXCEPTION,
        detected_at=UNTIL,
        evidence={"needs_operator": WHY},
    )
    await api.projected(recorded.position)


async def test_a_resumption_of_a_task_that_waits_is_one_event(api: Server) -> None:
    await waiting(api)
    shown = (await api.http.get(TASK)).json()
    assert shown["wait"] == {"reason": WHY, "until": None}
    answer = await api.http.post(f"{TASK}/resume")
    assert (answer.status_code, answer.json()["wait"]) == (201, None)
    assert isinstance(api.journal.log.read()[-1].event, TaskResumeRequested)
    again = await api.http.post(f"{TASK}/resume")
    assert again.status_code == 409
    assert "waits after failures" in again.text


async def test_a_task_that_does_not_wait_is_not_resumed(api: Server) -> None:
    assert (await api.http.post("/v1/tasks", json=api.spec())).status_code == 201
    assert (await api.http.post(f"{TASK}/resume")).status_code == 409
    assert api.journal.log.last_position() == 1


@pytest.mark.parametrize(("value", "said"), [(0, "greater than 0"), (1e9, "less than or equal to 31536000")])
async def test_the_limit_without_progress_is_checked(api: Server, value: float, said: str) -> None:
    refused_answer = await api.http.post("/v1/tasks", json=api.spec(progress_timeout_s=value))
    assert refused_answer.status_code == 422
    assert "progress_timeout_s" in refused_answer.text
    assert said in refused_answer.text


def test_the_limit_is_in_a_specification_only_where_it_is_another() -> None:
    assert "progress_timeout_s" not in spec().model_dump(mode="json")
    assert spec(progress_timeout_s=60).model_dump(mode="json")["progress_timeout_s"] == 60.0
