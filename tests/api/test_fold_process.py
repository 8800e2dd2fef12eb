"""The fold in a process of its own: it does what the fold of a store does, and its end is an outage like any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine

from services.api.findings import Found
from services.api.fold_process import FoldProcess
from services.api.store import Store
from services.api.tables import INCIDENTS, PLANS, TASKS, table_of
from shared.bus import Bus
from shared.errors import Unavailable
from shared.log.journal import Journal
from shared.settings import Settings
from tests.agent.kit import alive
from tests.api.kit import Story, serving
from tests.shared.samples import node_joined

WAIT_S = 40.0
"""Far above what the process takes to start, or to end."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'projections.db'}"


@pytest.fixture
def folds(url: str) -> Iterator[FoldProcess]:
    folds = FoldProcess(url)
    yield folds
    folds.close()


def kill(pid: int | None) -> None:
    """Kill a process, and wait until it has ended, whether or not its parent has asked how."""
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    latest_s = time.monotonic() + WAIT_S
    while alive(pid):
        assert time.monotonic() < latest_s
        time.sleep(0.01)


def views(url: str) -> Sequence[object]:
    """Return what the projections have."""
    store = Store(url)
    with store.reading() as reader:
        found = [reader.page(kind) for kind in (TASKS, INCIDENTS, PLANS)]
    store.close()
    return found


def test_it_folds_and_finds_what_a_store_does(folds: FoldProcess, url: str, story: Story, tmp_path: Path) -> None:
    story.running().process_exit().process_restored()
    own_url, found, own_found = f"sqlite:///{tmp_path / 'own.db'}", list[Found](), list[Found]()
    store = Store(own_url)
    for start in range(0, len(story.records), 7):
        batch = story.records[start : start + 7]
        assert folds.fold(batch, found.append) == store.fold(batch, own_found.append)
        folds.settle()
        store.settle()
    assert folds.head() == store.head()
    store.close()
    assert found == own_found
    assert sum(len(one.restored) for one in found) == 1
    assert views(url) == views(own_url)
    folds.reset()
    assert folds.head() == (0, "")
    assert views(url) == [[], [], []]


def test_a_fold_goes_on_in_a_new_process_where_the_last_one_ended(folds: FoldProcess, story: Story) -> None:
    story.running()
    folds.fold(story.records[:3], lambda _: None)
    ended = folds.pid
    kill(ended)
    with pytest.raises(Unavailable, match="the process that folds was ended by signal 9"):
        folds.fold(story.records, lambda _: None)
    assert folds.pid is None
    assert folds.fold(story.records, lambda _: None) == len(story.records)
    assert folds.pid != ended


def test_a_database_that_does_not_answer_is_an_outage_and_may_come_later(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    folds = FoldProcess(f"sqlite:///{folder / 'projections.db'}")
    with pytest.raises(Unavailable, match="projections"):
        folds.head()
    started = folds.pid
    folder.mkdir()
    assert folds.head() == (0, "")
    assert folds.pid == started
    folds.close()


def test_a_process_that_cannot_be_started_is_an_outage(folds: FoldProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as missing:
        missing.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(Unavailable, match=r"cannot be started: .*/nonexistent/python"):
            folds.head()
    assert folds.head() == (0, "")


def test_a_fold_that_fails_says_where_and_leaves_the_position(folds: FoldProcess, url: str, story: Story) -> None:
    story.running()
    folds.fold(story.records[:4], lambda _: None)
    folds.close()  # and with it the views in memory
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(table_of(TASKS.row).update().values(document="{}"))
    engine.dispose()
    with pytest.raises(RuntimeError, match=r"(?s)in the process that folds: Traceback.*batches\.py.*ValidationError"):
        folds.fold(story.records, lambda _: None)
    assert folds.head()[0] == 4


def test_metrics_are_those_of_the_process_that_runs(url: str) -> None:
    registry = CollectorRegistry()
    folds = FoldProcess(url, registry)
    assert registry.get_sample_value("unicron_fold_process_start_time_seconds") is None
    folds.head()
    assert folds.pid is not None
    began_s = registry.get_sample_value("unicron_fold_process_start_time_seconds")
    # The kernel counts in ticks of 10 ms since the machine started.
    assert began_s == pytest.approx(psutil.Process(folds.pid).create_time(), abs=1.0)
    folds.close()
    assert registry.get_sample_value("unicron_fold_process_start_time_seconds") is None


def test_to_close_it_ends_the_process(url: str) -> None:
    folds = FoldProcess(url)
    folds.close()
    folds.head()
    pid = folds.pid
    folds.close()
    assert pid is not None
    assert not psutil.pid_exists(pid)


def test_the_process_ends_with_a_gateway_that_is_killed(url: str) -> None:
    program = (
        "import sys, time\n"
        "from services.api.fold_process import FoldProcess\n"
        "folds = FoldProcess(sys.argv[1])\n"
        "folds.head()\n"
        "print(folds.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, url], stdout=subprocess.PIPE) as gateway:
        assert gateway.stdout is not None
        pid = int(gateway.stdout.readline())
        gateway.kill()
        wait_for_end(pid)


async def test_a_gateway_follows_the_log_through_the_end_of_the_process(
    settings: Settings, bus: Bus, journal: Journal
) -> None:
    started: list[FoldProcess] = []

    def folding(url: str, registry: CollectorRegistry) -> FoldProcess:
        started.append(FoldProcess(url, registry))
        return started[0]

    async with serving(settings, bus, journal, folding) as api:
        await journal.append([node_joined(1)])
        await api.projected(1)
        kill(started[0].pid)
        await journal.append([node_joined(2)])
        await api.projected(2)
        assert "unicron_fold_process_resident_memory_bytes" in (await api.http.get("/metrics")).text
        pid = started[0].pid
    assert pid is not None
    assert not psutil.pid_exists(pid)
