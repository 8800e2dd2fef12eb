"""Requests that are refused by their headers or parameters, whatever they ask for; HEAD and OPTIONS; errors."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from services.api.http.problems import MOST_ECHOED
from shared.settings.model import Settings
from tests.api.kit import Server, client_of, offline_gateway, spec_dict

JSON = {"Content-Type": "application/json"}


def code(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["code"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8642", "localhost.evil.example", "[::1", "", "a@b:c"])
async def test_another_host_is_refused(offline: httpx.AsyncClient, host: str) -> None:
    assert code(await offline.get("/healthz", headers={"Host": host})) == (421, "wrong-host")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8642", "127.0.0.1:8642", "[::1]:8642", socket.gethostname()])
async def test_own_names_and_addresses_are_accepted(offline: httpx.AsyncClient, host: str) -> None:
    assert (await offline.get("/healthz", headers={"Host": host})).status_code == 200


async def test_further_names_are_a_setting(tmp_path: Path) -> None:
    with offline_gateway(tmp_path) as gateway:
        gateway.settings = Settings(run_dir=tmp_path, allowed_hosts="unicron.example, api")
        async with client_of(gateway) as client:
            for host, status in (("unicron.example", 200), ("API:8642", 200), ("other.example", 421)):
                assert (await client.get("/healthz", headers={"Host": host})).status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:9999"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost"},
    ],
)
async def test_a_page_of_another_site_changes_nothing(offline: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert code(await offline.post("/v1/tasks", json=spec_dict(), headers=headers)) == (403, "cross-origin")
    assert (await offline.get("/healthz", headers=headers)).status_code == 200


async def test_a_page_of_this_server_may_change(api: Server) -> None:
    headers = {"Origin": api.url, "Sec-Fetch-Site": "same-origin"}
    assert (await api.http.post("/v1/tasks", json=api.spec(), headers=headers)).status_code == 201


@pytest.mark.parametrize("given", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_body_of_another_type_is_refused(offline: httpx.AsyncClient, given: str) -> None:
    body = json.dumps(spec_dict())
    answer = await offline.post("/v1/tasks", content=body, headers={"Content-Type": given})
    assert code(answer) == (415, "unsupported-content-type")
    assert "application/json" in answer.json()["detail"]


async def test_a_request_for_a_change_needs_no_body(api: Server) -> None:
    await api.http.post("/v1/tasks", json=api.spec())
    assert (await api.http.post("/v1/tasks/gpt/stop")).status_code == 202


async def test_unknown_parameters_are_refused(offline: httpx.AsyncClient) -> None:
    for path, given, meant in (
        ("/v1/tasks", "limits=5", "limit"),
        ("/v1/plan/throughput", "layer=5", "layers"),
        ("/v1/costs", "form=2025-01-01", "from"),
    ):
        answer = await offline.get(f"{path}?{given}")
        assert code(answer) == (422, "invalid-input")
        (error,) = (e for e in answer.json()["errors"] if e["field"] == given.partition("=")[0])
        assert f"did you mean {meant!r}?" in error["problem"]
    assert code(await offline.get("/healthz?a=b")) == (422, "invalid-input")


@pytest.mark.parametrize("name", ["TINY", "a.b", "%00", "..%2f..", "a%20b", "x" * 64, "-", "%ff"])
async def test_what_is_no_name_is_refused_and_matches_nothing(offline: httpx.AsyncClient, name: str) -> None:
    for path in (f"/v1/tasks/{name}", f"/v1/tasks/{name}/logs", f"/v1/tasks/{name}/result", f"/v1/nodes/{name}"):
        answer = await offline.get(path)
        assert (answer.status_code, answer.json()["code"]) in ((422, "invalid-input"), (404, "not-found"))
        assert answer.status_code == 422 or "%2f" in name  # that is another path
    for path in (f"/v1/incidents?task={name}", f"/v1/plans?task={name}"):
        answer = await offline.get(path)
        assert code(answer) == (422, "invalid-input")
        assert answer.json()["errors"][0]["field"] == "task"


async def test_a_task_is_found_by_its_own_name_only(api: Server) -> None:
    assert (await api.http.post("/v1/tasks", json=api.spec("tiny"))).status_code == 201
    assert (await api.http.get("/v1/tasks/tiny")).status_code == 200
    assert (await api.http.get("/v1/tasks/TINY")).status_code == 422
    assert (await api.http.get("/v1/tasks/tin")).status_code == 404
    assert (await api.http.get("/v1/plans?task=tiny")).status_code == 200
    assert (await api.http.get("/v1/plans?task=TINY")).status_code == 422


async def test_parameters_at_the_ends_of_their_ranges_are_answered(api: Server) -> None:
    for path, headers in (
        ("/v1/events?follow=true", {"Last-Event-ID": "9" * 5000}),
        ("/v1/events?follow=true", {"Last-Event-ID": "9" * 20}),
        ("/v1/costs?from=0001-01-01T00:00:00%2B14:00", {}),
        ("/v1/costs?to=9999-12-31T23:59:59-14:00", {}),
        ("/v1/events?after=9223372036854775808", {}),
        ("/v1/incidents/%00", {}),
    ):
        status = (await api.http.head(path, headers=headers)).status_code
        assert status == (200 if headers else 422), path


@pytest.mark.parametrize("path", ["/v1/tasks/gpt/stop", "/v1/nodes/n0/cordon", "/v1/nodes/n0/drain"])
async def test_small_bodies_are_read_up_to_a_limit(offline: httpx.AsyncClient, path: str) -> None:
    for body, status in ((b" " * 100_000, 413), (b"[" * 60_000, 422), (b'{"reason": "\\ud800"}', 422), (b"[]", 422)):
        answer = await offline.post(path, content=body, headers=JSON)
        assert answer.status_code == status, answer.text
    answer = await offline.post(path, content=b'{"other": 1}', headers=JSON)
    assert answer.json()["errors"][0] == {"field": "other", "value": 1, "problem": "Extra inputs are not permitted"}


async def test_head_is_get_without_a_body(api: Server) -> None:
    got = await api.http.get("/v1/tasks")
    head = await api.http.head("/v1/tasks")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]
    assert (await api.http.head("/v1/tasks/none")).status_code == 404
    stream = await api.http.head("/v1/events?follow=true")  # ends, though the stream does not
    assert stream.headers["content-type"].startswith("text/event-stream")
    # The connection is still good, and so is the server.
    assert (await api.http.get("/healthz")).status_code == 200


async def test_options_and_refused_methods_name_all_that_are_allowed(offline: httpx.AsyncClient) -> None:
    answer = await offline.options("/v1/tasks")
    assert (answer.status_code, answer.headers["allow"]) == (204, "GET, HEAD, OPTIONS, POST")
    answer = await offline.delete("/v1/tasks")
    assert code(answer) == (405, "method-not-allowed")
    assert answer.headers["allow"] == "GET, HEAD, OPTIONS, POST"
    assert code(await offline.options("/none")) == (404, "not-found")


@pytest.mark.parametrize("text", ["\ud800", "x" * 10_000, "\0", "\u202e\udfff"])
async def test_errors_repeat_a_part_only_and_are_valid_json(offline: httpx.AsyncClient, text: str) -> None:
    for body in ({**spec_dict(), "name": text}, {**spec_dict(), text: 1}, {**spec_dict(), "env": {"A": {"b": text}}}):
        answer = await offline.post("/v1/tasks", content=json.dumps(body), headers=JSON)
        assert code(answer) == (422, "invalid-input")
        assert "x" * (MOST_ECHOED + 1) not in answer.text
    for path in ("/v1/nodes/" + "x" * 9000, "/v1/incidents/" + "x" * 9000, "/" + "x" * 9000):
        answer = await offline.get(path)
        assert answer.status_code == (422 if path.startswith("/v1/") else 404)
        assert "x" * (MOST_ECHOED + 1) not in answer.text


async def test_text_that_is_no_unicode_is_not_logged(api: Server) -> None:
    for path, body in (
        ("/v1/nodes/n0/cordon", {"reason": "\ud800"}),
        ("/v1/tasks", api.spec(script="/x\ud800")),
        ("/v1/tasks", api.spec(env={"A": "\ud800"})),
    ):
        answer = await api.http.post(path, content=json.dumps(body), headers=JSON)
        assert code(answer) == (422, "invalid-input")
    assert api.journal.log.last_position() == 0


async def test_answers_say_what_browsers_may_do_with_them(offline: httpx.AsyncClient) -> None:
    for answer in (await offline.get("/healthz"), await offline.get("/none")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
