"""Notices of incidents: to a real receiver that answers, refuses, hangs, or is away."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.api.notices import webhook
from services.api.notices.webhook import read_secret
from shared.bus.connection import Bus
from shared.errors import InvalidInput
from shared.events.plans import Response as PlanResponse
from shared.events.plans import Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, PlanDecided, TaskCheckpointFailed, TaskFailed, TaskSubmitted
from shared.log.journal import Journal
from shared.model import utc_now
from shared.service.http_server import HttpServer, listen
from shared.settings.model import Settings
from tests.api.kit import Server, serving, spec

KEY = b"0123456789abcdef0123456789abcdef"
LIMIT_S = 60.0


class Receiver:
    """Takes notices. ``statuses``: of the next answers; 200 follows. ``hangs``: while it is set, no answer comes."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        self.hangs = asyncio.Event()
        self.port = 0

    async def take(self, request: Request) -> Response:
        self.requests.append((dict(request.headers), await request.body()))
        if self.hangs.is_set():
            await asyncio.Event().wait()
        return Response(status_code=self.statuses.pop(0) if self.statuses else 200)

    def taken(self) -> list[tuple[str, str]]:
        """Return type and incident of each request; check that its signature is the key's."""
        return [(str(body["type"]), str(body["data"]["incident"])) for body in map(verified, self.requests)]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():  # noqa: ASYNC110 - requests come from a client of HTTP
                await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        app = Starlette(routes=[Route("/hook", self.take, methods=["POST"])])
        with contextlib.closing(listen("127.0.0.1", self.port)) as listening:
            self.port = listening.getsockname()[1]
            config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=0)
            server = HttpServer(config)
            running = asyncio.create_task(server.serve(sockets=[listening]))
            await server.listens.wait()
            try:
                yield
            finally:
                server.should_exit = True
                await asyncio.wait({running})


def verified(request: tuple[dict[str, str], bytes]) -> dict[str, Any]:
    """Return a notice as a receiver does that knows the key."""
    headers, body = request
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    version, _, signature = headers["webhook-signature"].partition(",")
    assert version == "v1"
    assert hmac.compare_digest(base64.b64decode(signature), hmac.new(KEY, content, hashlib.sha256).digest())
    assert abs(int(headers["webhook-timestamp"]) - utc_now().timestamp()) < 300.0
    found = json.loads(body)
    assert isinstance(found, dict)
    return found


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    async with made.listening():
        yield made


@pytest.fixture
def hooked(settings: Settings, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings with the receiver, which is tried often."""
    monkeypatch.setattr(webhook, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(webhook, "LONGEST_PAUSE_S", 0.05)
    secret = tmp_path / "secret"
    secret.write_text("whsec_" + base64.b64encode(KEY).decode() + "\n")
    return settings.model_copy(
        update={
            "webhook_url": f"http://127.0.0.1:{receiver.port}/hook",
            "webhook_secret_file": secret,
            "server": "https://unicron.example/",
        }
    )


async def fault(api: Server, incident: str, severity: Severity = Severity.SEV2) -> int:
    recorded = await api.append(
        ErrorDetected,
        incident=incident,
        kind=ErrorKind.PROCESS_EXIT,
        severity=severity,
        method=Method.PROCESS_SUPERVISION,
        detected_at=utc_now(),
        node="n0",
    )
    return recorded.position


async def heal(api: Server, incident: str) -> None:
    """Append a plan that answers the incident, and has nothing to do."""
    await api.append(
        PlanDecided,
        plan=f"plan-{incident}",
        trigger=Trigger.ERROR,
        cause="cause",
        incident=incident,
        response=PlanResponse.NONE,
        changes=[],
    )


async def test_a_task_that_waits_for_its_storage_is_reported(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver
) -> None:
    """A checkpoint that could not be written in the midst of training is nothing that somebody is called for."""
    async with serving(hooked, bus, journal) as api:
        task = spec()
        await api.append(TaskSubmitted, task="gpt", spec=task)
        failed = {"task": "gpt", "generation": 1, "worker": "n0/0"}
        await api.append(TaskCheckpointFailed, step=task.steps - 1, reason="no room", **failed)
        await api.append(TaskCheckpointFailed, step=task.steps, reason="all steps are done, and no room", **failed)
        await fault(api, "i1")
        await receiver.until(lambda: len(receiver.requests) == 2)
    waiting, opened = map(verified, receiver.requests)
    assert (waiting["type"], opened["type"]) == ("task.waiting", "incident.opened")
    data = waiting["data"]
    assert (data["task"], data["reason"], data["step"]) == ("gpt", "all steps are done, and no room", task.steps)
    assert data["link"] == "https://unicron.example/v1/tasks/gpt"


async def test_a_failed_task_and_an_incident_that_is_open_again_are_reported(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver
) -> None:
    async with serving(hooked, bus, journal) as api:
        await api.join("n0")
        await fault(api, "i1")
        await heal(api, "i1")
        await receiver.until(lambda: len(receiver.requests) == 2)
        again = {"kind": ErrorKind.EXCEPTION, "severity": Severity.SEV2, "method": Method.EXCEPTION}
        await api.append(ErrorDetected, incident="i1", detected_at=utc_now(), repeats="earlier", **again)
        await receiver.until(lambda: len(receiver.requests) == 3)
        await api.append(TaskSubmitted, task="gpt", spec=spec())
        reason = "exception (ValueError) at step 3 happened 2 times"
        await api.append(TaskFailed, task="gpt", generation=3, step=3, reason=reason, incident="i1")
        await receiver.until(lambda: len(receiver.requests) == 5)
    earlier = [("incident.opened", "i1"), ("incident.closed", "i1"), ("incident.reopened", "i1")]
    assert receiver.taken() == [*earlier, ("task.failed", "i1"), ("incident.closed", "i1")]
    failed, closed = (verified(request)["data"] for request in receiver.requests[-2:])
    assert (failed["task"], failed["reason"], failed["step"]) == ("gpt", reason, 3)
    assert failed["link"] == "https://unicron.example/v1/tasks/gpt"
    assert (closed["restored_at"], closed["failed_tasks"]) == (None, {"gpt": reason})
    assert closed["closed_at"] is not None
    # A receiver drops what it has by its id: the second end is another one.
    assert len({headers["webhook-id"] for headers, _ in receiver.requests}) == 5


async def test_an_incident_is_told_when_it_opens_and_when_it_is_over(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver
) -> None:
    async with serving(hooked, bus, journal) as api:
        await api.join("n0")
        position = await fault(api, "i/1", Severity.SEV3)
        await receiver.until(lambda: len(receiver.requests) == 1)
        await fault(api, "i/1", Severity.SEV2)  # an escalation
        await heal(api, "i/1")
        await receiver.until(lambda: len(receiver.requests) == 2)
    assert receiver.taken() == [("incident.opened", "i/1"), ("incident.closed", "i/1")]
    opened, closed = (verified(request)["data"] for request in receiver.requests)
    assert opened["position"] == closed["position"] == position
    assert (opened["cause"], opened["severity"], opened["node"]) == ("process-exit", "SEV3", "n0")
    assert (opened["restored_at"], opened["task"], opened["plans"]) == (None, None, [])
    assert (closed["severity"], closed["plans"]) == ("SEV2", ["plan-i/1"])
    assert closed["restored_at"] is not None
    assert closed["link"] == "https://unicron.example/v1/incidents/i%2F1"
    assert closed["cost"]["currency"] == "USD"
    assert closed["cost"]["money"] >= 0.0
    ids = {headers["webhook-id"] for headers, _ in receiver.requests}
    assert len(ids) == 2


async def test_what_the_receiver_refuses_is_sent_again_as_it_was(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver
) -> None:
    receiver.statuses = [500, 302, 404]
    async with serving(hooked, bus, journal) as api:
        await fault(api, "i1")
        await fault(api, "i2")
        await receiver.until(lambda: len(receiver.requests) == 5)
        page = (await api.http.get("/metrics")).text
    assert receiver.taken() == [("incident.opened", "i1")] * 4 + [("incident.opened", "i2")]
    assert len({(headers["webhook-id"], body) for headers, body in receiver.requests[:4]}) == 1
    assert "unicron_webhook_failures_total 3.0" in page


async def test_a_receiver_that_hangs_keeps_nothing_waiting(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver
) -> None:
    receiver.hangs.set()
    async with serving(hooked, bus, journal) as api:
        await api.join("n0")
        await fault(api, "i1")
        await receiver.until(lambda: len(receiver.requests) == 1)
        last = 0
        for number in range(2, 30):
            last = await fault(api, f"i{number}")
        async with asyncio.timeout(webhook.TIMEOUT_S / 2):  # the fold and requests go on beside the one that hangs
            await api.projected(last)
            assert len((await api.http.get("/v1/incidents")).json()["items"]) == 29
        assert len(receiver.requests) == 1
    # And the api has ended all the same.
    assert receiver.taken() == [("incident.opened", "i1")]


async def test_a_restart_sends_nothing_twice_and_what_came_meanwhile(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver, tmp_path: Path
) -> None:
    state = tmp_path / "webhook.json"
    async with serving(hooked, bus, journal) as api:
        await receiver.until(state.exists)
        before = state.read_bytes()
        await fault(api, "i1")
        await receiver.until(lambda: state.exists() and json.loads(state.read_bytes())["open"] == ["i1"])
    offline = Server("", api.http, journal, api.data)
    await fault(offline, "i2")
    await heal(offline, "i1")
    async with serving(hooked, bus, journal):
        await receiver.until(lambda: len(receiver.requests) == 3)
    assert receiver.taken() == [("incident.opened", "i1"), ("incident.opened", "i2"), ("incident.closed", "i1")]
    state.write_bytes(before)  # as if the process had died each time between the request and the file
    async with serving(hooked, bus, journal):
        await receiver.until(lambda: len(receiver.requests) == 6)
    ids = [headers["webhook-id"] for headers, _ in receiver.requests]
    assert sorted(ids[:3]) == sorted(ids[3:])


async def test_a_new_webhook_gets_nothing_of_before(
    settings: Settings, hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver
) -> None:
    async with serving(settings, bus, journal) as api:
        await fault(api, "old")
    async with serving(hooked, bus, journal) as api:
        await fault(api, "new")
        await receiver.until(lambda: len(receiver.requests) == 1)
    assert receiver.taken() == [("incident.opened", "new")]


async def test_a_receiver_that_was_away_gets_all_in_order(
    hooked: Settings, bus: Bus, journal: Journal, tmp_path: Path
) -> None:
    away = Receiver()
    async with away.listening():
        pass  # its port is known, and closed
    hooked = hooked.model_copy(update={"webhook_url": f"http://127.0.0.1:{away.port}/hook"})
    async with serving(hooked, bus, journal) as api:
        for number in range(40):
            await fault(api, f"i{number}")

        async def failed() -> bool:
            return "unicron_webhook_failures_total 0.0" not in (await api.http.get("/metrics")).text

        async with asyncio.timeout(LIMIT_S):
            while not await failed():  # noqa: ASYNC110 - a page of the api
                await asyncio.sleep(0.01)
        async with away.listening():
            await away.until(lambda: len(away.requests) == 40)
    assert [incident for _, incident in away.taken()] == [f"i{number}" for number in range(40)]


@pytest.mark.parametrize("text", ["", "secret", "whsec_", "whsec_####", "whsec_" + base64.b64encode(b"short").decode()])
def test_a_secret_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(text)
    with pytest.raises(InvalidInput, match=r"webhook_secret_file.*must have whsec_"):
        read_secret(tmp_path / "secret")
    with pytest.raises(InvalidInput, match=r"webhook_secret_file.*cannot be read"):
        read_secret(tmp_path / "none")


async def test_a_webhook_without_a_secret_is_refused_at_the_start(hooked: Settings, bus: Bus, journal: Journal) -> None:
    with pytest.raises(InvalidInput, match="webhook_secret_file"):
        async with serving(hooked.model_copy(update={"webhook_secret_file": None}), bus, journal):
            pass
