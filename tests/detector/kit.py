"""Builders for the monitor's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from services.detector import stalls
from services.detector.core import Clean, Limits, Monitor
from shared.events import ErrorDetected, Event, PlanDecided, StateMoved, TaskSubmitted
from shared.plans import Layout, Member, Response, Stage, TaskChange, Trigger
from shared.signals import Heartbeat, ProcessExited, RankRaised, Signal, WorkerStatus
from shared.tasks import parse_spec

START = datetime(2026, 1, 1, tzinfo=UTC)
LIMITS = Limits(
    node_timeout_s=1.5,
    progress_interval_s=5.0,
    restart_window_s=600.0,
    stalls=stalls.Limits(
        hang_factor=3.0,
        hang_floor_s=3.0,
        stop_factor=3.0,
        stop_floor_s=3.0,
        collective_floor_s=5.0,
        slow_region_timeout_s=120.0,
    ),
)
SPEC = {
    "name": "gpt",
    "model": {"layers": 2, "hidden": 64, "heads": 4, "sequence_length": 32},
    "batch": {"global": 12},
    "steps": 100,
    "data": "corpus.txt",
}


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def stage(generation: int, workers: list[str], kind: Any = "boundary", source: Any = "live") -> Stage:
    members = [Member(rank=r, worker=w, node=w.rpartition("/")[0], source=source) for r, w in enumerate(workers)]
    layout = Layout(tensor=1, pipeline=1, data=len(workers), micro_batch=1)
    return Stage(kind=kind, generation=generation, layout=layout, members=members)


def plan(name: str, cause: str, *changes: TaskChange, response: Response = Response.RESTART) -> PlanDecided:
    return PlanDecided(
        event_id=f"event of {name}",
        occurred_at=START,
        plan=name,
        trigger=Trigger.ERROR,
        cause=cause,
        response=response,
        changes=list(changes),
    )


def moved(name: str, generation: int, phase: Any, **rest: Any) -> StateMoved:
    fields = {"event_id": f"{name}/{generation}/{phase}", "occurred_at": START, "started_at": START, "task": "gpt"}
    return StateMoved.model_validate({**fields, "plan": name, "generation": generation, "phase": phase, **rest})


@dataclass
class Found:
    """What the monitor decided; events untyped, for tests that look at the fields of one they expect."""

    events: list[Any] = field(default_factory=list)
    cleans: list[Clean] = field(default_factory=list)


class Cluster:
    """A monitor with nodes that can send heartbeats; ``gpt`` trains in generation 1 on one worker a node."""

    def __init__(self, nodes: int = 3, *, max_restarts: int = 3) -> None:
        self.monitor = Monitor(limits=LIMITS, started_at=at(0))
        self.monitor.echo(at(0))
        self.names = [f"n{i}" for i in range(nodes)]
        self.workers = [f"{n}/0" for n in self.names]
        self.generation = 1
        self.sequence = 0
        self.signals = 0
        spec = parse_spec({**SPEC, "max_restarts": max_restarts})
        self.fold(TaskSubmitted(event_id="submitted", occurred_at=START, task="gpt", spec=spec))
        for name in self.names:
            self.beat(name, 0.0, task=None)
        first = stage(1, self.workers, source="initial")
        change = TaskChange(
            task="gpt", reason="new", action="move", from_generation=0, target=first, prepare=self.workers
        )
        self.fold(plan("p1", "submitted", change, response=Response.RECONFIGURE))
        self.fold(moved("p1", 1, "restored", complete=True))

    def fold(self, *events: Event) -> Found:
        decision = Found()
        for event in events:
            found = self.monitor.record(event, at(0))
            decision.events += found.events
        return decision

    def beat(self, node: str, seconds: float, *, task: Any = "gpt", **status: Any) -> Found:
        """One heartbeat of a node at a time; ``status`` overrides what its worker reports."""
        self.sequence += 1
        worker = f"{node}/0"
        fields: dict[str, Any] = {"worker": worker}
        if task is not None:
            fields |= {"state": "training", "task": task, "generation": self.generation, "pid": 100, "phase": "compute"}
            fields |= {"rank": self.names.index(node), "progress_age_s": 0.01}
        heartbeat = Heartbeat(
            node=node,
            incarnation=status.pop("incarnation", f"first {node}"),
            agent_pid=1,
            sequence=self.sequence,
            sent_at=at(seconds),
            interval_s=0.25,
            workers=[WorkerStatus.model_validate({**fields, **status})],
        )
        decision = self.monitor.heartbeat(heartbeat, at(seconds))
        return Found(list(decision.events), decision.cleans)

    def signal(self, signal: Signal, seconds: float) -> list[Any]:
        """A signal that the monitor gets at a time."""
        return list(self.monitor.signal(signal, at(seconds)).events)

    def listen_until(self, seconds: float) -> None:
        """Let time pass in which the monitor hears itself, and nothing else happens."""
        for tenth in range(round(seconds * 10) + 1):
            self.monitor.echo(at(tenth / 10))

    def tick(self, seconds: float, *, echo: bool = True) -> list[Any]:
        if echo:
            self.monitor.echo(at(seconds))
        return list(self.monitor.tick(at(seconds)).events)

    def exited(self, worker: str, seconds: float, *, code: int = -9, step: int = 16, **rest: Any) -> ProcessExited:
        return ProcessExited.model_validate(
            {**self._about(worker, seconds, step, **rest), "pid": 100, "exit_code": code, "last_output": "the end"}
        )

    def raised(self, worker: str, seconds: float, cause: str, *, step: int = 16, **rest: Any) -> RankRaised:
        error = {"exception": "ValueError", "communication": "CommunicationFailed", "non_finite": "NonFiniteValue"}
        said = {"cause": cause, "error": error[cause], "detail": "it broke", "traceback": "Traceback ..."}
        return RankRaised.model_validate({**self._about(worker, seconds, step, **rest), **said})

    def _about(self, worker: str, seconds: float, step: int, **rest: Any) -> dict[str, Any]:
        self.signals += 1
        node = worker.rpartition("/")[0]
        about = {
            "signal_id": f"signal {self.signals}",
            "node": node,
            "incarnation": f"first {node}",
            "occurred_at": at(seconds),
            "task": "gpt",
            "worker": worker,
            "generation": self.generation,
            "rank": self.names.index(node),
            "step": step,
        }
        return {**about, **rest}


def only_error(events: Sequence[Any]) -> ErrorDetected:
    assert [type(e) for e in events] == [ErrorDetected]
    return events[0]  # type: ignore[no-any-return]


def restart_plan(name: str, error: ErrorDetected, cluster: Cluster, worker: str, generation: int = 1) -> None:
    """The plan that answers a dead rank: survivors finish the step, the rank comes back at the boundary."""
    survivors = [w for w in cluster.workers if w != worker]
    change = TaskChange(
        task="gpt",
        reason="restart",
        action="move",
        from_generation=generation,
        survivors=survivors,
        failed=[worker],
        hold=True,
        interrupted=stage(generation + 1, survivors, kind="interrupted"),
        prepare=[worker],
        target=stage(generation + 2, cluster.workers),
    )
    cluster.fold(plan(name, error.event_id, change))
