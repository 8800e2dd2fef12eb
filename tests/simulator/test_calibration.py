"""Calibration: medians of what a log measured, compared with the rows of recorded logs and with events made by hand."""

import json
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from services.planner.replay.replay import Replayer
from shared.events.union import Event, TaskProgressed, WorkerSlowed
from simulator.log_traces import calibration_of_log, workload_of_log
from simulator.policies import POLICIES
from simulator.policies.timing import LiveTiming
from simulator.run.calibration import Calibration
from simulator.run.measured_times import TIMES, assumed_times, on_cluster
from simulator.runs import Fixed, Run, make
from tests.logs.kit import golden_log, read_rows, restore


def calibrated(name: str, folder: Path) -> tuple[Replayer, Calibration]:
    replayer = Replayer.of_file(restore(read_rows(golden_log(name)), folder / "log.db"))
    return replayer, calibration_of_log([record.event for record in replayer.records], name)


def events(name: str, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the bytes of a recorded log as they are, not as the program reads them."""
    for row in read_rows(golden_log(name)):
        if row["type"] == kind:
            yield json.loads(row["data"])


def seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def test_detection_is_from_the_fault_to_its_incident(tmp_path: Path) -> None:
    _, found = calibrated("demo", tmp_path)
    names = {
        "node-lost": "node_detection_s",
        "process-exit": "process_detection_s",
        "exception": "exception_detection_s",
        "hang": "hang_detection_s",
    }
    errors = list(events("demo", "error.detected"))
    assert {each["kind"] for each in errors} == set(names)
    for each in errors:
        sampled = found.times[names[each["kind"]]]
        assert sampled.value == pytest.approx(seconds(each["occurred_at"], each["detected_at"]))
        assert sampled.samples == 1
    assert "link_detection_s" not in found.times, "the log has no example"


def test_transitions_and_checkpoints(tmp_path: Path) -> None:
    """Planned transitions are those that hold no step: their pause begins when the survivors have drained."""
    _, found = calibrated("demo", tmp_path)
    starts = [m["durations_s"]["prepare"] for m in events("demo", "state.moved") if m["phase"] == "prepared"]
    assert found.times["process_start_s"].value == pytest.approx(median(starts))
    assert found.times["process_start_s"].samples == len(starts)
    changes = {(p["plan"], c["task"]): c for p in events("demo", "plan.decided") for c in p["changes"]}
    drained, pauses, held = {}, [], 0
    for moved in events("demo", "state.moved"):
        part = moved["plan"], moved["task"]
        if moved["phase"] == "drained":
            drained[part] = moved["occurred_at"]
        if moved["phase"] == "restored" and moved["complete"] and changes[part]["survivors"]:
            took = moved["durations_s"]
            if changes[part]["hold"]:
                held += 1
            elif part in drained:
                whole_s = seconds(drained[part], moved["occurred_at"])
                pauses.append(whole_s - took["first_step"] - took.get("move", 0.0))
    assert found.times["pause_s"].value == pytest.approx(median(pauses))
    assert found.times["pause_s"].samples == len(pauses) > 0
    assert found.times["fault_pause_s"].samples == held > 0
    assert 0.0 < found.times["fault_pause_s"].value < 60.0
    written = [(c["task"], c["generation"], c["occurred_at"]) for c in events("demo", "task.checkpointed")]
    apart = [seconds(a[2], b[2]) for a, b in pairwise(sorted(written)) if a[:2] == b[:2]]
    assert found.times["checkpoint_every_s"].value == pytest.approx(median(apart))


def test_a_calibrated_task_takes_the_measured_step_time(tmp_path: Path) -> None:
    """One layout throughout: the simulated rate is that of the median step."""
    replayer, found = calibrated("unsaved", tmp_path)
    workload = workload_of_log(replayer, "unsaved")
    (task,) = found.throughput
    measured = [each["step_s"] for each in events("unsaved", "task.progressed") if each["step_s"] > 0]
    outcome = make(Run(Fixed(workload), "unicron", 0, costs=False))
    end_s = outcome.completed_s[task]
    assert workload.tasks[0].steps / end_s == pytest.approx(median(1 / step_s for step_s in measured), rel=1e-3)


def test_steps_beside_a_slow_worker_do_not_count(tmp_path: Path) -> None:
    replayer, _ = calibrated("demo", tmp_path)
    recorded = [record.event for record in replayer.records]
    slow = next(event for event in recorded if isinstance(event, WorkerSlowed))
    all_events: list[Event] = [event for event in recorded if not isinstance(event, WorkerSlowed)]
    before = calibration_of_log(all_events, "demo")
    reports = [e for e in all_events if isinstance(e, TaskProgressed) and e.task == "demo-gpt-large" and e.step_s > 0]
    assert before.throughput["demo-gpt-large"].samples == len(reports)
    # Its worker n0/0 is slow from its first report to its last one.
    for report, behind, slowdown in ((reports[-1], 1, 1.0), (reports[0], 0, slow.slowdown)):
        about = {"occurred_at": report.occurred_at, "worker": "n0/0", "node": "n0", "slowdown": slowdown}
        all_events.insert(all_events.index(report) + behind, slow.model_copy(update=about))
    after = calibration_of_log(all_events, "demo")
    assert "demo-gpt-large" not in after.throughput, "it trains on n0/0 throughout"
    assert after.throughput["demo-gpt-small"] == before.throughput["demo-gpt-small"]


def test_the_live_policy_takes_all_times_and_others_how_often_they_save() -> None:
    times = dict.fromkeys(TIMES, 7.0)
    live, other = on_cluster(POLICIES["unicron"], times), on_cluster(POLICIES["megatron"], times)
    assert set(assumed_times()) == set(TIMES)
    timing = live.timing.timing  # type: ignore[attr-defined]
    assert isinstance(timing, LiveTiming)
    assert (timing.pause_s, timing.fault_pause_s, timing.start_s) == (7.0, 7.0, 7.0)
    for kind in ("node-lost", "process-exit", "exception", "hang", "broken-link"):
        assert live.timing.detection_s(kind, 1.0, 4) == 7.0  # type: ignore[arg-type]
    assert (live.timing.checkpoint_every_s, other.timing.checkpoint_every_s) == (7.0, 7.0)
    published = POLICIES["megatron"].timing
    assert other.timing.detection_s("hang", 1.0) == published.detection_s("hang", 1.0)  # type: ignore[arg-type]
    assert on_cluster(POLICIES["unicron"], {}) == POLICIES["unicron"]
