"""Silent nodes: those that are dead are found, and those that only the control plane does not hear train on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.bed import CONTROL, Bed
from tests.cluster.recorded import Recorded
from tests.cluster.training import training
from tests.e2e.kit import Record, at, pids, rank

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

FOUND_S = 15.0
"""Generous beside node_timeout_s of 1.5 s: the machine may be busy with other tests."""

LIMIT_S = 60.0
"""For what must come: links heal within seconds."""


@pytest.fixture
def healed(bed: Bed) -> Iterator[None]:
    """Let a test that fails leave a whole network behind, in which its task can end."""
    yield
    bed.network.heal()


def states(bed: Bed) -> dict[str, str]:
    return {node["name"]: node["state"] for node in bed.client.items("/v1/nodes")}


def readiness(bed: Bed) -> Record:
    record: Record = bed.client.http.get("/readyz").json()
    return record


def nodes_check(bed: Bed) -> Record:
    check: Record = next(check for check in readiness(bed)["checks"] if check["name"] == "nodes")
    return check


def cut_control(bed: Bed, *nodes: str) -> None:
    for node in nodes:
        bed.network.between(CONTROL, node, cut=True)


@pytest.mark.usefixtures("healed")
def test_a_control_plane_that_is_cut_off_replaces_nobody(
    bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path
) -> None:
    """The ranks train on meanwhile; afterwards the nodes are adopted as they are."""
    with training(bed, "cut-off", corpus, tmp_path) as before:
        cut_control(bed, *bed.nodes)
        bed.client.until("all are unreachable", lambda: set(states(bed).values()) == {"unreachable"}, LIMIT_S)
        check = bed.client.until("the api knows", lambda: (c := nodes_check(bed)) and not c["ok"] and c, LIMIT_S)
        assert "cut off" in check["detail"]
        assert all("cut off" in node["reason"] for node in bed.client.items("/v1/nodes"))
        time.sleep(8.0)  # the length of the cut is what is tested
        bed.network.heal()
        bed.client.until("all are ready", lambda: set(states(bed).values()) == {"ready"}, LIMIT_S)
        bed.client.until_step("cut-off", before["step"] + 5)
        assert nodes_check(bed)["ok"]
        assert pids(bed.client.task("cut-off")) == pids(before)
        assert recorded.events("node.joined") == []
    assert recorded.incidents() == []
    assert bed.client.task("cut-off")["generation"] == before["generation"]


@pytest.mark.usefixtures("healed")
def test_a_node_that_only_the_control_plane_does_not_hear_is_kept(
    bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path
) -> None:
    """Witnesses reach its agent, so its ranks train on; it is shown as unreachable."""
    with training(bed, "one-cut", corpus, tmp_path) as before:
        victim = rank(before, 2)["node"]
        bed.network.set(victim, CONTROL, cut=True)
        bed.client.until("it is unreachable", lambda: states(bed)[victim] == "unreachable", LIMIT_S)
        assert sorted(states(bed).values()) == ["ready", "ready", "unreachable"]
        assert nodes_check(bed)["ok"]
        step = bed.client.task("one-cut")["step"]
        bed.client.until_step("one-cut", step + 5)
        assert states(bed)[victim] == "unreachable"
        bed.network.heal()
        bed.client.until("all are ready", lambda: set(states(bed).values()) == {"ready"}, LIMIT_S)
        assert pids(bed.client.task("one-cut")) == pids(before)
    assert recorded.incidents() == []


@pytest.mark.usefixtures("healed")
def test_two_of_three_nodes_that_are_dead_are_found(bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path) -> None:
    """The third one, which is their only witness, goes on alone."""
    with training(bed, "two-dead", corpus, tmp_path) as before:
        left = rank(before, 0)["node"]
        dead = sorted(set(bed.nodes) - {left})
        failed_at = time.time()
        for node in dead:
            bed.nodes[node].power_off()
        found = bed.client.until("both are lost", lambda: len(e := recorded.incidents()) == 2 and e, LIMIT_S)
        assert sorted(incident["node"] for incident in found) == dead
        assert {incident["kind"] for incident in found} == {"node-lost"}
        assert max(at(incident, "detected_at") for incident in found) - failed_at < FOUND_S
        assert all(incident["evidence"]["witnesses"] for incident in found)
        step = bed.client.task("two-dead")["step"]
        bed.client.until_step("two-dead", step + 2)
        assert pids(bed.client.task("two-dead")) == {w: p for w, p in pids(before).items() if w.startswith(f"{left}/")}
        bed.repair()
    assert len(recorded.incidents()) == 2


def test_the_last_of_several_nodes_are_found(cluster_host: None, tmp_path: Path) -> None:
    """Half of all at once (a failure domain), one of two, and one of one."""
    with Bed(tmp_path / "bed", nodes=4) as bed:
        found = lost_after(bed, {"n2", "n3"}, lambda node: bed.nodes[node].power_off())
        assert all(incident["evidence"]["witnesses"] for incident in found)
        lost_after(bed, {"n1"}, lambda node: bed.nodes[node].power_off())
        [last] = lost_after(bed, {"n0"}, lambda node: bed.nodes[node].kill(bed.agents[node].pid))
        assert set(last["evidence"]["witnesses"].values()) == {"absent"}


def lost_after(bed: Bed, nodes: set[str], fault: Callable[[str], None]) -> list[Record]:
    """Do something to nodes; wait until these and no others are lost, and return the incidents."""
    known = {incident["id"] for incident in bed.client.items("/v1/incidents")}
    failed_at = time.time()
    for node in nodes:
        fault(node)

    def new() -> list[Record]:
        return [i for i in bed.client.items("/v1/incidents") if i["id"] not in known]

    found: list[Record] = bed.client.until("they are lost", lambda: len(i := new()) >= len(nodes) and i, LIMIT_S)
    assert {(i["node"], i["kind"]) for i in found} == {(node, "node-lost") for node in nodes}
    assert max(at(incident, "detected_at") for incident in found) - failed_at < FOUND_S
    return found
