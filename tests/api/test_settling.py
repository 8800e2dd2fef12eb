"""What is settled step by step equals a settlement of all history at once, whatever the batches and the windows."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from benchmarks.log_course import Course
from services.api.store import settling
from services.api.store.accounts import Accounts
from services.api.store.projection_store import Store
from services.api.store.settled_rows import SettledRows
from services.api.store.tables import CLUSTER, SettledRow, table_of
from shared.costs.report import Period, incident_cost, report
from shared.costs.settlement import DAY_S, Sums
from shared.costs.span_claims import Window
from shared.events.union import Event, Recorded
from shared.interface.costs import Costs
from shared.log.log import EventLog
from shared.projections.evolve import evolve
from shared.views.documents import ClusterView, Views
from tests.api.kit import START, Story, cost_report
from tests.api.test_any_history import events, record
from tests.api.test_random_clusters import happenings, simulate
from tests.examples import examples
from tests.logs.kit import COURSES, FOLDER, golden_log, read_rows, restore


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settle after every record, up to the present: much has to be given up again."""
    monkeypatch.setattr(settling, "SETTLE_EVERY", 1)
    monkeypatch.setattr(settling, "_MERGE_EVERY", 3)
    monkeypatch.setattr(settling, "_BEHIND_S", 0.0)
    monkeypatch.setattr(settling, "_LEAST_S", 1.0)


@contextmanager
def folded(records: Sequence[Recorded], sizes: Iterable[int]) -> Iterator[Store]:
    """Give a store into which records were folded in batches of these sizes."""
    store = Store("sqlite://")
    start = 0
    for size in sizes:
        store.fold(records[start : start + size])
        start += size
    store.fold(records[start:])
    yield store
    store.close()


def settled_report(
    store: Store,
    now: datetime,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    period: Period | None = None,
    limit: int | None = None,
) -> Costs:
    """Return the report as the interface makes it."""
    with store.reading() as views:
        account = Accounts(views, now).account(start=start, end=end, days=period is not None, limit=limit)
        return report(account, views.get(CLUSTER, "cluster") or ClusterView(), period=period)


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Compare two reports: what is counted to 1e-6, shares without any time are as good as missing."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}/{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where}/{index}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6), where
    else:
        assert found == expected, where


def compare(records: Sequence[Recorded], sizes: Sequence[int], times: Iterable[tuple[float, float]]) -> None:
    """Compare the reports of all time and of windows, given in seconds after the start, with the reference."""
    views = Views()
    for recorded in records:
        evolve(views, recorded)
    now = START + timedelta(seconds=400)
    with folded(records, sizes) as store:
        whole = settled_report(store, now, period="day")
        with folded(records, [3] * len(records)) as again:
            assert settled_report(again, now, period="day").model_dump() == whole.model_dump()  # to the last bit
        assert_same(whole.model_dump(), cost_report(views, now, period="day").model_dump())
        with store.reading() as reader:
            amounts = Accounts(reader, now).incidents(views.incidents)
        for row in whole.incidents:
            cost = incident_cost(amounts.get(row.incident), whole.price_per_worker_hour)
            assert_same(cost.model_dump(), {name: getattr(row, name) for name in cost.model_dump()})
        later = now + timedelta(days=30)  # the open time has been settled once, and goes on
        assert_same(settled_report(store, later).model_dump(), cost_report(views, later).model_dump())
        for low, high in times:
            start, end = (START + timedelta(seconds=seconds) for seconds in (low, high))
            window: dict[str, Any] = {"start": start, "end": end, "period": "week"}
            assert_same(
                settled_report(store, now, **window).model_dump(), cost_report(views, now, **window).model_dump()
            )
            early = settled_report(store, now, end=end)
            assert_same(early.model_dump(), cost_report(views, now, end=end).model_dump())


def golden(name: str, folder: Path) -> list[Recorded]:
    """Return the records of a golden log."""
    source = EventLog(f"sqlite:///{restore(read_rows(FOLDER / f'{name}.jsonl'), folder / 'log.db')}", read_only=True)
    records = list(source.read_all())
    source.close()
    return records


batches = st.lists(st.integers(1, 8), max_size=20)
windows = st.lists(st.tuples(st.floats(0, 300), st.floats(0, 300)).map(lambda t: (min(t), max(t))), max_size=2)
quick = settings(
    deadline=None,
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@quick
@given(st.lists(events, max_size=25), batches, windows)
def test_any_history_is_settled_as_a_whole_one(
    history: list[Event], sizes: list[int], times: list[tuple[float, float]]
) -> None:
    compare(record(history), sizes, times)


@quick
@given(st.lists(happenings, max_size=25), batches, windows)
def test_a_random_cluster_is_settled_as_a_whole_one(
    history: list[Any], sizes: list[int], times: list[tuple[float, float]]
) -> None:
    compare(simulate(history).records, sizes, times)


@pytest.mark.slow
@pytest.mark.parametrize("log", COURSES)
def test_a_golden_log_is_settled_as_a_whole_one(log: Path, tmp_path: Path) -> None:
    records = golden(log.stem, tmp_path)
    drawn = random.Random(log.stem)
    first = (records[0].recorded_at - START).total_seconds()
    length = (records[-1].recorded_at - records[0].recorded_at).total_seconds()
    times = sorted(first + length * drawn.random() for _ in range(2))
    compare(records, [drawn.randint(1, 30) for _ in records], [(times[0], times[1])])


def test_what_a_late_event_changes_is_settled_again(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "_MERGE_EVERY", 10**9)
    story.running()
    for second in range(30, 90, 10):
        story.at(second).node(f"late{second}", 1)
    story.at(104).node("late104", 1)
    listed = len(story.records)
    story.process_exit().process_restored()
    with folded(story.records[:listed], [1] * len(story.records)) as store:
        before = settled_report(store, story.time(400)).categories
        with store.reading() as views:
            settled = select(func.count(), func.max(table_of(SettledRow).c.end_s))
            times, until_s = views.connection.execute(settled.where(table_of(SettledRow).c.dimension == "all")).one()
        assert times > 5
        assert until_s > story.time(100).timestamp()  # when the fault occurred that is told of below
        store.fold(story.records)
        after = settled_report(store, story.time(400)).categories
    assert before["transition_incident"] != after["transition_incident"]
    assert_same(after, cost_report(story.views(), story.time(400)).categories)


@pytest.mark.slow
def test_time_is_settled_once_where_faults_are_detected_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes late as a rule comes before the time is settled; the report is that of one batch."""
    monkeypatch.setattr(settling, "SETTLE_EVERY", 128)
    monkeypatch.setattr(settling, "_BEHIND_S", 30.0)
    given_up: list[float] = []
    give_up = SettledRows.give_up

    def noted(rows: SettledRows, from_s: float) -> float:
        given_up.append(from_s)
        return give_up(rows, from_s)

    monkeypatch.setattr(SettledRows, "give_up", noted)
    records = list(Course(3_000, step=timedelta(milliseconds=40), detection=timedelta(seconds=20)).records())
    with folded(records, [100] * (len(records) // 100)) as store:
        with store.reading() as views:
            open_s = records[-1].recorded_at.timestamp() - settling.settled_time(views.connection).settled_s
        found = settled_report(store, records[-1].recorded_at).model_dump()
    assert 30.0 <= open_s < 40.0
    assert given_up == []
    with folded(records, [len(records)]) as store:
        assert settled_report(store, records[-1].recorded_at).model_dump() == found


def test_a_burst_is_not_settled_record_by_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each settlement costs the same for all nodes, however short the time is that it settles."""
    monkeypatch.setattr(settling, "_LEAST_S", 10.0)
    settled_s = []
    settle = SettledRows.store

    def noted(rows: SettledRows, window: Window, sums: Sums) -> None:
        settled_s.append(window.end_s - window.start_s)
        settle(rows, window, sums)

    monkeypatch.setattr(SettledRows, "store", noted)
    records = list(Course(600, step=timedelta(milliseconds=100)).records())
    with folded(records, []) as store:
        found = settled_report(store, records[-1].recorded_at)
    lasted_s = (records[-1].recorded_at - records[0].recorded_at).total_seconds()
    assert 3 < len(settled_s) <= lasted_s / 10 + 1
    assert min(settled_s) >= 10.0
    views = Views()
    for recorded in records:
        evolve(views, recorded)
    assert_same(found.model_dump(), cost_report(views, records[-1].recorded_at).model_dump())


@pytest.mark.slow
def test_processes_that_fold_by_turns_settle_what_one_settles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "SETTLE_EVERY", 7)
    url = f"sqlite:///{tmp_path / 'projections.db'}"
    records = list(Course(400, step=timedelta(seconds=1)).records())
    store, other = Store(url), Store(url)
    for end in range(50, len(records), 50):
        (store if end % 100 else other).fold(records[:end])
    store.fold(records)
    found = settled_report(other, records[-1].recorded_at).model_dump()
    store.close()
    other.close()
    with folded(records, []) as alone:
        assert settled_report(alone, records[-1].recorded_at).model_dump() == found


@pytest.mark.slow
def test_the_times_of_a_day_that_is_over_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows do not grow by all nodes with every settlement, and the account of a day is what it was."""
    monkeypatch.setattr(settling, "SETTLE_EVERY", 4)
    records = list(Course(600, step=timedelta(seconds=400)).records())
    times, reports = [], []
    for every in (3, 10**9):
        monkeypatch.setattr(settling, "_MERGE_EVERY", every)
        with folded(records, []) as store:
            with store.reading() as views:
                table = table_of(SettledRow)
                ends = select(table.c.end_s).where(table.c.dimension == "all").order_by(table.c.end_s)
                times.append(Counter(math.ceil(end_s / DAY_S) for end_s in views.connection.scalars(ends)))
            reports.append(settled_report(store, records[-1].recorded_at, period="day").model_dump())
    merged, all_of_them = ([*counts.values()] for counts in times)
    assert merged[:-1] == [1, 1]
    assert merged[-1] <= all_of_them[-1] // 3 + 2
    assert all_of_them[1] > 50
    assert_same(reports[0], reports[1])


def test_a_limit_leaves_the_costliest_and_all_sums(tmp_path: Path) -> None:
    records = golden(golden_log("demo").stem, tmp_path)
    now = records[-1].recorded_at
    with folded(records, [50] * len(records)) as store:
        whole = settled_report(store, now)
        few = settled_report(store, now, limit=2)
    costliest = sorted((row.failure_money for row in whole.incidents), reverse=True)
    assert [row.failure_money for row in few.incidents] == costliest[:2]
    assert len(few.breakdowns["incident"]) == 3  # with the time of no incident
    assert len(whole.breakdowns["incident"]) > 3
    assert {row.task: row for row in few.tasks}.items() <= {row.task: row for row in whole.tasks}.items()
    assert few.breakdowns["node"] == whole.breakdowns["node"]
    assert (few.totals, few.categories, few.sum_check) == (whole.totals, whole.categories, whole.sum_check)
