"""The projections' tables: the fold and its position move together, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlmodel import Session, create_engine

from services.api.store import INCIDENTS, NODES, PLANS, TASKS, PositionRow, Store
from tests.api.kit import Story


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
    assert {view.name: view for view in store.page(TASKS)} == views.tasks
    assert {view.id: view for view in store.page(INCIDENTS)} == views.incidents
    assert {view.id: view for view in store.page(PLANS)} == views.plans
    assert {view.name: view for view in store.page(NODES)} == views.nodes
    assert store.head() == (len(story.records), story.records[-1].hash)


def test_a_record_delivered_again_has_no_effect(store: Store, story: Story) -> None:
    story.running().process_exit()
    store.fold(story.records)
    before = store.page(PLANS)
    assert store.fold(story.records[-3:]) == len(story.records)
    assert store.page(PLANS) == before


def test_a_fold_that_fails_moves_neither_views_nor_position(store: Store, story: Story) -> None:
    story.running()
    store.fold(story.records[:4])
    broken = story.records[5].model_copy(update={"event": story.records[5].event.model_copy(update={"phase": 5})})
    with pytest.raises(ValueError, match="phase"):
        store.fold([story.records[4], broken])
    assert store.position() == 4
    assert store.page(PLANS) == []
    assert store.fold(story.records) == len(story.records)
    assert store.get(TASKS, "gpt") == story.views().tasks["gpt"]


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
    assert (store.position(), store.page(TASKS)) == (0, [])
    store.close()
