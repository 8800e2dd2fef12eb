"""Items of lists whose JSON is stored, or is that of the log: they are what the models would show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.api import present
from services.api.live import LiveState
from services.api.routers import events as events_router
from services.api.routers.events import event_json, show
from services.api.store.projection_store import Store
from services.api.store.tables import INCIDENTS, PLANS, TASKS
from shared.errors import Corrupt, NewerVersion
from shared.events.union import Event
from shared.log.base import FIRST_HASH
from shared.log.log import EventLog, recorded
from shared.log.schema import StoredRow
from shared.log.writing import draft
from shared.tasks.specification import ENDED
from tests.api.test_any_history import events
from tests.examples import examples
from tests.logs.kit import GOLDEN, read_rows, restore


def row_of(event: Event, **changes: Any) -> StoredRow:
    """Return the row of an event; ``changes``: of its columns."""
    place = {"position": 7, "stream_version": 3, "recorded_at": "2025-03-01T12:00:00.000001+00:00"}
    return StoredRow(**draft(event)._asdict() | place | {"previous_hash": FIRST_HASH, "hash": "1" * 64} | changes)


def shown(row: StoredRow) -> Any:
    return json.loads(show(recorded(row)).model_dump_json())


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events)
def test_an_event_is_shown_as_its_model_shows_it(event: Event) -> None:
    row = row_of(event)
    assert json.loads(event_json(row)) == shown(row)


@pytest.mark.parametrize("log", GOLDEN, ids=lambda path: path.stem)
def test_events_of_old_logs_are_shown_as_their_models_show_them(log: Path) -> None:
    rows = [StoredRow(**row) for row in read_rows(log)]
    assert [json.loads(event_json(row)) for row in rows] == [shown(row) for row in rows]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events, st.data())
def test_an_event_without_a_field_that_has_a_default_shows_the_default(event: Event, data: st.DataObject) -> None:
    kind = type(event)
    optional = sorted(name for name, field in kind.model_fields.items() if not field.is_required())
    left_out = data.draw(st.sampled_from([name for name in optional if name not in ("type", "schema_version")] or [""]))
    stored = json.loads(draft(event).data)
    stored.pop(left_out, None)
    row = row_of(event, data=json.dumps(stored))
    assert json.loads(event_json(row)) == shown(row)


@settings(deadline=None, max_examples=examples(10), suppress_health_check=[HealthCheck.too_slow])
@given(events)
def test_an_event_that_is_not_known_is_refused(event: Event) -> None:
    stored = json.loads(draft(event).data)
    with pytest.raises(NewerVersion):
        event_json(row_of(event, data=json.dumps({**stored, "new": 1})))
    with pytest.raises(NewerVersion):
        event_json(row_of(event, data=json.dumps({**stored, "schema_version": 99})))
    with pytest.raises(Corrupt):
        event_json(row_of(event, data="{"))


def test_most_types_of_events_are_shown_as_they_are_stored() -> None:
    # A type that gets an inner model is shown by its model again, which takes ten times as long.
    assert {"task.progressed", "state.moved", "error.detected", "task.checkpointed"} <= events_router._FLAT.keys()


@pytest.mark.parametrize("log", GOLDEN[:1], ids=lambda path: path.stem)
def test_stored_items_are_what_the_views_show(log: Path, tmp_path: Path) -> None:
    source = EventLog(f"sqlite:///{restore(read_rows(log), tmp_path / 'log.db')}", read_only=True)
    store = Store("sqlite://")
    for record in source.read_all():
        store.fold([record])
    source.close()
    with store.reading() as views:
        for plan in views.page(PLANS):
            row = views.row(PLANS, plan.id, "shown")
            assert json.loads(row.shown) == present.plan_summary(plan).model_dump(mode="json")
        for incident in views.page(INCIDENTS):
            row = views.row(INCIDENTS, incident.id, "shown", "other_answers")
            assert json.loads(row.shown) == present.incident_facts(incident).model_dump(mode="json")
            assert json.loads(row.other_answers) == incident.other_answers.model_dump(mode="json")
        for task in views.page(TASKS):
            text = views.row(TASKS, task.name, "shown").shown
            expected = present.task(task, LiveState()).model_dump(mode="json", by_alias=True)
            assert (json.loads(text) == expected) if task.state in ENDED else text == ""
    store.close()
