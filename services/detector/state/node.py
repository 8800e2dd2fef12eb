"""A node as the detector knows it: what the log has of it, and its telemetry."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from pydantic import InstanceOf

from services.detector.state.arrivals import Arrivals
from services.detector.state.stalls import STOPPED
from shared.events.union import NodeDraining
from shared.messages.signals import Heartbeat
from shared.service.state_codec import Unlogged


class Place(NamedTuple):
    """A task's workers on one node. ``expected``: those that must have a process; ``others``: what a plan concerns."""

    expected: list[str]
    others: list[str]


class Ages(NamedTuple):
    """The shortest time without progress of a task's ranks, and the longest of those that are to make some; seconds."""

    youngest_s: float
    oldest_s: float


Stand = tuple[str, str | None, int, int | None, str | None]
"""Where a rank stands: ``state``, ``phase``, ``step``, ``micro_batch`` and ``process_state`` of its status."""


class Summary(NamedTuple):
    """What a node's newest heartbeat says of a task's ranks there.

    Attributes:
        place: the workers of which it was made.
        generation: of the task then.
        stands: where ranks of the task stand, and the workers that do so.
        is_usual: whether every rank that must be there is, none was stopped, and no script goes on behind the last
            step.
        youngest_s: the shortest time without progress, seconds.
        oldest_s: the longest, without ranks that wait for the control plane; seconds.
    """

    place: Place
    generation: int
    stands: dict[Stand, list[str]]
    is_usual: bool
    youngest_s: float
    oldest_s: float


@dataclass(slots=True)
class MonitoredNode:
    """A node.

    Attributes:
        name: the node's name.
        incarnation: of its agent.
        joined: id of its newest join event.
        supervisor: id of the process that starts its agents again; empty if there is none.
        hardware: the kind of its workers.
        workers: how many it has.
        probe: where its agent answers probes; empty if that is not known.
        network: its network stack (``shared.machine.network``); empty if that is not known.
        past: the incarnations before it.
        lost: id of the error event that declared it lost; None while it counts as alive.
        draining: the newest request to empty it; None if there is none, or it was returned.
        planned: whether a plan has answered that request.
        drained: whether the log has that it is empty.
        closed: whether a user, or a report, wants no new work on it; that holds over incarnations.
        left: whether its agent has left in order. Heartbeats that still come from that agent mean nothing.
        heard_at: when the detector received its newest heartbeat.
        excused_until: until when a bus that was away explains its silence.
        heartbeat: its newest heartbeat.
        cleaned_at: when it was last asked to end the ranks that its absence left behind, or that no plan names.
        leftover_since: workers whose process no plan names, and since when (``leftovers.py``).
        unneeded_since: tasks whose copies in memory it seems to keep in vain, and since when (``kept_copies.py``).
        copies_asked_at: when it was last asked to delete the copies of each task.
        stopped: pid -> the time since which every heartbeat has shown the process stopped (kernel state T).
        reached_at: when the newest question was put that a witness answered with having reached its agent.
        witnesses: who was asked to probe it -> when last.
        asked_at: when witnesses were asked about it last because of its silence.
        asked_since: when a witness was first asked about it in its present silence.
        unreachable_since: when it was heard last, while it is silent and not lost (``silence.py``).
        adopted_until: end of the time in which a node that was unreachable sends the signals that have waited.
        arrivals: how late its heartbeats have come.
        summaries: what its newest heartbeat says of each task (``calm.py``).
    """

    name: str
    incarnation: str
    joined: str
    supervisor: str = ""
    hardware: str = "cpu"
    workers: int = 0
    probe: str = ""
    network: str = ""
    past: frozenset[str] = frozenset()
    lost: str | None = None
    left: bool = False
    draining: NodeDraining | None = None
    planned: bool = False
    drained: bool = False
    closed: bool = False
    heard_at: datetime | None = None
    excused_until: datetime | None = None
    heartbeat: Heartbeat | None = None
    cleaned_at: datetime | None = None
    leftover_since: dict[str, datetime] = field(default_factory=dict)
    unneeded_since: dict[str, datetime] = field(default_factory=dict)
    copies_asked_at: dict[str, datetime] = field(default_factory=dict)
    stopped: dict[int, datetime] = field(default_factory=dict)
    reached_at: datetime | None = None
    witnesses: dict[str, datetime] = field(default_factory=dict)
    asked_at: datetime | None = None
    asked_since: datetime | None = None
    unreachable_since: datetime | None = None
    adopted_until: datetime | None = None
    arrivals: Unlogged[InstanceOf[Arrivals]] = field(default_factory=Arrivals, compare=False, repr=False)
    summaries: Unlogged[dict[str, Summary]] = field(default_factory=dict, compare=False, repr=False)

    def has_newer(self, heartbeat: Heartbeat) -> bool:
        """Return whether a later heartbeat of the same agent has been received, or this very one."""
        newest = self.heartbeat
        same = newest is not None and newest.incarnation == heartbeat.incarnation
        return same and newest is not None and newest.sequence >= heartbeat.sequence

    def receive(self, heartbeat: Heartbeat, now: datetime) -> None:
        """Take a heartbeat that was received at ``now``.

        How late it is tells of the node, unless the bus or the node's link was away, another agent has sent the one
        before, or heartbeats between the two were skipped or lost.
        """
        known, excused = self.heartbeat, (self.excused_until, self.adopted_until)
        if known is not None and known.incarnation == heartbeat.incarnation and self.heard_at is not None:
            follows = heartbeat.sequence == known.sequence + 1
            if follows and all(until is None or until < self.heard_at for until in excused):
                self.arrivals.note((now - self.heard_at).total_seconds(), known.interval_s)
        self.heard_at = now if self.heard_at is None else max(now, self.heard_at)
        self.heartbeat, self.probe, self.network = heartbeat, heartbeat.probe, heartbeat.network
        self.summaries.clear()
        self.asked_since = None
        stopped = [w.pid for w in heartbeat.workers if w.pid is not None and w.process_state in STOPPED]
        self.stopped = {pid: self.stopped.get(pid, now) for pid in stopped}

    @property
    def present(self) -> bool:
        """Whether the node takes part in the cluster: neither lost nor left."""
        return self.lost is None and not self.left

    @property
    def silent_since(self) -> datetime | None:
        """The time from which its silence counts; None before its first heartbeat, unless it is excused."""
        heard_at, excused_until = self.heard_at, self.excused_until
        if heard_at is None or excused_until is None:
            return heard_at or excused_until
        return max(heard_at, excused_until)

    def stopped_s(self, pid: int | None, now: datetime) -> float:
        """Return for how many seconds a process has been seen stopped; 0 if it was not.

        The agent reports at once when a stopped process goes on. So the process counts as stopped until the node's
        next heartbeat is overdue.
        """
        since = self.stopped.get(pid) if pid is not None else None
        if since is None or self.heard_at is None or self.heartbeat is None:
            return 0.0
        until = min(now, self.heard_at + timedelta(seconds=self.heartbeat.interval_s))
        return (until - since).total_seconds()
