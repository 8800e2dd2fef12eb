"""What if, the whole history: against a fresh simulation of files that the test writes from the rows of a log."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.main import main
from services.planner.replay.replay import Replayer
from shared.errors import InvalidInput
from shared.events.union import ClusterConfigured
from shared.settings.model import Settings
from simulator.what_if.changed_inputs import SettingsInput
from simulator.what_if.changes import KEYS, SETTINGS, parse_changes
from simulator.what_if.simulation import HistoryComparison, compare_histories
from simulator.workloads.workload import PARAMETERS
from tests.logs.kit import Row, golden_log, read_rows, restore


def asked(log: str, text: str, folder: Path, seeds: int = 1) -> HistoryComparison:
    path = folder / f"{log}.db"
    if not path.exists():
        restore(read_rows(golden_log(log)), path)
    return compare_histories(Replayer.of_file(path), log, parse_changes(text), seeds)


def simulated(folder: Path, policy: str) -> dict[str, Any]:
    """Return the line of ``unicron simulate`` for the files in a folder."""
    files = ("--trace", "trace.csv", "--cluster", "cluster.yaml", "--tasks", "tasks.yaml")
    words = [word if word.startswith("--") else str(folder / word) for word in files]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["simulate", *words, "--policy", policy, "--jobs", "1", "-o", "json"])
    assert (code, err.getvalue()) == (0, "")
    (line,) = json.loads(out.getvalue().splitlines()[-1])["policies"]
    found: dict[str, Any] = line
    return found


def seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def write_files(rows: list[Row], folder: Path, found: HistoryComparison, nodes: int, **weights: float) -> None:
    """Write trace, tasks and cluster of a log from its rows alone; of ``found`` what it says of its parameters."""
    events = [json.loads(row["data"]) for row in rows]
    specs = {each["task"]: each["spec"] for each in events if each["type"] == "task.submitted"}
    began = next(each["occurred_at"] for each in events if each["type"] == "task.submitted")
    last = max(seconds(began, each["occurred_at"]) for each in events)
    lines = []
    for each in events:
        at, node = seconds(began, each["occurred_at"]), each.get("node")
        match each["type"]:
            case "node.joined":
                lines.append((max(0.0, at), node, "up", "", "", ""))
            case "error.detected" if each["kind"] == "node-lost":
                lines.append((at, node, "down", "node-lost", "", ""))
            case "error.detected":
                lines.append((at, each["worker"].split("/")[0], "error", each["kind"], "", each["task"]))
            case "worker.slowed":
                lines.append((at, node, "degraded", "", each["slowdown"], ""))
            case "node.left":
                lines.append((at, node, "down", "left", "", ""))
            case "task.finished":
                specs[each["task"]]["steps"] = each["step"]
    lines.sort(key=lambda line: (line[0], line[1]))
    text = "".join(",".join(map(str, line)) + "\n" for line in lines)
    header = f"# name: log\n# horizon_s: {last}\ntime_s,node,event,kind,slowdown,task\n"
    (folder / "trace.csv").write_text(header + text)
    tasks = [{**spec, "weight": weights.get(name.replace("-", "_"), spec["weight"])} for name, spec in specs.items()]
    (folder / "tasks.yaml").write_text(yaml.safe_dump_all(tasks))
    configured = next(each for each in events if each["type"] == "cluster.configured")
    parameters = {each.name: each.value for each in found.parameters}
    throughput = {name.partition(".")[2]: v for name, v in parameters.items() if name.startswith("throughput.")}
    joined = next(each for each in events if each["type"] == "node.joined")
    cluster = {
        "hardware": joined["hardware"],
        "workers_per_node": len(joined["workers"]),
        "nodes": nodes,
        "settings": {name: float(value) for name, value in configured.items() if name in PARAMETERS},
        "times": {name: value for name, value in parameters.items() if not name.startswith("throughput.")},
        "throughput": throughput,
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))


def agree(line: dict[str, Any], found: HistoryComparison) -> None:
    """Assert that two ways to one answer agree within 1%; worker-seconds within 1% of the allocated ones."""
    assert line["accumulated_waf_flop"] == pytest.approx(found.what_if.accumulated_waf_flop, rel=0.01)
    allocated = found.what_if.allocated_worker_s
    assert sum(line["worker_s"].values()) == pytest.approx(allocated, rel=0.01)
    for kind, value in line["worker_s"].items():
        assert value == pytest.approx(found.what_if.worker_s[kind], abs=0.01 * allocated), kind


@pytest.mark.parametrize("log", ["demo"])
@pytest.mark.parametrize(
    ("changes", "nodes", "weights"),
    [
        ("spares=0", 4, {}),
        ("weight.demo-gpt-small=3", 4, {"demo_gpt_small": 3.0}),
        ("spares=1", 5, {}),
        ("weight.demo-gpt-small=3,spares=1", 5, {"demo_gpt_small": 3.0}),
    ],
)
def test_a_fresh_simulation_of_files_agrees(
    log: str, changes: str, nodes: int, weights: dict[str, float], tmp_path: Path
) -> None:
    found = asked(log, changes, tmp_path)
    write_files(read_rows(golden_log(log)), tmp_path, found, nodes, **weights)
    agree(simulated(tmp_path, "unicron"), found)


def test_a_spare_is_kept_free_by_a_policy_that_gives_fixed_shares(tmp_path: Path) -> None:
    """``megatron-spares`` is ``megatron`` with one node kept free: the same cluster of five, named otherwise."""
    found = asked("demo", "policy=megatron,spares=1", tmp_path)
    write_files(read_rows(golden_log("demo")), tmp_path, found, 5)
    agree(simulated(tmp_path, "megatron-spares"), found)
    assert (found.what_if.policy, found.what_if.nodes, found.model.nodes) == ("megatron", 5, 4)


@pytest.mark.parametrize(
    ("log", "text"),
    [
        ("demo", "policy=unicron"),
        ("drained-node", "spares=0"),
        ("slow-worker", "spares=0"),
        ("planned-stop", "spares=0,policy=unicron"),
    ],
)
def test_no_change_is_no_difference(log: str, text: str, tmp_path: Path) -> None:
    found = asked(log, text, tmp_path)
    assert found.what_if == found.model
    assert set(found.difference.worker_s.values()) == {0.0}
    others = found.difference.model_dump(exclude={"worker_s"})
    assert set(others.values()) == {0.0}


def test_the_answer_is_that_of_the_log_whatever_its_file_is_called(tmp_path: Path) -> None:
    first = asked("demo", "spares=1", tmp_path)
    copy = tmp_path / "other.db"
    copy.write_bytes((tmp_path / "demo.db").read_bytes())
    again = compare_histories(Replayer.of_file(copy), "other", parse_changes("spares=1"))
    assert again.model_copy(update={"log": "demo"}) == first


def test_the_measured_column_is_what_the_log_says(tmp_path: Path) -> None:
    """Allocated: from the first submission, or a later join, until the node leaves; a node that is lost stays."""
    found = asked("demo", "spares=1", tmp_path)
    events = [json.loads(row["data"]) for row in read_rows(golden_log("demo"))]
    began = next(each["occurred_at"] for each in events if each["type"] == "task.submitted")
    left = [seconds(began, each["occurred_at"]) for each in events if each["type"] == "node.left"]
    assert found.seconds == pytest.approx(max(seconds(began, each["occurred_at"]) for each in events))
    assert found.measured.allocated_worker_s == pytest.approx(2 * sum(left), rel=1e-3)
    assert found.measured.allocated_worker_s == pytest.approx(sum(found.measured.worker_s.values()))
    assert (found.measured.basis, found.model.basis, found.what_if.basis) == ("measured", "modelled", "modelled")
    ends = {each["task"]: seconds(began, each["occurred_at"]) for each in events if each["type"] == "task.finished"}
    steps = {each["task"]: each["step"] for each in events if each["type"] == "task.finished"}
    for task, totals in found.measured.tasks.items():
        assert totals.ended_s == pytest.approx(ends[task], abs=0.1)
        assert totals.steps == steps[task]
    assert found.measured.money == pytest.approx(found.measured.allocated_worker_s * 2.0 / 3600)
    assert found.model_error.money == found.model.money - found.measured.money


def test_a_price_alone_changes_only_money(tmp_path: Path) -> None:
    found = asked("demo", "price_per_worker_hour=5", tmp_path)
    assert set(found.difference.worker_s.values()) == {0.0}
    assert found.what_if.money == pytest.approx(found.model.money * 5 / 2)
    assert found.what_if.failure_money == pytest.approx(found.model.failure_money * 5 / 2)


def test_a_time_out_lengthens_the_detection_of_lost_nodes_alone(tmp_path: Path) -> None:
    found = asked("demo", "node_timeout_s=3", tmp_path)
    assert found.difference.worker_s["detection"] > 0
    given = next(each for each in found.parameters if each.name == "node_detection_s")
    assert (given.value, given.origin, given.samples) == (3.0, "change", 0)
    hang = next(each for each in found.parameters if each.name == "hang_detection_s")
    assert (hang.origin, hang.samples) == ("log", 1)


def test_another_policy_has_the_times_of_its_paper(tmp_path: Path) -> None:
    found = asked("demo", "policy=oobleck,checkpoint_every_s=60", tmp_path)
    named = {each.name: each.origin for each in found.parameters}
    assert named == {
        "checkpoint_every_s": "change",
        "throughput.demo-gpt-large": "log",
        "throughput.demo-gpt-small": "log",
    }
    assert found.what_if.accumulated_waf_flop < found.model.accumulated_waf_flop


def test_seeds_give_means_and_an_interval(tmp_path: Path) -> None:
    found = asked("demo", "weight.demo-gpt-small=3", tmp_path, seeds=2)
    one = asked("demo", "weight.demo-gpt-small=3", tmp_path)
    low, high = found.intervals["accumulated_waf_flop"]
    assert found.seeds == 2
    assert low <= found.difference.accumulated_waf_flop <= high
    assert one.intervals["failure_worker_s"] == (one.difference.failure_worker_s,) * 2


def test_what_a_log_cannot_answer_is_said(tmp_path: Path) -> None:
    notes = " ".join(asked("planned-stop", "spares=1", tmp_path).notes)
    assert "as somebody wished" in notes
    assert "no failure in the log" in notes
    assert "no failure" not in " ".join(asked("demo", "spares=1", tmp_path).notes)
    with pytest.raises(InvalidInput, match="nodes of one kind and size can be simulated"):
        asked("every-event", "spares=1", tmp_path)


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("polcy=oobleck", "polcy", "did you mean policy?"),
        ("policy=ooblek", "policy", "did you mean oobleck?"),
        ("weigt.gpt=2", "weigt.gpt", "did you mean weight.gpt?"),
        ("spares=one", "spares", "whole number from 0"),
        ("spares=-1", "spares", "whole number from 0"),
        ("spares=100000000", "spares", "whole number from 0"),
        ("node_timeout_s=0", "node_timeout_s", "above 0"),
        ("node_timeout_s=nan", "node_timeout_s", "above 0"),
        ("checkpoint_every_s=soon", "checkpoint_every_s", "above 0"),
        ("weight.gpt=0", "weight.gpt", "greater than 0"),
        ("max_workers.gpt=0", "max_workers.gpt", "greater than or equal to 1"),
        ("mtbf_node_s=soon", "mtbf_node_s", "valid number"),
        ("rollouts=32", "rollouts", "unknown; allowed are"),
        ("price_per_worker_hour=-1", "price_per_worker_hour", "greater than or equal to 0"),
        ("spares=1,spares=2", "spares", "twice"),
        ("spares", "spares", "needs a value"),
        ("spares=", "spares", "needs a value"),
        ("prices=1", "prices", "unknown; allowed are"),
    ],
)
def test_wrong_changes_are_named_with_what_is_allowed(text: str, field: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_changes(text)
    assert message in caught.value.detail
    (error,) = caught.value.extra["errors"]
    assert error["field"] == field
    assert str(error["value"]) in text


def test_an_unknown_key_names_all_keys() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_changes("size=5")
    assert [key for key in KEYS if key not in caught.value.detail] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weight.demo-gpt-larg=2", "did you mean demo-gpt-large?"),
        ("min_workers.demo-gpt-large=9", r"tasks\.demo-gpt-large"),
        ("spares=99999", "nodes can be simulated"),
    ],
)
def test_changes_that_the_log_does_not_bear(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        asked("demo", text, tmp_path)


def test_every_setting_that_decisions_use_can_be_changed() -> None:
    """But ``prices`` of several kinds of workers, a log of which is not simulated, and the version of who decides."""
    others = {"event_id", "occurred_at", "schema_version", "type", "currency", "policy", "prices", "decider"}
    assert set(SettingsInput.model_fields) == set(SETTINGS) == set(ClusterConfigured.model_fields) - others
    for name, field in SettingsInput.model_fields.items():
        assert field.metadata == Settings.model_fields[name].metadata
