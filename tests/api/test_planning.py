"""``POST /v1/plan/solve``."""

from __future__ import annotations

import json

from shared.planning.standalone import MAX_PROBLEM_BYTES
from tests.api.kit import Server

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


async def test_a_problem_is_solved(api: Server) -> None:
    answer = await api.http.post("/v1/plan/solve", json=PROBLEM)
    assert answer.status_code == 200
    body = answer.json()
    assert body["assignment"] == {"a": 16}
    assert body["objective"] == body["bound"] == 2e12 * 3600 - 1e12 * 5
    assert [term["name"] for term in body["terms"]] == ["a"]


async def test_a_bad_problem_is_refused_by_its_fields(api: Server) -> None:
    answer = await api.http.post("/v1/plan/solve", content=json.dumps({**PROBLEM, "workers": float("nan")}))
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert [error["field"] for error in answer.json()["errors"]] == ["workers"]


async def test_a_body_that_is_too_large_is_not_read(api: Server) -> None:
    answer = await api.http.post("/v1/plan/solve", content=b" " * (MAX_PROBLEM_BYTES + 1))
    assert answer.status_code == 413


async def test_throughput_is_predicted(api: Server) -> None:
    sizes = {"layers": 24, "hidden": 2048, "heads": 16, "sequence_length": 2048, "global_batch": 512, "workers": 32}
    answer = await api.http.get("/v1/plan/throughput", params={**sizes, "hardware": "a100-80", "tensor": 1})
    assert answer.status_code == 200
    body = answer.json()
    assert body["fits"]
    assert body["layout"]["tensor"] == 1
    assert 0.1 < body["mfu"] < 0.8


async def test_an_impossible_model_is_refused_by_its_field(api: Server) -> None:
    sizes = {"layers": 24, "hidden": 2048, "heads": 15, "sequence_length": 2048, "global_batch": 512, "workers": 32}
    answer = await api.http.get("/v1/plan/throughput", params=sizes)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert "heads" in answer.text
