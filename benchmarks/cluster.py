"""What a task on several machines lives through: ranks, agents, nodes, links, services, the bus and the database fail.

    .venv/bin/python -m benchmarks.cluster [--layouts dp tp] [--courses rank-kill ...] [--long]

Needs root: the machines are namespaces with a network that fails in parts (``tests/cluster``). For each layout of the
task, data-parallel (``dp``: one worker a node) and tensor-parallel inside a node (``tp``: two workers a node), one
cluster of three nodes is started, a task without failures trains, and then one task for each course of
``cluster_courses``. After a course the log is read: every plan must be decided again alike, the chain be intact, and
the bus have every event. On a second cluster, of four nodes, one node after the other dies (``cluster_losses``).

With ``--long`` the only course is a network that is slow for ten minutes (``cluster_slow``).

JSON lines on stdout: one for each course with what was seen, then its bounds. Exit status 0 if all bounds hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks import cluster_losses, cluster_slow
from benchmarks.cluster_courses import COURSES, Course
from benchmarks.cluster_tasks import LAYOUTS, RESTORED_S, Cluster
from benchmarks.report import Report, run
from shared.errors import Unavailable
from tests.cluster.bed import Bed
from tests.cluster.recorded import Recorded
from tests.cluster.requirements import missing
from tests.e2e.kit import at, pids

NODES = 3

WHOLE_RUN_S = 1200.0
"""Required: all courses in both layouts, on two cores (issue 11)."""


def take(report: Report, cluster: Cluster, course: Course, expected: bytes) -> None:
    """Have a task live through a course; report what was seen and whether the bounds hold."""
    name = course.name
    recorded = Recorded(cluster.bed.client)
    before, pace = cluster.begin(name, course.changes(cluster.bed, name))
    began_at = time.time()
    struck = course.strike(cluster.bed, before)
    struck_at = struck.at or began_at
    trained_s = _until_trains(cluster, course, recorded, struck_at)
    during = cluster.bed.client.task(name)
    cluster.bed.repair()
    parameters = cluster.end(name, pace)
    incidents = recorded.incidents()
    found_s = min((at(i, "detected_at") - struck_at for i in incidents), default=None)
    report.line(
        "course", course=name, found_s=found_s, trained_s=trained_s, workers=during["workers"],
        incidents=[(i["kind"], i["severity"], i["node"]) for i in incidents],
    )  # fmt: skip
    if course.found_s is None:
        report.equal(f"{name}: incidents", len(incidents), 0)
    else:
        report.at_most(f"{name}: found, s", found_s, course.found_s)
    for what, (value, must_be) in struck.seen.items():
        report.equal(f"{name}: {what}", value, must_be)
    isolated = {i["node"] for i in incidents if i["severity"] == "SEV1"}
    others = {worker: pid for worker, pid in pids(before).items() if worker.rpartition("/")[0] not in struck.may_lose}
    replaced = others.items() - pids(during).items()
    report.equal(f"{name}: processes replaced on other nodes", len(replaced), course.replaces)
    report.at_most(f"{name}: trains again, s", trained_s, course.trains_s)
    report.equal(f"{name}: healthy nodes isolated", len(isolated - struck.may_lose), 0)
    report.at_most(f"{name}: nodes isolated", len(isolated), course.leaves)
    recomputed = sum(event["steps_recomputed"] for event in recorded.events("state.moved", task=name))
    report.at_most(f"{name}: steps recomputed", recomputed, course.recomputes)
    report.equal(f"{name}: parameters as without a failure", parameters == expected, True)
    cluster.check_log(report, name)


def _until_trains(cluster: Cluster, course: Course, recorded: Recorded, struck_at: float) -> float:
    """Wait until the task has answered a course and trains; return the time since the strike."""
    client = cluster.bed.client
    name = course.name
    if course.found_s is not None:
        client.until(
            f"{name} is healed",
            lambda: (found := recorded.incidents()) and all(i["restored_at"] for i in found),
            RESTORED_S,
        )
    client.until_step(name, client.task(name)["step"] + 1, RESTORED_S)
    return time.time() - struck_at


def measure_courses(report: Report, layout: str, courses: list[Course], folder: Path) -> None:
    """Start a cluster and have a task of this layout live through each course."""
    with Bed(folder / "machines", nodes=NODES, workers_per_node=LAYOUTS[layout].workers_per_node) as bed:
        cluster = Cluster(bed, layout, folder)
        expected = cluster.end("calm", cluster.begin("calm")[1])
        for course in courses:
            try:
                take(report, cluster, course, expected)
            except AssertionError as err:
                report.equal(f"{course.name}: healed", str(err), "")
                cluster.give_up(course.name)


def measure(report: Report, layouts: list[str], names: list[str], long: bool) -> None:
    """Have each layout live through the courses.

    Raises:
        Unavailable: the host cannot make machines.
    """
    if reason := missing():
        raise Unavailable(f"machines cannot be made here: {reason}")
    began_s = time.monotonic()
    for layout in layouts:
        report.line("layout", layout=layout, nodes=NODES, workers_per_node=LAYOUTS[layout].workers_per_node)
        with tempfile.TemporaryDirectory() as temporary:
            if long:
                cluster_slow.measure(report, layout, Path(temporary))
                continue
            if courses := [course for course in COURSES if course.name in names]:
                measure_courses(report, layout, courses, Path(temporary, "three"))
            if cluster_losses.NAME in names:
                cluster_losses.measure(report, layout, Path(temporary, "four"))
    if not long:
        report.at_most("whole run, s", time.monotonic() - began_s, WHOLE_RUN_S)


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    names = [*(course.name for course in COURSES), cluster_losses.NAME]
    parser.add_argument("--courses", nargs="+", choices=names, default=names, metavar="COURSE")
    parser.add_argument("--long", action="store_true", help="a network that is slow for ten minutes, and nothing else")
    arguments = parser.parse_args()
    return run(partial(measure, layouts=arguments.layouts, names=arguments.courses, long=arguments.long))


if __name__ == "__main__":
    sys.exit(main())
