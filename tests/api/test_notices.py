"""Notices of incidents: to a real receiver that answers, refuses, hangs, or is away."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.api import main
from services.api.notices import notices, occasions, sending
from services.api.notices.queues import Queues, Sent
from services.api.notices.receivers import read_receivers
from services.api.notices.sending import NotDelivered, public_address
from services.api.routers import health
from services.api.store.projection_store import database_url
from shared.bus.connection import Bus
from shared.errors import InvalidInput
from shared.events.plans import Response as PlanResponse
from shared.events.plans import Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, PlanDecided, TaskCheckpointFailed, TaskFailed, TaskSubmitted
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.model import utc_now
from shared.service.http_server import HttpServer, listen
from shared.settings.model import Settings
from shared.views import incident_parts
from tests.api.kit import Server, Story, serving, spec
from tests.condition import until
from tests.postgres import PostgresServer

KEY = b"0123456789abcdef0123456789abcdef"


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
    """Settings with the receiver as the only one, which is tried often."""
    monkeypatch.setattr(sending, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(sending, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(notices, "LOOK_S", 0.1)
    (tmp_path / "secret").write_text("whsec_" + base64.b64encode(KEY).decode() + "\n")
    return telling(settings, tmp_path, {"archive": generic(tmp_path, receiver.port)})


def telling(settings: Settings, folder: Path, receivers: dict[str, dict[str, Any]]) -> Settings:
    """Return settings with these receivers."""
    (folder / "notices.yaml").write_text(yaml.safe_dump(receivers))
    return settings.model_copy(update={"notices_file": folder / "notices.yaml", "server": "https://unicron.example/"})


def generic(folder: Path, port: int, **more: Any) -> dict[str, Any]:
    return {
        "shape": "generic",
        "url_file": url_file(folder, port),
        "secret_file": "secret",
        "allow_private": True,
    } | more


def url_file(folder: Path, port: int) -> str:
    (folder / f"{port}.url").write_text(f"http://127.0.0.1:{port}/hook\n")
    return f"{port}.url"


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
    story = Story(hooked.run_dir / "log.db")
    story.running()
    story.log.close()
    steps = spec().steps
    async with serving(hooked, bus, journal) as api:
        failed = {"task": "gpt", "generation": 1, "worker": "n0/0"}
        await api.append(TaskCheckpointFailed, step=steps - 1, reason="no room yet", **failed)
        await fault(api, "i1")
        await until(lambda: len(receiver.requests) == 1)
        await api.append(TaskCheckpointFailed, step=steps, reason="no room", **failed)
        await until(lambda: len(receiver.requests) == 2)
    opened, waiting = map(verified, receiver.requests)
    assert (opened["type"], waiting["type"]) == ("incident.opened", "task.waiting")
    assert (waiting["data"]["task"], waiting["data"]["reason"]) == ("gpt", "waits for its storage: no room")
    assert waiting["data"]["link"] == "https://unicron.example/tasks/gpt"


async def test_a_failed_task_and_an_incident_that_is_open_again_are_reported(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver
) -> None:
    async with serving(hooked, bus, journal) as api:
        await api.join("n0")
        await fault(api, "i1")
        await heal(api, "i1")
        await until(lambda: len(receiver.requests) == 2)
        again = {"kind": ErrorKind.EXCEPTION, "severity": Severity.SEV2, "method": Method.EXCEPTION}
        await api.append(ErrorDetected, incident="i1", detected_at=utc_now(), repeats="earlier", **again)
        await until(lambda: len(receiver.requests) == 3)
        await api.append(TaskSubmitted, task="gpt", spec=spec())
        reason = "exception (ValueError) at step 3 happened 2 times"
        await api.append(TaskFailed, task="gpt", generation=3, step=3, reason=reason, incident="i1")
        await until(lambda: len(receiver.requests) == 5)
        await api.append(TaskSubmitted, task="own", spec=spec())
        await api.append(TaskFailed, task="own", generation=1, step=3, reason="its script is wrong")
        await until(lambda: len(receiver.requests) == 6)
    earlier = [("incident.opened", "i1"), ("incident.closed", "i1"), ("incident.reopened", "i1")]
    assert receiver.taken()[:3] == earlier
    last = {body["type"]: body["data"] for body in map(verified, receiver.requests[3:5])}
    failed, closed = last["task.failed"], last["incident.closed"]
    assert (failed["task"], failed["reason"], failed["step"]) == ("gpt", reason, 3)
    assert failed["link"] == "https://unicron.example/v1/incidents/i1/postmortem?format=html"
    assert (closed["restored_at"], closed["failed_tasks"]) == (None, {"gpt": reason})
    assert closed["closed_at"] is not None
    assert verified(receiver.requests[5])["data"]["link"] == "https://unicron.example/tasks/own"
    # A receiver drops what it has by its id: the second end is another one.
    assert len({headers["webhook-id"] for headers, _ in receiver.requests}) == 6


async def test_an_incident_is_told_when_it_opens_and_when_it_is_over(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver
) -> None:
    async with serving(hooked, bus, journal) as api:
        await api.join("n0")
        position = await fault(api, "i/1", Severity.SEV3)
        await until(lambda: len(receiver.requests) == 1)
        await fault(api, "i/1", Severity.SEV2)  # an escalation
        await heal(api, "i/1")
        await until(lambda: len(receiver.requests) == 2)
    assert receiver.taken() == [("incident.opened", "i/1"), ("incident.closed", "i/1")]
    opened, closed = (verified(request)["data"] for request in receiver.requests)
    assert opened["position"] == closed["position"] == position
    assert (opened["cause"], opened["severity"], opened["node"]) == ("process-exit", "SEV3", "n0")
    assert (opened["restored_at"], opened["task"], opened["plans"]) == (None, None, [])
    assert (closed["severity"], closed["plans"]) == ("SEV2", ["plan-i/1"])
    assert closed["restored_at"] is not None
    assert closed["link"] == "https://unicron.example/v1/incidents/i%2F1/postmortem?format=html"
    assert opened["key"] == closed["key"]
    assert (opened["resolved"], closed["resolved"]) == (False, True)
    assert opened["to_do"]
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
        await until(lambda: len(receiver.requests) == 5)
        page = (await api.http.get("/metrics")).text
    assert receiver.taken() == [("incident.opened", "i1")] * 4 + [("incident.opened", "i2")]
    assert len({(headers["webhook-id"], body) for headers, body in receiver.requests[:4]}) == 1
    assert 'unicron_notice_failures_total{receiver="archive"} 3.0' in page


@pytest.mark.slow
async def test_a_receiver_that_hangs_keeps_nothing_waiting(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver
) -> None:
    receiver.hangs.set()
    async with serving(hooked, bus, journal) as api:
        await api.join("n0")
        await fault(api, "i1")
        await until(lambda: len(receiver.requests) == 1)
        last = 0
        for number in range(2, 30):
            last = await fault(api, f"i{number}")
        async with asyncio.timeout(sending.TIMEOUT_S / 2):  # the fold and requests go on beside the one that hangs
            await api.projected(last)
            assert len((await api.http.get("/v1/incidents")).json()["items"]) == 29
        assert len(receiver.requests) == 1
    # And the api has ended all the same.
    assert receiver.taken() == [("incident.opened", "i1")]


@pytest.mark.slow
async def test_a_restart_sends_nothing_twice_and_what_came_meanwhile(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver
) -> None:
    queues = Queues(database_url(hooked, "notices"))
    async with serving(hooked, bus, journal) as api:
        await fault(api, "i1")
        await until(lambda: len(announced(queues)) == 1)
        before = queues.turn("archive")
    assert before is not None
    offline = Server("", api.http, journal, api.data)
    await fault(offline, "i2")
    await heal(offline, "i1")
    async with serving(hooked, bus, journal):
        await until(lambda: len(receiver.requests) == 3)
    assert receiver.taken() == [("incident.opened", "i1"), ("incident.opened", "i2"), ("incident.closed", "i1")]
    # As if the process had died each time between the request and the row, in which nobody is the sender.
    turn = queues.turn("archive")
    assert turn is not None
    assert turn.sender == ""
    assert queues.beat("archive", "", Sent(position=0))
    async with serving(hooked, bus, journal):
        await until(lambda: len(receiver.requests) == 6)
    queues.close()
    ids = [headers["webhook-id"] for headers, _ in receiver.requests]
    assert sorted(ids[:3]) == sorted(ids[3:])


def announced(queues: Queues) -> set[str]:
    turn = queues.turn("archive")
    return set() if turn is None else {one.name for one in turn.sent.open.values()}


async def test_a_new_receiver_gets_nothing_of_before(
    settings: Settings, hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver
) -> None:
    async with serving(settings, bus, journal) as api:
        await fault(api, "old")
    async with serving(hooked, bus, journal) as api:
        await fault(api, "new")
        await until(lambda: len(receiver.requests) == 1)
    assert receiver.taken() == [("incident.opened", "new")]


@pytest.mark.slow
async def test_a_receiver_that_was_away_gets_all_in_order(
    hooked: Settings, bus: Bus, journal: Journal, tmp_path: Path
) -> None:
    away = Receiver()
    async with away.listening():
        pass  # its port is known, and closed
    hooked = telling(hooked, tmp_path, {"archive": generic(tmp_path, away.port)})
    async with serving(hooked, bus, journal) as api:
        for number in range(40):
            await fault(api, f"i{number}")

        async def failed() -> bool:
            return 'unicron_notice_failures_total{receiver="archive"} 0.0' not in (await api.http.get("/metrics")).text

        await until(failed)
        async with away.listening():
            await until(lambda: len(away.requests) == 40)
    assert [incident for _, incident in away.taken()] == [f"i{number}" for number in range(40)]


async def test_receivers_have_queues_and_shapes_of_their_own(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver, tmp_path: Path
) -> None:
    """One that hangs holds up no other; Slack and PagerDuty are told what people are called for, and its end."""
    (tmp_path / "routing").write_text("R0UT1NG\n")
    chat, pager = Receiver(), Receiver()
    receiver.hangs.set()
    async with chat.listening(), pager.listening():
        hooked = telling(
            hooked,
            tmp_path,
            {
                "archive": generic(tmp_path, receiver.port),
                "chat": {"shape": "slack", "url_file": url_file(tmp_path, chat.port), "allow_private": True},
                "on-call": {
                    "shape": "pagerduty",
                    "url_file": url_file(tmp_path, pager.port),
                    "key_file": "routing",
                    "about": ["task-failed"],
                    "allow_private": True,
                },
            },
        )
        async with serving(hooked, bus, journal) as api:
            await api.join("n0")
            await fault(api, "i1")
            await api.append(TaskSubmitted, task="gpt", spec=spec())
            await api.append(TaskFailed, task="gpt", generation=3, step=3, reason="<loss> is & nan", incident="i1")
            await until(lambda: len(chat.requests) == len(pager.requests) == 1)
            await api.append(TaskSubmitted, task="gpt", spec=spec(), resumes=True)
            await until(lambda: len(chat.requests) == len(pager.requests) == 2 and receiver.requests)
            status = (await api.http.get("/v1/status")).text
    assert receiver.taken() == [("incident.opened", "i1")]
    failed, over = (json.loads(body)["text"] for _, body in chat.requests)
    assert "task gpt failed at step 3: &lt;loss&gt; is &amp; nan" in failed
    assert "unicron resume gpt" in failed
    assert "<https://unicron.example/v1/incidents/i1/postmortem?format=html|" in failed
    assert over.startswith(":white_check_mark: Resolved: task gpt")
    trigger, resolve = (json.loads(body) for _, body in pager.requests)
    assert (trigger["event_action"], resolve["event_action"]) == ("trigger", "resolve")
    assert trigger["dedup_key"] == resolve["dedup_key"]
    assert trigger["routing_key"] == resolve["routing_key"] == "R0UT1NG"
    assert trigger["payload"]["severity"] == "critical"
    assert trigger["payload"]["custom_details"]["task"] == "gpt"
    assert "R0UT1NG" not in status


@pytest.mark.slow
async def test_what_holds_is_told_until_it_is_over(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An isolated node, an incident that is stuck, and a control plane without its services: none is an event."""
    monkeypatch.setattr(occasions, "DEGRADED_S", 0.0)
    monkeypatch.setattr(incident_parts, "NEVER_HEALED_S", 0.0)
    about = ["node-isolated", "incident-stuck", "control-plane"]
    hooked = telling(hooked, tmp_path, {"archive": generic(tmp_path, receiver.port, about=about)})
    async with serving(hooked, bus, journal) as api:
        await api.join("n0")
        await fault(api, "i1", Severity.SEV1)
        await until(lambda: len(receiver.requests) == 3)
        await api.join("n0")  # anew: an isolated node is back once it has passed its self-test
        await heal(api, "i1")
        await until(lambda: len(receiver.requests) == 5)
        await fault(api, "i2", Severity.SEV1)
        await until(lambda: len(receiver.requests) == 7)
    # A receiver drops what it has by its id, and the same node is isolated again.
    assert len({headers["webhook-id"] for headers, _ in receiver.requests}) == 7
    found = {body["type"]: body["data"] for body in map(verified, receiver.requests[:5])}
    isolated, stuck = ("node.isolated", "node.isolated.resolved"), ("incident.stuck", "incident.stuck.resolved")
    assert {*found} == {*isolated, *stuck, "control-plane.degraded"}
    for first, last in (isolated, stuck):
        assert (found[first]["key"], found[first]["resolved"]) == (found[last]["key"], False)
        assert found[last]["resolved"]
    assert found["node.isolated"]["node"] == "n0"
    assert found["node.isolated"]["link"] == "https://unicron.example/v1/incidents/i1/postmortem?format=html"
    assert [part.split(":")[0] for part in found["control-plane.degraded"]["parts"]] == [*health.SERVICES]


@pytest.mark.slow
async def test_that_the_log_is_away_is_told_while_it_is(
    hooked: Settings, bus: Bus, receiver: Receiver, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log, projections and what was sent are in one PostgreSQL here."""
    monkeypatch.setattr(occasions, "DEGRADED_S", 5.0)
    log = EventLog(postgres.url)
    settings = hooked.model_copy(update={"log_url": postgres.url})
    async with Journal(log, bus) as journal, serving(settings, bus, journal) as api:
        queues = Queues(postgres.url)
        await until(lambda: queues.turn("archive") is not None)
        queues.close()
        postgres.kill()
        try:
            await until(lambda: receiver.requests)
            shown = (await api.http.get("/v1/troubles")).json()
        finally:
            postgres.start()
    log.close()
    first = verified(receiver.requests[0])
    assert first["type"] == "control-plane.degraded"
    assert any(part.startswith("log: ") for part in first["data"]["parts"])
    assert [one["kind"] for one in shown["items"]] == ["control-plane"]
    assert "log: " in shown["items"][0]["what"]


@pytest.mark.slow
async def test_of_two_apis_one_sends_and_the_other_takes_over(
    hooked: Settings, bus: Bus, journal: Journal, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "BEAT_S", 0.1)
    monkeypatch.setattr(notices, "LEASE_S", 1.0)
    (tmp_path / "other").mkdir()
    second = hooked.model_copy(update={"run_dir": tmp_path / "other", "log_url": hooked.log_database_url})
    monkeypatch.setattr(main, "database_url", one_place(database_url(hooked, "notices")))
    async with serving(second, bus, journal) as other:
        async with serving(hooked, bus, journal) as api:
            for number in range(5):
                await fault(api, f"i{number}")
            await until(lambda: len(receiver.requests) == 5)
            first = Queues(database_url(hooked, "notices")).turn("archive")
        # As one that was killed leaves it: a sender that beats no more.
        queues = Queues(database_url(hooked, "notices"))
        assert first is not None
        assert await until(lambda: (turn := queues.turn("archive")) and queues.take("archive", "killed", turn))
        await fault(other, "i5")
        await until(lambda: len(receiver.requests) == 6)
        queues.close()
    assert [incident for _, incident in receiver.taken()] == [f"i{number}" for number in range(6)]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_apis_that_start_together_make_one_table(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = f"sqlite:///{tmp_path / 'notices.db'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    together = threading.Barrier(8)

    def first_look(_: int) -> object:
        queues = Queues(url)
        together.wait()
        try:
            return queues.turn("chat")
        finally:
            queues.close()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(first_look, range(8))) == [None] * 8


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_receiver_has_one_sender_at_a_time(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = f"sqlite:///{tmp_path / 'a%20 notices?.db'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    one, other = Queues(url), Queues(url)
    assert one.turn("chat") is None
    assert one.begin("chat", "one", Sent(position=7))
    assert not other.begin("chat", "other", Sent(position=9))
    seen = other.turn("chat")
    assert seen is not None
    assert (seen.sender, seen.sent.position) == ("one", 7)
    assert one.beat("chat", "one", Sent(position=8))
    assert not other.take("chat", "other", seen)  # its sender has beaten since
    seen = other.turn("chat")
    assert seen is not None
    assert other.take("chat", "other", seen)
    assert not one.beat("chat", "one", Sent(position=10))
    one.leave("chat", "one")  # of a turn that another has: nothing
    seen = one.turn("chat")
    assert seen is not None
    assert (seen.sender, seen.sent.position) == ("other", 8)
    other.leave("chat", "other")
    seen = one.turn("chat")
    assert seen is not None
    assert seen.sender == ""
    one.close()
    other.close()


def one_place(notices_url: str) -> Callable[[Settings, str], str]:
    """Return ``database_url`` of apis that share what receivers were sent, as those on PostgreSQL do."""

    def url(settings: Settings, name: str) -> str:
        return notices_url if name == "notices" else database_url(settings, name)

    return url


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "[::1]", "[::ffff:192.168.0.1]", "169.254.169.254"])
async def test_a_private_address_is_refused(host: str) -> None:
    with pytest.raises(NotDelivered, match="private address"):
        await public_address(host.strip("[]"), 443)


@pytest.mark.parametrize("text", ["", "secret", "whsec_", "whsec_####", "whsec_" + base64.b64encode(b"short").decode()])
def test_a_secret_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(text)
    (tmp_path / "notices.yaml").write_text(yaml.safe_dump({"archive": generic(tmp_path, 1)}))
    with pytest.raises(InvalidInput, match=r"archive\.secret_file: must have whsec_"):
        read_receivers(tmp_path / "notices.yaml")


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"shape": "fax"}, r"chat\.shape"),
        ({"shape": "slack"}, "the shape slack needs url_file"),
        ({"shape": "slack", "url_file": "plain"}, r"chat\.url_file: must have an address https://"),
        ({"shape": "slack", "url_file": "none"}, r"chat\.url_file: cannot be read"),
        ({"shape": "slack", "url_file": "good", "key_file": "good"}, "the shape slack takes no key_file"),
        ({"shape": "pagerduty", "key_file": "empty"}, r"chat\.key_file: has no routing key"),
        ({"shape": "slack", "url_file": "good", "about": ["weather"]}, r"chat\.about"),
        ({"shape": "slack", "url_file": "good", "colour": "red"}, r"chat\.colour"),
    ],
)
def test_receivers_that_are_refused(entry: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("http://hooks.example/T0KEN")
    (tmp_path / "good").write_text("https://hooks.example/T0KEN")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "notices.yaml").write_text(yaml.safe_dump({"chat": entry}))
    with pytest.raises(InvalidInput, match=problem) as refused:
        read_receivers(tmp_path / "notices.yaml")
    assert "T0KEN" not in str(refused.value)


async def test_receivers_that_are_wrong_are_refused_at_the_start(hooked: Settings, bus: Bus, journal: Journal) -> None:
    with pytest.raises(InvalidInput, match="notices_file"):
        async with serving(hooked.model_copy(update={"notices_file": Path("/none")}), bus, journal):
            pass
