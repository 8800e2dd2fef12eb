"""Output, results and inputs of tasks, where each machine has a run directory of its own."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from tests.cluster.bed import Bed
from tests.cluster.control import API_PORT
from tests.cluster.outputs import ANSWER_S, missing, printed
from tests.cluster.training import MODEL, training
from tests.e2e.kit import rank, small_task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def unicron(bed: Bed, *arguments: str, code: int = 0) -> list[str]:
    """Run the command on the control machine; return the lines that it printed."""
    machine = bed.control.machine
    command = [sys.executable, "-m", "cli.main", *arguments, "--server", f"http://127.0.0.1:{API_PORT}"]
    process = machine.start(command, output=f"unicron-{arguments[0]}.log")
    assert machine.wait(process, ANSWER_S) == code
    return process.output.read_bytes()[process.offset :].decode().splitlines()


def until_lost(bed: Bed, node: str) -> None:
    """Wait until the cluster knows that a node is lost."""
    bed.client.until(f"{node} is lost", lambda: node not in bed.ready_nodes())


def test_output_of_all_machines_is_readable(bed: Bed, corpus: Path, tmp_path: Path) -> None:
    """While a task trains, after a rank and then an agent were started again, and after its end."""
    with training(bed, "printing", corpus, tmp_path) as before:
        workers = {r["worker"] for r in before["ranks"]}
        first = printed(bed.client, "printing")
        assert {worker for worker, _ in first} == workers
        victim = rank(before, 1)
        bed.nodes[victim["node"]].kill(victim["pid"])
        bed.client.until_restored("process-exit", task="printing")
        both = printed(bed.client, "printing")
        assert both > first
        assert {worker for worker, _ in both - first} == {victim["worker"]}

        node = rank(before, 2)["node"]
        bed.nodes[node].kill(bed.agents[node].pid)
        until_lost(bed, node)
        problem = f"output of {rank(before, 2)['worker']} is on {node}, which is lost"
        entries = missing(bed.client, "printing", problem)
        assert {(e["worker"], e["generation"]) for e in entries if "line" in e} >= {
            p for p in both if p[0] not in problem
        }
        assert f"unicron: {problem}" in unicron(bed, "logs", "printing")
        bed.repair()
        assert printed(bed.client, "printing") >= both
    assert printed(bed.client, "printing") >= both


def test_output_on_a_machine_without_power_is_named(bed: Bed, corpus: Path, tmp_path: Path) -> None:
    with training(bed, "powerless", corpus, tmp_path) as before:
        lost = rank(before, 2)
        bed.nodes[lost["node"]].power_off()
        until_lost(bed, lost["node"])
        problem = f"output of {lost['worker']} is on {lost['node']}, which is lost"
        entries = missing(bed.client, "powerless", problem)
        assert {"workers": [lost["worker"]], "node": lost["node"], "problem": problem} in entries
        others = {r["worker"] for r in before["ranks"]} - {lost["worker"]}
        assert {e["worker"] for e in entries if "line" in e} == others


def test_a_result_is_fetched_from_the_machine_that_wrote_it(bed: Bed, corpus: Path, tmp_path: Path) -> None:
    """It equals the file there, which ``training`` compares with that of a run without failures."""
    with training(bed, "fetched", corpus, tmp_path):
        pass
    result = bed.client.task("fetched")["result"]
    expected = bed.nodes[result["node"]].path(result["parameters_path"]).read_bytes()
    target = tmp_path / "fetched.safetensors"
    (line,) = unicron(bed, "result", "fetched", str(target))
    assert target.read_bytes() == expected == bed.file(result["parameters_path"])
    assert line == f"{target}: {len(expected)} bytes, sha256 {hashlib.sha256(expected).hexdigest()}"
    bed.nodes[result["node"]].power_off()
    until_lost(bed, result["node"])
    (line,) = unicron(bed, "result", "fetched", str(tmp_path / "again"), code=5)
    assert f"the result of 'fetched' is on {result['node']}, which is lost" in line


def test_data_that_a_machine_lacks_is_refused_by_name(bed: Bed, corpus: Path) -> None:
    """What counts is what the nodes have; the control machine never has it."""
    data = "/run/corpus.txt"
    spec = small_task("sparse", Path(data), model=MODEL, steps=2, checkpoint={"every": 0}, workers={"min": 3})
    for node in ("n0", "n2"):
        bed.nodes[node].path(data).write_bytes(corpus.read_bytes())
    answer = bed.client.http.post("/v1/tasks", json=spec)
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert (error["field"], error["value"]) == ("data", data)
    assert error["problem"].startswith("there is no such file, nor corpus.txt.bin with corpus.txt.idx, on n1;")
    bed.nodes["n1"].path(data).write_bytes(corpus.read_bytes())
    bed.client.submit(spec)
    assert bed.client.until_state("sparse", "succeeded")["result"]["steps"] == 2
