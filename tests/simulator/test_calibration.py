"""Calibration: medians of what a log measured, compared with the rows of recorded logs and with events made by hand."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from services.planner.replay import Replayer
from shared.events import TaskProgressed, WorkerSlowed
from simulator.calibration import Calibration
from simulator.log_traces import calibration_of_log, workload_of_log
from simulator.measured_times import TIMES, assumed_times, on_cluster
from simulator.policies import POLICIES
from simulator.policies.timing import LiveTiming
from simulator.runs import Fixed, Run, make
from tests.logs.kit import FOLDER, read_rows, restore


def calibrated(name: str, folder: Path) -> tuple[Replayer, Calibration]:
    replayer = Replayer.of_file(restore(read_rows(FOLDER / f"{name}.jsonl"), folder / "log.db"))
    return replayer, calibration_of_log([record.event for record in replayer.records], name)


def events(name: str, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the bytes of a recorded log as they are, not as the program reads them."""
    for row in read_rows(FOLDER / f"{name}.jsonl"):
        if row["type"] == kind:
            yield json.loads(row["data"])


def seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def test_detection_is_from_the_fault_to_its_incident(tmp_path: Path) -> None:
    _, found = calibrated("demo-5", tmp_path)
    names = {
        "node-lost": "node_detection_s",
        "process-exit": "process_detection_s",
        "exception": "exception_detection_s",
        "hang": "hang_detection_s",
    }
    errors = list(events("demo-5", "error.detected"))
    assert {each["kind"] for each in errors} == set(names)
    for each in errors:
        sampled = found.times[names[each["kind"]]]
        assert sampled.value == pytest.approx(seconds(each["occurred_at"], each["detected_at"]))
        assert sampled.samples == 1
    assert "link_detection_s" not in found.times, "the log has no example"


def test_transitions_and_checkpoints(tmp_path: Path) -> None:
    """By hand of demo-5: eight parts went on with survivors, five of them after a fault."""
    _, found = calibrated("demo-5", tmp_path)
    starts = [m["durations_s"]["prepare"] for m in events("demo-5", "state.moved") if m["phase"] == "prepared"]
    assert found.times["process_start_s"].value == pytest.approx(median(starts))
    assert found.times["process_start_s"].samples == len(starts)
    drained, pauses = {}, []
    for moved in events("demo-5", "state.moved"):
        if moved["phase"] == "drained":
            drained[moved["plan"], moved["task"]] = moved["occurred_at"]
        if moved["phase"] == "restored" and moved["plan"] in ("p11", "p12"):
            took = moved["durations_s"]
            whole_s = seconds(drained[moved["plan"], moved["task"]], moved["occurred_at"])
            pauses.append(whole_s - took["first_step"] - took["move"])
    assert found.times["pause_s"].value == pytest.approx(median(pauses))
    assert found.times["pause_s"].samples == len(pauses) == 3
    # p7: the trigger at 46.529, restored at 48.448; a first step of 0.253, a move of 0.069, a start of 0.134.
    assert found.times["fault_pause_s"].samples == 5
    assert 0.9 < found.times["fault_pause_s"].value < 1.6
    small = [each for each in events("demo-5", "task.checkpointed") if each["generation"] == 6]
    apart = [seconds(a["occurred_at"], b["occurred_at"]) for a, b in pairwise(small)]
    assert min(apart) <= found.times["checkpoint_every_s"].value <= max(apart)


def test_a_calibrated_task_takes_the_measured_step_time(tmp_path: Path) -> None:
    """One layout throughout: the simulated rate is that of the median step."""
    replayer, found = calibrated("unsaved-5", tmp_path)
    workload = workload_of_log(replayer, "unsaved-5")
    (task,) = found.throughput
    measured = [each["step_s"] for each in events("unsaved-5", "task.progressed") if each["step_s"] > 0]
    outcome = make(Run(Fixed(workload), "unicron", 0, costs=False))
    end_s = outcome.completed_s[task]
    assert workload.tasks[0].steps / end_s == pytest.approx(1 / median(measured), rel=1e-3)


def test_steps_beside_a_slow_worker_do_not_count(tmp_path: Path) -> None:
    replayer, before = calibrated("demo-5", tmp_path)
    all_events = [record.event for record in replayer.records]
    reports = [e for e in all_events if isinstance(e, TaskProgressed) and e.task == "demo-gpt-large" and e.step_s > 0]
    assert before.throughput["demo-gpt-large"].samples == len(reports)
    slow = next(event for event in all_events if isinstance(event, WorkerSlowed))
    first = reports[0].occurred_at - timedelta(seconds=0.001)
    index = next(i for i, event in enumerate(all_events) if event.occurred_at >= first and event is reports[0])
    all_events.insert(index, slow.model_copy(update={"occurred_at": first, "worker": "n0/0", "node": "n0"}))
    after = calibration_of_log(all_events, "demo-5")
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
