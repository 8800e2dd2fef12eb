"""A harness for the pure core: plays agents, log and timers, and checks the invariants of commands and events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from services.planner.decide import DECIDER
from services.transition.decide import decide
from services.transition.evolve import evolve
from services.transition.state import (
    Cancel,
    Effect,
    Input,
    Outcome,
    Replied,
    Send,
    State,
    Timer,
    TimerFired,
    TransitionLimits,
    node_of,
)
from shared.events.plans import Layout, Member, Response, Stage, TaskChange, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import (
    ErrorDetected,
    Event,
    NodeJoined,
    NodeLeft,
    NodeReturned,
    PlanDecided,
    Recorded,
    StateMoved,
    TaskFailed,
    TaskFinished,
    TaskStopped,
    TaskSubmitted,
)
from shared.messages.commands import (
    ConfigureTask,
    DrainTask,
    HoldTask,
    OpenStore,
    Prepare,
    ReleaseTask,
    Reply,
    StopTask,
    WorkerResult,
)
from shared.service.core import Append, Logged, Started
from shared.tasks.specification import Batch, ModelShape, TaskSpec

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
Source = Literal["live", "take", "checkpoint", "initial"]


def spec(name: str) -> TaskSpec:
    return TaskSpec(
        name=name,
        model=ModelShape(layers=2, hidden=8, heads=2, sequence_length=8),
        batch=Batch.model_validate({"global": 12}),
        steps=100,
        data="corpus.txt",
    )


def stage(
    generation: int,
    workers: Sequence[str],
    source: Source = "live",
    take: Iterable[str] = (),
    interrupted: bool = False,
) -> Stage:
    return Stage(
        kind="interrupted" if interrupted else "boundary",
        generation=generation,
        layout=Layout(tensor=1, pipeline=1, data=len(workers), micro_batch=1),
        members=[
            Member(rank=rank, worker=w, node=node_of(w), source="take" if w in take else source)
            for rank, w in enumerate(workers)
        ],
    )


def change(
    task: str = "a", action: Literal["move", "stop", "pause", "end", "none"] = "move", **rest: Any
) -> TaskChange:
    return TaskChange(task=task, reason="test", action=action, **{"from_generation": 1, **rest})


THREE = ["n0/0", "n1/0", "n2/0"]
TWO = THREE[:2]


def restart_change(**rest: Any) -> TaskChange:
    """Return the change that answers a SEV2 fault of n2/0, with survivors n0/0 and n1/0."""
    fields: dict[str, Any] = {
        "survivors": TWO,
        "failed": ["n2/0"],
        "hold": True,
        "interrupted": stage(2, TWO, interrupted=True),
        "prepare": ["n2/0"],
        "target": stage(3, THREE, take=["n2/0"]),
    }
    return change(**{**fields, **rest})


class Drive:
    """The service's core with the world around it in memory: a log, unanswered commands, timers."""

    def __init__(self, tasks: Sequence[str] = ("a",), nodes: Sequence[str] = ("n0", "n1", "n2")) -> None:
        self.state = State(limits=TransitionLimits())
        self.at = EPOCH
        self.records: list[Recorded] = []
        self.waiting: dict[str, Send] = {}
        self.sent: list[Send] = []
        self.moved: list[StateMoved] = []
        self.timers: list[Timer] = []
        self.plans: dict[tuple[str, str], TaskChange] = {}
        self.outcomes: dict[tuple[str, str], Outcome] = {}
        for node in nodes:
            self.log(
                NodeJoined(
                    event_id=f"join-{node}",
                    occurred_at=self.at,
                    node=node,
                    incarnation="1",
                    agent_pid=1,
                    domain="d",
                    workers=[f"{node}/0", f"{node}/1"],
                )
            )
        for task in tasks:
            self.log(TaskSubmitted(event_id=f"submit-{task}", occurred_at=self.at, task=task, spec=spec(task)))

    # ---- inputs

    def record(self, event: Event) -> Recorded:
        position = len(self.records) + 1
        recorded = Recorded(
            position=position,
            stream=event.stream,
            stream_version=1,
            recorded_at=self.at,
            event=event,
            previous_hash="",
            hash="",
        )
        self.records.append(recorded)
        return recorded

    def log(self, event: Event) -> list[Effect]:
        return self.feed(Logged(self.record(event)))

    def feed(self, item: Input) -> list[Effect]:
        self.at += timedelta(milliseconds=10)
        before = self.state
        if isinstance(item, Logged):
            self.state = evolve(before, item.record.event, self.at)
        self.state, effects = decide(self.state, item, self.at)
        self._perform(effects)
        self._outcomes(before)
        return effects

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    assert effect.command.command_id not in self.waiting, "sent twice"
                    assert effect.node not in self.state.lost
                    self.waiting[effect.command.command_id] = effect
                    self.sent.append(effect)
                case Cancel(command_id=command_id):
                    self.waiting.pop(command_id, None)
                case Append(events=[event]):
                    assert isinstance(event, StateMoved)
                    assert event.event_id not in {m.event_id for m in self.moved}, "recorded twice"
                    self.moved.append(event)
                    self.record(event)
                    # The log delivers the event later, which must change nothing.
                    again = evolve(self.state, event, self.at)
                    assert decide(again, Logged(self.records[-1]), self.at)[1] == []
                case Timer():
                    self.timers.append(effect)

    def _outcomes(self, before: State) -> None:
        """Record the outcome of each part. A part must end once."""
        parts = {part.task: part for part in self.state.parts()}
        for old in before.parts():
            new = parts.get(old.task)
            if new is None:
                assert not old.active, "forgotten"
                continue
            replaced = new.plan != old.plan
            if old.active and (replaced or not new.active):
                ended = Outcome.SUPERSEDED if replaced else new.outcome
                assert self.outcomes.setdefault((old.plan, old.task), ended) is ended
        for new in parts.values():
            if not new.active and (new.plan, new.task) not in self.outcomes:
                self.outcomes[new.plan, new.task] = new.outcome

    def plan(self, name: str, *changes: TaskChange, incident: str | None = None) -> list[Effect]:
        for one in changes:
            self.plans[name, one.task] = one
        return self.log(
            PlanDecided(
                event_id=f"event-{name}",
                occurred_at=self.at,
                decider=DECIDER,
                plan=name,
                trigger=Trigger.ERROR,
                cause="cause",
                incident=incident,
                response=Response.RECONFIGURE,
                changes=list(changes),
            )
        )

    def error(self, kind: ErrorKind, node: str | None = None, task: str | None = None, step: int | None = None) -> None:
        self.log(self._error(kind, node, task, step))

    def _error(
        self, kind: ErrorKind, node: str | None = None, task: str | None = None, step: int | None = None
    ) -> ErrorDetected:
        return ErrorDetected(
            event_id=f"error-{len(self.records)}",
            occurred_at=self.at,
            detected_at=self.at,
            incident=f"incident-{len(self.records)}",
            kind=kind,
            severity=Severity.SEV1,
            method=Method.NODE_HEALTH,
            node=node,
            task=task,
            step=step,
        )

    def lost(self, node: str) -> ErrorDetected:
        """Return the event of a lost node."""
        return self._error(ErrorKind.NODE_LOST, node=node)

    def leave(self, node: str) -> None:
        """The node leaves in order."""
        incarnation = self.state.incarnations[node]
        self.log(
            NodeLeft(
                event_id=f"left-{len(self.records)}",
                occurred_at=self.at,
                node=node,
                incarnation=incarnation,
                reason="asked to end",
            )
        )

    def put_back(self, node: str) -> None:
        """A user returns the node."""
        incarnation = self.state.incarnations[node]
        event_id = f"returned-{len(self.records)}"
        self.log(NodeReturned(event_id=event_id, occurred_at=self.at, node=node, incarnation=incarnation))

    def lose(self, node: str) -> None:
        self.log(self.lost(node))

    def finish(self, task: str) -> None:
        self.log(
            TaskFinished(
                event_id=f"finish-{task}-{len(self.records)}",
                occurred_at=self.at,
                task=task,
                generation=1,
                step=100,
                samples_sha256="",
                parameters_path="",
            )
        )

    def fail(self, task: str) -> None:
        self.log(
            TaskFailed(
                event_id=f"fail-{task}-{len(self.records)}",
                occurred_at=self.at,
                task=task,
                generation=1,
                step=50,
                reason="too often",
            )
        )

    def stopped(self, task: str, step: int) -> None:
        """Log where the task's state was saved, as the detector does."""
        self.log(
            TaskStopped(
                event_id=f"stopped-{task}-{len(self.records)}",
                occurred_at=self.at,
                task=task,
                generation=1,
                step=step,
                path=f"/step-{step}",
            )
        )

    def fire(self, timer: Timer) -> None:
        self.timers.remove(timer)
        self.feed(TimerFired(timer.plan, timer.task, timer.name, self.at))

    def reply(self, send: Send, **rest: Any) -> list[Effect]:
        """Reply to a command as an agent would, but for the fields in ``rest``."""
        del self.waiting[send.command.command_id]
        return self.feed(Replied(send.command.command_id, answer(send, **rest), self.at))

    def silence(self, send: Send) -> list[Effect]:
        del self.waiting[send.command.command_id]
        return self.feed(Replied(send.command.command_id, None, self.at))

    # ---- what was sent and recorded

    def open(self, kind: str = "", task: str = "", node: str = "") -> list[Send]:
        """Return the unanswered commands, of a kind, task and node where given."""
        return [
            s
            for s in self.waiting.values()
            if (not kind or s.command.kind == kind)
            and (not task or s.command.task == task)
            and (not node or s.node == node)
        ]

    def one(self, kind: str, task: str = "", node: str = "") -> Send:
        (found,) = self.open(kind, task, node)
        return found

    def kinds(self) -> list[str]:
        """Return the unanswered commands as ``kind@node``, sorted."""
        return sorted(f"{s.command.kind}@{s.node}" for s in self.waiting.values())

    def answer_all(self) -> None:
        while self.waiting:
            self.reply(next(iter(self.waiting.values())))

    def phases(self, task: str = "a") -> list[str]:
        return [m.phase for m in self.moved if m.task == task]

    def restarted(self) -> Drive:
        """Return a restarted service: it has folded the log and then decided once."""
        other = Drive(tasks=(), nodes=())
        other.records, other.at, other.moved = list(self.records), self.at, list(self.moved)
        for record in self.records:
            other.state = evolve(other.state, record.event, self.at)
        other.state, effects = decide(other.state, Started(), other.at)
        other._perform(effects)
        return other


def answer(send: Send, **rest: Any) -> Reply:
    """Return the reply of an agent that has carried out the command, but for the fields in ``rest``."""
    command = send.command
    fields: dict[str, Any] = {"command_id": command.command_id, "node": send.node, "ok": True}
    match command:
        case Prepare() | HoldTask() | DrainTask() | StopTask() | ReleaseTask():
            fields["workers"] = {w: WorkerResult(pid=100 + int(w[-1]), step=7) for w in command.workers}
        case ConfigureTask():
            sources = {m.worker: m.source for m in command.stage.members if m.node == send.node}
            fields["workers"] = {
                w: WorkerResult(
                    pid=100 + int(w[-1]),
                    step=8,
                    source="own" if source == "live" else "live",
                    phases={"rebuild": 0.1 + int(w[-1]), "agree": 0.01},
                    deal={"0": [0, 2], "1": [1, 3]},
                )
                for w, source in sources.items()
            }
        case OpenStore():
            fields |= {"host": "127.0.0.1", "port": 29500}
    if rest.get("ok") is False and "workers" not in rest:
        fields["workers"] = {}
    return Reply.model_validate({**fields, **rest})
