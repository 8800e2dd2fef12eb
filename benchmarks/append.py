"""What an append costs beside what the disk and the bus cost by themselves. JSON lines; exit 1 if a bound is missed.

    .venv/bin/python -m benchmarks.append [--rounds 10] [--appends 50] [--folder FOLDER]

    threads     appends for each second: raw commits of one row in one thread, and 8 threads of one process that append
                through the log. Raw: SQLite with the same table, triggers and settings, and rows that are made already
    consumer    the time from the call of an append until a follower on another connection has the record, beside that
                of a raw commit and of a raw publication to a stream of files

Each round measures all of it, one after the other, so that another program of the machine disturbs all alike. The
ratio is the median of the rounds' ratios. ``--folder`` is on the disk that is measured.

How many appends there can be depends on the disk, and on the processor: an append takes 0.17 ms of its time, and
threads of a Python process take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from nats.js.api import StorageType, StreamConfig

from benchmarks.report import Report, at_least, run
from shared.bus.connection import Bus
from shared.events.union import Recorded, TaskProgressed
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.log.relay import encode
from shared.log.schema import COLUMNS
from tests.nats_server import OpenServer

THREADS = 8
LEAST_PER_S = 2000
"""Appends of ``THREADS`` threads: ten times what a cluster of 2,000 nodes writes in a burst (200 events a second)."""
MOST_ADDED_MS = 2.0
"""What the way from an append to a consumer adds to a raw commit and a raw publication."""
START = datetime(2026, 1, 1, tzinfo=UTC)
RAW_STREAM = "RAW"
_CONSUMER_LIMIT_S = 30.0
"""A follower that has not got a record by then never will."""


class Events:
    """New events, of the kind that a log has most of."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def next(self, task: str) -> TaskProgressed:
        number = next(self._numbers)
        return TaskProgressed(
            event_id=f"{number:032x}", occurred_at=START, task=task, generation=1, step=number, workers=8, step_s=0.125
        )


class RawCommits:
    """Commits of one row each, in the way in which the log makes them, without anything else."""

    def __init__(self, folder: Path, count: int) -> None:
        source, events = EventLog(f"sqlite:///{folder / 'source.db'}"), Events()
        source.append([events.next("a") for _ in range(count)])
        self._rows = iter(list(source.rows()))
        source.close()
        EventLog(f"sqlite:///{folder / 'raw.db'}").close()
        self._connection = sqlite3.connect(folder / "raw.db", isolation_level=None)
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.execute("PRAGMA journal_mode=WAL")

    def commit(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute(f"INSERT INTO log VALUES ({','.join('?' * len(COLUMNS))})", next(self._rows))
        self._connection.execute("COMMIT")

    def commits(self, count: int) -> None:
        for _ in range(count):
            self.commit()

    def close(self) -> None:
        self._connection.close()


def measure_threads(folder: Path, rounds: int, appends: int, report: Report) -> None:
    """Measure the appends of several threads beside raw commits."""
    log, events = EventLog(f"sqlite:///{folder / 'threads.db'}"), Events()
    raw = RawCommits(folder, (rounds + 1) * appends)
    in_order = threading.Lock()

    def append(task: str) -> None:
        for _ in range(appends):
            with in_order:
                event = events.next(task)
            log.append([event])

    found = []
    for number in range(rounds + 1):
        raw_per_s = appends / _seconds(lambda: raw.commits(appends))
        single_per_s = appends / _seconds(lambda: append("single"))
        cpu_s = time.process_time()
        threads_per_s = THREADS * appends / _seconds(lambda: _in_threads(append))
        cpu_ms = (time.process_time() - cpu_s) / (THREADS * appends) * 1e3
        if number > 0:  # the first round opens connections and prepares statements
            found.append((raw_per_s, single_per_s, threads_per_s, threads_per_s / raw_per_s, cpu_ms))
    raw_per_s, single_per_s, threads_per_s, _, cpu_ms = (median(values) for values in zip(*found, strict=True))
    report.line(
        "threads",
        threads=THREADS,
        raw_per_s=round(raw_per_s),
        one_thread_per_s=round(single_per_s),
        threads_per_s=round(threads_per_s),
        cpu_ms_per_append=round(cpu_ms, 3),
        ratios=[round(values[3], 2) for values in found],
    )
    report.at_least(f"appends of {THREADS} threads, a second", round(threads_per_s), LEAST_PER_S)
    report.equal("the log verifies", log.verify().ok, True)
    log.close()
    raw.close()


def _in_threads(append: Callable[[str], None]) -> None:
    threads = [threading.Thread(target=append, args=(f"t{index}",)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


async def measure_consumer(folder: Path, count: int, report: Report) -> None:
    """Measure the way from an append to a consumer beside a raw commit and a raw publication."""
    url, events = f"sqlite:///{folder / 'consumer.db'}", Events()
    raw = RawCommits(folder, count)
    async with OpenServer(folder / "nats") as server:  # no service has a right to a stream of the benchmark's own
        buses = [
            await Bus.connect(server.url, credential=server.credential, name=name) for name in ("appends", "follows")
        ]
        with _opened(url) as log, _opened(url) as other:
            async with Journal(log, buses[0]) as journal, Journal(other, buses[1]) as follows:
                times = await _latencies(journal, follows, buses[0], raw, events, count)
        for bus in buses:
            await bus.close()
    raw.close()
    commit_ms, publish_ms, consumer_ms = (round(median(values) * 1e3, 3) for values in times)
    report.line(
        "consumer", events=count, commit_p50_ms=commit_ms, publish_p50_ms=publish_ms, consumer_p50_ms=consumer_ms
    )
    bound_ms = round(commit_ms + publish_ms + MOST_ADDED_MS, 3)
    report.at_most("append to consumer, p50, ms", consumer_ms, bound_ms)


async def _latencies(
    journal: Journal, follows: Journal, bus: Bus, raw: RawCommits, events: Events, count: int
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of raw commits, of raw publications, and from appends to the consumer."""
    await bus.jetstream.add_stream(StreamConfig(name=RAW_STREAM, subjects=["raw"], storage=StorageType.FILE))
    received: asyncio.Queue[tuple[float, int]] = asyncio.Queue()

    async def handle(record: Recorded) -> None:
        received.put_nowait((time.perf_counter(), record.position))

    following = asyncio.create_task(follows.follow(handle, consumer="measured", after=0))
    commits, publications, ways = [], [], []
    try:
        for _ in range(count):
            commits.append(_seconds(raw.commit))
            began = time.perf_counter()
            (record,) = await journal.append([events.next("a")])
            async with asyncio.timeout(_CONSUMER_LIMIT_S):
                at, position = await received.get()
            if position != record.position:
                raise RuntimeError(f"the consumer got position {position} instead of {record.position}")
            ways.append(at - began)
            (row,) = journal.log.page(after=position - 1, limit=1)
            payload = encode(row)
            began = time.perf_counter()
            await bus.jetstream.publish("raw", payload)
            publications.append(time.perf_counter() - began)
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    return commits, publications, ways


@contextlib.contextmanager
def _opened(url: str) -> Iterator[EventLog]:
    log = EventLog(url)
    try:
        yield log
    finally:
        log.close()


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(3, "the ratio is a median"), default=10)
    parser.add_argument("--appends", type=at_least(10), default=50, help="of each thread in each round")
    parser.add_argument("--folder", type=Path, help="where the databases are made")
    given = parser.parse_args()

    async def whole(report: Report) -> None:
        with tempfile.TemporaryDirectory(prefix="unicron-append-", dir=given.folder) as folder:
            for part in ("threads", "consumer"):
                (Path(folder) / part).mkdir()
            await asyncio.to_thread(measure_threads, Path(folder) / "threads", given.rounds, given.appends, report)
            await measure_consumer(Path(folder) / "consumer", given.rounds * given.appends, report)

    return run(whole)


if __name__ == "__main__":
    sys.exit(main())
