"""The kinds of time on random histories of small clusters, against an accounting second by second.

The simulation writes down what each worker does in each second, straight from the definitions of docs/costs.md, while
it makes the events from which the ledger has to find the same. One thing happens after the other; what overlaps, and
what makes no sense, is left to ``test_any_history.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.planner.decide import DECIDER
from shared.costs.ledger import CATEGORIES
from shared.events.plans import Response, TaskChange, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import (
    ErrorDetected,
    Event,
    NodeCordoned,
    NodeDrained,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeReturned,
    PlanDecided,
    Recorded,
    StateMoved,
    TaskFinished,
    TaskSubmitted,
)
from shared.projections.evolve import evolve
from shared.views.documents import ClusterView, Views
from tests.api.accounting import allocated_worker_s
from tests.api.kit import START, cost_report, spec, stage

NODES = ["n0", "n1", "n2"]
WEIGHTS = {"a": 2.0, "b": 1.0}
FEWEST_WORKERS = {"a": 3, "b": 1}
MOST_WORKERS = 4
DETECTION_S, START_S, DRAIN_S, TRANSITION_S = 2, 4, 3, 3


@dataclass
class SimulatedTask:
    """A task. With less than its fewest workers it waits.

    ``lacking``: for each incident, the workers that it took, and how many the task had.
    """

    generation: int = 0
    workers: list[str] = field(default_factory=list)
    lacking: dict[str, tuple[set[str], int]] = field(default_factory=dict)


@dataclass
class Simulation:
    """A cluster.

    ``nodes``: the state of each. ``closed``: those that a user closed. ``incidents``: what took those that are away.
    ``seconds``: by node and kind.
    """

    now: int = 0
    nodes: dict[str, str] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    tasks: dict[str, SimulatedTask] = field(default_factory=dict)
    incidents: dict[str, str] = field(default_factory=dict)
    seconds: Counter[tuple[str, str]] = field(default_factory=Counter)
    records: list[Recorded] = field(default_factory=list)
    number: int = 0

    def add(self, kind: type[Any], /, occurred: int | None = None, **fields: Any) -> None:
        event: Event = kind(event_id="x", occurred_at=at(self.now if occurred is None else occurred), **fields)
        position = len(self.records) + 1
        place = {"position": position, "stream": event.stream, "stream_version": position}
        self.records.append(
            Recorded(**place, recorded_at=at(self.now), event=event, previous_hash="", hash="")  # type: ignore[arg-type]
        )

    def new(self, prefix: str) -> str:
        self.number += 1
        return f"{prefix}{self.number}"

    def workers(self, *states: str) -> list[str]:
        return [worker for node in NODES if self.nodes.get(node) in states for worker in workers_of(node)]

    def pass_time(self, seconds: int, instead: dict[str, str] | None = None) -> None:
        """Let time pass. ``instead``: what some workers do meanwhile."""
        for worker in self.workers("open", "cordoned", "draining", "away"):
            kind = (instead or {}).get(worker) or self.kind(worker)
            self.seconds[worker.split("/")[0], kind] += seconds
        self.now += seconds

    def kind(self, worker: str) -> str:
        """Return what a worker does while nothing happens."""
        state = self.nodes[worker.split("/")[0]]
        if state == "away":
            return "lost"
        used_by = [WEIGHTS[name] for name, task in self.tasks.items() if worker in task.workers]
        lacked_by = [
            WEIGHTS[name] for name, task in self.tasks.items() if any(worker in w for w, _ in task.lacking.values())
        ]
        if lacked_by and max(lacked_by) > max(used_by, default=0.0):
            return "sub_healthy"
        if used_by:
            return "useful"
        wanted = any(len(task.workers) < MOST_WORKERS for task in self.tasks.values())
        return "idle" if wanted and state == "open" else "unscheduled"

    def end_incident_of(self, node: str) -> None:
        incident = self.incidents.pop(node, "")
        for task in self.tasks.values():
            task.lacking.pop(incident, None)

    # What may happen. Each does nothing where it makes no sense.

    def join(self, node: str, _: str) -> None:
        if self.nodes.get(node) in {None, "away", "left"}:
            self.add(NodeJoined, node=node, incarnation=node, agent_pid=1, domain="d", workers=workers_of(node))
            self.end_incident_of(node)
            self.nodes[node] = "cordoned" if node in self.closed else "open"

    def leave(self, node: str, _: str) -> None:
        used = {worker for task in self.tasks.values() for worker in task.workers}
        if self.nodes.get(node) in {"open", "away"} and not used & set(workers_of(node)):
            self.add(NodeLeft, node=node, incarnation=node, reason="removed")
            self.end_incident_of(node)
            self.nodes[node] = "left"

    def cordon(self, node: str, _: str) -> None:
        if self.nodes.get(node) == "open":
            self.add(NodeCordoned, node=node)
            self.closed.add(node)
            self.nodes[node] = "cordoned"

    def return_node(self, node: str, _: str) -> None:
        if self.nodes.get(node) in {"cordoned", "drained"}:
            self.add(NodeReturned, node=node, incarnation=node)
            self.closed.discard(node)
            self.nodes[node] = "open"

    def drain(self, node: str, _: str) -> None:
        used = {worker for task in self.tasks.values() for worker in task.workers}
        if self.nodes.get(node) == "open" and not used & set(workers_of(node)):
            self.add(NodeDraining, node=node, by="user", timeout_s=60.0)
            self.nodes[node] = "draining"
            self.pass_time(DRAIN_S)
            self.add(NodeDrained, node=node)
            self.nodes[node] = "drained"

    def submit(self, _: str, name: str) -> None:
        if name not in self.tasks:
            self.add(TaskSubmitted, task=name, spec=spec(name, weight=WEIGHTS[name], workers={"max": MOST_WORKERS}))
            self.tasks[name] = SimulatedTask()

    def finish(self, _: str, name: str) -> None:
        if (task := self.tasks.pop(name, None)) is not None:
            self.add(
                TaskFinished, task=name, generation=task.generation, step=9, samples_sha256="s", parameters_path="/p"
            )

    def grow(self, _: str, name: str) -> None:
        """Give a task the free workers; those that it has go on until they pause for the last second."""
        task = self.tasks.get(name)
        used = {worker for other in self.tasks.values() for worker in other.workers}
        free = [worker for worker in self.workers("open") if worker not in used]
        if task is None or not (new := free[: MOST_WORKERS - len(task.workers)]):
            return
        if len(task.workers) + len(new) < FEWEST_WORKERS[name]:
            return
        plan, before, after = self.new("p"), task.workers, [*task.workers, *new]
        change = TaskChange(
            task=name,
            reason="more",
            action="move",
            from_generation=task.generation,
            survivors=before,
            prepare=new,
            target=stage(task.generation + 1, after),
        )
        self.add(
            PlanDecided,
            decider=DECIDER,
            plan=plan,
            trigger=Trigger.NODE_JOINED,
            cause="c",
            response=Response.RECONFIGURE,
            changes=[change],
        )
        starting = dict.fromkeys(new, "transition_planned")
        task.workers, task.generation = after, task.generation + 1
        task.lacking = {i: (w, count) for i, (w, count) in task.lacking.items() if len(after) < count}
        self.pass_time(START_S - 1, starting)
        if before:
            self.moved(plan, name, "drained")
        self.pass_time(1, starting | dict.fromkeys(before, "transition_planned"))
        self.moved(plan, name, "restored", complete=True)

    def lose(self, node: str, _: str) -> None:
        """Lose a node; each task that it had a part of goes on with the others, or waits if they are too few."""
        if self.nodes.get(node) not in {"open", "cordoned"}:
            return
        hit = {name: task for name, task in self.tasks.items() if set(task.workers) & set(workers_of(node))}
        involved = {worker for task in hit.values() for worker in task.workers}
        self.nodes[node] = "away"
        self.pass_time(DETECTION_S, dict.fromkeys({*involved, *workers_of(node)}, "detection"))
        plan, incident = self.new("p"), self.new("i")
        fault = {
            "incident": incident,
            "kind": ErrorKind.NODE_LOST,
            "severity": Severity.SEV1,
            "method": Method.NODE_HEALTH,
        }
        self.add(ErrorDetected, occurred=self.now - DETECTION_S, detected_at=at(self.now), node=node, **fault)
        changes = []
        for name, task in hit.items():
            left = [worker for worker in task.workers if worker not in workers_of(node)]
            failed = [worker for worker in task.workers if worker not in left]
            if len(left) < FEWEST_WORKERS[name]:
                left = []
            task.lacking[incident] = (set(task.workers) - set(left), len(task.workers))
            target = stage(task.generation + 1, left) if left else None
            changes.append(
                TaskChange(
                    task=name,
                    reason="a node is lost",
                    action="move" if left else "pause",
                    from_generation=task.generation,
                    survivors=left,
                    failed=failed,
                    hold=True,
                    target=target,
                )
            )
            task.workers, task.generation = left, task.generation + 1
        fields: dict[str, Any] = {"trigger": Trigger.ERROR, "response": Response.RECONFIGURE, "incident": incident}
        self.add(PlanDecided, decider=DECIDER, plan=plan, cause="c", changes=changes, **fields)
        self.incidents[node] = incident
        self.pass_time(TRANSITION_S, dict.fromkeys(involved, "transition_incident"))
        for name, task in hit.items():
            self.moved(plan, name, "restored" if task.workers else "ended", complete=True)

    def moved(self, plan: str, name: str, phase: str, **fields: Any) -> None:
        generation = self.tasks[name].generation
        self.add(StateMoved, plan=plan, task=name, phase=phase, generation=generation, started_at=at(0), **fields)


def at(seconds: int) -> datetime:
    return START + timedelta(seconds=seconds)


def workers_of(node: str) -> list[str]:
    return [f"{node}/0", f"{node}/1"]


ACTIONS = [
    Simulation.join,
    Simulation.leave,
    Simulation.cordon,
    Simulation.return_node,
    Simulation.drain,
    Simulation.submit,
    Simulation.finish,
    Simulation.grow,
    Simulation.grow,
    Simulation.lose,
    Simulation.lose,
]  # growth and losses twice, since they need what the others prepare

happenings = st.tuples(
    st.sampled_from(ACTIONS), st.sampled_from(NODES), st.sampled_from(list(WEIGHTS)), st.integers(0, 20)
)


def simulate(history: list[Any]) -> Simulation:
    """Return a cluster after what has happened to it."""
    simulation = Simulation()
    for node in NODES[:2]:
        simulation.join(node, "")
    simulation.submit("", "a")
    simulation.grow("", "a")
    for action, node, name, then_s in history:
        action(simulation, node, name)
        simulation.pass_time(then_s)
    return simulation


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(happenings, max_size=30))
def test_the_ledger_finds_what_each_worker_did_in_each_second(history: list[Any]) -> None:
    simulation = simulate(history)
    views = Views()
    for recorded in simulation.records:
        evolve(views, recorded)
    report = cost_report(views, at(simulation.now), ClusterView())
    assert report.sum_check.ok
    assert report.allocated_worker_s == pytest.approx(sum(simulation.seconds.values()), abs=1e-6)
    assert report.allocated_worker_s == pytest.approx(
        allocated_worker_s(simulation.records, at(simulation.now)), abs=1e-6
    )
    found = {share.key: share.categories for share in report.breakdowns["node"]}
    expected = {
        node: {kind: float(simulation.seconds[node, kind]) for kind in CATEGORIES.values()}
        for node in NODES
        if any(simulation.seconds[node, kind] for kind in CATEGORIES.values())
    }
    assert found == {node: pytest.approx(kinds, abs=1e-6) for node, kinds in expected.items()}
