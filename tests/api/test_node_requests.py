"""Nodes that a user cordons, drains and returns."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from cli.incidents.incident_show import print_observations
from services.api import gateway
from shared.bus.connection import Bus
from shared.errors import Conflict, NotFound, Unavailable
from shared.events.measurements import Measurement
from shared.events.node_events import CheckResult
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import (
    ErrorDetected,
    Event,
    IncidentObserved,
    NodeAdopted,
    NodeDrained,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeMeasured,
    NodeReturned,
    Observation,
)
from shared.log.log import EventLog
from shared.messages.admission import AGENT_RESTART, AgentRestart, AgentRestartResult
from shared.messages.self_test import SELF_TEST, SelfTest, SelfTestResult
from shared.model import utc_now
from tests.api.kit import Server

INCARNATION = "first"


async def join(api: Server, incarnation: str = INCARNATION) -> None:
    joined = {"incarnation": incarnation, "agent_pid": 1, "domain": "d", "workers": ["n0/0"]}
    await api.projected((await api.append(NodeJoined, node="n0", **joined)).position)


async def ask(api: Server, what: str, **body: Any) -> dict[str, Any]:
    answer = await api.http.post(f"/v1/nodes/n0/{what}", json=body or None)
    assert answer.is_success, answer.text
    node: dict[str, Any] = answer.json()
    return node


async def refused(api: Server, what: str, node: str = "n0") -> dict[str, Any]:
    answer = await api.http.post(f"/v1/nodes/{node}/{what}")
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == answer.status_code
    return problem


async def isolate(api: Server, kind: ErrorKind = ErrorKind.PROCESS_EXIT) -> None:
    fields = {"incident": "i", "kind": kind, "severity": Severity.SEV1, "method": Method.TRANSITION}
    record = await api.append(ErrorDetected, node="n0", detected_at=utc_now(), **fields)
    await api.projected(record.position)


async def leave(api: Server) -> None:
    await api.projected((await api.append(NodeLeft, node="n0", incarnation=INCARNATION, reason="asked")).position)


async def requests(api: Server) -> list[Event]:
    """Return what users asked of nodes, as it is in the log."""
    events = [record.event for record in api.journal.log.read_all()]
    return [e for e in events if e.type in ("node.cordoned", "node.draining", "node.returned")]


class StandIn:
    """An agent that answers self-tests."""

    def __init__(self, problem: str = "", incarnation: str = INCARNATION) -> None:
        self.asked: list[SelfTest] = []
        self._result = SelfTestResult(incarnation=incarnation, problem=problem)

    async def serve(self, data: bytes) -> bytes:
        self.asked.append(SELF_TEST.request.decode(data))
        return self._result.model_dump_json().encode()


async def agent(bus: Bus, **fields: str) -> StandIn:
    tested = StandIn(**fields)
    await bus.answer(SELF_TEST.at("n0"), lambda _, data: tested.serve(data))
    return tested


async def test_a_node_is_cordoned_once_and_stays_so(api: Server) -> None:
    await join(api)
    node = await ask(api, "cordon", reason="memory errors")
    assert (node["state"], node["reason"]) == ("cordoned", "memory errors")
    assert (await ask(api, "cordon"))["reason"] == "memory errors"
    assert len(await requests(api)) == 1
    await leave(api)
    assert (await api.http.get("/v1/nodes/n0")).json()["state"] == "left"
    await join(api, "second")
    assert (await api.http.get("/v1/nodes/n0")).json()["state"] == "cordoned"


async def test_closed_nodes_keep_the_api_ready(api: Server) -> None:
    """Otherwise a stack all of whose nodes are cordoned could not be started again."""
    await join(api)
    await ask(api, "cordon")
    checks = {check["name"]: check for check in (await api.http.get("/readyz")).json()["checks"]}
    assert (checks["nodes"]["ok"], checks["nodes"]["detail"]) == (True, "0 ready, 1 closed to new work")


async def test_a_node_is_drained(api: Server, bus: Bus) -> None:
    await join(api)
    assert (await ask(api, "drain", timeout_s=7.0, reason="new kernel"))["state"] == "draining"
    assert (await ask(api, "drain"))["state"] == "draining"
    (event,) = await requests(api)
    assert isinstance(event, NodeDraining)
    assert (event.by, event.timeout_s, event.save, event.reason) == ("user", 7.0, False, "new kernel")
    await api.projected((await api.append(NodeDrained, node="n0")).position)
    assert [n["name"] for n in (await api.http.get("/v1/nodes?state=drained")).json()["items"]] == ["n0"]
    tested = await agent(bus)
    assert (await ask(api, "return"))["state"] == "ready"
    assert tested.asked == [SelfTest(empty=False, preflight=True)]


async def test_the_time_of_a_drain_is_the_setting(api: Server) -> None:
    await join(api)
    await ask(api, "drain")
    (event,) = await requests(api)
    assert isinstance(event, NodeDraining)
    assert event.timeout_s == 60.0


async def test_a_drain_that_its_agent_asked_for_becomes_the_users(api: Server) -> None:
    await join(api)
    record = await api.append(NodeDraining, node="n0", by="agent", timeout_s=5.0)
    await api.projected(record.position)
    assert (await api.http.get("/v1/nodes/n0")).json()["state"] == "draining"
    await ask(api, "drain")
    assert [getattr(event, "by", "") for event in await requests(api)] == ["agent", "user"]


async def test_an_isolated_node_is_returned_once_it_has_passed_its_self_test(api: Server, bus: Bus) -> None:
    await join(api)
    await isolate(api)
    tested = await agent(bus)
    assert (await ask(api, "return"))["state"] == "ready"
    assert tested.asked == [SelfTest(empty=True, preflight=True)]
    assert (await ask(api, "return"))["state"] == "ready"
    assert len(await requests(api)) == 1


async def measure(api: Server, verdict: str, incarnation: str = INCARNATION) -> None:
    about = {"incarnation": incarnation, "agent_pid": 1, "domain": "d", "workers": ["n0/0"]}
    found = {"measurement": Measurement(device="a", count=2), "verdict": verdict, "reason": "disk read: 1 MB/s"}
    await api.projected((await api.append(NodeMeasured, node="n0", **about, **found)).position)


async def test_a_node_that_its_preflight_keeps_from_joining_is_shown_and_an_operator_may_use_it(
    api: Server, bus: Bus
) -> None:
    await measure(api, "accepted")
    assert (await api.http.get("/v1/nodes/n0")).status_code == 404
    await measure(api, "refused")
    node = (await api.http.get("/v1/nodes/n0")).json()
    assert (node["state"], node["reason"]) == ("isolated", "its preflight was refused: disk read: 1 MB/s")
    assert [worker["worker"] for worker in node["workers"]] == ["n0/0"]
    tested = await agent(bus)
    assert (await ask(api, "return"))["state"] == "ready"
    assert tested.asked == [SelfTest(empty=True)]  # it is not measured again
    (event,) = await requests(api)
    assert (event.type, getattr(event, "incarnation", "")) == ("node.returned", INCARNATION)
    await join(api)
    node = (await api.http.get("/v1/nodes/n0")).json()
    assert (node["state"], node["reason"]) == ("ready", "")


async def test_a_lost_node_whose_next_agent_is_refused_is_isolated_and_can_be_returned(api: Server, bus: Bus) -> None:
    await join(api)
    await isolate(api, ErrorKind.NODE_LOST)
    await measure(api, "refused", "second")
    node = (await api.http.get("/v1/nodes/n0")).json()
    assert (node["state"], node["reason"]) == ("isolated", "its preflight was refused: disk read: 1 MB/s")
    await measure(api, "refused", "third")  # as of an agent that its supervisor has started again
    await agent(bus, incarnation="third")
    assert (await ask(api, "return"))["incarnation"] == "third"


async def test_an_isolated_node_that_is_slow_stays_so_and_the_second_return_uses_it(api: Server, bus: Bus) -> None:
    await join(api)
    await isolate(api)
    reason = (await api.http.get("/v1/nodes/n0")).json()["reason"]
    tested = await agent(bus, problem="preflight: disk read: 1 MB/s")
    await measure(api, "refused")  # as the detector has judged meanwhile
    shown = (await api.http.get("/v1/nodes/n0")).json()
    assert shown["reason"] == f"{reason}; its preflight was refused: disk read: 1 MB/s"
    await refused(api, "return")
    await measure(api, "accepted")
    assert (await api.http.get("/v1/nodes/n0")).json()["reason"] == reason
    await refused(api, "return")
    assert [request.preflight for request in tested.asked] == [False, True]


async def test_a_failed_self_test_is_answered_with_its_reason(api: Server, bus: Bus) -> None:
    await join(api)
    await isolate(api)
    await agent(bus, problem="/run cannot be written to: No space left on device")
    problem = await refused(api, "return")
    assert (problem["code"], problem["status"], problem["state"]) == (Conflict.code, 409, "isolated")
    assert "No space left on device" in problem["detail"]
    assert await requests(api) == []


async def test_an_agent_that_does_not_answer_returns_nothing(api: Server, bus: Bus) -> None:
    await join(api)
    await isolate(api)
    assert (await refused(api, "return"))["code"] == Unavailable.code
    await agent(bus, incarnation="second")
    problem = await refused(api, "return")
    assert (problem["code"], "has not joined yet" in problem["detail"]) == (Unavailable.code, True)
    assert await requests(api) == []


@pytest.mark.parametrize("what", ["cordon", "drain", "return"])
async def test_an_unknown_node_is_not_found(api: Server, what: str) -> None:
    assert (await refused(api, what, "n9"))["code"] == NotFound.code


async def test_nothing_is_drained_or_returned_where_no_agent_is(api: Server) -> None:
    await join(api)
    await leave(api)
    for what in ("drain", "return"):
        problem = await refused(api, what)
        assert (problem["code"], problem["state"]) == (Conflict.code, "left")
    await ask(api, "cordon")
    assert (await ask(api, "return"))["state"] == "left"
    assert [event.type for event in await requests(api)] == ["node.cordoned", "node.returned"]
    await join(api, "second")
    await isolate(api, ErrorKind.NODE_LOST)
    assert (await refused(api, "drain"))["state"] == "lost"
    assert (await refused(api, "return"))["state"] == "lost"


async def test_a_request_is_checked(api: Server) -> None:
    await join(api)
    for body in ({"timeout_s": -1}, {"timeout": 5}, {"reason": "x" * 300}):
        assert (await api.http.post("/v1/nodes/n0/drain", json=body)).status_code == 422
    assert await requests(api) == []


async def test_a_node_whose_stream_goes_on_meanwhile_is_asked_again(api: Server) -> None:
    """The append expects the version that the answer was judged by."""
    await join(api)
    await api.append(NodeDraining, event_id=str(uuid.uuid4()), node="n0", by="agent", timeout_s=5.0)
    assert (await ask(api, "cordon"))["state"] == "draining"


async def test_a_request_for_which_the_log_has_no_room_is_refused_with_the_reason(
    api: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait until somebody makes room."""
    await join(api)

    def full(*_: Any, **__: Any) -> list[Any]:
        raise Unavailable("no space left")

    monkeypatch.setattr(gateway, "APPEND_LIMIT_S", 0.1)
    with monkeypatch.context() as blocked:
        blocked.setattr(EventLog, "append_rows", full)
        problem = await refused(api, "cordon")
    assert (problem["status"], problem["code"]) == (503, "unavailable")
    assert problem["detail"] == "no space left; the request may have been recorded: look before you repeat it"
    assert (await ask(api, "cordon"))["state"] == "cordoned"


async def successor(api: Server, incarnation: str = "second") -> None:
    fields = {"incarnation": incarnation, "predecessor": INCARNATION, "agent_pid": 2}
    await api.projected((await api.append(NodeAdopted, node="n0", **fields)).position)


async def test_an_agent_hands_over_and_its_successor_is_the_nodes(api: Server, bus: Bus) -> None:
    await join(api)
    asked: list[AgentRestart] = []

    async def answer(data: bytes) -> bytes:
        asked.append(AGENT_RESTART.request.decode(data))
        return AgentRestartResult(incarnation=INCARNATION).model_dump_json().encode()

    await bus.answer(AGENT_RESTART.at("n0"), lambda _, data: answer(data))
    node = await ask(api, "agent/restart")
    assert (node["state"], node["incarnation"], node["agent_pid"]) == ("ready", INCARNATION, 1)
    assert asked == [AgentRestart(incarnation=INCARNATION)]
    await successor(api)
    node = (await api.http.get("/v1/nodes/n0")).json()
    assert (node["state"], node["incarnation"], node["agent_pid"]) == ("ready", "second", 2)
    problem = await refused(api, "agent/restart")  # the predecessor still answers
    assert problem["code"] == Unavailable.code
    assert "has not joined yet" in problem["detail"]
    await successor(api, "of another predecessor")
    assert (await api.http.get("/v1/nodes/n0")).json()["incarnation"] == "second"


async def test_an_agent_that_is_not_there_is_not_started_again(api: Server) -> None:
    assert (await refused(api, "agent/restart"))["code"] == NotFound.code
    await join(api)
    problem = await refused(api, "agent/restart")
    assert problem["code"] == Unavailable.code
    assert "the agent of node 'n0' does not answer" in problem["detail"]
    await leave(api)
    problem = await refused(api, "agent/restart")
    assert (problem["code"], problem["state"]) == (Conflict.code, "left")


async def test_a_lemon_says_why_and_is_returned_also_where_its_agent_was_started_again(api: Server) -> None:
    await join(api)
    evidence = {"rule": "lemon", "repetition": {"faults": 5, "window_s": 604800.0, "expected": 0.35}}
    fields: dict[str, Any] = {"severity": Severity.SEV1, "detected_at": utc_now(), "node": "n0", "incident": "i"}
    fields["evidence"] = evidence
    await api.append(ErrorDetected, kind=ErrorKind.DEVICE, method=Method.DEVICE, **fields)
    lost = {**fields, "incident": "j", "evidence": {}}
    record = await api.append(ErrorDetected, kind=ErrorKind.NODE_LOST, method=Method.NODE_HEALTH, **lost)
    first = await api.append(ErrorDetected, kind=ErrorKind.NODE_LOST, method=Method.NODE_HEALTH, **fields)
    await api.projected(max(record.position, first.position))
    shown = (await api.http.get("/v1/nodes/n0")).json()
    assert shown["state"] == "lost"
    assert shown["reason"].startswith("lemon: 5 faults of its own within 7 days, 0.35 expected; node-lost")
    assert (await ask(api, "return"))["state"] == "lost"  # its agent joins again
    assert [event.type for event in await requests(api)] == ["node.returned"]
    assert (await refused(api, "return"))["code"] == Conflict.code


async def test_what_the_self_test_found_is_in_the_event(api: Server, bus: Bus) -> None:
    await join(api)
    await isolate(api)
    check = CheckResult(name="compute", ok=True, value=0.0, bound=0.0, unit="wrong products")
    result = SelfTestResult(incarnation=INCARNATION, checks=[check])

    async def serve(_: bytes) -> bytes:
        return result.model_dump_json().encode()

    await bus.answer(SELF_TEST.at("n0"), lambda _, data: serve(data))
    await ask(api, "return")
    (event,) = await requests(api)
    assert isinstance(event, NodeReturned)
    assert event.self_test == [check]


async def test_an_incident_shows_what_was_seen_of_it_and_the_root_cause(
    api: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    await join(api)
    await isolate(api)
    about: dict[str, Any] = {"node": "n0", "at": utc_now(), "method": Method.EXCEPTION}
    cause = Observation(kind=ErrorKind.PROCESS_EXIT, worker="n0/0", rank=0, error="SIGKILL", **about)
    seen = [cause, Observation(kind=ErrorKind.CONNECTION, worker="n0/1", rank=1, error="CommunicationFailed", **about)]
    observed = {"incident": "i", "task": None, "observations": seen, "omitted": 3, "root_cause": cause}
    await api.projected((await api.append(IncidentObserved, **observed)).position)
    shown = (await api.http.get("/v1/incidents/i")).json()
    assert [one["kind"] for one in shown["observations"]] == ["process-exit", "connection"]
    assert (shown["omitted"], shown["root_cause"]["error"]) == (3, "SIGKILL")
    print_observations(shown, wide=True)
    printed = capsys.readouterr().out
    assert "CommunicationFailed" in printed
    assert "and 3 more\nroot cause: process-exit (SIGKILL) of n0/0\n" in printed


async def test_a_node_on_which_alone_processes_do_not_start_says_so(api: Server) -> None:
    await join(api)
    evidence = {"rule": "starts", "repetition": {"cause": "exception/KeyError", "also_failed": ["bert"]}}
    fields: dict[str, Any] = {"severity": Severity.SEV1, "detected_at": utc_now(), "node": "n0", "incident": "i"}
    record = await api.append(
        ErrorDetected, kind=ErrorKind.EXCEPTION, method=Method.EXCEPTION, evidence=evidence, **fields
    )
    await api.projected(record.position)
    reason = (await api.http.get("/v1/nodes/n0")).json()["reason"]
    said = "exception/KeyError of a process that starts, and nowhere else failed those of bert; exception"
    assert reason.startswith(said)
