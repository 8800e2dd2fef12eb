"""Builders for the monitor's inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, TypeVar

from services.detector.decide import decide
from services.detector.decisions.admission import Ask, Liveness
from services.detector.decisions.decision import DetectorLimits, Effect, Note, Revoke
from services.detector.decisions.inputs import Echo, Greeting, Input, Probed, Tick
from services.detector.evolve import evolve
from services.detector.nodes.leftovers import Clean
from services.detector.nodes.probing import ProbeQuestion
from services.detector.progress.standstill import StacksQuestion
from services.detector.state.cluster import DetectorState
from services.detector.state.stalls import StallLimits
from services.detector.state.unlogged import SelfTestQuestion
from services.planner.decide import DECIDER
from shared.events.plans import Layout, Response, TaskChange, Trigger
from shared.events.union import ErrorDetected, Event, PlanDecided, Recorded, StateMoved, TaskProgressed, TaskSubmitted
from shared.messages.admission import Answer, Departure, DepartureAnswer, Hello
from shared.messages.probes import Outcome
from shared.messages.signals import (
    Heartbeat,
    ProcessExited,
    RankCheckpointed,
    RankFinished,
    RankRaised,
    Signal,
    WorkerStatus,
)
from shared.service.core import Append, Logged, Started
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC, stage

K = TypeVar("K")

START = datetime(2026, 1, 1, tzinfo=UTC)
LIMITS = DetectorLimits(
    heartbeat_interval_s=0.25,
    node_timeout_s=1.5,
    progress_interval_s=5.0,
    restart_window_s=600.0,
    stalls=StallLimits(
        hang_factor=3.0,
        hang_floor_s=3.0,
        stop_factor=3.0,
        stop_floor_s=3.0,
        collective_floor_s=5.0,
        slow_region_timeout_s=120.0,
    ),
)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def plan(name: str, cause: str, *changes: TaskChange, response: Response = Response.RESTART) -> PlanDecided:
    return PlanDecided(
        event_id=f"event of {name}",
        occurred_at=START,
        decider=DECIDER,
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
    """What the detector decided; events untyped, for tests that look at the fields of one they expect."""

    effects: list[Effect] = field(default_factory=list)

    @property
    def events(self) -> list[Any]:
        return [event for append in self._of(Append) for event in append.events]

    @property
    def notes(self) -> list[str]:
        return [note.text for note in self._of(Note)]

    @property
    def cleans(self) -> list[Clean]:
        return self._of(Clean)

    @property
    def revokes(self) -> list[Revoke]:
        return self._of(Revoke)

    @property
    def probes(self) -> list[ProbeQuestion]:
        return self._of(ProbeQuestion)

    @property
    def stacks(self) -> list[StacksQuestion]:
        return self._of(StacksQuestion)

    @property
    def tests(self) -> list[SelfTestQuestion]:
        return self._of(SelfTestQuestion)

    def _of(self, kind: type[K]) -> list[K]:
        return [effect for effect in self.effects if isinstance(effect, kind)]


class Monitor:
    """The detector's core with a state, which began to listen at a time. ``log``: what it has appended and folded."""

    def __init__(
        self, started_at: datetime, state: DetectorState | None = None, limits: DetectorLimits = LIMITS
    ) -> None:
        self.state = state if state is not None else DetectorState()
        self.limits = limits
        self.log: list[Event] = []
        self.feed(Started(), started_at)

    def feed(self, item: Input, at: datetime) -> Found:
        self.state, effects = decide(self.state, item, at, self.limits)
        found = Found(effects)
        self.log += found.events
        return found

    def fold(self, event: Event) -> None:
        """An event of the log on which nothing is decided."""
        self.log.append(event)
        self.state = evolve(self.state, event, event.occurred_at)

    def record(self, event: Event, at: datetime) -> Found:
        """An event that the log delivers at a time."""
        self.fold(event)
        record = Recorded(
            position=1,
            stream=event.stream,
            stream_version=1,
            recorded_at=at,
            event=event,
            previous_hash="",
            hash="",
        )
        return self.feed(Logged(record), at)

    def echo(self, at: datetime) -> None:
        self.feed(Echo(), at)

    def tick(self, at: datetime) -> Found:
        return self.feed(Tick(), at)

    def probed(
        self,
        question: ProbeQuestion,
        outcomes: Mapping[str, Outcome],
        at: datetime,
        round_trips_s: Mapping[str, float] = MappingProxyType({}),
    ) -> Found:
        return self.feed(Probed(question, outcomes, round_trips_s), at)

    def hello(self, hello: Hello, answers: Mapping[str, Liveness], at: datetime) -> Answer | Ask:
        [answer] = self.feed(Greeting(hello, answers), at).effects
        assert isinstance(answer, Answer | Ask)
        return answer


class Cluster:
    """A monitor with nodes that can send heartbeats; ``gpt`` trains in generation 1 on one worker a node."""

    def __init__(
        self,
        nodes: int = 3,
        *,
        max_restarts: int = 3,
        trained: bool = True,
        layout: Layout | None = None,
        supervised: bool = False,
        first: Callable[[str], dict[str, Any]] = lambda _: {},
    ) -> None:
        """``trained``: generation 1 has formed; else its processes are being started. ``layout``: if not only data.

        ``supervised``: whether the nodes' agents have a supervisor. ``first``: what else a node's first heartbeat says.
        """
        self.supervised = supervised
        self.monitor = Monitor(at(0))
        self.monitor.echo(at(0))
        self.names = [f"n{i}" for i in range(nodes)]
        self.workers = [f"{n}/0" for n in self.names]
        self.generation = 1
        self.sequences: Counter[str] = Counter()
        """Of the newest heartbeat of each node."""
        self.signals = 0
        spec = parse_spec({**SPEC, "max_restarts": max_restarts})
        self.fold(TaskSubmitted(event_id="submitted", occurred_at=START, task="gpt", spec=spec))
        for name in self.names:
            self.beat(name, 0.0, task=None, **first(name))
        target = stage(1, self.workers, source="initial")
        target = target.model_copy(update={"layout": layout or target.layout})
        change = TaskChange(
            task="gpt", reason="new", action="move", from_generation=0, target=target, prepare=self.workers
        )
        self.fold(plan("p1", "submitted", change, response=Response.RECONFIGURE))
        if trained:
            self.fold(moved("p1", 1, "restored", complete=True))

    def fold(self, *events: Event) -> Found:
        return Found([effect for event in events for effect in self.monitor.record(event, at(0)).effects])

    def beat(self, node: str, seconds: float, *, task: Any = "gpt", **status: Any) -> Found:
        """One heartbeat of a node at a time; ``status`` overrides what its worker reports."""
        self.sequences[node] += 1
        worker = f"{node}/0"
        fields: dict[str, Any] = {"worker": worker}
        if task is not None:
            fields |= {"state": "training", "task": task, "generation": self.generation, "pid": 100, "phase": "compute"}
            fields |= {"rank": self.names.index(node), "progress_age_s": 0.01}
        heartbeat = Heartbeat(
            node=node,
            incarnation=status.pop("incarnation", f"first {node}"),
            agent_pid=1,
            sequence=self.sequences[node],
            sent_at=at(seconds),
            interval_s=0.25,
            probe=status.pop("probe", ""),
            network=status.pop("network", ""),
            domain=status.pop("domain", "default"),
            hardware=status.pop("hardware", "cpu"),
            supervisor=status.pop("supervisor", f"supervisor of {node}" if self.supervised else ""),
            copies=status.pop("copies", []),
            workers=[WorkerStatus.model_validate({**fields, **status})],
        )
        return self.monitor.feed(heartbeat, at(seconds))

    def signal(self, signal: Signal, seconds: float) -> list[Any]:
        """A signal that the monitor gets at a time."""
        return self.monitor.feed(signal, at(seconds)).events

    def depart(self, node: str, seconds: float, *, verdict: str = "left", **fields: Any) -> list[Any]:
        """A departure that the monitor gets at a time; ``verdict``: of the answer."""
        departure = Departure(**{"node": node, "incarnation": f"first {node}", "reason": "asked to end", **fields})
        found = self.monitor.feed(departure, at(seconds))
        answer = found.effects[-1]
        assert isinstance(answer, DepartureAnswer)
        assert answer.verdict == verdict
        return found.events

    def listen_until(self, seconds: float) -> None:
        """Let time pass in which the monitor receives its own message, and nothing else happens."""
        for tenth in range(round(seconds * 10) + 1):
            self.monitor.echo(at(tenth / 10))

    def tick(self, seconds: float, *, echo: bool = True) -> list[Any]:
        if echo:
            self.monitor.echo(at(seconds))
        return self.monitor.tick(at(seconds)).events

    def exited(self, worker: str, seconds: float, *, code: int = -9, step: int = 16, **rest: Any) -> ProcessExited:
        return ProcessExited.model_validate(
            {"pid": 100, "exit_code": code, "last_output": "the end", **self._about(worker, seconds, step, **rest)}
        )

    def raised(self, worker: str, seconds: float, cause: str, *, step: int = 16, **rest: Any) -> RankRaised:
        errors = {"communication": "CommunicationFailed", "non_finite": "NonFiniteValue", "refused": "ImportError"}
        error = errors.get(cause, "ValueError")
        text = f"Traceback ...\n{error}: it broke\n"
        raised = {"cause": cause, "error": error, "detail": "it broke", "traceback": text}
        return RankRaised.model_validate({**self._about(worker, seconds, step, **rest), **raised})

    def checkpointed(self, worker: str, seconds: float, *, step: int = 16, **rest: Any) -> RankCheckpointed:
        return RankCheckpointed.model_validate({"path": f"/step-{step}", **self._about(worker, seconds, step, **rest)})

    def finished(self, worker: str, seconds: float, *, step: int = 16) -> RankFinished:
        result = {"samples_sha256": "abc", "parameters_path": "/parameters", "loss": None}
        return RankFinished.model_validate({**self._about(worker, seconds, step), **result})

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
    events = [event for event in events if not isinstance(event, TaskProgressed)]  # before the error
    assert [type(e) for e in events] == [ErrorDetected]
    return events[0]  # type: ignore[no-any-return]


def timed(cluster: Cluster, *steps_s: float) -> None:
    """The first steps of its generation took these times: their mean and deviation are known."""
    for step, step_s in enumerate(steps_s, 1):
        cluster.beat(cluster.names[0], step / 10, step=step, step_s=step_s, steps_timed=step)


def restart_plan(
    name: str, error: ErrorDetected, cluster: Cluster, worker: str, generation: int = 1, source: Any = "live"
) -> None:
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
        target=stage(generation + 2, cluster.workers, source=source),
    )
    cluster.fold(plan(name, error.event_id, change))


def grow_plan(cluster: Cluster, prepare: list[str]) -> None:
    """The plan by which a healthy task takes more workers at the next step boundary."""
    change = TaskChange(
        task="gpt",
        reason="grow",
        action="move",
        from_generation=1,
        survivors=cluster.workers,
        prepare=prepare,
        target=stage(2, [*cluster.workers, *prepare]),
    )
    cluster.fold(plan("p2", "a node joined", change, response=Response.RECONFIGURE))


def complete(name: str, cluster: Cluster, generation: int, step: int = 17) -> None:
    cluster.fold(moved(name, generation - 1, "resumed", step=step))
    cluster.fold(moved(name, generation, "restored", step=step, complete=True))
    cluster.generation = generation


def lose(cluster: Cluster, node: str) -> list[Any]:
    """Bring all nodes to second 10, and let one fall silent there."""
    cluster.listen_until(10.0)
    for name in cluster.names:
        cluster.beat(name, 10.0)
    for tenth in range(101, 117):
        for name in cluster.names:
            if name != node:
                cluster.beat(name, tenth / 10)
        if events := cluster.tick(tenth / 10):
            return events
    return []
