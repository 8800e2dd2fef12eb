"""``POST /v1/plan/solve``."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from shared.planning.standalone import MAX_PROBLEM_BYTES
from tests.api.kit import Server

JSON = {"Content-Type": "application/json"}
PROBLEM = {
    "workers": 24,
    "running_s": 3600,
    "tasks": [
        {
            "name": "a",
            "weight": 1,
            "necessary": 1,
            "current": 8,
            "transition_s": 5,
            "throughput": {"8": 1e12, "16": 2e12},
        }
    ],
}


async def test_a_problem_is_solved(offline: httpx.AsyncClient) -> None:
    answer = await offline.post("/v1/plan/solve", json=PROBLEM)
    assert answer.status_code == 200
    body = answer.json()
    assert body["assignment"] == {"a": 16}
    assert body["objective"] == body["bound"] == 2e12 * 3600 - 1e12 * 5
    assert [term["name"] for term in body["terms"]] == ["a"]


async def test_a_bad_problem_is_refused_by_its_fields(offline: httpx.AsyncClient) -> None:
    answer = await offline.post(
        "/v1/plan/solve", content=json.dumps({**PROBLEM, "workers": float("nan")}), headers=JSON
    )
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert [error["field"] for error in answer.json()["errors"]] == ["workers"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1, 10**12, "many"])
@pytest.mark.parametrize("field", ["workers", "tasks.0.current", "tasks.0.necessary", "tasks.0.newcomers_s"])
async def test_a_bad_number_is_refused_by_its_field(offline: httpx.AsyncClient, field: str, value: object) -> None:
    posed = json.loads(json.dumps(PROBLEM))
    *_, key = field.split(".")
    (posed["tasks"][0] if "." in field else posed)[key] = value
    answer = await offline.post("/v1/plan/solve", content=json.dumps(posed), headers=JSON)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == field
    assert f"{field}: {error['problem']}" in answer.json()["detail"]


async def test_a_problem_without_a_task_is_refused(offline: httpx.AsyncClient) -> None:
    answer = await offline.post("/v1/plan/solve", json={**PROBLEM, "tasks": []})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["tasks"]
    assert "at least 1" in answer.json()["detail"]


@pytest.mark.parametrize("announced", [True, False])
async def test_a_gigabyte_is_refused_before_it_was_sent(api: Server, announced: bool) -> None:
    """The answer comes with the length, or where no length is told, with the first byte above the limit."""
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    length = f"Content-Length: {2**30}" if announced else "Transfer-Encoding: chunked"
    json_type = "Content-Type: application/json"
    writer.write(f"POST /v1/plan/solve HTTP/1.1\r\nHost: {host}\r\n{length}\r\n{json_type}\r\n\r\n".encode())
    if not announced:
        writer.write(f"{2**30:x}\r\n".encode())
        for _ in range(MAX_PROBLEM_BYTES // 2**20 + 1):
            writer.write(bytes(2**20))
            await writer.drain()
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 20)
    writer.close()
    await writer.wait_closed()


async def test_a_body_that_is_too_large_is_not_read(offline: httpx.AsyncClient) -> None:
    answer = await offline.post("/v1/plan/solve", content=b" " * (MAX_PROBLEM_BYTES + 1), headers=JSON)
    assert answer.status_code == 413


async def test_throughput_is_predicted(offline: httpx.AsyncClient) -> None:
    sizes = {"layers": 24, "hidden": 2048, "heads": 16, "sequence_length": 2048, "global_batch": 512, "workers": 32}
    answer = await offline.get("/v1/plan/throughput", params={**sizes, "hardware": "a100-80", "tensor": 1})
    assert answer.status_code == 200
    body = answer.json()
    assert body["fits"]
    assert body["layout"]["tensor"] == 1
    assert 0.1 < body["mfu"] < 0.8


async def test_an_impossible_model_is_refused_by_its_field(offline: httpx.AsyncClient) -> None:
    sizes = {"layers": 24, "hidden": 2048, "heads": 15, "sequence_length": 2048, "global_batch": 512, "workers": 32}
    answer = await offline.get("/v1/plan/throughput", params=sizes)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert "heads" in answer.text
