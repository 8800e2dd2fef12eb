"""A course of ``benchmarks.cluster``: the network is slow and loses frames for ten minutes; then a node is cut off."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from benchmarks.cluster_tasks import LAYOUTS, RESTORED_S, Cluster
from benchmarks.report import Report
from tests.cluster.bed import Bed
from tests.cluster.recorded import Recorded
from tests.e2e.kit import at, pids, rank

NAME = "slow-network"

NODES = 3

DELAY_S, LOSS, SLOW_S = 0.2, 0.05, 600.0
"""Required: in each direction of every link, for so long, without an incident."""

FOUND_S = 10.0
"""Required: a node that is cut off in that state is found within this time."""

STEPS = 200
"""More than a task does in that time: a step takes many times the delay, and three replicas were seen to do 69."""

ENDED_S = 600.0
"""For the steps that are left, without the pace: up to 0.5 s each where six ranks share two cores."""


def measure(report: Report, layout: str, folder: Path) -> None:
    """Start a cluster, make its network slow, and at last cut a node off."""
    with Bed(folder / "machines", nodes=NODES, workers_per_node=LAYOUTS[layout].workers_per_node) as bed:
        try:
            _take(report, Cluster(bed, layout, folder))
        except AssertionError as err:
            report.equal(f"{NAME}: healed", str(err), "")


def _take(report: Report, cluster: Cluster) -> None:
    bed = cluster.bed
    expected = cluster.end("calm", cluster.begin("calm", steps=STEPS)[1], ENDED_S)
    recorded = Recorded(bed.client)
    before, pace = cluster.begin(NAME, steps=STEPS)
    for one, other in itertools.combinations(bed.machines, 2):
        bed.network.between(one, other, delay_s=DELAY_S, loss=LOSS)
    time.sleep(SLOW_S)  # the length of this state is what is measured
    task = bed.client.task(NAME)
    report.line("course", course=NAME, steps=task["step"] - before["step"], seconds=SLOW_S)
    report.equal(f"{NAME}: incidents", len(recorded.incidents()), 0)
    report.equal(f"{NAME}: processes as before", pids(task) == pids(before), True)
    node = rank(task, 1)["node"]
    struck_at = time.time()
    bed.network.isolate(node)
    bed.client.until("the node is found", recorded.incidents, RESTORED_S)
    incidents = recorded.incidents()
    report.equal(f"{NAME}: found", [(i["node"], i["kind"]) for i in incidents], [(node, "node-lost")])
    report.at_most(f"{NAME}: found, s", at(incidents[0], "detected_at") - struck_at, FOUND_S)
    bed.repair()
    report.equal(f"{NAME}: parameters as without a failure", cluster.end(NAME, pace, ENDED_S) == expected, True)
    cluster.check_log(report, NAME)
