"""``/v1/tasks`` over a real server, bus and log, without nodes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import yaml

from services.api.gateway import with_place
from shared.errors import InvalidInput
from shared.events.union import TaskFailed, TaskFinished, TaskStopped, TaskStopRequested, TaskSubmitted
from shared.tasks.specification import MAX_SPEC_BYTES, parse_spec
from tests.api.kit import Server, spec_dict
from tests.condition import until


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert (response.status_code, problem["status"], problem["code"]) == (status, status, code)
    assert problem["type"] == f"urn:unicron:{code}"
    return problem


async def test_a_submitted_task_can_be_read_at_once(api: Server) -> None:
    response = await api.http.post("/v1/tasks", json=api.spec(weight=2.0))
    assert response.status_code == 201
    assert response.headers["location"] == "/v1/tasks/gpt"
    task = (await api.http.get("/v1/tasks/gpt")).json()
    assert task == response.json()
    assert (task["name"], task["state"], task["step"], task["steps"], task["weight"]) == ("gpt", "pending", 0, 100, 2.0)
    assert task["spec"]["batch"]["global"] == 8
    fields = "layout ranks generation loss throughput_flop_per_s waf_flop_per_s reason workers".split()
    assert set(fields) <= task.keys()
    (recorded,) = api.journal.log.read()
    assert isinstance(recorded.event, TaskSubmitted)
    assert recorded.event.spec.data == str(api.data)


async def test_yaml_is_taken_too(api: Server) -> None:
    text = yaml.safe_dump(api.spec())
    headers = {"Content-Type": "application/yaml"}
    assert (await api.http.post("/v1/tasks", content=text, headers=headers)).status_code == 201


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"colour": "red"}, "colour"),
        ({"batch": {"global": "many"}}, "batch.global"),
        ({"data": "nul\0byte"}, "data"),
        ({"script": "/" + "x" * 4096}, "script"),
        ({"name": "No Such Name"}, "name"),
    ],
)
async def test_a_refused_field_is_named(offline: httpx.AsyncClient, changes: dict[str, Any], field: str) -> None:
    """Nothing is logged: there is no log that the submission could reach."""
    spec = spec_dict(**{"data": "/data/corpus.txt", **changes})
    problem = refused(await offline.post("/v1/tasks", json=spec), 422, "invalid-input")
    assert [error["field"] for error in problem["errors"]] == [field]
    assert all(error["problem"] for error in problem["errors"])


async def test_a_refused_submission_is_not_logged(api: Server) -> None:
    refused(await api.http.post("/v1/tasks", json=api.spec(steps=0)), 422, "invalid-input")
    assert api.journal.log.last_position() == 0


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"{", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[1, 2]", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b"a: [", "application/yaml"),
        (b"[" * 700, "application/yaml"),
        (b"", "application/json"),
    ],
)
async def test_a_body_that_is_no_specification_is_refused(
    offline: httpx.AsyncClient, body: bytes, content_type: str
) -> None:
    response = await offline.post("/v1/tasks", content=body, headers={"Content-Type": content_type})
    refused(response, 422, "invalid-input")


async def test_a_body_above_the_limit_is_refused(offline: httpx.AsyncClient) -> None:
    body = b"#" * (MAX_SPEC_BYTES + 1)
    refused(
        await offline.post("/v1/tasks", content=body, headers={"Content-Type": "application/yaml"}), 413, "too-large"
    )


def test_the_place_of_checkpoints() -> None:
    def placed(default: str, **checkpoint: str) -> str | None:
        place = with_place(parse_spec(spec_dict(checkpoint=checkpoint)), default).checkpoint
        return place.url or place.directory

    assert placed("") is None
    assert placed("s3://bucket/run") == "s3://bucket/run/gpt"  # of the cluster, in a folder of the task
    assert placed("s3://bucket/run", url="gs://mine") == "gs://mine"
    assert placed("s3://bucket/run", directory="/mine") == "/mine"
    for url in ("s3://", "bucket/run", "s3://bucket/*", "s3://bucket/run/"):
        with pytest.raises(InvalidInput, match=r"checkpoint\.url"):
            parse_spec(spec_dict(checkpoint={"url": url}))
    with pytest.raises(InvalidInput, match=r"not beside checkpoint\.directory"):
        parse_spec(spec_dict(checkpoint={"url": "s3://bucket/run", "directory": "/mine"}))


async def test_a_name_in_use_is_refused_and_free_again_once_stopped(api: Server) -> None:
    await api.http.post("/v1/tasks", json=api.spec())
    problem = refused(await api.http.post("/v1/tasks", json=api.spec()), 409, "conflict")
    assert "gpt" in problem["detail"]
    recorded = await api.append(TaskStopped, task="gpt", generation=1, step=40, path="/c40")
    await api.projected(recorded.position)
    problem = refused(await api.http.post("/v1/tasks", json=api.spec(steps=39)), 422, "invalid-input")
    assert problem["errors"][0]["field"] == "steps"
    model = {**api.spec()["model"], "layers": 4}
    problem = refused(await api.http.post("/v1/tasks", json=api.spec(model=model)), 422, "invalid-input")
    assert problem["errors"][0]["field"] == "model"
    assert (await api.http.post("/v1/tasks", json=api.spec())).status_code == 201
    event = api.journal.log.read()[-1].event
    assert isinstance(event, TaskSubmitted)
    assert (event.checkpoint, event.step) == ("/c40", 40)


async def test_the_name_of_a_task_that_succeeded_stays_taken(api: Server) -> None:
    await api.http.post("/v1/tasks", json=api.spec())
    recorded = await api.append(
        TaskFinished, task="gpt", generation=1, step=100, samples_sha256="ab", parameters_path="/p", worker="n1/0"
    )
    await api.projected(recorded.position)
    refused(await api.http.post("/v1/tasks", json=api.spec()), 409, "conflict")
    task = (await api.http.get("/v1/tasks/gpt")).json()
    assert task["result"] == {
        "steps": 100, "samples_sha256": "ab", "parameters_path": "/p", "generation": 1, "node": "n1"
    }  # fmt: skip
    refused(await api.http.post("/v1/tasks/gpt/stop"), 409, "conflict")


async def test_of_racing_submissions_one_wins(api: Server) -> None:
    responses = await asyncio.gather(*(api.http.post("/v1/tasks", json=api.spec(seed=n)) for n in range(8)))
    assert sorted(response.status_code for response in responses) == [201] + [409] * 7
    assert api.journal.log.last_position() == 1


async def test_a_repeated_idempotency_key_returns_the_same_task(api: Server) -> None:
    async def submit(**changes: Any) -> httpx.Response:
        return await api.http.post("/v1/tasks", json=api.spec(**changes), headers={"Idempotency-Key": "k1"})

    responses = await asyncio.gather(*(submit() for _ in range(4)))
    assert sorted(response.status_code for response in responses) == [200, 200, 200, 201]
    assert len({response.json()["id"] for response in responses}) == 1
    assert api.journal.log.last_position() == 1
    refused(await submit(seed=7), 409, "conflict")
    refused(await submit(name="other"), 409, "conflict")
    assert api.journal.log.last_position() == 1


async def test_a_key_that_was_used_says_for_what(api: Server) -> None:
    async def detail(key: str, **changes: Any) -> str:
        headers = {"Idempotency-Key": key}
        problem = (await api.http.post("/v1/tasks", json=api.spec(**changes), headers=headers)).json()
        assert (problem["code"], problem.get("key", key)) == ("conflict", key)
        return str(problem["detail"])

    async def fails() -> None:
        failed = await api.append(TaskFailed, task="gpt", generation=1, step=3, reason="it is broken")
        await api.projected(failed.position)

    await api.http.post("/v1/tasks", json=api.spec(env={"A": "secret"}), headers={"Idempotency-Key": "k1"})
    changes = {"seed": 7, "workers": {"max": 4}, "env": {"A": "other"}}
    assert await detail("k1", **changes) == (
        "idempotency key 'k1' was used for another specification of 'gpt': "
        "env.A differs; seed was 1234, is 7; workers.max was null, is 4"
    )
    assert await detail("k1", name="bert") == "idempotency key 'k1' was used for task 'gpt', not 'bert'"
    await fails()
    again = await api.http.post("/v1/tasks", json=api.spec(), headers={"Idempotency-Key": "k2"})
    assert again.status_code == 201
    assert await detail("k1") == ("idempotency key 'k1' was used for another specification of 'gpt': env.A differs")
    await fails()
    assert (await api.http.post("/v1/tasks", json=api.spec(), headers={"Idempotency-Key": "k3"})).status_code == 201
    await fails()
    assert (await detail("k2")).startswith("idempotency key 'k2' was used for an earlier submission of 'gpt', which")


async def test_a_name_that_there_is_not_names_the_nearest(api: Server) -> None:
    await api.http.post("/v1/tasks", json=api.spec())
    for path in ("/v1/tasks/gtp", "/v1/tasks/gtp/logs"):
        assert (await api.http.get(path)).json()["detail"] == "no task named 'gtp'; did you mean 'gpt'?"
    assert (await api.http.get("/v1/tasks/other")).json()["detail"] == "no task named 'other'"
    await api.join("node-1")
    assert (await api.http.get("/v1/nodes/nod-1")).json()["detail"] == "no node named 'nod-1'; did you mean 'node-1'?"


async def test_stopping_is_accepted_once_and_idempotent(api: Server) -> None:
    refused(await api.http.post("/v1/tasks/gpt/stop"), 404, "not-found")
    await api.http.post("/v1/tasks", json=api.spec())
    responses = await asyncio.gather(*(api.http.post("/v1/tasks/gpt/stop") for _ in range(4)))
    assert [response.status_code for response in responses] == [202] * 4
    assert responses[0].json()["state"] == "stopping"
    events = [recorded.event for recorded in api.journal.log.read()]
    assert sum(isinstance(event, TaskStopRequested) for event in events) == 1


async def test_a_stop_may_be_asked_for_again_if_steps_may_now_be_lost(api: Server) -> None:
    await api.http.post("/v1/tasks", json=api.spec())
    asked = [{}, {"lose_steps": True}, {"lose_steps": True}, {"lose_steps": False}]
    responses = [await api.http.post("/v1/tasks/gpt/stop", json=body) for body in asked]
    assert [response.status_code for response in responses] == [202] * 4
    events = [recorded.event for recorded in api.journal.log.read()]
    assert [event.lose_steps for event in events if isinstance(event, TaskStopRequested)] == [False, True]
    refused(await api.http.post("/v1/tasks/gpt/stop", json={"loose_steps": True}), 422, "invalid-input")


async def test_a_task_that_is_to_stop_may_be_killed(api: Server) -> None:
    await api.http.post("/v1/tasks", json=api.spec())
    asked = [{}, {"at_once": True}, {"at_once": True}, {"lose_steps": True}]
    responses = [await api.http.post("/v1/tasks/gpt/stop", json=body) for body in asked]
    assert [response.status_code for response in responses] == [202] * 4
    events = [recorded.event for recorded in api.journal.log.read()]
    stops = [(event.lose_steps, event.at_once) for event in events if isinstance(event, TaskStopRequested)]
    assert stops == [(False, False), (True, True)]
    await api.append(TaskStopped, task="gpt", generation=1, step=3, path="/c")

    async def ended() -> bool:
        task = (await api.http.get("/v1/tasks/gpt")).json()
        return bool(
            task["reason"] == "ended at once as asked: the newest checkpoint is of step 3, and later steps are lost"
        )

    await until(ended)


async def test_lists_have_pages_and_filters(api: Server) -> None:
    for name in ("a", "b", "c"):
        await api.http.post("/v1/tasks", json=api.spec(name))
    await api.http.post("/v1/tasks/b/stop")
    first = (await api.http.get("/v1/tasks", params={"limit": 2})).json()
    assert [task["name"] for task in first["items"]] == ["a", "b"]
    second = (await api.http.get("/v1/tasks", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert [task["name"] for task in second["items"]] == ["c"]
    assert second["next_cursor"] is None
    found = (await api.http.get("/v1/tasks", params={"state": ["stopping", "failed"]})).json()
    assert [task["name"] for task in found["items"]] == ["b"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/tasks?limit=0", "limit"),
        ("/v1/tasks?limit=5000", "limit"),
        ("/v1/tasks?cursor=x", "cursor"),
        ("/v1/tasks?state=sleeping", "state.0"),
        ("/v1/events?after=-1", "after"),
        ("/v1/events?after=99999999999999999999999", "after"),
        ("/v1/incidents?state=x", "state"),
    ],
)
async def test_a_wrong_parameter_is_named(offline: httpx.AsyncClient, path: str, field: str) -> None:
    problem = refused(await offline.get(path), 422, "invalid-input")
    assert [error["field"] for error in problem["errors"]] == [field]


@pytest.mark.parametrize(
    "path",
    ["/v1/tasks/none", "/v1/tasks/none/logs", "/v1/nodes/none", "/v1/incidents/none", "/v1/plans/none", "/v2", "/v1/x"],
)
async def test_what_is_not_there_is_a_problem(offline: httpx.AsyncClient, path: str) -> None:
    refused(await offline.get(path), 404, "not-found")


async def test_a_wrong_method_is_a_problem(offline: httpx.AsyncClient) -> None:
    problem = refused(await offline.delete("/v1/tasks"), 405, "method-not-allowed")
    assert "DELETE" in problem["detail"]
