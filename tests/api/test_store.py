"""The projections' tables: the fold and its position move together, once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, inspect, select, text
from sqlmodel import create_engine

from services.api.store import settling
from services.api.store.projection_store import Store
from services.api.store.tables import ATTEMPTS, INCIDENTS, NODES, PLANS, PREFIX, TASKS, Kind, Tables
from shared.events.union import IncidentNoted, Recorded, TaskChanged, TaskStopped
from shared.log.log import EventLog
from shared.model import Model
from shared.views.documents import SCHEMA_VERSION, PlanState
from tests.api.kit import Story
from tests.logs.kit import COURSES, read_rows, restore

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


@pytest.mark.parametrize("name", ["a%20b", "a?b=c", "a#b", "a'b", 'a"b', "ü b", "[1]{x}*", "a&b;c+d", "a:b@c", "%s%%"])
def test_a_folder_of_any_name(name: str, tmp_path: Path, story: Story) -> None:
    around = tmp_path / "around"
    folder = around / name / "run"
    folder.mkdir(parents=True)
    store = Store(f"sqlite:///{folder / 'projections.db'}")
    store.fold(story.running().records)
    store.close()
    assert (folder / "projections.db").is_file()
    assert list(around.iterdir()) == [around / name]


@pytest.mark.parametrize("reopened", [False, True])
def test_the_tables_hold_what_the_pure_fold_gives(store: Store, url: str, reopened: bool, story: Story) -> None:
    story.running().process_exit().process_restored()
    story.at(120).add(TaskChanged, task="gpt", weight=3.0, min_workers=1)
    story.add(IncidentNoted, incident="i1", text="a note")
    story.at(130).add(TaskStopped, task="gpt", generation=3, step=99, path="/c")
    for start in range(2):  # two more attempts
        story.at(140 + start).submit()
    for start in range(0, len(story.records), 3):
        store.fold(story.records[start : start + 3])
    if reopened:  # what is in memory is not needed
        store.close()
        store = Store(url)
    views = story.views()
    assert {view.name: view for view in page(store, TASKS)} == views.tasks
    assert {view.id: view for view in page(store, INCIDENTS)} == views.incidents
    assert {view.id: view for view in page(store, PLANS)} == views.plans
    assert {view.name: view for view in page(store, NODES)} == views.nodes
    assert sorted(page(store, ATTEMPTS), key=lambda view: view.number) == list(views.attempts.values())
    assert len(views.attempts) == 2
    assert store.head() == (len(story.records), story.records[-1].hash)
    store.close()


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


def test_versions_side_by_side_have_tables_of_their_own_and_older_ones_go(url: str, story: Story) -> None:
    story.running()
    engine = create_engine(url)
    others = [f"api{SCHEMA_VERSION + step}_tasks" for step in (-2, -1, 1)]
    with engine.begin() as connection:
        for name in (*others, "api_nodes", "api_keys_of_somebody_else"):
            connection.execute(text(f"CREATE TABLE {name} (document INTEGER)"))
    store = Store(url)
    assert store.fold(story.records) == len(story.records)
    store.close()
    left = set(inspect(engine).get_table_names()) - set(Tables.metadata.tables)
    assert left == {*others[1:], "api_keys_of_somebody_else"}
    store = Store(url)
    assert store.position() == len(story.records), "what was folded stays"
    store.close()
    engine.dispose()


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


def contents(url: str) -> dict[str, list[Any]]:
    """Return all rows of all tables, in the order of their keys."""
    engine = create_engine(url)
    with engine.connect() as connection:
        rows = {
            table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))]
            for table in Tables.metadata.sorted_tables
        }
    engine.dispose()
    return rows


@pytest.mark.parametrize("log", COURSES)
def test_batches_of_any_size_leave_the_same_tables(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "SETTLE_EVERY", 5)
    monkeypatch.setattr(settling, "_MERGE_EVERY", 3)
    monkeypatch.setattr(settling, "_BEHIND_S", 1.0)
    monkeypatch.setattr(settling, "_LEAST_S", 1.0)
    source = EventLog(f"sqlite:///{restore(read_rows(log), tmp_path / 'log.db')}", read_only=True)
    records = list(source.read_all())
    source.close()
    found = []
    for size in (1, 7, 100):
        url = f"sqlite:///{tmp_path / f'{size}.db'}"
        store = Store(url)
        for start in range(0, len(records), size):
            if size == 7 and start % (5 * size) == 3 * size:  # what is in memory is not needed
                store.close()
                store = Store(url)
            store.fold(records[start : start + size])
        store.close()
        found.append(contents(url))
    assert found[0][f"{PREFIX}plans"]
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_views_that_another_process_has_changed_are_read_again(url: str, store: Store, story: Story) -> None:
    story.running()
    store.fold(story.records[:6])
    other = Store(url)
    other.fold(story.records[:-1])
    other.close()
    assert store.fold(story.records) == len(story.records)
    with store.reading() as views:
        assert views.get(TASKS, "gpt") == story.views().tasks["gpt"]


def test_a_list_by_state_and_task_goes_on_behind_its_cursor(store: Store, story: Story) -> None:
    story.running()
    for number in range(6):
        story.process_exit(f"i{number}", f"p{number}")
        if number != 4:
            story.process_restored(f"i{number}", f"p{number}")
    story.at(200).submit("other")
    story.at(201).plan("elsewhere", queued={"other": "no workers"})
    store.fold(story.records)
    with store.reading() as views:
        every = views.page(PLANS)
        assert [view.id for view in views.page(PLANS, task="gpt")] == [view.id for view in every[:-1]]
        assert views.page(PLANS, task="other") == every[-1:]
        done = [view for view in every if view.state is PlanState.DONE]
        assert 0 < len(done) < len(every)
        assert views.page(PLANS, states=["done"]) == done
        mixed = views.page(PLANS, states=["done", "superseded"], task="gpt", after=done[0].position, limit=2)
        assert mixed == [view for view in every[:-1] if view.position > done[0].position][:2]
        assert views.page(INCIDENTS, states=["open"]) == [v for v in views.page(INCIDENTS) if v.restored_at is None]


@pytest.fixture(params=["sqlite", "postgresql"])
def either_url(request: pytest.FixtureRequest, url: str) -> str:
    """URL of an empty database of either kind."""
    found: str = url if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    return found


def test_two_processes_that_fold_at_once_fold_one_after_the_other(either_url: str, story: Story) -> None:
    """What one has read of the position counts until it has written: the other may not fold the same records then."""
    story.running()
    stores = [Store(either_url), Store(either_url)]
    reads, may_go_on = threading.Event(), threading.Event()
    begin = stores[0]._batch.begin

    def held(connection: Connection, records: Iterable[Recorded]) -> None:
        reads.set()
        assert may_go_on.wait(20)
        begin(connection, records)

    stores[0]._batch.begin = held  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(stores[0].fold, story.records)
        assert reads.wait(20)
        second = pool.submit(stores[1].fold, story.records)
        with pytest.raises(TimeoutError):
            second.result(0.5)  # a fold of these records takes a hundredth of it
        may_go_on.set()
        assert first.result(20) == second.result(20) == len(story.records)
    assert {view.name: view for view in page(stores[0], TASKS)} == story.views().tasks
    for store in stores:
        store.close()
