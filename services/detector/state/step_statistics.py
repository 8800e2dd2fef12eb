"""The reports of steps that heartbeats have, put together for each task: which step every rank has done, and its tests.

Telemetry beside the fold: a detector that starts anew begins without it. What was found is in the log and folded, so
that it is neither appended twice nor forgotten. Heartbeats overlap and may be lost: each worker's steps are taken in
order, each once, and a step is judged when all members have reported it or ``LATE_STEPS`` later ones have been.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from services.detector.state.loss_spikes import LossWindow
from services.detector.state.stragglers import WARM_UP, Change, PeerGroup
from shared.events.plans import Layout, Member
from shared.messages.signals import WorkerStatus

LATE_STEPS = 4
"""Further steps after which a step is judged without the ranks that have not reported it: their heartbeats were lost,
or they report none. That is little beside the 20 steps within which a slow worker is to be found."""


OF_ITS_OWN = -1
"""Number that stands for all pipeline stages of a task where each has one rank."""


class Passes(NamedTuple):
    """A rank's own compute time of one step, seconds, for this many micro-batches; both positive."""

    compute_s: float
    micro_batches: int


@dataclass(slots=True)
class StepStatistics:
    """What is known of the steps of one task.

    Attributes:
        generation: the generation of the ranks whose steps these are.
        taken: worker -> its newest step that was taken.
        pending: step -> worker -> its passes, of steps that are not judged yet.
        judged: the newest step that was judged.
        silent: workers without a report of the last step that was judged.
        ranks: worker -> its rank.
        groups: pipeline stage, or ``OF_ITS_OWN`` -> the test of its ranks, over generations with the same tensor and
            pipeline sizes.
        shape: these sizes.
        losses: the task's losses.
        regressed_since: since when the newest steps have been slower than those before the last transition, all the
            time.
    """

    generation: int = -1
    taken: dict[str, int] = field(default_factory=dict)
    pending: dict[int, dict[str, Passes]] = field(default_factory=dict)
    judged: int = 0
    silent: frozenset[str] = frozenset()
    ranks: dict[str, int] = field(default_factory=dict)
    groups: dict[int, PeerGroup] = field(default_factory=dict)
    shape: tuple[int, int] = (0, 0)
    losses: LossWindow = field(default_factory=LossWindow)
    regressed_since: datetime | None = None

    def enter(self, generation: int, layout: Layout, members: Mapping[str, Member]) -> None:
        """Begin a generation, unless it is the present one.

        The tests go on where the same processes have the same work: a new deal of micro-batches does not hide who is
        becoming slow. The times of a process that has ended say nothing of the next process, except how much times
        vary.

        Args:
            generation: its number.
            layout: its layout.
            members: its ranks, by worker.
        """
        if generation == self.generation:
            return
        shape = (layout.tensor, layout.pipeline)
        ranks = {worker: member.rank for worker, member in members.items()}
        if shape != self.shape:
            self.groups.clear()
        elif ranks != self.ranks or any(each.source != "live" for each in members.values()):
            for group in self.groups.values():
                if group.unequal and ranks != self.ranks:
                    group.forget_work()
                else:
                    group.renew()
        self.generation, self.shape, self.ranks = generation, shape, ranks
        self.judged, self.silent = -1, frozenset()
        self.regressed_since = None
        self.taken.clear()
        self.pending.clear()

    def add(self, status: WorkerStatus) -> None:
        """Take the reports of a worker; those that were taken before change nothing."""
        worker, known = status.worker, self.taken.get(status.worker, -1)
        for report in sorted(status.steps):
            if report.step <= known:
                continue
            self.taken[worker] = known = report.step
            if self.judged < 0:
                self.judged = report.step + WARM_UP - 1
            if report.step > self.judged and report.compute_s and report.micro_batches:
                self.pending.setdefault(report.step, {})[worker] = Passes(report.compute_s, report.micro_batches)

    def changes(self, members: Mapping[str, Member], layout: Layout, known: Mapping[str, float]) -> list[Change]:
        """Judge the steps that all have reported; return the slowdowns that have changed.

        Args:
            members: the ranks of the generation.
            layout: its layout.
            known: worker -> slowdown that is known already.
        """
        if not self.pending:
            return []
        found: list[Change] = []
        present = dict(known)
        for step in sorted(self.pending):
            passes = self.pending[step]
            if len(self.pending) <= LATE_STEPS and self._lacks(passes, members):
                break
            del self.pending[step]
            self.judged, self.silent = step, frozenset(members.keys() - passes.keys())
            for stage, of_stage in _by_stage(passes, members, layout).items():
                if 2 * len(of_stage) <= _in_stage(layout):
                    continue  # a majority of the peers is not known
                group = self.groups.setdefault(stage, PeerGroup(unequal=stage == OF_ITS_OWN))
                times_s = {worker: each.compute_s / each.micro_batches for worker, each in of_stage.items()}
                compute_s = min(each.compute_s for each in of_stage.values())
                changes = group.take(step, times_s, present, compute_s=compute_s)
                found += changes
                present |= {change.worker: change.slowdown for change in changes}
        return found

    def _lacks(self, passes: Mapping[str, Passes], members: Mapping[str, Member]) -> bool:
        """Return whether a member is missing from a step's passes that reported the step before.

        Every status of every rank leads here. So the members are looked through only once there are enough reports.
        """
        if len(passes) + len(self.silent) < len(members):
            return True
        return bool(members.keys() - passes.keys() - self.silent)


def _in_stage(layout: Layout) -> int:
    """Return how many ranks are compared with one another."""
    ranks = layout.tensor * layout.data
    return ranks if ranks > 1 else layout.pipeline


def _by_stage(
    passes: Mapping[str, Passes], members: Mapping[str, Member], layout: Layout
) -> dict[int, dict[str, Passes]]:
    """Return the passes of the workers by pipeline stage, or together if each has a stage of its own."""
    found: dict[int, dict[str, Passes]] = {}
    shared = layout.tensor * layout.data > 1
    for worker, each in passes.items():
        if worker in members:
            stage = layout.pipeline_stage(members[worker].rank) if shared else OF_ITS_OWN
            found.setdefault(stage, {})[worker] = each
    return found
