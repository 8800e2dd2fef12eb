"""Logs of real runs as workloads: what happened to the nodes, and what the tasks were."""

import json
from pathlib import Path

import pytest

from services.planner.replay.replay import Replayer
from shared.errors import InvalidInput
from simulator.log_traces import workload_of_log, workload_of_records
from simulator.workloads.trace_files import parse_trace, write_trace
from simulator.workloads.workload import Workload
from tests.logs.kit import GOLDEN, golden_log, read_rows, restore


def golden(path: Path, folder: Path) -> Workload:
    return workload_of_log(Replayer.of_file(restore(read_rows(path), folder / "log.db")), path.stem)


def what(found: Workload) -> list[tuple[str, str, str]]:
    return [(each.node, each.change, each.kind) for each in found.trace.occurrences]


def test_the_demo(tmp_path: Path) -> None:
    """A kill, an exception, a hang, a node that is lost and back, and four agents that end."""
    found = golden(golden_log("demo"), tmp_path)
    assert (found.trace.nodes, found.trace.present) == (("n0", "n1", "n2", "n3"), 4)
    assert (found.hardware, found.workers_per_node) == ("cpu", 2)
    assert [each for each in what(found) if each[1] in ("error", "up") or each[2] == "node-lost"][:5] == [
        ("n1", "error", "process-exit"),
        ("n1", "error", "exception"),
        ("n2", "error", "hang"),
        ("n3", "down", "node-lost"),
        ("n3", "up", ""),
    ]
    assert sorted(what(found)[-4:]) == [(f"n{number}", "down", "left") for number in range(4)]
    ended = [json.loads(row["data"]) for row in read_rows(golden_log("demo")) if row["type"] == "task.finished"]
    assert [(spec.name, spec.steps) for spec in found.tasks] == sorted((each["task"], each["step"]) for each in ended)
    assert found.parameters["mtbf_node_s"] > 0
    assert not found.endless


def test_slow_workers(tmp_path: Path) -> None:
    found = golden(golden_log("slow-worker"), tmp_path)
    slow = [(each.node, each.change, each.slowdown) for each in found.trace.occurrences if each.change != "error"]
    recorded = [("n0", "degraded", 2.0), ("n0", "up", 1.0), ("n0", "degraded", 1.5)]
    assert [each for each in slow if each in recorded][:3] == recorded  # a busy machine has others


def test_a_drained_node_is_away_until_it_is_returned(tmp_path: Path) -> None:
    found = golden(golden_log("drained-node"), tmp_path)
    assert what(found)[:2] == [("n1", "down", "drained"), ("n1", "up", "")]
    assert found.tasks[0].steps < 100_000  # stopped by a user: the steps that it made


ONE_KIND = [path for path in GOLDEN if "every-event" not in path.stem]


@pytest.mark.parametrize("path", ONE_KIND, ids=lambda path: path.stem)
def test_every_log_is_a_trace(path: Path, tmp_path: Path) -> None:
    trace = golden(path, tmp_path).trace
    assert parse_trace(write_trace(trace)).occurrences == trace.occurrences


def test_nodes_of_several_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nodes with 2 workers of a100-80, 2 workers of cpu"):
        golden(golden_log("every-event"), tmp_path)


def test_a_log_without_tasks() -> None:
    with pytest.raises(InvalidInput, match="no task was submitted"):
        workload_of_records([], "empty")
