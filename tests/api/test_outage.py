"""The database of log and projections goes away: requests that need it are refused for now, and then served again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from services.api.http.problems import MEDIA_TYPE
from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.settings.model import Settings
from tests.api.kit import Server, serving, spec_dict
from tests.condition import until
from tests.postgres import PostgresServer


@pytest.fixture
async def server(postgres: PostgresServer, settings: Settings, bus: Bus) -> AsyncIterator[Server]:
    """The gateway over an empty log in PostgreSQL."""
    log = EventLog(postgres.url)
    async with (
        Journal(log, bus) as journal,
        serving(settings.model_copy(update={"log_url": postgres.url}), bus, journal) as api,
    ):
        yield api
    log.close()


def refused(response: httpx.Response) -> bool:
    problem = response.json()
    return (
        response.status_code == problem["status"] == 503
        and problem["code"] == "unavailable"
        and response.headers["content-type"] == MEDIA_TYPE
        and int(response.headers["retry-after"]) > 0
    )


async def test_requests_during_an_outage(server: Server, postgres: PostgresServer) -> None:
    task = spec_dict(data=str(server.data))
    key = {"Idempotency-Key": "one"}
    assert (await server.http.post("/v1/tasks", json=task, headers=key)).status_code == 201
    async with server.http.stream("GET", "/v1/events?follow=true") as stream:
        lines = (line async for line in stream.aiter_lines() if line.startswith("id: "))
        assert await anext(lines) == "id: 1"
        postgres.kill()
        for path in ("/v1/tasks", "/v1/tasks/gpt", "/v1/events", "/v1/nodes", "/v1/costs"):
            response = await server.http.get(path)
            assert refused(response), (path, response.text)
        for path, body in (("/v1/tasks", spec_dict("other", str(server.data))), ("/v1/tasks/gpt/stop", None)):
            assert refused(await server.http.post(path, json=body)), path
        assert (await server.http.get("/healthz")).status_code == 200
        readiness = await server.http.get("/readyz")
        assert readiness.status_code == 503
        checks = {check["name"]: check for check in readiness.json()["checks"]}
        assert not checks["log"]["ok"]
        assert "log postgres: " in checks["log"]["detail"]
        assert checks["bus"]["ok"]
        postgres.start()

        async def served() -> bool:
            return (await server.http.post("/v1/tasks", json=task, headers=key)).status_code == 200

        await until(served)
        assert (await server.http.post("/v1/tasks/gpt/stop")).status_code == 202
        async with asyncio.timeout(40):
            assert await anext(lines) == "id: 2"
    events = (await server.http.get("/v1/events")).json()["items"]
    assert [event["type"] for event in events] == ["task.submitted", "task.stop-requested"]
