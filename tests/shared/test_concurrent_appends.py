"""Appends of several threads: each has its own result, and is all or nothing by itself."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared.errors import VersionConflict
from shared.events.union import Recorded
from shared.log.log import EventLog
from tests.shared.samples import node_joined

THREADS = 8
LIMIT_S = 60.0


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
