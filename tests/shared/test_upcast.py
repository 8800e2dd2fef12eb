"""Events of older schema versions: parsing, the log that has them, and appending them again after an upgrade."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from pydantic import ValidationError

from services.planner.main import configuration
from shared.codes import FailureCode
from shared.errors import Conflict
from shared.events import EVENT, EVENT_CLASSES, StateMoved, TaskSubmitted
from shared.log.log import FIRST_HASH, EventLog, row_hash
from shared.log.relay import decode, encode
from shared.log.scan import utc_text
from shared.log.schema import TABLE
from shared.model import canonical_json
from shared.settings import Settings
from shared.upcast import STEPS, upcast
from tests.shared.samples import EPOCH, event_id, node_joined, plan, spec

RELEASED_TEXT = "released: hold: an earlier plan released n2/0"


def moved(**fields: Any) -> StateMoved:
    required = {"event_id": event_id(1), "occurred_at": EPOCH, "started_at": EPOCH, "plan": "p", "task": "a"}
    return StateMoved.model_validate({**required, "generation": 2, "phase": "failed", **fields})


def submitted() -> TaskSubmitted:
    return TaskSubmitted(event_id=event_id(1), occurred_at=EPOCH, task="a", spec=spec("a"))


def version_1(event: StateMoved) -> dict[str, Any]:
    """Return the event as version 1 of its schema had it."""
    data: dict[str, Any] = json.loads(event.canonical())
    del data["code"]
    return {**data, "schema_version": 1}


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


@pytest.mark.parametrize(
    ("detail", "code"),
    [
        (RELEASED_TEXT, FailureCode.RELEASED),
        ("node-lost: configure-target: members on n1; timeout: hold: no answer in time", FailureCode.NODE_LOST),
        ("refused: drain: n0: ", FailureCode.REFUSED),
        ("gpu-on-fire: hold: n0: hot", FailureCode.UNKNOWN),
        ("", None),
    ],
)
def test_the_code_of_an_old_failure_is_read_from_its_text(detail: str, code: FailureCode | None) -> None:
    event = moved(detail=detail, code=code)
    assert EVENT.validate_python(version_1(event)) == event
    assert EVENT.validate_json(canonical_json(version_1(event))) == event


def test_an_old_phase_that_did_not_fail_has_no_code() -> None:
    event = moved(phase="held", detail="released: no failure")
    assert EVENT.validate_python(version_1(event)).code is None  # type: ignore[union-attr]


def test_an_event_of_the_present_version_stays_as_it_is() -> None:
    data = json.loads(moved(code=FailureCode.BUSY, detail=RELEASED_TEXT).canonical())
    assert upcast(data) == data
    assert moved(detail=RELEASED_TEXT).code is None


def test_a_code_of_a_newer_version_in_the_log_is_read_as_unknown() -> None:
    data = {**json.loads(moved().canonical()), "code": "gpu-on-fire"}
    assert EVENT.validate_python(data).code is FailureCode.UNKNOWN  # type: ignore[union-attr]


def test_every_event_type_is_upcast_from_every_earlier_version() -> None:
    kinds = [kind.model_fields for kind in EVENT_CLASSES]
    newest = {fields["type"].default: fields["schema_version"].default for fields in kinds}
    assert set(STEPS) == {(kind, version) for kind in newest for version in range(1, newest[kind])}
    changed = {kind for kind in newest if newest[kind] > 1}
    assert changed == {"cluster.configured", "plan.decided", "state.moved", "task.submitted"}


@pytest.mark.parametrize("checkpoint", [None, {}, {"every": 5}, {"memory_every": 0}, {"memory_every": 7}])
def test_an_old_submission_that_says_nothing_of_copies_means_one_after_every_step(
    checkpoint: dict[str, int] | None,
) -> None:
    data: dict[str, Any] = json.loads(submitted().canonical())
    data["schema_version"] = 1
    data["spec"].pop("checkpoint")
    if checkpoint is not None:
        data["spec"]["checkpoint"] = checkpoint
    event = EVENT.validate_python(data)
    assert isinstance(event, TaskSubmitted)
    assert event.spec.checkpoint.memory_every == (checkpoint or {}).get("memory_every", 1)


def test_a_new_submission_that_says_nothing_of_copies_means_auto() -> None:
    event = EVENT.validate_json(submitted().canonical())
    assert isinstance(event, TaskSubmitted)
    assert (event.schema_version, event.spec.checkpoint.memory_every) == (2, "auto")


def test_old_parameters_of_futures_are_left_out() -> None:
    event = configuration(Settings(), event_id=event_id(1), clock=lambda: EPOCH)
    data = json.loads(event.canonical())
    old = {**data, "schema_version": 1, "rollouts": 32, "repair_prior_s": 3600.0, "spare_nodes_max": 1}
    assert EVENT.validate_python(old) == event
    with pytest.raises(ValidationError, match="rollouts"):
        EVENT.validate_python({**old, "schema_version": 2})


@pytest.mark.parametrize("where", ["outlook", "plan"])
def test_an_old_plan_keeps_its_advice_on_checkpoints_and_not_its_futures(where: str) -> None:
    advice = {"a": 60.0}
    event = plan(1, {3: 1.0}).model_copy(update={"checkpoint_every_s": advice})
    old = {**json.loads(event.canonical()), "schema_version": 1, "outlook": {"rollouts": 32}}
    if where == "outlook":
        del old["checkpoint_every_s"]
        old["outlook"]["checkpoint_every_s"] = advice
    assert EVENT.validate_python(old) == event


def test_an_old_log_is_read_and_its_chain_holds(url: str, opened: EventLog) -> None:
    event = moved(detail=RELEASED_TEXT, code=FailureCode.RELEASED)
    append_raw(url, version_1(event))
    (record,) = opened.read()
    assert record.event == event
    assert opened.verify().ok, opened.verify().problem
    opened.append([moved(event_id=event_id(2)), node_joined(3)])
    report = opened.verify()
    assert (report.ok, report.events) == (True, 3)


@pytest.mark.parametrize(("data_version", "column"), [(1, 2), (2, 1)])
def test_a_version_column_that_contradicts_the_event_is_found(
    url: str, opened: EventLog, data_version: int, column: int
) -> None:
    data = version_1(moved()) if data_version == 1 else json.loads(moved().canonical())
    append_raw(url, data, column=column)
    assert opened.verify().problem == "position 1: column schema_version contradicts the event"


def test_an_event_appended_again_after_an_upgrade_is_the_recorded_one(url: str, opened: EventLog) -> None:
    event = moved(detail=RELEASED_TEXT, code=FailureCode.RELEASED)
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


def test_a_message_of_an_older_version_is_decoded(url: str, opened: EventLog) -> None:
    event = moved(detail=RELEASED_TEXT, code=FailureCode.RELEASED)
    append_raw(url, version_1(event))
    (row,), (record,) = opened.page(), opened.read()
    message = encode(row)
    assert json.loads(message)["event"] == version_1(event)
    assert decode(message) == record
    assert record.event == event
