"""Wall clocks that are wrong, and that are stepped while a task trains: nobody is lost, and all times are sane."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.bed import CONTROL, Bed
from tests.cluster.machine import MachineFailed
from tests.cluster.recorded import Recorded
from tests.cluster.training import BATCH_S, FIRST_STEPS, MODEL, on_all_nodes
from tests.e2e.kit import Pace, Record, at, pids, rank, small_task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

HOUR_S = 3600

FOUND_S = 15.0
"""Generous: the signal of a killed rank arrives within milliseconds, and the machine may be busy."""

MANY_STEPS = 10_000
"""More than a task does while a test lasts."""

SETTINGS = {"UNICRON_NODE_TIMEOUT_S": "10"}
"""An agent that gets no processor for seconds, as on a busy test machine, is no subject here. An hour is far longer."""

HEALED_S = 120.0
"""Generous: a killed rank is replaced within a second or two. Far below an hour, which is what a wrong clock adds."""


@pytest.fixture(scope="module")
def own_bed(cluster_host: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Three nodes whose wall clocks differ by an hour each, and a control plane whose clock can be stepped."""
    offsets = {CONTROL: 0, "n0": HOUR_S, "n1": 0, "n2": -HOUR_S}
    with Bed(tmp_path_factory.mktemp("clocks"), clock_offsets_s=offsets, settings=SETTINGS) as started:
        yield started
        assert started.control.ended() == {}


@pytest.fixture
def bed(own_bed: Bed) -> Iterator[Bed]:
    """The bed; after the test its nodes are ready again."""
    yield own_bed
    own_bed.repair()


@contextmanager
def endless(bed: Bed, name: str, corpus: Path, folder: Path) -> Iterator[Record]:
    """Train a task of one rank on each node until the body ends; the body gets it as it was after its first steps."""
    spec = small_task(name, corpus, model=MODEL, steps=MANY_STEPS, checkpoint={"every": 0})
    bed.client.submit(Pace(folder, BATCH_S).of(spec))
    try:
        bed.client.until_step(name, FIRST_STEPS)
        yield bed.client.until("all nodes train", lambda: on_all_nodes(bed, name), HEALED_S)
    finally:
        bed.client.http.post(f"/v1/tasks/{name}/stop", json={"lose_steps": True})
        bed.client.until_state(name, "stopped")


def step_clock(bed: Bed, machine: str, offset_s: int) -> None:
    """Set the wall clock of a machine's processes, and see that they have it."""
    clock = bed.machines[machine].clock
    assert clock is not None
    clock.step(offset_s)
    shown = float(bed.machines[machine].run(["date", "+%s"], output="date.log"))
    assert abs(shown - time.time() - offset_s) < FOUND_S


def trains(bed: Bed, name: str) -> bool:
    """Return whether the task does steps with a rank on each node."""
    task = on_all_nodes(bed, name)
    return task is not None and task["state"] == "running" and {r["state"] for r in task["ranks"]} == {"training"}


def killed(bed: Bed, name: str, number: int) -> Record | None:
    """Kill a rank and return it; None if the process that the API knows of has been replaced just now."""
    victim = rank(bed.client.task(name), number)
    try:
        bed.nodes[victim["node"]].kill(victim["pid"])
    except MachineFailed:
        return None
    return victim


def heal(bed: Bed, recorded: Recorded, name: str, number: int) -> Record:
    """Kill a rank; return its incident, which is over. No duration in it has anything of a wrong clock."""
    known = {incident["id"] for incident in recorded.incidents()}
    bed.client.until("all ranks train", lambda: trains(bed, name), HEALED_S)
    killed_s = time.monotonic()
    victim = bed.client.until("a rank is killed", lambda: killed(bed, name, number))

    def over() -> list[Record]:
        return [i for i in recorded.incidents() if i["id"] not in known and i["restored_at"]]

    found: list[Record] = bed.client.until("the rank is back", over, HEALED_S)
    [incident] = found
    took_s = time.monotonic() - killed_s
    assert (incident["kind"], incident["worker"]) == ("process-exit", victim["worker"])
    occurred, detected = at(incident, "occurred_at"), at(incident, "detected_at")
    planned, restored = at(incident, "planned_at"), at(incident, "restored_at")
    assert occurred <= detected <= planned <= restored
    assert detected - occurred < FOUND_S
    assert restored - occurred <= took_s + FOUND_S
    shown: Record = bed.client.http.get(f"/v1/incidents/{incident['id']}").raise_for_status().json()
    for part in ("detection", "transition", "recompute", "sub_healthy"):
        worker_s = shown["cost"][f"{part}_worker_s"]
        assert 0 <= worker_s < HEALED_S * len(bed.nodes), (part, worker_s)
    return incident


def test_nodes_whose_clocks_are_wrong_train_and_heal(
    bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path
) -> None:
    """The clocks of n0 and n2 were wrong when their agents started."""
    with endless(bed, "wrong-clocks", corpus, tmp_path) as before:
        for node in ("n0", "n2"):
            heal(bed, recorded, "wrong-clocks", next(r["rank"] for r in before["ranks"] if r["node"] == node))
        for shown in bed.client.items("/v1/nodes"):
            assert abs(at(shown, "last_heartbeat_at") - time.time()) < HEALED_S, shown
    assert len(recorded.incidents()) == 2


def test_clocks_of_nodes_that_jump_are_no_fault(bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path) -> None:
    """By an hour and by a day, forward and back, under agents and ranks that run."""
    with endless(bed, "jumping-nodes", corpus, tmp_path) as before:
        for offset_s in (HOUR_S, -24 * HOUR_S, 0):
            for node in bed.nodes:
                step_clock(bed, node, offset_s)
            bed.client.until_step("jumping-nodes", bed.client.task("jumping-nodes")["step"] + 2)
        step_clock(bed, "n1", HOUR_S)
        assert recorded.incidents() == []
        assert (bed.ready_nodes(), pids(bed.client.task("jumping-nodes"))) == (set(bed.nodes), pids(before))
        for number in range(len(bed.nodes)):
            heal(bed, recorded, "jumping-nodes", number)
    assert len(recorded.incidents()) == len(bed.nodes)


def test_a_clock_of_the_control_plane_that_jumps_is_no_fault(
    bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path
) -> None:
    """Forward and back, under services that run, and under one that is started again in between."""
    name, healed = "jumping-control", 0
    with endless(bed, name, corpus, tmp_path) as before:
        for offset_s, restarted in ((HOUR_S, "planner"), (-HOUR_S, "detector")):
            step_clock(bed, CONTROL, offset_s)
            bed.client.until_step(name, bed.client.task(name)["step"] + 2)
            assert len(recorded.incidents()) == healed
            heal(bed, recorded, name, 1)
            bed.control.kill(restarted)
            bed.control.start_service(restarted)
            heal(bed, recorded, name, 1)
            healed += 2
        killed_workers = {incident["worker"] for incident in recorded.incidents()}
        survivors = {worker: pid for worker, pid in pids(before).items() if worker not in killed_workers}
        assert survivors.items() <= pids(bed.client.task(name)).items()
        assert bed.ready_nodes() == set(bed.nodes)
        step_clock(bed, CONTROL, 0)
    assert [i["kind"] for i in recorded.incidents()] == ["process-exit"] * healed
    log = bed.control.open_log()
    try:
        assert log.verify().ok
    finally:
        log.close()
