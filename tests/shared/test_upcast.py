"""Events of older schema versions: parsing, the log that has them, and appending them again after an upgrade.

No released version has written an older schema, so the tests register one as an example: version 1 of ``state.moved``
has ``updates`` where the present one has ``step``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from shared.errors import Conflict, OlderVersion
from shared.events.codes import FailureCode
from shared.events.union import EVENT, StateMoved, TaskSubmitted
from shared.events.upcast import STEPS, oldest, upcast
from shared.log.base import FIRST_HASH
from shared.log.chain import row_hash
from shared.log.log import EventLog
from shared.log.relay import decode, encode
from shared.log.scan import utc_text
from shared.log.schema import TABLE
from shared.model import canonical_json
from tests.shared.samples import EPOCH, event_id, node_joined, spec


def moved(**fields: Any) -> StateMoved:
    required = {"event_id": event_id(1), "occurred_at": EPOCH, "started_at": EPOCH, "plan": "p", "task": "a"}
    return StateMoved.model_validate({**required, "generation": 2, "phase": "failed", **fields})


def submitted() -> TaskSubmitted:
    return TaskSubmitted(event_id=event_id(1), occurred_at=EPOCH, task="a", spec=spec("a"))


def version_1(event: StateMoved) -> dict[str, Any]:
    """Return the event as version 1 of the example has it."""
    data: dict[str, Any] = json.loads(event.canonical())
    return {"updates": data.pop("step"), **data, "schema_version": 1}


def _step_of_version_1(data: dict[str, Any]) -> dict[str, Any]:
    return {"step": data.pop("updates"), **data}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 is readable."""
    monkeypatch.setitem(STEPS, ("state.moved", 1), _step_of_version_1)


def append_raw(url: str, *events: dict[str, Any], column: int | None = None) -> None:
    """Write rows into an empty log as another version did. ``column``: for ``schema_version``, if not the event's."""
    previous_hash = FIRST_HASH
    versions: dict[str, int] = {}
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        for position, data in enumerate(events, start=1):
            stream = f"node/{data['node']}" if data["type"].startswith("node.") else "cluster"
            versions[stream] = versions.get(stream, 0) + 1
            row = {
                "position": position,
                "event_id": data["event_id"],
                "stream": stream,
                "stream_version": versions[stream],
                "type": data["type"],
                "schema_version": column or data["schema_version"],
                "occurred_at": utc_text(datetime.fromisoformat(data["occurred_at"])),
                "recorded_at": EPOCH.isoformat(timespec="microseconds"),
                "data": canonical_json(data),
                "previous_hash": previous_hash,
            }
            row["hash"] = previous_hash = row_hash(row)
            connection.execute(sqlalchemy.insert(TABLE), row)
    engine.dispose()


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path / 'log.db'}"
    EventLog(found).close()
    return found


@pytest.fixture
def opened(url: str) -> Iterator[EventLog]:
    log = EventLog(url)
    yield log
    log.close()


@pytest.mark.usefixtures("example")
def test_an_event_of_an_older_version_is_brought_to_the_present_shape() -> None:
    event = moved(step=7)
    assert EVENT.validate_python(version_1(event)) == event
    assert EVENT.validate_json(canonical_json(version_1(event))) == event


def test_steps_are_taken_one_after_the_other_up_to_where_they_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert oldest("state.moved", 4) == 4
    for version in (1, 2, 3):
        monkeypatch.setitem(STEPS, ("state.moved", version), lambda data: {**data, "took": [*data["took"], "step"]})
    data = {"type": "state.moved", "took": [], "schema_version": 2}
    assert upcast(data) == {**data, "took": ["step", "step"], "schema_version": 4}
    assert data["took"] == [], "what was given stays as it was"
    assert (oldest("state.moved", 4), oldest("node.joined", 4)) == (1, 4)


@pytest.mark.usefixtures("example")
def test_an_event_of_the_present_version_stays_as_it_is() -> None:
    data = json.loads(moved(code=FailureCode.BUSY).canonical())
    assert upcast(data) == data


def test_a_code_of_a_newer_version_in_the_log_is_read_as_unknown() -> None:
    data = {**json.loads(moved().canonical()), "code": "gpu-on-fire"}
    assert EVENT.validate_python(data).code is FailureCode.UNKNOWN  # type: ignore[union-attr]


def test_a_submission_that_says_nothing_of_copies_means_auto() -> None:
    event = EVENT.validate_json(submitted().canonical())
    assert isinstance(event, TaskSubmitted)
    assert event.spec.checkpoint.memory_every == "auto"


@pytest.mark.usefixtures("example")
def test_an_old_log_is_read_and_its_chain_holds(url: str, opened: EventLog) -> None:
    event = moved(step=7)
    append_raw(url, version_1(event))
    (record,) = opened.read()
    assert record.event == event
    assert opened.verify().ok, opened.verify().problem
    opened.append([moved(event_id=event_id(2)), node_joined(3)])
    report = opened.verify()
    assert (report.ok, report.events) == (True, 3)


def test_without_its_step_it_is_refused(url: str, opened: EventLog) -> None:
    append_raw(url, version_1(moved()))
    words = "position 1: event 'state.moved', schema version 1: version 2 is the oldest readable here"
    for ask in (opened.read, opened.verify):
        with pytest.raises(OlderVersion, match=words):
            ask()


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(("data_version", "column"), [(1, 2), (2, 1)])
def test_a_version_column_that_contradicts_the_event_is_found(
    url: str, opened: EventLog, data_version: int, column: int
) -> None:
    data = version_1(moved()) if data_version == 1 else json.loads(moved().canonical())
    append_raw(url, data, column=column)
    assert opened.verify().problem == "position 1: column schema_version contradicts the event"


@pytest.mark.usefixtures("example")
def test_an_event_appended_again_after_an_upgrade_is_the_recorded_one(url: str, opened: EventLog) -> None:
    event = moved(code=FailureCode.RELEASED)
    append_raw(url, version_1(event))
    before = opened.verify().head
    (record,) = opened.append([event])
    assert (record.position, record.event) == (1, event)
    assert opened.last_position() == 1
    assert opened.verify().head == before, "the stored bytes stay"
    with pytest.raises(Conflict, match="different content"):
        opened.append([event.model_copy(update={"code": FailureCode.BUSY})])


def test_a_field_with_a_default_that_was_added_later_makes_no_difference(url: str, opened: EventLog) -> None:
    event = moved(code=FailureCode.BUSY)
    data = json.loads(event.canonical())
    del data["deal"], data["incident"]
    append_raw(url, data)
    assert opened.append([event])[0].position == 1
    assert opened.verify().ok


@pytest.mark.usefixtures("example")
def test_a_message_of_an_older_version_is_decoded(url: str, opened: EventLog) -> None:
    event = moved(step=7)
    append_raw(url, version_1(event))
    (row,), (record,) = opened.page(), opened.read()
    message = encode(row)
    assert json.loads(message)["event"] == version_1(event)
    assert decode(message) == record
    assert record.event == event
