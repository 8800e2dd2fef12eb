"""Agents that are killed or started again while a task trains: ranks go on under the successor, and nothing is lost."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.bed import Bed
from tests.cluster.recorded import Recorded
from tests.cluster.training import training
from tests.e2e.kit import Record, pids, rank

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

RETURN_S = 60.0
"""An agent starts in two seconds; all machines of the bed share the cores with other tests."""


def kill_agent(bed: Bed, node: str) -> None:
    bed.nodes[node].kill(shown(bed, node)["agent_pid"])


def restart_agent(bed: Bed, node: str) -> None:
    """Restart it as an operator does, from the machine of the control plane."""
    command = [sys.executable, "-P", "-m", "cli.main", "agent", "restart", node]
    said = bed.control.machine.run(command, output="restart.log", limit_s=RETURN_S)
    assert said.startswith(f"{node}: ready, agent "), said


def shown(bed: Bed, node: str) -> Record:
    found: Record = bed.client.http.get(f"/v1/nodes/{node}").raise_for_status().json()
    return found


def adopted(bed: Bed, before: Record) -> Record:
    """Return a node once it has another agent than before."""

    def look() -> Record | None:
        node = shown(bed, before["name"])
        return node if node["incarnation"] != before["incarnation"] and node["state"] == "ready" else None

    found: Record = bed.client.until(f"{before['name']} has another agent", look, RETURN_S)
    return found


@pytest.mark.parametrize("end", [kill_agent, restart_agent], ids=lambda f: f.__name__)
def test_ranks_train_on_under_the_successor_of_their_agent(
    end: Callable[[Bed, str], None], bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path
) -> None:
    """No incident, the same processes, no step lost or recomputed; the result is that of a run without failures."""
    name = end.__name__.replace("_", "-")
    with training(bed, name, corpus, tmp_path) as before:
        node = shown(bed, rank(before, 2)["node"])
        end(bed, node["name"])
        after = adopted(bed, node)
        assert after["agent_pid"] != node["agent_pid"]
        task = bed.client.task(name)
        bed.client.until_step(name, task["step"] + 2)
        assert pids(bed.client.task(name)) == pids(before)
    assert recorded.incidents() == []
    [adoption] = recorded.events("node.adopted", "node.joined", "node.left", "error.detected")
    assert (adoption["node"], adoption["predecessor"]) == (node["name"], node["incarnation"])
    assert {event["steps_recomputed"] for event in recorded.events("state.moved", task=name)} == {0}


def test_a_rank_that_ends_while_its_node_has_no_agent_is_replaced(corpus: Path, tmp_path: Path) -> None:
    """The others wait for it, so the next agent may take three times node_timeout_s, also on a busy machine."""
    with Bed(tmp_path / "bed", nodes=2, settings={"UNICRON_NODE_TIMEOUT_S": "15"}) as bed:
        recorded = Recorded(bed.client)
        with training(bed, "alone", corpus, tmp_path) as before:
            victim = rank(before, 1)
            machine, supervisor = bed.nodes[victim["node"]], bed.agents[victim["node"]].pid
            node = shown(bed, victim["node"])
            machine.signal(supervisor, signal.SIGSTOP)  # no other agent is started before the rank has ended
            machine.kill(node["agent_pid"])
            machine.kill(victim["pid"])
            machine.signal(supervisor, signal.SIGCONT)
            incident = recorded.restored()
            assert (incident["kind"], incident["worker"]) == ("process-exit", victim["worker"])
            assert incident["steps_recomputed"] == 0
            adopted(bed, node)
            after = pids(bed.client.task("alone"))
            assert {worker for worker, pid in pids(before).items() if after[worker] != pid} == {victim["worker"]}
        assert [i["id"] for i in recorded.incidents()] == [incident["id"]]
