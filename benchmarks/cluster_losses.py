"""The course ``losses`` of ``benchmarks.cluster``: on four nodes, half of all, one of two, and one of one die.

The first two nodes that die are a failure domain, and their machines lose power, as does the third one. Of the last
node only the agent ends and the machine stays up: that a lone machine is off cannot be told from a cut link
(docs/detector.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.cluster_tasks import LAYOUTS, RESTORED_S, Cluster
from benchmarks.report import Report
from tests.cluster.bed import Bed
from tests.cluster.recorded import Recorded
from tests.e2e.kit import Pace, at, pids

NAME = "losses"

NODES = 4

DOMAINS = {"n0": "near", "n1": "near", "n2": "far", "n3": "far"}

DOMAIN_S = 5.0
"""Required: a whole domain of half of the nodes is found within this time."""

LAST_S = 3.0
"""Required: one node of two, and one of one, is found within this time."""


def measure(report: Report, layout: str, folder: Path) -> None:
    """Start a cluster of four nodes and let them die; the task must train on what is left, and then end as it must."""
    workers = LAYOUTS[layout].workers_per_node
    with Bed(folder / "machines", nodes=NODES, workers_per_node=workers, domains=DOMAINS) as bed:
        try:
            Losses(report, Cluster(bed, layout, folder)).take()
        except AssertionError as err:
            report.equal(f"{NAME}: healed", str(err), "")


class Losses:
    """One run of the course.

    Args:
        report: for what is seen.
        cluster: of four nodes.
    """

    def __init__(self, report: Report, cluster: Cluster) -> None:
        self._report, self._cluster, self._bed = report, cluster, cluster.bed

    def take(self) -> None:
        """Let the nodes die, then start them again; the task trains from its beginning, since nothing was saved."""
        calm = self._cluster.end("calm", self._cluster.begin("calm")[1])
        before, pace = self._cluster.begin(NAME)
        self._lost("half of four nodes", {"n2", "n3"}, lambda n: self._bed.nodes[n].power_off(), DOMAIN_S)
        self._trains(pids(before), {"n0", "n1"})
        self._lost("one of two nodes", {"n1"}, lambda n: self._bed.nodes[n].power_off(), LAST_S)
        self._trains(pids(before), {"n0"})
        self._lost("the last node", {"n0"}, lambda n: self._bed.nodes[n].kill(self._bed.agents[n].pid), LAST_S)
        self._bed.repair()
        self._end(pace, calm)

    def _lost(self, what: str, nodes: set[str], fault: Callable[[str], None], bound_s: float) -> None:
        """Do something to nodes; require that these and no others are found within a time."""
        recorded = Recorded(self._bed.client)
        struck_at = time.time()
        for node in sorted(nodes):
            fault(node)
        self._bed.client.until(f"{what}: found", lambda: len(recorded.incidents()) >= len(nodes), RESTORED_S)
        incidents = recorded.incidents()
        found_s = max(at(incident, "detected_at") for incident in incidents) - struck_at
        self._report.at_most(f"{NAME}: {what}: found, s", found_s, bound_s)
        kinds = sorted((incident["node"], incident["kind"]) for incident in incidents)
        self._report.equal(f"{NAME}: {what}: incidents", kinds, [(node, "node-lost") for node in sorted(nodes)])

    def _trains(self, before: dict[str, int], nodes: set[str]) -> None:
        """Require that the processes on the nodes that are left train on."""
        client = self._bed.client
        client.until_step(NAME, client.task(NAME)["step"] + 2, RESTORED_S)
        left = {worker: pid for worker, pid in before.items() if worker.rpartition("/")[0] in nodes}
        self._report.equal(f"{NAME}: processes on {len(nodes)} nodes as before", pids(client.task(NAME)) == left, True)

    def _end(self, pace: Pace, calm: bytes) -> None:
        parameters = self._cluster.end(NAME, pace)
        self._report.equal(f"{NAME}: parameters as without a failure", parameters == calm, True)
        self._cluster.check_log(self._report, NAME)
