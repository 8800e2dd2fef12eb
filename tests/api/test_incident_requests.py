"""Notes about incidents, and who takes care of one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from services.api.requests import incident_requests
from shared.events.request_events import NOTE_CHARACTERS
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, IncidentAcknowledged, IncidentNoted
from shared.service.tokens import Scope
from shared.settings.model import Settings
from tests.api.kit import Server, bearer
from tests.api.test_tasks import refused

INCIDENT = "/v1/incidents/i1"


@pytest.fixture
async def known(api: Server) -> Server:
    """A gateway that knows an incident."""
    recorded = await api.append(
        ErrorDetected,
        incident="i1",
        kind=ErrorKind.PROCESS_EXIT,
        severity=Severity.SEV2,
        method=Method.PROCESS_SUPERVISION,
        detected_at=datetime.now(UTC),
    )
    await api.projected(recorded.position)
    return api


async def test_notes_are_shown_in_their_order_with_who_wrote_them(known: Server, settings: Settings) -> None:
    assert (await known.http.get(INCIDENT)).json()["notes"] == []
    first = await known.http.post(f"{INCIDENT}/notes", json={"text": "the switch was <rebooted>"})
    assert first.status_code == 201
    token = bearer(settings, Scope.SUBMIT)
    second = await known.http.post(f"{INCIDENT}/notes", json={"text": "again\n`rm`"}, headers=token)
    notes = second.json()["notes"]
    assert [note["text"] for note in notes] == ["the switch was <rebooted>", "again\n`rm`"]
    assert [note["by"].partition("/")[0] for note in notes] == ["uid", "token"]
    assert datetime.fromisoformat(notes[0]["at"]).tzinfo is not None
    assert (await known.http.get(INCIDENT)).json()["notes"] == notes
    event = known.journal.log.read()[-1].event
    assert isinstance(event, IncidentNoted)
    assert (event.incident, event.actor) == ("i1", notes[1]["by"])


async def test_pages_show_notes_as_text(known: Server) -> None:
    await known.http.post(f"{INCIDENT}/notes", json={"text": "<script>alert(1)</script> | *b*"})
    await known.http.post(f"{INCIDENT}/acknowledge")
    html = (await known.http.get(f"{INCIDENT}/postmortem", params={"format": "html"})).text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<script>" not in html
    assert "acknowledged" in html
    markdown = (await known.http.get(f"{INCIDENT}/postmortem", params={"format": "md"})).text
    assert r"\<script\>alert(1)\</script\> \| \*b\*" in markdown
    document = (await known.http.get(f"{INCIDENT}/postmortem")).json()
    assert document["incident"]["notes"][0]["text"] == "<script>alert(1)</script> | *b*"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text": ""}, "text"),
        ({"text": "x" * (NOTE_CHARACTERS + 1)}, "text"),
        ({}, "text"),
        ({"text": "a", "by": "me"}, "by"),
        (None, "(body)"),
    ],
)
async def test_a_note_that_is_none_is_refused(known: Server, body: Any, field: str) -> None:
    problem = refused(await known.http.post(f"{INCIDENT}/notes", json=body), 422, "invalid-input")
    assert [error["field"] for error in problem["errors"]] == [field]
    surrogate = await known.http.post(
        f"{INCIDENT}/notes", content=b'{"text": "\\ud800"}', headers={"Content-Type": "application/json"}
    )
    refused(surrogate, 422, "invalid-input")
    assert known.journal.log.last_position() == 1


async def test_an_incident_has_so_many_notes(known: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident_requests, "MOST_NOTES", 1)
    assert (await known.http.post(f"{INCIDENT}/notes", json={"text": "a"})).status_code == 201
    refused(await known.http.post(f"{INCIDENT}/notes", json={"text": "b"}), 409, "conflict")


async def test_the_first_who_acknowledges_is_shown(known: Server, settings: Settings) -> None:
    assert (await known.http.get(INCIDENT)).json()["acknowledged"] is None
    token = bearer(settings, Scope.SUBMIT)
    shown = (await known.http.post(f"{INCIDENT}/acknowledge", headers=token)).json()["acknowledged"]
    assert shown["by"].startswith("token/")
    again = await known.http.post(f"{INCIDENT}/acknowledge")
    assert (again.status_code, again.json()["acknowledged"]) == (200, shown)
    assert isinstance(known.journal.log.read()[-1].event, IncidentAcknowledged)
    assert known.journal.log.last_position() == 2
    listed = (await known.http.get("/v1/incidents")).json()["items"]
    assert [item["acknowledged"] for item in listed] == [shown]


async def test_who_may_only_read_says_nothing(known: Server, settings: Settings) -> None:
    read = bearer(settings, Scope.READ)
    refused(await known.http.post(f"{INCIDENT}/notes", json={"text": "a"}, headers=read), 403, "forbidden")
    refused(await known.http.post(f"{INCIDENT}/acknowledge", headers=read), 403, "forbidden")
    for path in ("notes", "acknowledge"):
        refused(await known.http.post(f"/v1/incidents/i9/{path}", json={"text": "a"}), 404, "not-found")


async def test_an_incident_and_a_plan_have_tags(known: Server) -> None:
    await known.http.post(f"{INCIDENT}/acknowledge")
    first = await known.http.get(INCIDENT)
    tag = first.headers["etag"]
    assert (await known.http.get(INCIDENT, headers={"If-None-Match": tag})).status_code == 304
    await known.http.post(f"{INCIDENT}/notes", json={"text": "a"})
    assert (await known.http.get(INCIDENT, headers={"If-None-Match": tag})).status_code == 200
