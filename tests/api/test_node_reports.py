"""Troubles of nodes that monitors from outside report: who may, what is one report, and how many are taken."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.api.access import request_rates
from services.api.requests import node_reports
from services.api.requests.node_reports import MOST_REPORTS, is_news
from shared.bus.connection import Bus
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import (
    ErrorDetected,
    NodeDraining,
    NodeJoined,
    NodeReported,
    NodeReportHeld,
    NodeReturned,
    Recorded,
)
from shared.log.journal import Journal
from shared.model import utc_now
from shared.projections.evolve import evolve
from shared.service import tokens
from shared.service.tokens import Scope
from shared.settings.model import Settings
from shared.views.documents import Views
from tests.api.kit import START, Server, bearer, serving

DRAIN = {"key": "drain", "severity": "warning", "reason": "a fan", "evidence": {"state": "IDLE+DRAIN"}}


def monitor(settings: Settings, *nodes: str, name: str = "slurm") -> dict[str, str]:
    """Make the token of a monitor; return the header that has it."""
    token = tokens.add(settings.token_file, name, Scope.REPORT, utc_now(), nodes)
    return {"Authorization": f"Bearer {token}"}


async def report(api: Server, who: dict[str, str], node: str = "n0", **fields: Any) -> dict[str, Any]:
    answer = await api.http.post(f"/v1/nodes/{node}/reports", json={**DRAIN, **fields}, headers=who)
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    return found


def reported(api: Server) -> list[NodeReported]:
    return [record.event for record in api.journal.log.read_all() if isinstance(record.event, NodeReported)]


async def test_a_report_is_an_event_with_principal_and_evidence(api: Server, settings: Settings) -> None:
    await api.join("n0")
    found = await report(api, monitor(settings, "n0"), deadline_s=600.0)
    (event,) = reported(api)
    assert (event.node, event.actor, event.key, event.severity) == ("n0", "token/slurm", "drain", "warning")
    assert (event.reason, event.evidence) == ("a fan", {"state": "IDLE+DRAIN"})
    assert event.expires_at - event.occurred_at == timedelta(hours=1)
    assert event.deadline_at == event.occurred_at + timedelta(minutes=10)
    assert (found["actor"], found["key"], found["answer"], found["held"]) == ("token/slurm", "drain", None, "")
    (shown,) = (await api.http.get("/v1/nodes/n0")).json()["reports"]
    assert shown == found


async def test_the_scope_allows_reports_of_the_named_nodes_and_nothing_else(api: Server, settings: Settings) -> None:
    await api.join("n0", "n1", "rack1-n3")
    who = monitor(settings, "n0", "rack1-*")
    await report(api, who)
    await report(api, who, "rack1-n3")
    answer = await api.http.post("/v1/nodes/n1/reports", json=DRAIN, headers=who)
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert answer.json()["detail"] == "token/slurm may report of n0, rack1-*, and not of 'n1'"
    for method, path in (
        ("POST", "/v1/nodes/n0/return"),
        ("POST", "/v1/nodes/n0/drain"),
        ("POST", "/v1/browser-links"),
        ("POST", "/v1/nodes/n0/reports/../return"),
        ("GET", "/v1/nodes"),
        ("GET", "/v1/events"),
        ("GET", "/openapi.json"),
    ):
        answer = await api.http.request(method, path, headers=who)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), path
    assert (await api.http.get("/v1/actor", headers=who)).json() == {"name": "token/slurm", "scope": "report"}
    for scope in (Scope.READ, Scope.SUBMIT):
        answer = await api.http.post("/v1/nodes/n0/reports", json=DRAIN, headers=bearer(settings, scope))
        assert answer.status_code == 403, scope
    assert [event.node for event in reported(api)] == ["n0", "rack1-n3"]


async def test_a_report_brings_no_node_back(api: Server, settings: Settings) -> None:
    await api.join("n0")
    for severity in ("ok", "none", "ready"):
        answer = await api.http.post(
            "/v1/nodes/n0/reports", json={**DRAIN, "severity": severity}, headers=monitor(settings, "n0", name=severity)
        )
        assert answer.status_code == 422
        assert "'warning' or 'error'" in answer.json()["detail"]


async def test_a_report_that_is_told_again_is_one(
    api: Server, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.join("n0")
    who = monitor(settings, "n0")
    first = await report(api, who)
    assert await report(api, who, reason="a fan, still") == first
    assert len(reported(api)) == 1
    await report(api, monitor(settings, "n0", name="kubernetes"))  # another source
    await report(api, who, key="memory")
    await report(api, who, severity="error")  # graver
    await report(api, who, severity="error", deadline_s=100.0)
    assert len(reported(api)) == 5
    later = utc_now() + timedelta(minutes=31)
    monkeypatch.setattr(node_reports, "utc_now", lambda: later)
    await report(api, who, severity="error", deadline_s=100.0)  # has lived for half of its time
    assert len(reported(api)) == 6


async def test_reports_of_one_source_are_limited(api: Server, settings: Settings) -> None:
    await api.join("n0", "n1")
    who = monitor(settings, "*")
    for number in range(MOST_REPORTS):
        await report(api, who, key=f"k{number}")
    answer = await api.http.post("/v1/nodes/n0/reports", json=DRAIN, headers=who)
    assert (answer.status_code, answer.json()["code"]) == (429, "too-many-requests")
    assert f"token/slurm has {MOST_REPORTS} reports of node 'n0'" in answer.json()["detail"]
    await report(api, who, key="k0")  # is known
    await report(api, who, "n1")


async def test_new_reports_of_one_source_come_at_a_limited_rate(
    settings: Settings, bus: Bus, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(request_rates, "REPORTS_BURST_S", 3.0)
    monkeypatch.setattr(node_reports, "time", SimpleNamespace(monotonic=lambda: now_s))
    async with serving(settings, bus, journal) as api:
        await api.join("n0")
        who = monitor(settings, "*")
        for number in range(3):
            await report(api, who, key=f"k{number}")
        answer = await api.http.post("/v1/nodes/n0/reports", json=DRAIN, headers=who)
        assert answer.status_code == 429
        assert "token/slurm has sent too many: allowed are 1 report a second that is new" in answer.json()["detail"]
        await report(api, who, key="k1")  # what is known is no burden
        await report(api, monitor(settings, "*", name="other"))
        now_s = 1.0
        await report(api, who)


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": "A B"},
        {"key": ""},
        {"reason": "x" * 201},
        {"evidence": {"text": "x" * 5000}},
        {"expires_s": 1},
        {"expires_s": 1e9},
        {"deadline_s": -1},
        {"answer": "drained"},
    ],
)
async def test_a_report_is_checked(api: Server, settings: Settings, wrong: dict[str, Any]) -> None:
    await api.join("n0")
    body = {**DRAIN, **wrong}
    answer = await api.http.post("/v1/nodes/n0/reports", json=body, headers=monitor(settings, "n0"))
    assert answer.status_code == 422
    assert next(iter(wrong)) in answer.json()["detail"]
    assert reported(api) == []


async def test_a_report_of_an_unknown_node_is_not_found(api: Server, settings: Settings) -> None:
    answer = await api.http.post("/v1/nodes/n9/reports", json=DRAIN, headers=monitor(settings, "n9"))
    assert (answer.status_code, answer.json()["code"]) == (404, "not-found")


class History:
    """Views of one node, to which events are added."""

    def __init__(self) -> None:
        self.views, self.number = Views(), 0
        self.add(NodeJoined, incarnation="first", agent_pid=1, domain="d", workers=["n0/0"])

    def add(self, kind: type[Any], seconds: float = 0.0, /, **fields: Any) -> None:
        self.number += 1
        at = START + timedelta(seconds=seconds)
        event = kind(event_id=f"e{self.number}", occurred_at=at, node="n0", **fields)
        position = {"position": self.number, "stream": event.stream, "stream_version": self.number}
        evolve(self.views, Recorded(**position, recorded_at=at, event=event, previous_hash="", hash=""))

    def report(self, seconds: float = 0.0, **fields: Any) -> NodeReported:
        at = START + timedelta(seconds=seconds)
        known: dict[str, Any] = {"actor": "token/slurm", "key": "drain", "severity": "warning", "reason": "a fan"}
        known |= {"expires_at": at + timedelta(seconds=fields.pop("expires_s", 600.0)), **fields}
        self.add(NodeReported, seconds, **known)
        return NodeReported(event_id="", occurred_at=at, node="n0", **known)

    @property
    def shown(self) -> list[tuple[str, str | None, str]]:
        return [(one.severity, one.answer, one.held) for one in self.views.nodes["n0"].reports]


def test_a_node_shows_what_has_followed_from_a_report() -> None:
    history = History()
    event = history.report()
    history.add(NodeReportHeld, report=event.report, why="budget", reason="it may not")
    assert history.shown == [("warning", None, "it may not")]
    history.add(NodeDraining, by="user", timeout_s=1.0, report=event.report)
    assert history.shown == [("warning", "drained", "")]
    history.report(10.0, severity="error")
    assert history.shown == [("error", None, "")]
    evidence = {"report": event.report, "source": "token/slurm", "key": "drain", "reason": "a fan"}
    found = {"kind": ErrorKind.REPORTED, "severity": Severity.SEV1, "method": Method.REPORT, "evidence": evidence}
    history.add(ErrorDetected, incident="i", detected_at=START, **found)
    assert history.shown == [("error", "isolated", "")]
    node = history.views.nodes["n0"]
    assert (node.state, node.kept_out) == ("isolated", True)
    assert node.reason == "token/slurm reports drain: a fan; reported (report), incident i"
    history.add(NodeReturned, incarnation="first", actor="uid/0")
    assert history.shown == [("error", "overruled", "")]
    history.report(20.0, severity="error")  # an operator's word stands for as long as the report is told
    assert history.shown == [("error", "overruled", "")]
    history.report(1000.0, severity="error")
    assert history.shown == [("error", None, "")]


@given(st.lists(st.tuples(st.floats(0.0, 400.0), st.sampled_from(["warning", "error"])), max_size=30))
def test_a_report_that_is_told_every_moment_is_seldom_renewed(reports: list[tuple[float, str]]) -> None:
    history, seconds, events, grave = History(), 0.0, 0, 0
    for after_s, severity in reports:
        seconds += after_s
        at = START + timedelta(seconds=seconds)
        event = NodeReported(
            event_id="", occurred_at=at, node="n0", actor="token/slurm", key="drain", reason="",
            severity="error" if severity == "error" else "warning", expires_at=at + timedelta(seconds=600.0),
        )  # fmt: skip
        if is_news(history.views.nodes["n0"], event):
            history.report(seconds, severity=severity)
            events += 1
            grave += severity == "error"
        assert len(history.shown) == 1
        assert history.views.nodes["n0"].reports[0].expires_at > at  # it never lapses while it is told
    assert events <= 2 + 2 * seconds / 600.0 + grave
