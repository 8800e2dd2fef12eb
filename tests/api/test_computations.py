"""Computations of requests: bounded in number and duration, and ended when nobody waits for them any more."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import psutil

from services.api.http import computations
from services.api.http.computations import Computations, most_at_once
from tests.api.kit import Server, client_of, offline_gateway
from tests.condition import until

ENDLESS = {
    "layers": 5040, "hidden": 1_000_000, "heads": 10_000, "sequence_length": 2048,
    "global_batch": 720_720, "workers": 720_720,
}  # fmt: skip
"""Divisors without end: the search over layouts takes hours."""


def computing() -> set[int]:
    """Return the processes of this one that do not wait."""
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_SLEEPING}


async def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with offline_gateway(tmp_path) as gateway:
        gateway.computations = Computations(limit_s=1.0)
        async with client_of(gateway) as client:
            answer = await client.get("/v1/plan/throughput", params=ENDLESS)
    assert answer.status_code == 503
    assert answer.json()["code"] == "time-limit"
    assert int(answer.headers["Retry-After"]) > 0
    assert not computing()


async def test_clients_that_leave_take_theirs_with_them_and_others_are_served(api: Server) -> None:
    """As many as one address may have at once, and one more: meanwhile tasks are submitted, and all is ready again."""
    before = len(psutil.Process().children())
    asked = [
        asyncio.create_task(api.http.get("/v1/plan/throughput", params=ENDLESS))
        for _ in range(computations.MOST_OF_ONE_PEER)
    ]
    # One of them computes; the others wait for its process, or beside it.
    await until(computing)

    async def refused() -> bool:
        answer = await api.http.get("/v1/plan/throughput", params=ENDLESS, timeout=5)
        return answer.status_code == 429 and answer.json()["code"] == "too-many-requests"

    assert await refused()
    assert (await api.http.get("/healthz")).status_code == 200
    assert (await api.http.post("/v1/tasks", json=api.spec())).status_code == 201
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    await until(lambda: not computing())
    assert len(psutil.Process().children()) <= before + most_at_once()
    small = {"layers": 2, "hidden": 64, "heads": 2, "sequence_length": 64, "global_batch": 8, "workers": 2}
    answer = await api.http.get("/v1/plan/throughput", params=small)
    assert answer.status_code == 200
    assert answer.json()["fits"]


async def test_all_addresses_together_are_bounded(tmp_path: Path) -> None:
    with offline_gateway(tmp_path) as gateway, ExitStack() as others:
        for number in range(computations.MOST_PENDING):
            others.enter_context(gateway.computations.admitted(f"198.51.100.{number}"))
        async with client_of(gateway) as client:
            answer = await client.get("/v1/plan/throughput", params=ENDLESS)
        assert (answer.status_code, answer.json()["code"]) == (503, "busy")
        assert "Retry-After" in answer.headers
