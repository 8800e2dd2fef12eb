"""A cluster of machines with tasks that train on it, as the courses of ``benchmarks.cluster`` need them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Report
from cli.waiting import Record
from services.planner.replay.replay import verify
from tests.cluster.bed import Bed
from tests.e2e.kit import Pace, make_corpus, small_task

STEPS = 60
"""More than a task does at its pace while a course lasts; the rest takes a second or two without the pace."""

BATCH_S = 0.2
"""Pace of a task: three replicas do a step of eight micro-batches in 0.6 s."""

FIRST_STEPS = 3
"""A task has done these before something fails: enough for the mean step, which time limits need."""

RESTORED_S = 60.0
"""For a fault to be healed, and for the bus to have what the log has; both take seconds."""

ENDED_S = 120.0
"""For what is left of ``STEPS`` without the pace, which takes a few seconds."""


@dataclass(frozen=True)
class LayoutSpec:
    """Workers of a node, and what the specification of a task in this layout has besides."""

    workers_per_node: int
    changes: Mapping[str, object] = field(default_factory=dict)


LAYOUTS: Mapping[str, LayoutSpec] = {
    "dp": LayoutSpec(1),
    "tp": LayoutSpec(2, {"parallel": {"tensor": 2, "pipeline": 1}, "workers": {"min": 2, "max": 8}}),
}


class Cluster:
    """A bed, and the tasks that train on it.

    Args:
        bed: started.
        layout: a key of ``LAYOUTS``.
        folder: for what the tasks need.
    """

    def __init__(self, bed: Bed, layout: str, folder: Path) -> None:
        self.bed, self._layout, self._folder = bed, layout, folder
        folder.mkdir(exist_ok=True)
        self._corpus = make_corpus(folder)

    def begin(self, name: str, changes: Record | None = None, steps: int = STEPS) -> tuple[Record, Pace]:
        """Submit a task; return it as it is after its first steps, and its pace.

        Args:
            name: of the task.
            changes: of its specification; ``env`` is added to.
            steps: of the task.
        """
        folder = self._folder / name
        folder.mkdir()
        pace = Pace(folder, BATCH_S)
        layout, changes = LAYOUTS[self._layout], changes or {}
        spec = small_task(name, self._corpus, steps=steps, exact=True, checkpoint={"every": 0}, **layout.changes)
        spec |= {**changes, "env": spec["env"] | changes.get("env", {})}
        self.bed.client.submit(pace.of(spec))
        self.bed.client.until_step(name, FIRST_STEPS)
        # Heartbeats tell of steps before the log has told of the ranks that do them.
        return self.bed.client.until(f"{name} trains", lambda: (t := self.bed.client.task(name))["ranks"] and t), pace

    def end(self, name: str, pace: Pace, limit_s: float = ENDED_S) -> bytes:
        """Let a task train to its end; return its parameters' file, as the API has it from the node that wrote it."""
        pace.end()
        self.bed.client.until_state(name, "succeeded", limit_s)
        return self.bed.client.http.get(f"/v1/tasks/{name}/result").raise_for_status().content

    def give_up(self, name: str) -> None:
        """Stop a task that a course has left in the way of the next ones."""
        client = self.bed.client
        self.bed.repair()
        client.http.post(f"/v1/tasks/{name}/stop", json={"lose_steps": True})
        client.until(f"{name} has ended", lambda: not client.task(name)["ranks"], RESTORED_S)

    def check_log(self, report: Report, name: str) -> None:
        """Require that every plan is decided again alike, the chain is intact, and the bus has every event once."""
        log = self.bed.control.open_log()
        try:
            found = verify(log)
        finally:
            log.close()
        problems = len(found.mismatches) + len(found.problems) + (not found.chain_ok)
        report.equal(f"{name}: problems in the log", problems, 0, events=found.events)
        deadline = time.monotonic() + RESTORED_S
        while (relayed := self.bed.control.relayed()) < found.events and time.monotonic() < deadline:
            pass  # a look takes a third of a second
        report.at_least(f"{name}: events on the bus", relayed, found.events)
