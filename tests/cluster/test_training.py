"""Tasks train on several machines, and go on when ranks, agents, services, machines or links fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.stack.children import SERVICES
from shared.errors import NameInUse
from tests.cluster.bed import Bed
from tests.cluster.control import START_S
from tests.cluster.recorded import Recorded
from tests.cluster.training import training
from tests.e2e.kit import at, pids, rank

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

FOUND_S = 10.0
"""Generous beside node_timeout_s of 1.5 s: the machine may be busy with other tests."""

MANY_STEPS = 150
"""More than a task does at its pace while four services start again, each of which imports for seconds."""


def end_supervisor(bed: Bed, node: str) -> None:
    """Kill a node's main process; all others end by themselves."""
    bed.nodes[node].kill(bed.agents[node].pid)


def cut_power(bed: Bed, node: str) -> None:
    bed.nodes[node].power_off()


def cut_links(bed: Bed, node: str) -> None:
    bed.network.isolate(node)


def test_a_killed_rank_heals(bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path) -> None:
    """The rank comes back, the others stay, and nothing is recomputed."""
    with training(bed, "killed", corpus, tmp_path) as before:
        victim = rank(before, 1)
        bed.nodes[victim["node"]].kill(victim["pid"])
        incident = recorded.restored()
        assert (incident["kind"], incident["severity"]) == ("process-exit", "SEV2")
        assert (incident["worker"], incident["steps_recomputed"]) == (victim["worker"], 0)
        after = pids(bed.client.task("killed"))
        assert {worker for worker, pid in pids(before).items() if after[worker] != pid} == {victim["worker"]}
    assert len(recorded.incidents()) == 1


@pytest.mark.parametrize(
    "fault",
    [pytest.param(cut_links, marks=pytest.mark.short), cut_power, end_supervisor],
    ids=lambda f: f.__name__,
)
def test_a_node_is_lost_and_back(
    fault: Callable[[Bed, str], None], bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path
) -> None:
    """The task goes on on the other nodes, whose processes stay; the node can be used again."""
    name = fault.__name__.replace("_", "-")
    with training(bed, name, corpus, tmp_path) as before:
        node = rank(before, 2)["node"]
        failed_at = time.time()
        fault(bed, node)
        incident = recorded.restored()
        assert (incident["kind"], incident["severity"], incident["node"]) == ("node-lost", "SEV1", node)
        assert at(incident, "detected_at") - failed_at < FOUND_S
        task = bed.client.task(name)
        assert pids(task) == {w: pid for w, pid in pids(before).items() if not w.startswith(f"{node}/")}
        bed.client.until_step(name, task["step"] + 2)
        assert bed.ready_nodes() == set(bed.nodes) - {node}
        # Whether the task is worth moving to the node for its last steps is the planner's to say.
        bed.repair()
        assert bed.ready_nodes() == set(bed.nodes)
    assert [i["id"] for i in recorded.incidents()] == [incident["id"]]


def test_a_second_agent_with_a_name_in_use_is_refused(
    bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path
) -> None:
    """It ends by itself with a clear message; the node whose name it has trains on, and the log knows nothing of it."""
    with training(bed, "twice", corpus, tmp_path) as before:
        second = bed.start_agent(bed.nodes["n1"], UNICRON_NODE="n0", UNICRON_RUN_DIR="/run/second")
        assert bed.nodes["n1"].wait(second, START_S) == NameInUse.exit_code
        bed.client.until_step("twice", before["step"] + 2)
        assert pids(bed.client.task("twice")) == pids(before)
        assert bed.ready_nodes() == set(bed.nodes)
        assert recorded.events("node.joined") == []
    assert recorded.incidents() == []


def test_services_and_nats_are_killed(bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path) -> None:
    """The task trains on, nobody is blamed, and a fault after that is healed."""
    with training(bed, "control", corpus, tmp_path, steps=MANY_STEPS) as before:
        for name in SERVICES:
            bed.control.kill(name)
        for name in SERVICES:
            bed.control.start_service(name)
        bed.control.kill("nats")
        bed.control.start_nats()
        task = bed.client.task("control")
        bed.client.until_step("control", task["step"] + 2)
        assert pids(bed.client.task("control")) == pids(before)
        assert recorded.incidents() == []
        victim = rank(before, 1)
        bed.nodes[victim["node"]].kill(victim["pid"])
        assert recorded.restored()["kind"] == "process-exit"
    assert len(recorded.incidents()) == 1
