"""Nodes in simulated time: what a trace does to them, and when the system finds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from services.planner.state.cluster import node_of
from shared.events.severities import SEVERITY, ErrorKind, Method
from shared.events.union import ErrorDetected, Event, NodeJoined, WorkerSlowed
from simulator.policy import Policy
from simulator.run.agenda import Agenda, Entry, time_of
from simulator.run.execution import Execution
from simulator.run.training import Formation, Training
from simulator.workloads.trace import WISHED, Occurrence

_METHODS: dict[ErrorKind, Method] = {
    ErrorKind.NODE_LOST: Method.NODE_HEALTH,
    ErrorKind.PROCESS_EXIT: Method.PROCESS_SUPERVISION,
    ErrorKind.CONNECTION: Method.EXCEPTION,
    ErrorKind.EXCEPTION: Method.EXCEPTION,
    ErrorKind.NON_FINITE: Method.EXCEPTION,
    ErrorKind.DEVICE: Method.DEVICE,
    ErrorKind.COLLECTIVE_TIMEOUT: Method.STATISTICS,
    ErrorKind.HANG: Method.STATISTICS,
    ErrorKind.TRANSITION_FAILED: Method.TRANSITION,
    ErrorKind.BROKEN_LINK: Method.NODE_HEALTH,
    ErrorKind.DIFFERENCE: Method.EXCEPTION,
    ErrorKind.REPORTED: Method.REPORT,
}
"""The method that finds an error of each kind (docs/detector.md, "From signal to incident")."""

SLOW_STEPS = 13
"""Steps until a worker 1.3 x slower is known: the median of ``benchmarks.detection --classes straggler``."""


class _Loss(NamedTuple):
    """A lost node: the detection that is to come, when it was lost, and whether somebody wished it."""

    found: Entry
    occurred_s: float
    wished: bool


class _Error(NamedTuple):
    """A fault of a process: of which task and rank, on which worker, and when it occurred.

    ``answers``: plans that had stopped the task before.
    """

    training: Training
    kind: ErrorKind
    rank: int
    worker: str
    occurred_s: float
    answers: int


class Nodes:
    """The nodes of a trace.

    Args:
        workers_per_node: of every node.
        hardware: kind of all workers.
        policy: how long detection takes.
        agenda: simulated time.
        trainings: all tasks, by name.
        seed: of the choice of the task and worker that a light fault hits.
        emit: takes the events.
        new_id: returns the id of the next event.

    ``dead``: nodes that are lost, whether that is known or not. ``slowdowns``: of nodes that are slower than others.
    """

    def __init__(
        self,
        workers_per_node: int,
        hardware: str,
        policy: Policy,
        agenda: Agenda,
        trainings: Mapping[str, Training],
        seed: int,
        emit: Callable[[Event], None],
        new_id: Callable[[], str],
    ) -> None:
        self.dead: set[str] = set()
        self.slowdowns: dict[str, float] = {}
        self.execution: Execution
        self._workers_per_node = workers_per_node
        self._hardware = hardware
        self._policy = policy
        self._agenda = agenda
        self._trainings = trainings
        self._random = Random(seed)
        self._emit = emit
        self._new_id = new_id
        self._joined: dict[str, int] = {}
        """How often each node has joined."""
        self._losses: dict[str, _Loss] = {}
        """The nodes that are lost and not found so far."""
        self._errors: list[_Error] = []
        """Faults of processes that have not been found yet, in the order of their occurrence."""
        self._isolated: set[str] = set()
        self._slow: dict[str, tuple[float, str, int]] = {}
        """Of each worker that is known as slow: slowdown, task and generation in which that was found."""

    # ---- what is not found by the end

    @property
    def unfound(self) -> int:
        """Number of the faults that have occurred and are not found yet."""
        return sum(not loss.wished for loss in self._losses.values()) + sum(
            not self._is_over(error) for error in self._errors
        )

    # ---- what the trace says

    def happen(self, occurrence: Occurrence) -> None:
        """Let something happen."""
        node = occurrence.node
        if occurrence.change == "up":
            self._up(node)
        elif node not in self._joined or node in self.dead:
            return
        elif occurrence.change == "down":
            self._down(node, wished=occurrence.kind in WISHED)
        elif occurrence.change == "degraded":
            self.slowdowns[node] = occurrence.slowdown
            self._slowness_changed(node)
        else:
            self._error(node, occurrence.error, occurrence.task)

    def joined(self, node: str) -> NodeJoined:
        """Return the event of a node that joins, with a new incarnation."""
        self._joined[node] = number = self._joined.get(node, 0) + 1
        return NodeJoined(
            event_id=self._new_id(),
            occurred_at=self._agenda.now,
            node=node,
            incarnation=f"{node}-{number}",
            agent_pid=number,
            domain=node,
            workers=[f"{node}/{slot}" for slot in range(self._workers_per_node)],
            hardware=self._hardware,
        )

    def _up(self, node: str) -> None:
        if node in self._losses:  # who joins again was lost, which is known by that at the latest
            self._find_loss(node)
        present = node in self._joined and node not in self.dead and node not in self._isolated
        if self.slowdowns.pop(node, None) is not None and present:
            self._slowness_changed(node)
        if present:
            return
        self.dead.discard(node)
        self._isolated.discard(node)
        for worker in [worker for worker in self._slow if node_of(worker) == node]:
            del self._slow[worker]
        self._emit(self.joined(node))

    def _down(self, node: str, *, wished: bool) -> None:
        now_s = self._agenda.now_s
        self.dead.add(node)
        self.slowdowns.pop(node, None)
        step_s = 0.0
        for training in self._trainings.values():
            if training.ended:
                continue
            trains = _works_on(training, node)
            awaited = training.part is not None and node in training.part.nodes
            if not trains and not awaited:
                continue
            if trains or (training.part is not None and training.part.stopped):
                step_s = min(step_s or training.step_s, training.step_s)
                self.execution.interrupt(training, now_s)
            else:
                self.execution.lose_newcomer(training)
        after_s = self._policy.timing.detection_s(ErrorKind.NODE_LOST, step_s)
        entry = self._agenda.at(now_s + after_s, lambda: self._find_loss(node))
        self._losses[node] = _Loss(entry, now_s, wished)

    def _find_loss(self, node: str) -> None:
        loss = self._losses.pop(node)
        loss.found.cancel()
        hit = [t for t in self._trainings.values() if t.formation is not None and node in t.formation.nodes]
        for training in hit:
            self.execution.report(training)
        self._isolated.discard(node)
        event_id = self._new_id()
        self._emit(
            ErrorDetected(
                event_id=event_id,
                occurred_at=time_of(loss.occurred_s),
                incident=f"i-{event_id[:8]}",
                kind=ErrorKind.NODE_LOST,
                severity=SEVERITY[ErrorKind.NODE_LOST],
                method=_METHODS[ErrorKind.NODE_LOST],
                detected_at=self._agenda.now,
                node=node,
                evidence={"tasks": sorted(training.name for training in hit)},
            )
        )

    def _error(self, node: str, kind: ErrorKind, task: str) -> None:
        """Let a process of a task fail; what the trace leaves open, the seed chooses.

        Without a task: one on the node. With one: its process on the node, or any of it, since the fault goes with the
        program; of a task that this run does not have, as without. Nothing happens where none runs.
        """
        running = [t for t in self._trainings.values() if t.formation is not None and not t.ended]
        if task in self._trainings:
            running = [training for training in running if training.name == task]
        else:
            running = [training for training in running if _works_on(training, node)]
        if not running:
            return
        training = running[self._random.randrange(len(running))]
        formation = training.formation
        assert formation is not None
        ranks = [rank for rank, worker in enumerate(formation.members) if node_of(worker) == node]
        ranks = ranks or list(range(len(formation.members)))
        rank = ranks[self._random.randrange(len(ranks))]
        now_s = self._agenda.now_s
        self.execution.interrupt(training, now_s)
        micro_batches = -(-training.spec.batch.micro_batches // formation.layout.data)
        after_s = self._policy.timing.detection_s(kind, training.step_s, micro_batches)
        error = _Error(training, kind, rank, formation.members[rank], now_s, training.answers)
        self._errors.append(error)
        self._agenda.at(now_s + after_s, lambda: self._find_error(error))

    def _is_over(self, error: _Error) -> bool:
        """Return whether a plan for another fault has had all processes begin anew meanwhile, or they have ended."""
        training = error.training
        gone = training.formation is None or training.ended or node_of(error.worker) in self.dead
        return gone or training.answers > error.answers

    def _find_error(self, error: _Error) -> None:
        """Report a fault of a process, unless it is over."""
        self._errors.remove(error)
        if self._is_over(error):
            return
        training, kind, rank, worker, occurred_s, _ = error
        formation = training.formation
        assert formation is not None
        self.execution.report(training)
        if SEVERITY[kind].value == "SEV1":
            self._isolated.add(node_of(worker))
        event_id = self._new_id()
        self._emit(
            ErrorDetected(
                event_id=event_id,
                occurred_at=time_of(occurred_s),
                incident=f"i-{event_id[:8]}",
                kind=kind,
                severity=SEVERITY[kind],
                method=_METHODS[kind],
                detected_at=self._agenda.now,
                node=node_of(worker),
                worker=worker,
                task=training.name,
                rank=rank,
                generation=_generation_at_work(training, formation),
                step=training.steps,
            )
        )

    # ---- slow nodes

    def _slowness_changed(self, node: str) -> None:
        for training in self._trainings.values():
            if training.formation is not None and node in training.formation.nodes:
                training.advance(self._agenda.now_s)
                self.execution.slow_down(training)
        self.watch(node)

    def watch(self, node: str) -> None:
        """Have the slowness of a node's workers found, in the task that trains on them."""
        if not self._policy.detects_slow:
            return
        step_s = max((t.step_s for t in self._trainings.values() if _trains_on(t, node)), default=0.0)
        if step_s > 0.0 or any(node_of(worker) == node for worker in self._slow):
            self._agenda.at(self._agenda.now_s + SLOW_STEPS * step_s, lambda: self._find_slowness(node))

    def _find_slowness(self, node: str) -> None:
        if node in self.dead or node in self._isolated:
            return
        slowdown = self.slowdowns.get(node, 1.0)
        for slot in range(self._workers_per_node):
            worker = f"{node}/{slot}"
            training = next((t for t in self._trainings.values() if _trains_with(t, worker)), None)
            known, task, generation = self._slow.get(worker, (1.0, "", 0))
            if training is not None and training.formation is not None:
                task, generation = training.name, training.formation.generation
            if known == slowdown or not task:
                continue
            self._slow[worker] = slowdown, task, generation
            self._emit(
                WorkerSlowed(
                    event_id=self._new_id(),
                    occurred_at=self._agenda.now,
                    node=node,
                    worker=worker,
                    slowdown=slowdown,
                    task=task,
                    generation=generation,
                    step=training.steps if training is not None else 0,
                )
            )


def _generation_at_work(training: Training, formation: Formation) -> int:
    """Return the generation of a task's processes: where a recovery has suspended the old one, that being formed."""
    part = training.part
    stages = part.change.stages if part is not None and part.change.hold else []
    return stages[-1].generation if stages else formation.generation


def _works_on(training: Training, node: str) -> bool:
    """Return whether a fault of a node stops a task: not where a plan that has stopped it goes on without the node."""
    part = training.part
    left = part is not None and part.stopped and node not in part.nodes
    return training.formation is not None and node in training.formation.nodes and not left


def _trains_on(training: Training, node: str) -> bool:
    return training.formation is not None and training.steps_per_s > 0.0 and node in training.formation.nodes


def _trains_with(training: Training, worker: str) -> bool:
    return _trains_on(training, node_of(worker)) and worker in (
        training.formation.members if training.formation else ()
    )
