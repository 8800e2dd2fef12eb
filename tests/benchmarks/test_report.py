"""The common part of the benchmarks: lines, bounds, errors, exit status."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.intervals import REASON, interval
from benchmarks.report import FAILED, INTERRUPTED, MISSED, Report, at_least, run
from shared.errors import NotFound


def outcome(measure: Callable[[Report], Any]) -> tuple[int, list[dict[str, Any]]]:
    """Run a benchmark; return its exit status and its lines."""
    stream = io.StringIO()
    status = run(measure, stream)
    return status, [json.loads(line) for line in stream.getvalue().splitlines()]


def test_bounds_that_hold_are_printed_with_value_and_bound() -> None:
    def measure(report: Report) -> None:
        report.line("run", seconds=1.5)
        report.at_most("seconds", 1.5, 1.5, rounds=3)
        report.at_least("ratio", 10.0, 2.0)
        report.below("memory", 1.0, 2.0)
        report.equal("recomputed", 0, 0)
        report.above("gain", 0.1, 0.0)

    status, lines = outcome(measure)
    assert status == 0
    assert lines[0] == {"line": "run", "seconds": 1.5}
    bound = {"line": "bound", "name": "seconds", "value": 1.5, "relation": "<=", "bound": 1.5, "ok": True, "rounds": 3}
    assert lines[1] == bound
    assert [line["relation"] for line in lines[1:]] == ["<=", ">=", "<", "==", ">"]


def test_the_bounds_of_another_run_count() -> None:
    lines = [
        {"line": "run", "seconds": 1.5},
        {"line": "bound", "name": "a", "value": 1, "relation": "<=", "bound": 2, "ok": True},
        {"line": "bound", "name": "b", "value": 3, "relation": "<=", "bound": 2, "ok": False},
    ]

    def measure(report: Report) -> None:
        for line in lines:
            report.relay(line)
        assert report.missed == ["b"]

    assert outcome(measure) == (1, lines)


@pytest.mark.parametrize(
    "measure",
    [
        lambda report: report.at_most("x", 2.0, 1.0),
        lambda report: report.at_most("x", None, 1.0),
        lambda report: report.at_most("x", float("nan"), 1.0),
        lambda report: report.below("x", 1.0, 1.0),
        lambda report: report.above("x", 1.0, 1.0),
        lambda report: report.at_least("x", 0.5, 1.0),
        lambda report: report.equal("x", False, True),
    ],
)
def test_a_missed_bound_is_printed_and_is_the_exit_status(measure: Callable[[Report], bool]) -> None:
    def measures(report: Report) -> None:
        assert measure(report) is False
        report.at_most("a later bound", 0, 1)

    status, lines = outcome(measures)
    assert status == MISSED
    assert [line["ok"] for line in lines] == [False, True]


def test_an_error_is_one_line_and_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    async def measure(report: Report) -> None:
        raise NotFound("no task named 'first'")

    assert outcome(measure) == (FAILED, [{"line": "error", "code": "not-found", "detail": "no task named 'first'"}])
    assert capsys.readouterr().err == ""


def test_an_unexpected_error_has_its_traceback_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(report: Report) -> None:
        raise KeyError("items")

    status, (line,) = outcome(measure)
    assert (status, line["line"], line["detail"]) == (FAILED, "error", "KeyError: 'items'")
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupted_benchmark_exits_as_shells_do() -> None:
    def measure(report: Report) -> None:
        raise KeyboardInterrupt

    assert outcome(measure) == (INTERRUPTED, [])


@pytest.mark.timeout(20)
def test_a_terminated_benchmark_removes_what_it_made() -> None:
    removed = []

    async def measure(report: Report) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            removed.append(True)

    assert outcome(measure) == (INTERRUPTED, [])
    assert removed == [True]


@pytest.mark.parametrize("text", ["1", "-1", "many", "", "2.5"])
def test_too_few_repetitions_are_refused_with_the_reason(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"at least 2, not '{text}': {REASON}"):
        at_least(2, REASON)(text)
    assert at_least(2, REASON)("2") == 2


@pytest.mark.parametrize("benchmark", ["checkpoints", "gradients"])
def test_one_cycle_is_refused_because_it_has_no_interval(benchmark: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{benchmark}", "--cycles", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert REASON in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interval_takes_two_ratios() -> None:
    mean, low, high = interval([1.0, 1.0])
    assert (mean, low, high) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="1 ratios have no confidence interval"):
        interval([1.0])
