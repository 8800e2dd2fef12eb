"""Machines, agents and links around a monitor, in simulated time: heartbeats come, and probes are answered."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from services.detector.evolve import evolve
from services.detector.nodes.probing import DETECTOR, ProbeQuestion
from services.detector.nodes.silence import reachability
from services.detector.state.cluster import DetectorState
from shared.messages.probes import Outcome
from tests.detector.kit import LIMITS, Cluster, Found, Monitor, at

TICK_S = 0.1
BEAT_TICKS = 2
"""A heartbeat every 0.2 s, since ticks are 0.1 s apart."""

QUICK_S = 0.05
"""An answer that does not have to wait for a time-out."""

TIMEOUT_S = LIMITS.node_timeout_s

SOON_S = TIMEOUT_S + 3 * TICK_S
"""Witnesses delay no loss: two ticks for the clock's grain, one for the answers."""


@dataclass
class World:
    """Nodes that train ``gpt``, one rank each, from second 0 on.

    Attributes:
        nodes: their number.
        older: nodes whose agents are of an older version.
        here: nodes on the detector's machine.
        off: machines that are off.
        ended: agents that have ended on machines that run.
        stopped: agents that do not run.
        unheard: nodes whose link to NATS is cut; those of ``off``, ``ended`` and ``stopped`` are not heard either.
        cut: pairs between which the link is cut; ``DETECTOR`` may be one of the two.
        idle: nodes whose workers have no process.
        late_s: by how much a witness's answers are late, seconds.
        status: what ranks report, beside the ordinary.
        of_node: what the rank of a node reports beside that.
        phases: whether every other node sends its heartbeats half an interval later than the others.
    """

    nodes: int = 3
    older: set[str] = field(default_factory=set)
    here: set[str] = field(default_factory=set)
    off: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    unheard: set[str] = field(default_factory=set)
    cut: set[frozenset[str]] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    late_s: dict[str, float] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    of_node: dict[str, dict[str, Any]] = field(default_factory=dict)
    phases: bool = False
    ticks: int = 0
    events: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cleans: list[Any] = field(default_factory=list)
    asked: list[ProbeQuestion] = field(default_factory=list)
    waiting: list[tuple[float, ProbeQuestion, dict[str, Outcome]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cluster = Cluster(self.nodes, first=self._place)
        self.monitor = self.cluster.monitor
        self.monitor.limits = replace(LIMITS, network="here")
        self.names = self.cluster.names
        self.run(1.0)

    @property
    def now_s(self) -> float:
        return self.ticks * TICK_S

    def cut_control(self, *names: str) -> None:
        """Cut the links of nodes to the control plane's machine."""
        for name in names or self.names:
            self.unheard.add(name)
            self.cut.add(frozenset({DETECTOR, name}))

    def heal(self) -> None:
        self.unheard.clear()
        self.cut.clear()

    def restart_detector(self) -> None:
        """End the detector, and start one that knows what the log says."""
        before, state = self.monitor, DetectorState()
        for event in before.log:
            evolve(state, event, event.occurred_at)
        self.monitor = self.cluster.monitor = Monitor(at(self.now_s), state, before.limits)
        self.monitor.log = before.log
        self.waiting.clear()

    def run(self, seconds: float) -> list[Any]:
        """Let time pass; return the events of that time."""
        before = len(self.events)
        for _ in range(round(seconds / TICK_S)):
            self._tick()
        return self.events[before:]

    def run_until_lost(self, limit_s: float) -> dict[str, float]:
        """Let time pass until a node is lost, and a little more; return node -> seconds from now until its loss."""
        start_s = self.now_s
        while self.now_s - start_s < limit_s and not self.run(TICK_S):
            pass
        self.run(1.0)
        return {
            e.node: (e.detected_at - at(start_s)).total_seconds() for e in self.events if e.detected_at > at(start_s)
        }

    def unreachable(self) -> dict[str, list[str]]:
        """Return node -> who reaches it, of the unreachable nodes."""
        return {name: found.reached_by for name, found in reachability(self.monitor.state).unreachable.items()}

    def is_cut_off(self) -> bool:
        return reachability(self.monitor.state).cut_off_since is not None

    def beat(self, name: str) -> None:
        about = self._place(name)
        about |= {"task": None} if name in self.idle else self.status | self.of_node.get(name, {})
        found = self.cluster.beat(name, self.now_s, **about)
        self.events += found.events
        self.cleans += found.cleans
        self.notes += found.notes

    def _place(self, name: str) -> dict[str, Any]:
        probe = "" if name in self.older else f"{name}:1"
        return {"probe": probe, "network": "here" if name in self.here else name, "domain": name}

    def _tick(self) -> None:
        self.ticks += 1
        silent = self.off | self.ended | self.stopped | self.unheard
        for number, name in enumerate(self.names):
            late = number % BEAT_TICKS if self.phases else 0
            if (self.ticks + late) % BEAT_TICKS == 0 and name not in silent:
                self.beat(name)
        due = [item for item in self.waiting if item[0] <= self.now_s]
        self.waiting = [item for item in self.waiting if item[0] > self.now_s]
        for _, question, outcomes in due:
            answered = question.witness == DETECTOR or question.witness not in silent
            self._take(self.monitor.probed(question, outcomes if answered else {}, at(self.now_s)))
        self.monitor.echo(at(self.now_s))
        self._take(self.monitor.tick(at(self.now_s)))

    def _take(self, decision: Found) -> None:
        self.events += decision.events
        self.notes += decision.notes
        self.asked += decision.probes
        for question in decision.probes:
            outcomes = {peer: self._outcome(question.witness, peer) for peer in question.peers}
            slow = any(outcome in (Outcome.SILENT, Outcome.MUTE) for outcome in outcomes.values())
            due_s = self.now_s + (question.timeout_s if slow else 0.0) + QUICK_S
            due_s += self.late_s.get(question.witness, 0.0)
            self.waiting.append((due_s, question, outcomes))

    def _outcome(self, witness: str, peer: str) -> Outcome:
        if peer in self.off or witness in self.off or frozenset({witness, peer}) in self.cut:
            return Outcome.SILENT
        if peer in self.ended:
            return Outcome.ABSENT
        return Outcome.MUTE if peer in self.stopped else Outcome.REACHED
