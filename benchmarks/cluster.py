"""What a task on several machines lives through: ranks, agents, nodes, links, services, the bus and the database fail.

    .venv/bin/python -m benchmarks.cluster [--layouts dp tp] [--courses rank-kill ...]

Needs root: the machines are namespaces with a network that fails in parts (``tests/cluster``). For each layout of the
task, data-parallel (``dp``: one worker a node) and tensor-parallel inside a node (``tp``: two workers a node), one
cluster of three nodes is started, a task without failures trains, and then one task for each course of
``cluster_courses``. After a course the log is read: every plan must be decided again alike, and the chain be intact.

JSON lines on stdout: one for each course with what was seen, then its bounds. Exit status 0 if all bounds hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.cluster_courses import COURSES, Course
from benchmarks.report import Report, run
from cli.waiting import Record
from services.planner.replay import Report as Verification
from services.planner.replay import verify
from shared.errors import Unavailable
from tests.cluster.bed import Bed
from tests.cluster.recorded import Recorded
from tests.cluster.requirements import missing
from tests.e2e.kit import Pace, at, make_corpus, pids, small_task

NODES = 3

STEPS = 60
"""More than a task does at its pace while a course lasts; the rest takes a second or two without the pace."""

BATCH_S = 0.2
"""Pace of a task: three replicas do a step of eight micro-batches in 0.6 s."""

FIRST_STEPS = 3
"""A task has done these before something fails: enough for the mean step, which time limits need."""

RESTORED_S = 60.0
"""For a fault to be healed, which takes seconds."""

LAYOUTS: Mapping[str, tuple[int, Mapping[str, object]]] = {
    "dp": (1, {}),
    "tp": (2, {"parallel": {"tensor": 2, "pipeline": 1}, "workers": {"min": 2, "max": 6}}),
}
"""Workers of a node, and what the task's specification has besides."""


class Cluster:
    """A bed, and the tasks that train on it.

    Args:
        bed: started.
        layout: a key of ``LAYOUTS``.
        folder: for what the tasks need.
    """

    def __init__(self, bed: Bed, layout: str, folder: Path) -> None:
        self.bed, self._layout, self._folder = bed, layout, folder
        self._corpus = make_corpus(folder)

    def begin(self, name: str) -> tuple[Record, Pace]:
        """Submit a task; return it as it is after its first steps, and its pace."""
        folder = self._folder / name
        folder.mkdir()
        pace = Pace(folder, BATCH_S)
        spec = small_task(name, self._corpus, steps=STEPS, exact=True, checkpoint={"every": 0})
        self.bed.client.submit(pace.of(spec | dict(LAYOUTS[self._layout][1])))
        return self.bed.client.until_step(name, FIRST_STEPS), pace

    def end(self, name: str, pace: Pace) -> bytes:
        """Let a task train to its end; return its parameters' file."""
        pace.end()
        task = self.bed.client.until_state(name, "succeeded")
        return self.bed.file(task["result"]["parameters_path"])

    def give_up(self, name: str) -> None:
        """Stop a task that a course has left in the way of the next ones."""
        self.bed.repair()
        self.bed.client.http.post(f"/v1/tasks/{name}/stop")
        self.bed.client.until(f"{name} has ended", lambda: not self.bed.client.task(name)["ranks"], RESTORED_S)

    def verified(self) -> Verification:
        """Return the report of a replay of the log."""
        log = self.bed.control.open_log()
        try:
            return verify(log)
        finally:
            log.close()


def take(report: Report, cluster: Cluster, course: Course, expected: bytes) -> None:
    """Have a task live through a course; report what was seen and whether the bounds hold."""
    name = course.name
    recorded = Recorded(cluster.bed.client)
    before, pace = cluster.begin(name)
    struck_at = time.time()
    may_lose = course.strike(cluster.bed, before)
    trained_s = _until_trains(cluster, course, recorded, struck_at)
    during = cluster.bed.client.task(name)
    cluster.bed.repair()
    parameters = cluster.end(name, pace)
    incidents = recorded.incidents()
    found_s = min((at(i, "detected_at") - struck_at for i in incidents), default=None)
    isolated = {i["node"] for i in incidents if i["severity"] == "SEV1"}
    others = {worker: pid for worker, pid in pids(before).items() if worker.rpartition("/")[0] not in may_lose}
    replaced = others.items() - pids(during).items()
    report.line(
        "course", course=name, found_s=found_s, trained_s=trained_s, workers=during["workers"],
        incidents=[(i["kind"], i["severity"], i["node"]) for i in incidents],
    )  # fmt: skip
    if course.found_s is None:
        report.equal(f"{name}: incidents", len(incidents), 0)
    else:
        report.at_most(f"{name}: found, s", found_s, course.found_s)
    report.equal(f"{name}: processes replaced on other nodes", len(replaced), course.replaces)
    report.at_most(f"{name}: trains again, s", trained_s, course.trains_s)
    report.equal(f"{name}: healthy nodes isolated", len(isolated - may_lose), 0)
    report.at_most(f"{name}: nodes isolated", len(isolated), course.leaves)
    report.equal(f"{name}: steps recomputed", sum(i["steps_recomputed"] or 0 for i in incidents), 0)
    report.equal(f"{name}: parameters as without a failure", parameters == expected, True)
    log = cluster.verified()
    problems = len(log.mismatches) + (not log.chain_ok)
    report.equal(f"{name}: problems in the log", problems, 0, events=log.events)


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


def measure_layout(report: Report, layout: str, courses: list[Course]) -> None:
    """Start a cluster and have a task of this layout live through each course."""
    workers, _ = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with Bed(folder / "machines", nodes=NODES, workers_per_node=workers) as bed:
            cluster = Cluster(bed, layout, folder)
            expected = cluster.end("calm", cluster.begin("calm")[1])
            for course in courses:
                try:
                    take(report, cluster, course, expected)
                except AssertionError as err:
                    report.equal(f"{course.name}: healed", str(err), "")
                    cluster.give_up(course.name)


def measure(report: Report, layouts: list[str], names: list[str]) -> None:
    """Have each layout live through the courses.

    Raises:
        Unavailable: the host cannot make machines.
    """
    if reason := missing():
        raise Unavailable(f"machines cannot be made here: {reason}")
    courses = [course for course in COURSES if course.name in names]
    for layout in layouts:
        report.line("layout", layout=layout, nodes=NODES, workers_per_node=LAYOUTS[layout][0])
        measure_layout(report, layout, courses)


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    names = [course.name for course in COURSES]
    parser.add_argument("--courses", nargs="+", choices=names, default=names, metavar="COURSE")
    arguments = parser.parse_args()
    return run(partial(measure, layouts=arguments.layouts, names=arguments.courses))


if __name__ == "__main__":
    sys.exit(main())
