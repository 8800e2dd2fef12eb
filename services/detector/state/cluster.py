"""The detector's state: the fold of the log (``evolve.py``), and beside it the telemetry that stays out of the log.

The state is changed in place: a large cluster sends thousands of heartbeats a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from services.detector.state.cause_history import CauseHistory
from services.detector.state.known_errors import KnownError
from services.detector.state.node import Ages, MonitoredNode
from services.detector.state.pairs import Pair
from services.detector.state.preflights import Preflight
from services.detector.state.reports import Reports
from services.detector.state.slow_links import RoundTrips
from services.detector.state.task import EndedTask, MonitoredTask, Standstill
from services.detector.state.unlogged import Condemnation, IncidentWatch, Isolation, ProbeResult, SelfTestState
from shared.events.evidence import LostRanks
from shared.messages.admission import Hello
from shared.messages.signals import DeviceFailed, WorkerStatus
from shared.service.state_codec import PairMap, Unlogged
from shared.tasks.specification import DEFAULT_MAX_RESTARTS

MTBF_NODE_S = 20 * 86_400.0
"""The default of the setting, for a log without ``cluster.configured`` (``shared.settings.model`` has the reason)."""


LONG_AGO = datetime.min.replace(tzinfo=UTC)
"""A time before the detector's start."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """An agent that was admitted under a name and has not sent a heartbeat yet. ``at``: when it was admitted."""

    hello: Hello
    at: datetime


@dataclass(slots=True)
class DetectorState:
    """Everything that the detector decides from.

    Attributes:
        nodes: by name.
        tasks: by name, without those in ``ended``.
        ended: tasks that have ended, and of which no plan and no answer is outstanding, by name.
        unanswered: errors that no plan has answered yet, by id, in the order of the log.
        joins: ids of the join events. Each incarnation of an agent joins once, and once after each loss.
        admitted: admitted agents that have not joined yet, by node. Not in the log.
        isolated: nodes that are left out because of a broken link, until it works or an operator returns them.
        condemned: nodes that another error of SEV1 isolated. They are tested before they return.
        early_devices: reports on devices by agents that have not joined yet, by node. Not in the log.
        preflights: the newest preflight of each node that had one.
        reports: what monitors from outside have reported of nodes.
        causes: what is remembered of the causes of errors.
        mtbf_node_s: mean time between failures of a node, of the newest ``cluster.configured``, seconds.
        breaks: when each pair of nodes was found broken, as long as it is remembered.
        slowed: worker -> slowdown, for the workers that are slower than their peers.
        round_trips: the round trips of pairs of nodes. Not in the log.
        probes: (witness, node) -> the answer to the newest question. Not in the log.
        self_tests: the self-tests of isolated nodes, by node. Not in the log.
        watches: incidents whose observations are collected, by id. Not in the log.
        cut_off_since: the time since which no node is heard, though none is known to be lost. Not in the log.
        losing_since: the time since which losses are known that are not logged yet, as more may be. Not in the log.
        link_may_be_cut: whether no node is heard on any other machine than the detector's, though some there are not
            known to be lost; or no node at all. Not in the log.
        standstills: what is known of tasks that seem to stand still, by task. Not in the log.
        listening_since: when the detector began to listen; after the bus was away, the end of the reconnect grace.
            Neither this attribute nor the next is in the log.
        echo_at: when its own message last arrived.
        seen: what ``statuses`` has found since ``look`` began, by task; None while no look is under way.
        ages: the same of ``progress/calm.py``; None of a task: not all that is heard of it is usual.
    """

    nodes: dict[str, MonitoredNode] = field(default_factory=dict)
    tasks: dict[str, MonitoredTask] = field(default_factory=dict)
    ended: dict[str, EndedTask] = field(default_factory=dict)
    unanswered: dict[str, KnownError] = field(default_factory=dict)
    joins: set[str] = field(default_factory=set)
    admitted: dict[str, Admitted] = field(default_factory=dict)
    isolated: dict[str, Isolation] = field(default_factory=dict)
    condemned: dict[str, Condemnation] = field(default_factory=dict)
    early_devices: Unlogged[dict[str, list[DeviceFailed]]] = field(default_factory=dict)
    causes: CauseHistory = field(default_factory=CauseHistory)
    reports: Reports = field(default_factory=Reports)
    preflights: dict[str, Preflight] = field(default_factory=dict)
    mtbf_node_s: float = MTBF_NODE_S
    breaks: PairMap[Pair, list[datetime]] = field(default_factory=dict)
    probes: PairMap[tuple[str, str], ProbeResult] = field(default_factory=dict)
    self_tests: Unlogged[dict[str, SelfTestState]] = field(default_factory=dict, compare=False)
    watches: Unlogged[dict[str, IncidentWatch]] = field(default_factory=dict, compare=False)
    cut_off_since: datetime | None = None
    losing_since: Unlogged[datetime | None] = None
    link_may_be_cut: bool = False
    standstills: Unlogged[dict[str, Standstill]] = field(default_factory=dict)
    slowed: dict[str, float] = field(default_factory=dict)
    round_trips: Unlogged[RoundTrips] = field(default_factory=RoundTrips, compare=False, repr=False)
    listening_since: Unlogged[datetime] = LONG_AGO
    echo_at: Unlogged[datetime | None] = None
    seen: Unlogged[dict[str, dict[str, WorkerStatus]] | None] = None
    ages: Unlogged[dict[str, Ages | None] | None] = None

    def is_held_by_device(self, node: str) -> bool:
        """Return whether a node is left out because of a device."""
        known = self.condemned.get(node)
        return known is not None and known.by_device

    def is_open(self, node: MonitoredNode) -> bool:
        """Return whether a node takes new work, as far as the log says, and is heard."""
        usable = node.present and node.unreachable_since is None and node.draining is None and not node.closed
        return usable and node.name not in self.isolated and node.name not in self.condemned

    def highest_generation(self, name: str) -> int:
        """Return the highest generation of a task that any plan has named; 0 if the log does not have the task."""
        task = self.tasks.get(name) or self.ended.get(name)
        return task.highest_generation if task is not None else 0

    def answered(self, cause: str) -> KnownError | None:
        """Take the error that a plan answers from the unanswered ones; return it, or None if the cause is no error.

        The planner answers in the order of the log: errors before this one are not answered any more, and are taken
        too.
        """
        error = self.unanswered.get(cause)
        while error is not None and cause in self.unanswered:
            del self.unanswered[next(iter(self.unanswered))]
        return error

    def settle(self, name: str) -> None:
        """Keep only a little of a task that has ended and has nothing left to do."""
        task = self.tasks.get(name)
        if task is not None and task.ended and task.change is None and not task.unanswered:
            del self.tasks[name]
            self.causes.forget_task(name)
            self.ended[name] = EndedTask(
                task.generation, task.highest_generation, task.recorded, task.identity, task.copies_until
            )

    def recall(self, name: str) -> MonitoredTask | None:
        """Return a task, moved back to ``tasks`` if it had ended; None if the log does not have it."""
        ended = self.ended.pop(name, None)
        if ended is not None:
            self.tasks[name] = MonitoredTask(
                name=name,
                max_restarts=DEFAULT_MAX_RESTARTS,
                generation=ended.generation,
                highest_generation=ended.highest_generation,
                recorded=ended.recorded,
                identity=ended.identity,
                copies_until=ended.copies_until,
                ended=True,
            )
        return self.tasks.get(name)

    def status(self, worker: str) -> WorkerStatus | None:
        """Return the newest status of a worker."""
        node = self.nodes.get(worker.rpartition("/")[0])
        if node is None or node.heartbeat is None:
            return None
        return node.heartbeat.statuses.get(worker)

    def trained_by(self, status: WorkerStatus) -> MonitoredTask | None:
        """Return the task of whose present generation a status is that of a member; None if there is none."""
        task = self.tasks.get(status.task) if status.task is not None else None
        if task is None or task.ended or status.generation != task.generation or status.worker not in task.members:
            return None
        return task

    def unreachable(self) -> set[str]:
        """Return the nodes that are unreachable."""
        return {name for name, node in self.nodes.items() if node.unreachable_since is not None}

    def statuses(self, task: MonitoredTask) -> dict[str, WorkerStatus]:
        """Return the newest status of each member of a task that has one."""
        if self.seen is not None and task.name in self.seen:
            return self.seen[task.name]
        # This is a loop, and not a call for each member, since every tick looks at all of them.
        nodes: dict[str, MonitoredNode] = self.nodes
        found: dict[str, WorkerStatus] = {}
        for worker, member in task.members.items():
            node = nodes.get(member.node)
            if node is not None and node.heartbeat is not None:
                status = node.heartbeat.statuses.get(worker)
                if status is not None:
                    found[worker] = status
        if self.seen is not None:
            self.seen[task.name] = found
        return found

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """Have ``statuses`` look at each task's members once in this block, in which no heartbeat and no plan comes."""
        self.seen, self.ages = {}, {}
        try:
            yield
        finally:
            self.seen = self.ages = None

    def lost_ranks(self, node: MonitoredNode) -> dict[str, LostRanks]:
        """Return the part of each task on a node, for the tasks that have one."""
        lost: dict[str, LostRanks] = {}
        for task in self.tasks.values():
            workers = task.workers_on(node.name)
            if workers:
                lost[task.name] = LostRanks(
                    workers=workers,
                    ranks={m.worker: m.rank for m in sorted(task.members_of(workers), key=lambda m: m.rank)},
                    generation=task.newest_generation(),
                    step=task.step,
                )
        return lost

    def running(self) -> Iterator[MonitoredTask]:
        """Yield the tasks that train and have neither an outstanding plan nor an unanswered error."""
        for task in self.tasks.values():
            if not task.ended and task.members and task.change is None and not task.unanswered:
                yield task

    def moving(self) -> Iterator[MonitoredTask]:
        """Yield the tasks that have a plan in progress and no unanswered error."""
        for task in self.tasks.values():
            if not task.ended and task.change is not None and task.failed_transition is None and not task.unanswered:
                yield task

    def stopped_s(self, worker: str, now: datetime) -> float:
        """Return for how many seconds the worker's process has been seen stopped; 0 if its node is lost or left."""
        node, status = self.nodes.get(worker.rpartition("/")[0]), self.status(worker)
        if node is None or not node.present or status is None:
            return 0.0
        return node.stopped_s(status.pid, now)
