"""What bounds a client: how many requests it sends, and which paths on the nodes its submissions name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.api.access.access import Actor
from services.api.access.request_rates import BURST_S, MOST_PEERS, RequestRates, peer_of
from services.api.gateway import with_paths
from services.api.submission.submitted_inputs import check_paths
from shared.errors import InvalidInput, TooManyRequests
from shared.service.tokens import Scope
from shared.settings.model import Settings, read_settings
from tests.api.kit import bearer, client_of, offline_gateway, spec

# ---- requests


@given(st.lists(st.floats(0, 2), max_size=200), st.floats(0.5, 100))
def test_a_peer_gets_its_burst_and_its_rate_and_no_more(pauses_s: list[float], per_s: float) -> None:
    rates, at_s, admitted = RequestRates(per_s), 0.0, 0
    for number, pause_s in enumerate(pauses_s):
        at_s += pause_s
        try:
            rates.admit("a", at_s)
            admitted += 1
        except TooManyRequests:
            rates.admit(f"another, {number}", at_s)  # others are not concerned
    assert admitted <= max(1.0, per_s * BURST_S) + per_s * at_s + 1e-6
    assert admitted >= min(len(pauses_s), int(per_s * BURST_S))


def test_peers_at_random_fill_no_memory() -> None:
    rates = RequestRates(1.0)
    for number in range(2 * MOST_PEERS):
        rates.admit(f"10.0.{number >> 8}.{number & 255}", 0.0)
    assert len(rates._peers) == MOST_PEERS


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
    ],
)
def test_a_peer_is_an_address_or_a_network_of_one_machine(address: str, peer: str) -> None:
    assert peer_of(address) == peer


async def test_too_many_requests_of_one_peer_are_refused_and_no_other_s(tmp_path: Path) -> None:
    with offline_gateway(tmp_path) as gateway:
        gateway.settings = Settings(run_dir=tmp_path, requests_per_s=0.001)
        async with client_of(gateway) as client:
            assert (await client.get("/v1/tasks")).status_code == 200
            refused = await client.get("/v1/tasks")
            assert (refused.status_code, refused.json()["code"]) == (429, "too-many-requests")
            assert int(refused.headers["Retry-After"]) > 0
            assert (await client.get("/v1/tasks", headers=bearer(gateway.settings))).status_code == 200
            for _ in range(9):
                assert (await client.get("/healthz")).status_code == 200
            # Whoever guesses tokens is counted by the address.
            guess = {"Authorization": "Bearer unicron_guess"}
            assert [(await client.get("/v1/tasks", headers=guess)).status_code for _ in range(3)] == [401, 429, 429]


def test_the_rate_is_generous_and_a_setting() -> None:
    assert Settings().requests_per_s >= 100
    with pytest.raises(InvalidInput, match="requests_per_s"):
        read_settings(requests_per_s=-1)


# ---- paths

ALICE, ROOT = Actor("token/alice", Scope.SUBMIT), Actor("uid/0", Scope.OPERATE)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("data", {"data": "/etc/shadow"}),
        ("data", {"data": "/data/../etc/shadow"}),
        ("data", {"data": "/database"}),
        ("script", {"data": "/data/a", "script": "/home/bob/x.py"}),
        ("checkpoint.directory", {"data": "/data/a", "checkpoint": {"directory": "/etc"}}),
        ("checkpoint.url", {"data": "/data/a", "checkpoint": {"url": "file:///etc/c"}}),
    ],
)
def test_who_may_only_submit_names_paths_below_the_allowed_directories(field: str, changes: dict[str, Any]) -> None:
    submitted = with_paths(spec(**changes))
    with pytest.raises(InvalidInput, match="/data, /scripts") as refused:
        check_paths(submitted, ALICE, [Path("/data"), Path("/scripts")])
    assert [error["field"] for error in refused.value.extra["errors"]] == [field]
    check_paths(submitted, ROOT, [])


def test_allowed_paths_are_allowed_and_without_directories_none_is() -> None:
    submitted = with_paths(
        spec(data="/data/./a", script="/scripts/x.py", checkpoint={"url": "s3://bucket/c"}, name="one")
    )
    check_paths(submitted, ALICE, [Path("/data"), Path("/scripts")])
    with pytest.raises(InvalidInput, match="UNICRON_INPUT_DIRS"):
        check_paths(submitted, ALICE, [])


@pytest.mark.parametrize("given_", ["relative", "/a,relative", "/a\0"])
def test_directories_are_absolute(given_: str) -> None:
    with pytest.raises(InvalidInput, match="input_dirs"):
        read_settings(input_dirs=given_)
    assert read_settings(input_dirs="/a, /b").input_directories == [Path("/a"), Path("/b")]


async def test_a_token_to_submit_reaches_allowed_paths_only(offline: httpx.AsyncClient, tmp_path: Path) -> None:
    headers = bearer(Settings(run_dir=tmp_path), Scope.SUBMIT)
    answer = await offline.post("/v1/tasks", json=spec(data="/etc/shadow").model_dump(by_alias=True), headers=headers)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "data"
