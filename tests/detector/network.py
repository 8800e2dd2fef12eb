"""Agents that probe one another, and links between them that can be cut, around a monitor in simulated time."""

from __future__ import annotations

from typing import Any

from services.detector.decisions.inputs import NodeTested
from services.detector.nodes.probing import ProbeQuestion
from services.detector.state.pairs import pair
from services.detector.state.unlogged import SelfTestQuestion
from shared.events.node_events import CheckResult
from shared.events.union import TaskProgressed
from shared.messages.probes import Outcome
from shared.messages.self_test import SelfTestResult
from tests.detector.kit import Cluster, Found, at

STEP_S = 0.25
"""Time between two rounds of heartbeats, answers and a tick."""

STALLED_S = 40.0
"""More than the limit of a first step (30 s)."""

IN_COLLECTIVE = {"phase": "reduce", "step": 16}


class Links:
    """A cluster whose agents probe one another, with links that can be cut; ``gpt`` trains on all or some nodes."""

    def __init__(self, nodes: int = 3, *, idle: int = 0, round_trip_s: float = 0.001, **rest: Any) -> None:
        self.cluster = Cluster(nodes, **rest)
        self.cut: set[tuple[str, str]] = set()
        self.round_trip_s = round_trip_s
        self.idle = [f"n{nodes + i}" for i in range(idle)]
        self.deaf: set[str] = set()
        self.hardware: dict[str, str] = {}
        self.asked: list[ProbeQuestion] = []
        self.tested: list[SelfTestQuestion] = []
        self.problem = ""
        self.notes: list[str] = []
        self.now_s = 1.0
        self._open: list[tuple[float, ProbeQuestion]] = []
        self.statuses: dict[str, dict[str, Any]] = {name: {} for name in self.cluster.names}
        self.cluster.names += self.idle
        for name in self.idle:
            self.cluster.beat(name, 0.0, task=None)

    def cut_pair(self, one: str, other: str) -> None:
        self.cut.add(pair(one, other))

    def run(self, seconds: float) -> list[Any]:
        """Let time pass; return the events."""
        events: list[Any] = []
        until = self.now_s + seconds
        while self.now_s < until - 1e-9:
            self.now_s += STEP_S
            events += self._round()
        return events

    def until_event(self, limit_s: float = 60.0) -> Any:
        until = self.now_s + limit_s
        while self.now_s < until:
            if events := self.run(STEP_S):
                (event,) = events
                return event
        raise AssertionError("nothing happened")

    def _round(self) -> list[Any]:
        cluster, events = self.cluster, []
        for name in cluster.names:
            status = {"task": None} if name in self.idle else self.statuses[name]
            node = {"probe": f"{name}:1", "hardware": self.hardware.get(name, "cpu")}
            found = cluster.beat(name, self.now_s, **node, **status)
            events += found.events
            self._test(found.tests)
        for due_s, question in [*self._open]:
            if due_s <= self.now_s:
                self._open.remove((due_s, question))
                outcomes = (
                    {} if question.witness in self.deaf else {p: self._outcome(question, p) for p in question.peers}
                )
                trips = {p: self.round_trip_s for p, o in outcomes.items() if o is Outcome.REACHED}
                events += cluster.monitor.probed(question, outcomes, at(self.now_s), trips).events
        cluster.monitor.echo(at(self.now_s))
        events += self.take(cluster.monitor.tick(at(self.now_s)))
        return [event for event in events if not isinstance(event, TaskProgressed)]

    def take(self, decision: Found) -> list[Any]:
        """Have the questions of a decision answered; return its events."""
        for question in decision.probes:
            slow = any(self._outcome(question, peer) is Outcome.SILENT for peer in question.peers)
            self._open.append((self.now_s + (question.timeout_s if slow else 0.0), question))
            self.asked.append(question)
        return list(decision.events)

    def _test(self, questions: list[SelfTestQuestion]) -> None:
        """Have isolated nodes test themselves."""
        for question in questions:
            self.tested.append(question)
            checks = [CheckResult(name="compute", ok=not self.problem, detail=self.problem)]
            result = SelfTestResult(incarnation=question.incarnation, problem=self.problem, checks=checks)
            self.notes += self.cluster.monitor.feed(NodeTested(question, result), at(self.now_s)).notes

    def _outcome(self, question: ProbeQuestion, peer: str) -> Outcome:
        return Outcome.SILENT if pair(question.witness, peer) in self.cut else Outcome.REACHED

    def stall(self, age_s: float = 0.0) -> None:
        """All ranks wait in a collective from now on."""
        self.statuses = {name: {**IN_COLLECTIVE, "progress_age_s": STALLED_S + age_s} for name in self.statuses}

    def train(self) -> None:
        self.statuses = {name: {} for name in self.statuses}


def timed(found: Links) -> Links:
    """Steps of 0.1 s: a collective times out after 5 s."""
    for step in range(1, 5):
        found.cluster.beat("n0", 1.0, step=step, step_s=0.1, steps_timed=step, probe="n0:1")
    return found
