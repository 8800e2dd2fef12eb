"""The projections' tables: the fold and its position move together, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from sqlmodel import Session, create_engine

from services.api.store import Store
from services.api.tables import INCIDENTS, NODES, PLANS, TASKS, Kind, PositionRow
from shared.model import Model
from tests.api.kit import Story

V = TypeVar("V", bound=Model)


def page(store: Store, kind: Kind[V]) -> list[V]:
    """Return all views of a kind."""
    with store.reading() as views:
        return views.page(kind)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'projections.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(url)
    yield store
    store.close()


def test_the_tables_hold_what_the_pure_fold_gives(store: Store, story: Story) -> None:
    story.running().process_exit().process_restored()
    for start in range(0, len(story.records), 3):
        store.fold(story.records[start : start + 3])
    views = story.views()
    assert {view.name: view for view in page(store, TASKS)} == views.tasks
    assert {view.id: view for view in page(store, INCIDENTS)} == views.incidents
    assert {view.id: view for view in page(store, PLANS)} == views.plans
    assert {view.name: view for view in page(store, NODES)} == views.nodes
    assert store.head() == (len(story.records), story.records[-1].hash)


def test_a_record_delivered_again_has_no_effect(store: Store, story: Story) -> None:
    story.running().process_exit()
    store.fold(story.records)
    before = page(store, PLANS)
    assert store.fold(story.records[-3:]) == len(story.records)
    assert page(store, PLANS) == before


def test_a_fold_that_fails_moves_neither_views_nor_position(store: Store, story: Story) -> None:
    story.running()
    store.fold(story.records[:4])
    broken = story.records[5].model_copy(update={"event": story.records[5].event.model_copy(update={"phase": 5})})
    with pytest.raises(ValueError, match="phase"):
        store.fold([story.records[4], broken])
    assert store.position() == 4
    assert page(store, PLANS) == []
    assert store.fold(story.records) == len(story.records)
    with store.reading() as views:
        assert views.get(TASKS, "gpt") == story.views().tasks["gpt"]


def test_tables_of_another_version_are_made_anew(url: str, story: Story) -> None:
    story.running()
    store = Store(url)
    store.fold(story.records)
    store.close()
    engine = create_engine(url)
    with Session(engine) as session:
        row = session.get(PositionRow, 1)
        assert row is not None
        row.schema_version += 1
        session.add(row)
        session.commit()
    engine.dispose()
    store = Store(url)
    assert (store.position(), page(store, TASKS)) == (0, [])
    store.close()


def test_all_views_of_one_answer_are_of_the_same_position(store: Store, story: Story) -> None:
    story.running()
    store.fold(story.records)
    story.process_exit()
    with store.reading() as views:
        assert [plan.id for plan in views.page(PLANS)] == ["start"]
        store.fold(story.records)
        assert views.page(INCIDENTS) == []
        assert views.find(TASKS, "gpt").plan == ""
    assert [incident.id for incident in page(store, INCIDENTS)] == ["i1"]
