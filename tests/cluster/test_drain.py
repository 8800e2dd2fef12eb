"""Nodes that are drained, cordoned and returned, or whose agent is asked to end, while a task trains on them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster.bed import Bed
from tests.cluster.recorded import Recorded
from tests.cluster.training import BATCH_S, MODEL, on_all_nodes, training
from tests.e2e.kit import Pace, Record, pids, rank, small_task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

STEPS = 200
"""Enough that it is worth the start of a process to have one more worker for what remains."""

LEAVE_S = 120.0
"""A task moves within its step and the next one, 2 s; drain_timeout_s is 60 s, and the machine may be busy."""


def ask(bed: Bed, node: str, what: str) -> Record:
    """Ask something of a node; return the answer."""
    answer = bed.client.http.post(f"/v1/nodes/{node}/{what}")
    assert answer.is_success, answer.text
    record: Record = answer.json()
    return record


def state(bed: Bed, node: str) -> str:
    return str(bed.client.http.get(f"/v1/nodes/{node}").raise_for_status().json()["state"])


def check_moved(bed: Bed, recorded: Recorded, before: Record, node: str) -> None:
    """The task went on elsewhere with the next step; all other processes stayed; nothing was lost or blamed."""
    name = before["name"]
    others = {worker: pid for worker, pid in pids(before).items() if not worker.startswith(f"{node}/")}
    assert pids(bed.client.task(name)) == others
    moved = {event["phase"]: event for event in recorded.events("state.moved") if event["task"] == name}
    assert moved["restored"]["step"] == moved["drained"]["step"] + 1
    assert {event["steps_recomputed"] for event in moved.values()} == {0}
    assert recorded.events("error.detected") == []


def test_a_node_is_drained_and_returned(bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path) -> None:
    with training(bed, "drained", corpus, tmp_path) as before:
        node = rank(before, 2)["node"]
        earlier = len(recorded.events("state.moved"))
        assert ask(bed, node, "drain")["state"] == "draining"
        bed.client.until("the node is drained", lambda: state(bed, node) == "drained", LEAVE_S)
        assert len(recorded.events("state.moved")) > earlier
        check_moved(bed, recorded, before, node)
        assert bed.client.http.post(f"/v1/nodes/{node}/drain").json()["state"] == "drained"
        assert ask(bed, node, "return")["state"] == "ready"
    assert [e["type"] for e in recorded.events("node.draining", "node.drained", "node.returned", "node.left")] == [
        "node.draining",
        "node.drained",
        "node.returned",
    ]
    assert recorded.events("error.detected") == []


def test_an_agent_that_is_asked_to_end_drains_its_node_and_leaves(
    bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path
) -> None:
    with training(bed, "leaving", corpus, tmp_path) as before:
        node = rank(before, 2)["node"]
        bed.nodes[node].signal(bed.agents[node].pid, signal.SIGTERM)
        assert bed.nodes[node].wait(bed.agents[node], LEAVE_S) == 0
        bed.client.until("the node has left", lambda: state(bed, node) == "left")
        check_moved(bed, recorded, before, node)
        bed.repair()
        assert state(bed, node) == "ready"
    assert recorded.events("error.detected") == []


def test_a_cordoned_node_gets_no_work_until_it_is_returned(
    bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path
) -> None:
    assert ask(bed, "n2", "cordon")["state"] == "cordoned"
    pace = Pace(tmp_path, BATCH_S)
    spec = small_task("cordoned", corpus, model=MODEL, steps=STEPS, checkpoint={"every": 0})
    bed.client.submit(pace.of(spec))
    try:
        before = bed.client.until_step("cordoned", 3)
        assert {r["node"] for r in before["ranks"]} == {"n0", "n1"}
        assert ask(bed, "n2", "return")["state"] == "ready"
        everywhere = bed.client.until("all nodes train", lambda: on_all_nodes(bed, "cordoned"))
        assert pids(before).items() <= pids(everywhere).items()
    finally:
        pace.end()
    bed.client.until_state("cordoned", "succeeded")
    assert recorded.events("error.detected") == []
