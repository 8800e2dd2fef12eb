"""Cluster and task files, and what a user can name as a trace."""

from pathlib import Path

import pytest

from shared.errors import InvalidInput, NotFound
from simulator.cluster_files import ClusterFile, read_cluster, read_tasks
from simulator.workload_inputs import resolve, with_cluster
from simulator.workloads.paper_tasks import CASES, six_tasks, tasks_for
from simulator.workloads.paper_workloads import NAMES, workload
from simulator.workloads.random_workloads import random_workload
from tests.logs.kit import golden_log, read_rows, restore

TASK = "name: {name}\nmodel: {{layers: 2, hidden: 64, heads: 4, sequence_length: 32}}\nbatch: {{global: 8}}\n"


def file(folder: Path, text: str) -> Path:
    path = folder / "given.yaml"
    path.write_text(text)
    return path


def test_cluster(tmp_path: Path) -> None:
    text = "hardware: h100\nworkers_per_node: 4\nnodes: 3\nsettings: {mtbf_node_s: 1000}\n"
    assert read_cluster(file(tmp_path, text)) == ClusterFile(
        hardware="h100", workers_per_node=4, nodes=3, settings={"mtbf_node_s": 1000.0}
    )
    assert read_cluster(file(tmp_path, "nodes: [a, b]")).nodes == ["a", "b"]
    assert read_cluster(file(tmp_path, "")) == ClusterFile()


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("hardware: tpu", "hardware", "hardware: must be one of v100, a100-40"),
        ("workers_per_node: 0", "workers_per_node", "greater than or equal to 1 (given: 0)"),
        (
            "size: 5",
            "size",
            "size: unknown field; allowed: hardware, workers_per_node, nodes, settings, times, throughput (given: 5)",
        ),
        ("settings: {mtbf: 5}", "settings.mtbf", "unknown field; allowed: allow_pausing, memory_copies, mtbf"),
        ("settings: {decider: 9}", "settings.decider", "unknown field; allowed: allow_pausing"),
        (
            "settings: {mtbf_nodes_s: 5}",
            "settings.mtbf_nodes_s",
            "did you mean 'mtbf_node_s'? allowed: allow_pausing, ",
        ),
        ("node: 5", "node", "node: unknown field; did you mean 'nodes'? allowed: hardware, workers_per_node, nodes"),
        ("times: {pause: 5}", "times.pause", "did you mean 'pause_s'? allowed: node_detection_s, process_detection_s"),
        ("times: {pause_s: -1}", "times.pause_s", "greater than or equal to 0"),
        ("throughput: {gpt: 0}", "throughput.gpt", "greater than 0"),
        ("settings: {mtbf_node_s: -1}", "settings.mtbf_node_s", "must be at least 0 (given: -1.0)"),
        ("settings: {mtbf_node_s: .nan}", "settings.mtbf_node_s", "finite"),
        ("nodes: [a, a]", "nodes", "a name is there twice"),
    ],
)
def test_errors_of_a_cluster(text: str, field: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_cluster(file(tmp_path, text))
    assert message in caught.value.detail
    assert caught.value.extra["errors"][0]["field"] == field


@pytest.mark.parametrize("text", ["- 5", "a: 1\n---\nb: 2", "{", "5"])
def test_no_cluster(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"mapping of fields|not YAML"):
        read_cluster(file(tmp_path, text))


def test_tasks_as_documents_and_as_a_list(tmp_path: Path) -> None:
    one, two = TASK.format(name="one"), TASK.format(name="two") + "steps: 5\n"
    found = read_tasks(file(tmp_path, f"{one}---\n{two}"))
    assert [(spec.name, spec.steps) for spec in found] == [("one", 1_000_000_000), ("two", 5)]
    listed = "".join(f"- {text}".replace("\n", "\n  ").rstrip() + "\n" for text in (one, two))
    assert read_tasks(file(tmp_path, listed)) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no task"),
        ("5", "task 1: a task specification is a mapping of fields, not int"),
        (TASK.format(name="a") + "weight: -1", "task 1: task specification refused: weight"),
        (TASK.format(name="a") + "---\n" + TASK.format(name="a"), "name: two tasks have it"),
    ],
)
def test_errors_of_tasks(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_tasks(file(tmp_path, text))
    assert message in caught.value.detail


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for read in (read_cluster, read_tasks):
        with pytest.raises(NotFound):
            read(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_no_task_of_a_named_workload_ends(name: str) -> None:
    assert workload(name).endless


def test_tasks_of_the_paper() -> None:
    for case, (sizes, weights) in CASES.items():
        assert [spec.weight for spec in six_tasks(case)] == list(weights)
        # Sizes by name: within 10% of the parameters that it says.
        for spec, size in zip(six_tasks(case), sizes, strict=True):
            assert spec.model.parameters() == pytest.approx(float(size[:-1]) * 1e9, rel=0.1)
    assert tasks_for(128) == six_tasks()
    assert len(tasks_for(16_384)) == 64
    assert workload("trace-a", nodes=2048).endless
    with pytest.raises(InvalidInput, match="case: 6 must be from 1 to 5"):
        six_tasks(6)


def test_random_workloads_are_varied() -> None:
    found = [random_workload(seed) for seed in range(50)]
    assert found[3] == random_workload(3)
    assert all(each.endless for each in found)
    assert {change for each in found for change in {o.change for o in each.trace.occurrences}} == {
        "up",
        "down",
        "degraded",
        "error",
    }
    assert any(each.trace.present < len(each.trace.nodes) for each in found)


def test_a_trace_file_alone(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("time_s,node,event\n0,a,up\n0,b,up\n50,a,down\n")
    found = resolve(str(tmp_path / "own.csv"))
    assert (found.name, found.trace.nodes, found.workers, found.hardware) == ("own", ("a", "b"), 16, "a800-80")
    assert found.tasks == six_tasks()
    assert found.endless


def test_a_trace_with_cluster_and_tasks(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("time_s,node,event\n0,n0,up\n50,n0,down\n60,late,up\n")
    (tmp_path / "tasks.yaml").write_text(TASK.format(name="one") + "steps: 5\n")
    cluster = file(tmp_path, "nodes: 4\nhardware: h100\nworkers_per_node: 2\nsettings: {mtbf_node_s: 5}")
    found = resolve(str(tmp_path / "own.csv"), cluster=cluster, tasks=tmp_path / "tasks.yaml")
    assert (found.trace.nodes, found.trace.present) == (("n0", "n1", "n2", "late"), 3)
    assert (found.hardware, found.workers, found.parameters) == ("h100", 6, {"mtbf_node_s": 5.0})
    assert [spec.name for spec in found.tasks] == ["one"]
    assert not found.endless


def test_a_cluster_that_the_trace_does_not_fit_into() -> None:
    with pytest.raises(InvalidInput, match="nodes: 2 must be at least 16"):
        with_cluster(workload("trace-b"), ClusterFile(nodes=2))
    with pytest.raises(InvalidInput, match="nodes: must have all nodes of the trace; n00 is missing"):
        with_cluster(workload("trace-b"), ClusterFile(nodes=["a"]))


def test_trace_a_on_a_cluster_of_another_size(tmp_path: Path) -> None:
    found = resolve("trace-a", 3, cluster=file(tmp_path, "nodes: 32"))
    assert found == workload("trace-a", 3, nodes=32)


def test_what_is_no_trace() -> None:
    with pytest.raises(NotFound, match="no trace 'trace-c'"):
        resolve("trace-c")


def test_a_log_by_its_file(tmp_path: Path) -> None:
    path = restore(read_rows(golden_log("demo")), tmp_path / "log.db")
    found = resolve(str(path), cluster=file(tmp_path, "nodes: 5"))
    assert (found.trace.present, found.workers, found.hardware) == (5, 10, "cpu")
    assert [spec.name for spec in found.tasks] == ["demo-gpt-large", "demo-gpt-small"]
