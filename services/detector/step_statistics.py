"""The reports of steps that heartbeats have, put together for each task: which step every rank has done, and its tests.

Telemetry beside the fold: a detector that starts anew begins without it. What was found is in the log and folded, so
that it is neither appended twice nor forgotten. Heartbeats overlap and may be lost: each worker's steps are taken in
order, each once, and a step is judged when all members have reported it or ``LATE_STEPS`` later ones have been.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.detector.loss_spikes import LossWindow
from services.detector.stragglers import WARM_UP, Change, PeerGroup
from shared.plans import Layout, Member
from shared.signals import WorkerStatus

LATE_STEPS = 4
"""Further steps after which a step is judged without the ranks that have not reported it: their heartbeats were lost,
or they report none. Little beside the 20 steps within which a straggler is to be found."""


@dataclass(slots=True)
class StepStatistics:
    """What is known of the steps of one task.

    Attributes:
        generation: of the ranks whose steps these are.
        taken: worker -> the newest step that was taken of it.
        pending: step -> worker -> own compute time for a micro-batch, seconds, of steps that are not judged yet.
        judged: the newest step that was judged.
        silent: workers without a report of the last step that was judged.
        groups: pipeline stage -> the test of its ranks.
        histories: pipeline stage -> worker -> logarithms of its own times, over generations with the same tensor and
            pipeline sizes.
        shape: these sizes.
        losses: of the task.
    """

    generation: int = -1
    taken: dict[str, int] = field(default_factory=dict)
    pending: dict[int, dict[str, float]] = field(default_factory=dict)
    judged: int = 0
    silent: frozenset[str] = frozenset()
    groups: dict[int, PeerGroup] = field(default_factory=dict)
    histories: dict[int, dict[str, deque[float]]] = field(default_factory=dict)
    shape: tuple[int, int] = (0, 0)
    losses: LossWindow = field(default_factory=LossWindow)

    def enter(self, generation: int, layout: Layout) -> None:
        """Begin a generation, unless it is the present one."""
        if generation == self.generation:
            return
        shape = (layout.tensor, layout.pipeline)
        if shape != self.shape:
            self.histories.clear()
        self.generation, self.shape, self.judged, self.silent = generation, shape, -1, frozenset()
        self.taken.clear()
        self.pending.clear()
        self.groups.clear()

    def add(self, status: WorkerStatus) -> None:
        """Take the reports of a worker; those that were taken before change nothing."""
        worker = status.worker
        for report in sorted(status.steps):
            if report.step <= self.taken.get(worker, -1):
                continue
            self.taken[worker] = report.step
            if self.judged < 0:
                self.judged = report.step + WARM_UP - 1
            if report.step > self.judged and report.compute_s and report.micro_batches:
                self.pending.setdefault(report.step, {})[worker] = report.compute_s / report.micro_batches

    def changes(self, members: Mapping[str, Member], layout: Layout, known: Mapping[str, float]) -> list[Change]:
        """Judge the steps that all have reported; return the slowdowns that have changed.

        Args:
            members: the ranks of the generation.
            layout: its layout.
            known: worker -> slowdown that is known already.
        """
        found: list[Change] = []
        present = dict(known)
        for step in sorted(self.pending):
            times = self.pending[step]
            missing = members.keys() - times.keys() - self.silent
            if missing and len(self.pending) <= LATE_STEPS:
                break
            del self.pending[step]
            self.judged, self.silent = step, frozenset(members.keys() - times.keys())
            for stage, group_times in _by_stage(times, members, layout).items():
                if 2 * len(group_times) <= _in_stage(layout):
                    continue  # no majority of the peers is known
                group = self.groups.setdefault(stage, PeerGroup(histories=self.histories.setdefault(stage, {})))
                changes = group.take(step, group_times, present)
                found += changes
                present |= {change.worker: change.slowdown for change in changes}
        return found


def _in_stage(layout: Layout) -> int:
    return layout.tensor * layout.data


def _by_stage(times: Mapping[str, float], members: Mapping[str, Member], layout: Layout) -> dict[int, dict[str, float]]:
    """Return the times by pipeline stage. Ranks are in the order tensor, data, pipeline (``placement.py``)."""
    found: dict[int, dict[str, float]] = {}
    for worker, time_s in times.items():
        if worker in members:
            found.setdefault(members[worker].rank // _in_stage(layout), {})[worker] = time_s
    return found
