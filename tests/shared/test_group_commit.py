"""Appends of several threads in one transaction: each has its own result, and is all or nothing by itself."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shared.errors import Conflict, VersionConflict
from shared.events.union import Event, Recorded
from shared.log.group import MOST, GroupCommit
from shared.log.log import EventLog
from tests.condition import until_blocking
from tests.shared.samples import node_joined

THREADS = 8
LIMIT_S = 60.0


class Transactions:
    """What a group has committed; the first transaction waits until it is let go."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.fails_at = 0
        self.group = GroupCommit(self.commit)

    def commit(self, requests: list[int]) -> None:
        self.calls.append(requests)
        if len(self.calls) == 1:
            self.begun.set()
            assert self.go.wait(LIMIT_S)
        if len(self.calls) == self.fails_at:
            raise KeyboardInterrupt

    def waiting(self) -> int:
        return len(self.group._queue)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(MOST + 2) as opened:
        yield opened


def test_requests_that_wait_share_a_transaction(pool: ThreadPoolExecutor) -> None:
    done = Transactions()
    first = pool.submit(done.group.run, 0)
    assert done.begun.wait(LIMIT_S)
    others = [pool.submit(done.group.run, number) for number in range(1, MOST + 2)]
    until_blocking(lambda: done.waiting() == MOST + 1)
    done.go.set()
    for future in (first, *others):
        future.result(LIMIT_S)
    assert [len(call) for call in done.calls] == [1, MOST, 1]
    assert sorted(number for call in done.calls for number in call) == list(range(MOST + 2))
    done.group.run(99)
    assert done.calls[-1] == [99]


def test_an_interrupt_of_the_thread_that_leads_loses_no_other_request(pool: ThreadPoolExecutor) -> None:
    done = Transactions()
    first = pool.submit(done.group.run, 0)
    assert done.begun.wait(LIMIT_S)
    leader = pool.submit(done.group.run, 1)
    until_blocking(lambda: done.waiting() == 1)
    others = [pool.submit(done.group.run, number) for number in (2, 3)]
    until_blocking(lambda: done.waiting() == 3)
    done.fails_at = 2
    done.go.set()
    with pytest.raises(KeyboardInterrupt):
        leader.result(LIMIT_S)
    for future in (first, *others):
        future.result(LIMIT_S)
    assert [sorted(call) for call in done.calls] == [[0], [1, 2, 3], [2, 3]]


class Gate:
    """The clock of a log, which is read within the transaction: the first one waits until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self) -> datetime:
        self.begun.set()
        assert self.go.wait(LIMIT_S)
        return datetime.now(UTC)


def together(
    log: EventLog, gate: Gate, pool: ThreadPoolExecutor, appends: list[tuple[list[Event], dict[str, int]]]
) -> list[Future[list[Recorded]]]:
    """Append a node's event, and meanwhile all of these, which then share a transaction in this order."""
    first = pool.submit(log.append, [node_joined(1, "n0")])
    assert gate.begun.wait(LIMIT_S)
    futures = []
    for number, (events, expected) in enumerate(appends, start=1):
        futures.append(pool.submit(log.append, events, expected=expected))
        until_blocking(lambda number=number: len(log._group._queue) == number)  # type: ignore[misc]
    gate.go.set()
    assert first.result(LIMIT_S)[0].position == 1
    return futures


def test_a_conflict_fails_one_append_only(log_url: str, pool: ThreadPoolExecutor) -> None:
    gate = Gate()
    log = EventLog(log_url, clock=gate)
    other = node_joined(3, "n0").model_copy(update={"agent_pid": 77})
    alone, late, right, doubled, same, changed, last = together(
        log,
        gate,
        pool,
        [
            ([node_joined(2, "n1")], {"node/n1": 0}),
            (
                [node_joined(20, "n1"), node_joined(21, "n2")],
                {"node/n1": 0},
            ),  # the append before has changed the stream
            ([node_joined(3, "n0"), node_joined(4, "n1")], {"node/n0": 1, "node/n1": 1}),
            ([node_joined(5, "n2"), other], {}),  # id 3 with other content
            ([node_joined(3, "n0")], {"node/n0": 1}),  # the same event once more: no conflict
            ([node_joined(6, "n2"), node_joined(6, "n2")], {"node/n2": 0}),
            ([node_joined(7, "n2")], {"node/n2": 1}),
        ],
    )
    assert [record.position for record in alone.result(LIMIT_S)] == [2]
    with pytest.raises(VersionConflict, match="stream node/n1 has version 1, expected 0"):
        late.result(LIMIT_S)
    assert [record.position for record in right.result(LIMIT_S)] == [3, 4]
    with pytest.raises(Conflict, match="different content"):
        doubled.result(LIMIT_S)
    assert [record.position for record in same.result(LIMIT_S)] == [3]
    assert [record.position for record in changed.result(LIMIT_S)] == [5, 5]
    assert [record.position for record in last.result(LIMIT_S)] == [6]
    records = log.read()
    assert [(record.stream, record.stream_version) for record in records] == [
        ("node/n0", 1),
        ("node/n1", 1),
        ("node/n0", 2),
        ("node/n1", 2),
        ("node/n2", 1),
        ("node/n2", 2),
    ]
    report = log.verify()
    assert (report.ok, report.events) == (True, 6), report.problem
    log.close()


def test_what_the_database_refuses_fails_one_append_only(postgres_url: str, pool: ThreadPoolExecutor) -> None:
    gate = Gate()
    log = EventLog(postgres_url, clock=gate)
    before, refused, after = together(
        log,
        gate,
        pool,
        [
            ([node_joined(2)], {}),
            ([node_joined(3)], {"\0": 0}),  # PostgreSQL takes no such text
            ([node_joined(4)], {}),
        ],
    )
    assert [future.result(LIMIT_S)[0].position for future in (before, after)] == [2, 3]
    with pytest.raises(Exception, match="NUL"):
        refused.result(LIMIT_S)
    assert log.verify().events == 3
    log.close()


def test_eight_threads_with_conflicts(log_url: str) -> None:
    """Each thread knows what it appended and what it did not; the log has exactly that."""
    log = EventLog(log_url)
    appended: list[dict[str, Recorded]] = [{} for _ in range(THREADS)]
    refused: list[set[str]] = [set() for _ in range(THREADS)]

    def work(index: int) -> None:
        drawn = random.Random(index)
        for number in range(15):
            node = f"n{drawn.randrange(3)}"
            events = [node_joined(1000 * (index + 1) + 2 * number + part, node) for part in range(drawn.choice((1, 2)))]
            expected = {f"node/{node}": log.stream_version(f"node/{node}")} if drawn.random() < 0.7 else {}
            try:
                records = log.append(events, expected=expected)
            except VersionConflict:
                refused[index] |= {event.event_id for event in events}
                continue
            assert [record.event for record in records] == events
            if expected:
                assert records[0].stream_version == expected[f"node/{node}"] + 1
            if drawn.random() < 0.3:  # as after a lost answer
                assert log.append(events, expected=expected) == records
            appended[index] |= {record.event.event_id: record for record in records}

    with ThreadPoolExecutor(THREADS) as threads:
        for future in [threads.submit(work, index) for index in range(THREADS)]:
            future.result(LIMIT_S)
    known = {event_id: record for records in appended for event_id, record in records.items()}
    assert {record.event.event_id: record for record in log.read()} == known
    assert not known.keys() & set().union(*refused)
    report = log.verify()
    assert (report.ok, report.events) == (True, len(known)), report.problem
    log.close()


_APPENDER = """
import os, sys, threading
from shared.log.log import EventLog
from tests.shared.samples import node_joined
log = EventLog(sys.argv[1])
def work(index):
    for number in range(0, 100_000, 2):
        first = 1_000_000 * (index + 1) + number
        log.append([node_joined(first, f"n{index}"), node_joined(first + 1, f"n{index}")])
        os.write(1, f"{index} {number // 2 + 1}\\n".encode())  # whole, whatever the other threads write
for index in range(8):
    threading.Thread(target=work, args=(index,)).start()
"""


def test_a_crash_leaves_all_of_an_append_or_nothing(log_url: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", _APPENDER, log_url], stdout=subprocess.PIPE, text=True, env=environment
    )
    with process:
        assert process.stdout is not None
        reported = [process.stdout.readline() for _ in range(60)]
        process.send_signal(signal.SIGKILL)
        reported += process.stdout.readlines()
    acknowledged = dict.fromkeys(range(THREADS), 0)
    for index, count in (map(int, line.split()) for line in reported):
        acknowledged[index] = max(acknowledged[index], count)
    log = EventLog(log_url)
    for index, count in acknowledged.items():
        events = log.stream_version(f"node/n{index}")
        assert events % 2 == 0  # no half of a pair
        assert count <= events // 2 <= count + 1  # all that were acknowledged, and the one that was on its way
    report = log.verify()
    assert report.ok, report.problem
    log.close()
