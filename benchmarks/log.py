"""What reading, folding and verifying a log costs, in processor time. JSON lines; exit status 1 if a bound is missed.

    .venv/bin/python -m benchmarks.log [--events 20000] [--log FILE]

The log is made by the real planner (``benchmarks.log_course``: its mix and its seed). Everything is counted in seconds
of processor time, so that other programs disturb less; where they share the cores they still slow each other down.

    chain       rows of the table fetched, and the hash chain checked: position, hash, stream version, time
    read-fold   rows checked, parsed and folded by the planner, with the recorded answers
    plans       causes decided again and compared with the recorded plan: SEV2 and SEV3 (no solver), others (solver)
    verify      all of it: ``unicron replay --verify``, in a process of its own, with its peak of memory
    jobs        the same with ``--jobs 2``: the mean processor time of the two processes over that of one

Memory: a pass keeps nothing of a record that was folded but ids. What grows with the log is counted by ``memory``: the
peak of a verification of the whole log less that of its first half, carried on to a million events.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.log_course import SEED, write
from benchmarks.report import Report, at_least, run
from services.planner.replay.log_fold import Fold
from services.planner.replay.sources import AnsweredRows, LogSource
from shared.events.severities import Severity
from shared.events.union import ErrorDetected, PlanDecided, Recorded
from shared.log.chain import ChainCheck
from shared.log.log import EventLog
from shared.log.scan import Scan

LEAST_CHAIN, LEAST_READ_FOLD = 50_000, 20_000
"""Events for each second of processor time."""
LEAST_IN_PLACE, LEAST_SOLVED = 1_000, 50
"""Plans for each second of processor time: those of SEV2 and SEV3, and those for which the solver is asked."""
MOST_MEMORY_MIB = 500
"""Of a verification of ``MILLION`` events."""
MILLION = 1_000_000
MOST_OF_TWO = 0.7
"""Of the processor time of a verification, what each of two jobs takes. Half would be linear; each job reads and folds
the whole log, too."""

_VERIFY = """
import json, resource, sys, time
from services.planner.replay.replay import Replayer
if __name__ == "__main__":
    began = time.perf_counter()
    report = Replayer.of_file(sys.argv[1]).verify(jobs=int(sys.argv[2]))
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps({"ok": report.ok, "events": report.events, "plans": report.plans, "verified": report.verified,
        "cpu_s": time.process_time(), "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "jobs_cpu_s": children.ru_utime + children.ru_stime, "wall_s": time.perf_counter() - began}))
"""


def measure(path: Path, report: Report) -> None:
    """Measure a log."""
    source = LogSource(partial(EventLog, f"sqlite:///{path}", read_only=True))
    _reference(report)
    _chain(path, report)
    _read_fold(source, report)
    _plans(source, report)
    _verify(path, report)


def _reference(report: Report) -> None:
    """How fast this machine is now: what a row's hash takes at least, on a small text."""
    text = json.dumps({"key": "value" * 60})
    count = 50_000
    began = time.process_time()
    for _ in range(count):
        hashlib.sha256(json.dumps([text]).encode()).hexdigest()
    report.line("reference", hashes_per_cpu_s=round(count / (time.process_time() - began)))


def _chain(path: Path, report: Report) -> None:
    log = EventLog(f"sqlite:///{path}", read_only=True)
    check, events = ChainCheck(), 0
    began = time.process_time()
    for row in log.rows():
        assert not check.next(row)
        events += 1
    rate = events / (time.process_time() - began)
    log.close()
    report.at_least("chain, events per CPU-second", round(rate), LEAST_CHAIN)


def _read_fold(source: LogSource, report: Report) -> None:
    began = time.process_time()
    rows = AnsweredRows(source.rows(Scan()), source.answers())
    fold, events = Fold(), 0
    for row in rows:
        assert row.record is not None
        events += 1
        if fold.take(row.record):
            fold.answer(row.record, [r.event for r in rows.answers_to(row.record)])
    rate = events / (time.process_time() - began)
    report.at_least("read and fold, events per CPU-second", round(rate), LEAST_READ_FOLD)


def _plans(source: LogSource, report: Report) -> None:
    rows = AnsweredRows(source.rows(Scan()), source.answers())
    fold = Fold()
    numbers, seconds = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    for row in rows:
        assert row.record is not None
        cause = row.record
        if not fold.take(cause):
            continue
        recorded = rows.answers_to(cause)
        if recorded:
            began = time.process_time()
            decided = fold.decide(cause)
            assert [event.canonical() for event in decided] == [r.event.canonical() for r in recorded]
            took = time.process_time() - began
            in_place = _is_in_place(cause, recorded[0])
            if in_place is not None:
                numbers[in_place] += 1
                seconds[in_place] += took
        fold.answer(cause, [r.event for r in recorded])
    report.at_least("SEV2 and SEV3 plans per CPU-second", round(numbers[True] / seconds[True]), LEAST_IN_PLACE)
    report.at_least("solver plans per CPU-second", round(numbers[False] / seconds[False]), LEAST_SOLVED)


def _is_in_place(cause: Recorded, answer: Recorded) -> bool | None:
    """Whether a plan answers a SEV2 or SEV3 without the solver; None for other plans without the solver."""
    event = answer.event
    if isinstance(event, PlanDecided) and event.problem is not None:
        return False
    error = cause.event
    return True if isinstance(error, ErrorDetected) and error.severity is not Severity.SEV1 else None


def _verify(path: Path, report: Report) -> None:
    whole = _verified(path)
    report.line("verify", **whole)
    report.equal("the log verifies", whole["ok"], True)
    two = _verified(path, jobs=2)
    report.line("verify", jobs=2, **two)
    report.equal("the log verifies with 2 jobs", (two["ok"], two["verified"]), (True, whole["verified"]))
    share = two["jobs_cpu_s"] / 2 / whole["cpu_s"]
    seconds = {"wall_s_1": whole["wall_s"], "wall_s_2": two["wall_s"]}
    report.at_most("processor time of each of 2 jobs over that of 1", round(share, 3), MOST_OF_TWO, **seconds)
    with tempfile.TemporaryDirectory(prefix="unicron-log-") as folder:
        half = Path(folder) / "half.db"
        counts = write(half, int(whole["events"]) // 2)
        part = _verified(half)
    for_each = (whole["peak_mib"] - part["peak_mib"]) / (whole["events"] - counts["events"])
    peak_mib = whole["peak_mib"] + max(0.0, for_each) * max(0.0, MILLION - whole["events"])
    extrapolated = whole["events"] < MILLION
    report.below("memory of a million events, MiB", round(peak_mib), MOST_MEMORY_MIB, extrapolated=extrapolated)


def _verified(path: Path, jobs: int = 1) -> dict[str, float]:
    command = [sys.executable, "-c", _VERIFY, str(path), str(jobs)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=at_least(1000), default=20_000)
    parser.add_argument("--log", type=Path, help="keep the log here, and use it if it is there")
    given = parser.parse_args()

    def whole(report: Report) -> None:
        with tempfile.TemporaryDirectory(prefix="unicron-log-") as folder:
            path = given.log or Path(folder) / "log.db"
            if not path.exists():
                began = time.process_time()
                counts = write(path, given.events)
                report.line("log", seed=SEED, cpu_s=round(time.process_time() - began, 1), **counts)
            measure(path, report)

    return run(whole)


if __name__ == "__main__":
    sys.exit(main())
