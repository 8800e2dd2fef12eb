"""``PATCH``, resuming and deleting of tasks, over a real server, bus and log, without a planner."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import httpx
import pytest

from shared.events.union import (
    TaskChanged,
    TaskDeleted,
    TaskFailed,
    TaskFinished,
    TaskProgressed,
    TaskStopped,
    TaskSubmitted,
)
from shared.service.tokens import Scope
from tests.api.kit import Server
from tests.api.test_tasks import refused

TASK = "/v1/tasks/gpt"


async def submitted(api: Server, **changes: Any) -> httpx.Response:
    response = await api.http.post("/v1/tasks", json=api.spec(**changes))
    assert response.status_code == 201
    return response


async def ended(api: Server, kind: type[Any], **fields: Any) -> None:
    known: dict[Any, dict[str, Any]] = {
        TaskStopped: {"step": 40, "path": "/c40"},
        TaskFailed: {"step": 40, "reason": "bug"},
        TaskFinished: {"step": 100, "samples_sha256": "s", "parameters_path": "/p"},
    }
    recorded = await api.append(kind, task="gpt", generation=1, **{**known[kind], **fields})
    await api.projected(recorded.position)


async def test_a_change_is_an_event_with_all_values_as_they_are_from_then_on(api: Server) -> None:
    await submitted(api, workers={"min": 2, "max": 4})
    answer = await api.http.patch(TASK, json={"weight": 2.5, "workers": {"max": None}})
    assert answer.status_code == 200
    task = answer.json()
    assert (task["weight"], task["spec"]["workers"]) == (2.5, {"min": 2, "max": None})
    event = api.journal.log.read()[-1].event
    assert isinstance(event, TaskChanged)
    assert (event.weight, event.min_workers, event.max_workers) == (2.5, 2, None)
    assert event.requested_by.startswith("uid/")
    assert (await api.http.get(TASK)).json() == task


@pytest.mark.parametrize("patch", [{}, {"weight": 1.0}, {"workers": {}}, {"workers": {"min": 1, "max": None}}])
async def test_a_change_to_what_is_there_is_no_event(api: Server, patch: dict[str, Any]) -> None:
    await submitted(api)
    assert (await api.http.patch(TASK, json=patch)).status_code == 200
    assert api.journal.log.last_position() == 1


async def test_merge_patches_have_a_media_type_of_their_own(api: Server) -> None:
    await submitted(api)
    headers = {"Content-Type": "application/merge-patch+json"}
    answer = await api.http.patch(TASK, content=b'{"weight": 7}', headers=headers)
    assert (answer.status_code, answer.json()["weight"]) == (200, 7.0)


@pytest.mark.parametrize(
    ("patch", "field", "said"),
    [
        ({"priority": 3}, "priority", "the weight is the priority; set weight"),
        ({"weight": 0}, "weight", "greater than 0"),
        ({"weight": 1e7}, "weight", "less than or equal to 1000000"),
        ({"weight": None}, "weight", "valid number"),
        ({"workers": {"min": 0}}, "workers.min", "greater than or equal to 1"),
        ({"workers": {"min": 3, "max": 2}}, "workers.min", "must not exceed workers.max"),
        ({"workers": {"min": 10_000}}, "workers.min", "more than batch.global and parallel can use"),
        ({"workers": {"least": 1}}, "workers.least", "allowed: weight, workers.min, workers.max"),
        ({"workers": 3}, "workers", "valid dictionary"),
        ({"steps": 5}, "steps", "cannot be changed; allowed: weight"),
        ({"colour": "red"}, "colour", "unknown field; allowed: weight"),
    ],
)
async def test_a_refused_change_names_field_value_and_what_is_allowed(
    api: Server, patch: dict[str, Any], field: str, said: str
) -> None:
    await submitted(api)
    problem = refused(await api.http.patch(TASK, json=patch), 422, "invalid-input")
    assert [error["field"] for error in problem["errors"]] == [field]
    assert said in problem["errors"][0]["problem"]
    assert api.journal.log.last_position() == 1


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"3", b"\xff"])
async def test_a_body_that_is_no_change_is_refused(api: Server, body: bytes) -> None:
    await submitted(api)
    answer = await api.http.patch(TASK, content=body, headers={"Content-Type": "application/json"})
    refused(answer, 422, "invalid-input")


async def test_what_has_ended_is_not_changed(api: Server) -> None:
    await submitted(api)
    await ended(api, TaskStopped)
    refused(await api.http.patch(TASK, json={"weight": 2}), 409, "conflict")
    refused(await api.http.patch("/v1/tasks/other", json={"weight": 2}), 404, "not-found")


async def test_who_may_submit_may_change_their_own(api: Server, settings: Any) -> None:
    from tests.api.kit import bearer

    await submitted(api)
    own, read = bearer(settings, Scope.SUBMIT), bearer(settings, Scope.READ)
    for headers in (own, read):
        refused(await api.http.patch(TASK, json={"weight": 2}, headers=headers), 403, "forbidden")
        refused(await api.http.post(f"{TASK}/resume", headers=headers), 403, "forbidden")
        refused(await api.http.delete(TASK, headers=headers), 403, "forbidden")
    assert (await api.http.post("/v1/tasks", json=api.spec("mine"), headers=own)).status_code == 201
    assert (await api.http.patch("/v1/tasks/mine", json={"weight": 2}, headers=own)).status_code == 200
    event = api.journal.log.read()[-1].event
    assert isinstance(event, TaskChanged)
    assert event.requested_by.startswith("token/test-")


async def test_a_read_is_not_answered_twice(api: Server) -> None:
    await submitted(api)
    first = await api.http.get(TASK)
    tag = first.headers["etag"]
    again = await api.http.get(TASK, headers={"If-None-Match": f'"x", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    await api.http.patch(TASK, json={"weight": 2})
    other = await api.http.get(TASK, headers={"If-None-Match": tag})
    assert other.status_code == 200
    assert other.headers["etag"] != tag


async def test_of_two_changes_of_the_same_reading_the_second_is_refused(api: Server) -> None:
    tag = (await submitted(api)).headers["etag"]
    answers = await asyncio.gather(
        *(api.http.patch(TASK, json={"weight": weight}, headers={"If-Match": tag}) for weight in (2, 3, 4))
    )
    assert sorted(answer.status_code for answer in answers) == [200, 412, 412]
    made = next(answer for answer in answers if answer.status_code == 200)
    for answer in answers:
        assert answer.headers["etag"] == made.headers["etag"]
        if answer.status_code == 412:
            assert refused(answer, 412, "precondition-failed")["etag"] == made.headers["etag"]
    assert api.journal.log.last_position() == 2
    present = {"If-Match": made.headers["etag"]}
    assert (await api.http.patch(TASK, json={"weight": 9}, headers=present)).status_code == 200
    assert (await api.http.patch(TASK, json={"weight": 8}, headers={"If-Match": "*"})).status_code == 200


async def test_steps_done_meanwhile_are_no_reason_to_refuse_a_change(api: Server) -> None:
    tag = (await submitted(api)).headers["etag"]
    recorded = await api.append(TaskProgressed, task="gpt", generation=0, step=5, workers=1, step_s=1.0)
    await api.projected(recorded.position)
    assert (await api.http.get(TASK)).headers["etag"] != tag
    assert (await api.http.patch(TASK, json={"weight": 2}, headers={"If-Match": tag})).status_code == 200


async def test_stop_and_delete_can_be_conditional_too(api: Server) -> None:
    old = {"If-Match": (await submitted(api)).headers["etag"]}
    new = {"If-Match": (await api.http.patch(TASK, json={"weight": 2})).headers["etag"]}
    refused(await api.http.post(f"{TASK}/stop", headers=old), 412, "precondition-failed")
    assert (await api.http.post(f"{TASK}/stop", headers=new)).status_code == 202
    await ended(api, TaskStopped)
    refused(await api.http.delete(TASK, headers=new), 412, "precondition-failed")
    refused(await api.http.delete(TASK, headers={"If-Match": "garbage"}), 412, "precondition-failed")
    assert (await api.http.delete(TASK)).status_code == 200


@pytest.mark.parametrize("end", [TaskStopped, TaskFailed])
async def test_a_task_is_resumed_with_its_last_specification(api: Server, end: type[Any]) -> None:
    await submitted(api)
    refused(await api.http.post(f"{TASK}/resume"), 409, "conflict")
    await api.http.patch(TASK, json={"weight": 3.0})
    await ended(api, TaskStopped)
    answer = await api.http.post(f"{TASK}/resume")
    assert (answer.status_code, answer.headers["location"]) == (201, TASK)
    event = api.journal.log.read()[-1].event
    assert isinstance(event, TaskSubmitted)
    assert (event.spec.weight, event.checkpoint, event.step) == (3.0, "/c40", 40)
    assert (answer.json()["attempt"], answer.json()["step"]) == (2, 40)
    await ended(api, end)
    assert (await api.http.post(f"{TASK}/resume")).json()["attempt"] == 3


async def test_what_has_succeeded_is_resumed_only_where_its_script_has_left_steps(api: Server) -> None:
    await submitted(api)
    await ended(api, TaskFinished, step=40)
    shown = (await api.http.get(TASK)).json()
    assert (shown["state"], shown["reason"]) == ("succeeded", "its script has ended behind step 40 of 100")
    again = await api.http.post(f"{TASK}/resume")
    assert (again.status_code, again.json().get("attempt")) == (201, 2), again.text
    await ended(api, TaskFinished)
    assert "succeeded" in refused(await api.http.post(f"{TASK}/resume"), 409, "conflict")["detail"]


async def test_a_deleted_task_is_listed_apart_until_its_name_is_submitted_again(api: Server) -> None:
    async def names(**params: Any) -> list[str]:
        items = (await api.http.get("/v1/tasks", params=params)).json()["items"]
        return [item["name"] for item in items]

    await submitted(api)
    await api.http.post("/v1/tasks", json=api.spec("other"))
    assert "stop it first" in refused(await api.http.delete(TASK), 409, "conflict")["detail"]
    await ended(api, TaskFinished)
    deleted = (await api.http.delete(TASK)).json()
    assert deleted["deleted_at"] is not None
    assert await names() == await names(order="newest") == ["other"]
    assert await names(state="succeeded") == []
    assert await names(deleted=True) == ["gpt"]
    refused(await api.http.get("/v1/tasks", params={"deleted": True, "state": "failed"}), 422, "invalid-input")
    assert (await api.http.get(TASK)).json() == deleted
    position = api.journal.log.last_position()
    assert (await api.http.delete(TASK)).json() == deleted
    assert api.journal.log.last_position() == position
    assert isinstance(api.journal.log.read()[-1].event, TaskDeleted)
    again = await submitted(api)
    assert again.json()["deleted_at"] is None
    assert await names() == ["other", "gpt"]
    assert await names(deleted=True) == []


async def test_a_deleted_name_goes_on_from_its_checkpoint(api: Server) -> None:
    """Its checkpoints are where a new start would write its own."""
    await submitted(api)
    await ended(api, TaskStopped)
    await api.http.delete(TASK)
    assert (await submitted(api)).json()["step"] == 40


async def test_every_submission_of_a_name_is_kept(api: Server) -> None:
    await submitted(api, steps=60)
    await ended(api, TaskStopped)
    await submitted(api, steps=80, weight=2.0)
    await ended(api, TaskFailed, step=50, reason="bug")
    await submitted(api, steps=100)
    first, second, third = (await api.http.get(f"{TASK}/attempts")).json()["items"]
    assert [one["number"] for one in (first, second, third)] == [1, 2, 3]
    assert [one["state"] for one in (first, second, third)] == ["stopped", "failed", "pending"]
    assert [one["spec"]["steps"] for one in (first, second, third)] == [60, 80, 100]
    assert [(one["first_step"], one["last_step"]) for one in (first, second, third)] == [(0, 40), (40, 50), (40, 40)]
    assert [one["checkpoint"] for one in (first, second, third)] == [None, "/c40", "/c40"]
    assert second["reason"] == "bug"
    assert second["flop"] == first["flop"] / 4 > 0
    assert second["weighted_flop"] == second["flop"] * 2
    assert (third["flop"], third["ended_at"]) == (0.0, None)
    assert first["ended_at"] < second["submitted_at"] < third["submitted_at"]
    page = (await api.http.get(f"{TASK}/attempts", params={"limit": 2})).json()
    assert (page["items"], page["next_cursor"]) == ([first, second], "2")
    rest = (await api.http.get(f"{TASK}/attempts", params={"limit": 2, "cursor": 2})).json()
    assert (rest["items"], rest["next_cursor"]) == ([third], None)
    refused(await api.http.get("/v1/tasks/other/attempts"), 404, "not-found")


async def test_the_course_of_a_submission_is_thinned_out_and_ends_with_what_came_last(api: Server) -> None:
    await submitted(api)
    for step in range(1, 31):
        await api.append(
            TaskProgressed, task="gpt", generation=1, step=step, workers=4, step_s=0.5, loss=5.0 - step / 10
        )
    await ended(api, TaskStopped)
    await submitted(api)
    await api.append(TaskProgressed, task="gpt", generation=2, step=41, workers=2, step_s=1.0, loss=None)
    first = (await api.http.get(f"{TASK}/progress", params={"attempt": 1})).json()
    assert [point["step"] for point in first["points"]] == list(range(1, 31))
    assert first["points"][2].items() >= {"generation": 1, "workers": 4, "step_s": 0.5, "loss": 4.7}.items()
    few = (await api.http.get(f"{TASK}/progress", params={"attempt": 1, "points": 5})).json()["points"]
    steps = [point["step"] for point in few]
    assert 3 <= len(steps) <= 5
    assert steps == sorted(steps)
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 12
    present = (await api.http.get(f"{TASK}/progress")).json()
    assert (present["attempt"], [point["step"] for point in present["points"]]) == (2, [41])
    refused(await api.http.get(f"{TASK}/progress", params={"attempt": 3}), 404, "not-found")


async def test_an_answer_is_as_new_as_asked_for(api: Server) -> None:
    position = int((await submitted(api)).headers["unicron-position"])
    assert position == 1
    for weight in range(2, 12):
        recorded = await api.append(TaskChanged, task="gpt", weight=float(weight), min_workers=1)
        task = (await api.http.get(TASK, params={"min_position": recorded.position})).json()
        assert task["weight"] == weight
    problem = await api.http.get("/v1/plans", params={"min_position": 10**6})
    assert "no position 1000000" in refused(problem, 503, "unavailable")["detail"]
    assert int(problem.headers["retry-after"]) > 0
    assert "unicron-position" not in (await api.http.get(TASK)).headers
    assert "unicron-position" not in (await api.http.post(f"{TASK}/resume")).headers


async def test_more_steps_keep_the_order_of_the_first_start(api: Server) -> None:
    """The order of samples is drawn from their number: that of the first start is in the log from then on."""

    def logged() -> tuple[int, int | None]:
        event = api.journal.log.read()[-1].event
        assert isinstance(event, TaskSubmitted)
        return event.spec.steps, event.spec.order_samples

    await submitted(api)
    assert logged() == (100, None)
    for step, steps, order in ((40, 300, 800), (60, 250, 800), (80, 100, None), (90, 200, 800)):
        await ended(api, TaskStopped, step=step, path=f"/c{step}")
        task = (await submitted(api, steps=steps, weight=2.0, checkpoint={"every": 7})).json()
        assert (task["step"], logged()) == (step, (steps, order))
        assert task["spec"].get("order_samples") == order
    await ended(api, TaskStopped, step=95, path="/c95")
    assert (await api.http.post(f"{TASK}/resume")).status_code == 201
    assert logged() == (200, 800)


async def test_a_repeated_submission_is_the_same_one_whatever_order_it_keeps(api: Server) -> None:
    await submitted(api)
    await ended(api, TaskStopped)
    key = {"Idempotency-Key": "more"}
    body = api.spec(steps=300)
    assert [(await api.http.post("/v1/tasks", json=body, headers=key)).status_code for _ in range(2)] == [201, 200]
    await ended(api, TaskStopped, step=50, path="/c50")
    await submitted(api, steps=400)
    answer = refused(await api.http.post("/v1/tasks", json=body, headers=key), 409, "conflict")
    assert "earlier submission" in answer["detail"]


async def test_a_task_that_goes_on_keeps_what_its_updates_depend_on(api: Server) -> None:
    """What may change, and what not, one by one: test_resumption.py."""
    await submitted(api)
    await ended(api, TaskStopped)
    position = api.journal.log.last_position()
    change = api.spec(batch={"global": 16, "micro": 1}, seed=99, optimizer={"name": "sgd", "lr": 0.1}, steps=300)
    problem = refused(await api.http.post("/v1/tasks", json=change), 422, "invalid-input")
    found = [(error["field"], error["value"]) for error in problem["errors"]]
    assert found == [("batch.global", 16), ("optimizer.lr", 0.1), ("optimizer.name", "sgd"), ("seed", 99)]
    assert "was 8; a task that goes on from its checkpoint keeps it, and may change steps" in problem["detail"]
    assert api.journal.log.last_position() == position, "nothing is logged"
