"""A log in memory that the planner answers: events with increasing times, folded as the service folds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from services.planner.decide import SERVICE
from services.planner.problem.problem import Solve
from services.planner.replay.log_fold import Fold
from services.planner.state.admission import due
from services.planner.state.cluster import State, Task, node_of
from services.planner.timers import next_timer
from shared.events.plans import Problem, Stage, TaskChange
from shared.events.severities import SEVERITY, ErrorKind, Method, Severity
from shared.events.union import (
    EVENT,
    ClusterConfigured,
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
    TaskChanged,
    TaskCheckpointed,
    TaskFailed,
    TaskFinished,
    TaskProgressed,
    TaskResultUnwritten,
    TaskStarving,
    TaskStopped,
    TaskStopRefused,
    TaskStopRequested,
    TaskSubmitted,
    WorkerSlowed,
    derived_id,
)
from shared.planning.solver import solve_with_alternatives
from shared.tasks.specification import TaskSpec, parse_spec

START = datetime(2024, 1, 1, tzinfo=UTC)


def spec(name: str = "a", **fields: Any) -> TaskSpec:
    """A small task; fields replace those of the specification."""
    return parse_spec(
        {
            "name": name,
            "model": {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": 32},
            "batch": {"global": 24, "micro": 1},
            "steps": 100_000,
            "data": "corpus",
            **fields,
        }
    )


UNWRITTEN = "all steps are done, and the result cannot be written: no room"
"""Why a task waits for its storage."""


class World:
    """Events in, plans out. Time advances by 10 ms with every record."""

    def __init__(self, solve: Solve = solve_with_alternatives, **parameters: Any) -> None:
        """``parameters``: those of ``ClusterConfigured``, in place of the ones here."""
        self.fold = Fold(solve)
        self.records: list[Recorded] = []
        self._skipped = timedelta()
        self.log(
            ClusterConfigured(
                **{
                    **self.base(),
                    "mtbf_node_s": 1e6,
                    "throughput_hysteresis": 0.2,
                    "transition_prior_s": 2.0,
                    "worker_flop_per_s": 5e9,
                    "price_per_worker_hour": 2.0,
                    "currency": "USD",
                    **parameters,
                }
            )
        )

    @property
    def state(self) -> State:
        return self.fold.state

    @property
    def now(self) -> datetime:
        return START + timedelta(milliseconds=10 * (len(self.records) + 1)) + self._skipped

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._skipped += timedelta(seconds=seconds)

    def task(self, name: str = "a") -> Task:
        task = self.state.find(name)
        assert task is not None
        return task

    def base(self) -> dict[str, Any]:
        return {"event_id": f"e{len(self.records)}", "occurred_at": self.now}

    def log(self, event: Event) -> PlanDecided | None:
        """Append an event; return the plan that answers it. What was decided is appended after it."""
        record = self._append(event)
        assert self.fold.take(record)
        decided = self.fold.decide(record)
        self.fold.answer(record, decided)
        for answer in decided:
            assert not self.fold.take(self._append(answer))
        plans = [answer for answer in decided if isinstance(answer, PlanDecided)]
        assert len(plans) <= 1
        return plans[0] if plans else None

    def _append(self, event: Event) -> Recorded:
        record = Recorded(
            position=len(self.records) + 1,
            stream=event.stream,
            stream_version=1,
            recorded_at=self.now,
            event=EVENT.validate_json(event.canonical()),
            previous_hash="",
            hash="",
        )
        self.records.append(record)
        return record

    def solved(self, plan: PlanDecided | None) -> Problem:
        """The problem that was solved for the newest plan, with its throughput tables."""
        assert plan is not None
        assert plan.problem is not None
        return plan.problem.with_tables(self.state.tables)

    def must(self, event: Event) -> PlanDecided:
        plan = self.log(event)
        assert plan is not None
        return plan

    # ---- events

    def join(self, node: str, workers: int = 2, domain: str = "default", hardware: str = "cpu") -> PlanDecided:
        return self.must(
            NodeJoined(
                **self.base(),
                node=node,
                incarnation=f"i{len(self.records)}",
                agent_pid=1,
                domain=domain,
                hardware=hardware,
                workers=[f"{node}/{slot}" for slot in range(workers)],
            )
        )

    def leave(self, node: str, incarnation: str | None = None) -> PlanDecided:
        known = self.state.nodes[node].incarnation
        return self.must(NodeLeft(**self.base(), node=node, incarnation=incarnation or known, reason="asked to end"))

    def cordon(self, node: str) -> None:
        assert self.log(NodeCordoned(**self.base(), node=node)) is None

    def drain(self, node: str, *, by: Literal["user", "agent"] = "user", save: bool = False) -> PlanDecided:
        return self.must(NodeDraining(**self.base(), node=node, by=by, timeout_s=60.0, save=save))

    def drained(self, node: str) -> PlanDecided:
        return self.must(NodeDrained(**self.base(), node=node))

    def put_back(self, node: str) -> PlanDecided:
        return self.must(NodeReturned(**self.base(), node=node, incarnation=self.state.nodes[node].incarnation))

    def submit(self, name: str = "a", *, saved: str = "", step: int = 0, **fields: Any) -> PlanDecided:
        return self.must(
            TaskSubmitted(**self.base(), task=name, spec=spec(name, **fields), checkpoint=saved, step=step)
        )

    def change(self, name: str = "a", **fields: Any) -> PlanDecided:
        """Change a task's weight or limits; what is not given stays."""
        spec = self.task(name).spec
        present = {"weight": spec.weight, "min_workers": spec.workers.min, "max_workers": spec.workers.max}
        return self.must(TaskChanged(**self.base(), task=name, **{**present, **fields}))

    def stop(self, name: str = "a", *, lose_steps: bool = False, at_once: bool = False) -> PlanDecided:
        asked = TaskStopRequested(**self.base(), task=name, lose_steps=lose_steps or at_once, at_once=at_once)
        return self.must(asked)

    def refuse_stop(self, plan: PlanDecided, name: str = "a") -> PlanDecided:
        generation = self.task(name).generation
        refused = TaskStopRefused(
            **self.base(), task=name, generation=generation, step=5, plan=plan.plan, reason="full"
        )
        return self.must(refused)

    def stopped(self, name: str = "a", step: int = 5, path: str = "stop-checkpoint") -> PlanDecided | None:
        generation = self.task(name).generation
        return self.log(TaskStopped(**self.base(), task=name, generation=generation, step=step, path=path))

    def age(self) -> PlanDecided | None:
        """Let time pass until the next task starves, and say so as the service does; None if none ever will."""
        waits = due(self.state)
        if not waits:
            return None
        first = waits[0]
        self._skipped += max(timedelta(), first.at - self.now)
        event_id = derived_id(first.cause, SERVICE, f"starving/{first.task}")
        return self.must(TaskStarving(event_id=event_id, occurred_at=first.at, task=first.task, since=first.since))

    def unwritten(self, name: str = "a", **fields: Any) -> PlanDecided:
        """Say, as the detector does, that a task cannot write its result and that its workers may be lent."""
        task = self.task(name)
        about = {"task": name, "generation": task.generation, "step": task.spec.steps, "worker": "n0/0"}
        said = {"reason": UNWRITTEN, "retry_at": self.now + timedelta(seconds=120)}
        return self.must(TaskResultUnwritten(**{**self.base(), **about, **said, **fields}))

    def write_again(self) -> PlanDecided:
        """Let time pass until the next timer, that of a task that is to write its result, and say so as the service."""
        timer = next_timer(self.state)
        assert timer is not None
        assert isinstance(timer.event, TaskResultUnwritten)
        self._skipped += max(timedelta(), timer.at - self.now)
        return self.must(timer.event)

    def finish(self, name: str = "a") -> PlanDecided:
        return self.must(
            TaskFinished(
                **self.base(),
                task=name,
                generation=self.task(name).generation,
                step=self.task(name).spec.steps,
                samples_sha256="",
                parameters_path="p",
            )
        )

    def fail(self, name: str = "a") -> PlanDecided:
        generation = self.task(name).generation
        return self.must(TaskFailed(**self.base(), task=name, generation=generation, step=3, reason="bug"))

    def checkpoint(self, name: str = "a", step: int = 5) -> None:
        generation = self.task(name).generation
        self.log(
            TaskCheckpointed(**self.base(), task=name, generation=generation, step=step, path=f"checkpoint-{step}")
        )

    def progress(
        self, name: str, step: int, step_s: float, generation: int | None = None, memory_every: int | None = None
    ) -> None:
        task = self.task(name)
        self.log(
            TaskProgressed(
                **self.base(),
                task=name,
                generation=task.generation if generation is None else generation,
                step=step,
                workers=len(task.members),
                step_s=step_s,
                memory_every=memory_every,
            )
        )

    def error(
        self,
        kind: ErrorKind,
        *,
        node: str | None = None,
        worker: str | None = None,
        task: str | None = None,
        severity: Severity | None = None,
        **fields: Any,
    ) -> PlanDecided:
        return self.must(
            ErrorDetected(
                **self.base(),
                incident=f"incident-{len(self.records)}",
                kind=kind,
                severity=severity or SEVERITY[kind],
                method=Method.PROCESS_SUPERVISION,
                detected_at=self.now,
                node=node,
                worker=worker,
                task=task,
                **fields,
            )
        )

    def exit(self, worker: str, task: str = "a", **fields: Any) -> PlanDecided:
        return self.error(ErrorKind.PROCESS_EXIT, worker=worker, node=node_of(worker), task=task, **fields)

    def slow(self, worker: str, slowdown: float, task: str = "a") -> PlanDecided | None:
        """Say that a worker is slower than its peers, or as fast again (1.0)."""
        generation = self.task(task).generation
        return self.log(
            WorkerSlowed(
                **self.base(),
                node=node_of(worker),
                worker=worker,
                slowdown=slowdown,
                task=task,
                generation=generation,
            )
        )

    def end_trial(self) -> PlanDecided:
        """Let time pass until the next timer, that of a trial, and say so as the service does."""
        timer = next_timer(self.state)
        assert timer is not None
        assert isinstance(timer.event, WorkerSlowed)
        self._skipped += max(timedelta(), timer.at - self.now)
        return self.must(timer.event)

    def lose(self, node: str) -> PlanDecided:
        return self.error(ErrorKind.NODE_LOST, node=node)

    def lose_together(self, *nodes: str) -> list[PlanDecided | None]:
        """Say of nodes that they are lost, as the detector does of those that fall silent at one moment."""
        known = len(self.records)
        events = [
            ErrorDetected(
                event_id=f"e{known + number}",
                occurred_at=self.now,
                incident=f"incident-{known + number}",
                kind=ErrorKind.NODE_LOST,
                severity=SEVERITY[ErrorKind.NODE_LOST],
                method=Method.NODE_HEALTH,
                detected_at=self.now,
                node=node,
                answered_with=f"e{known + len(nodes) - 1}" if number < len(nodes) - 1 else None,
            )
            for number, node in enumerate(nodes)
        ]
        return [self.log(event) for event in events]

    def moved(self, plan: PlanDecided, task: str, phase: str, generation: int, complete: bool = False) -> None:
        self.log(
            StateMoved(
                **self.base(),
                plan=plan.plan,
                task=task,
                generation=generation,
                phase=phase,  # type: ignore[arg-type]
                started_at=self.now,
                step=7,
                complete=complete,
            )
        )

    def complete(self, plan: PlanDecided) -> PlanDecided:
        """Report every change of the plan as carried out."""
        for change in plan.changes:
            self.resume(plan, change)
            if change.action == "move":
                assert change.target is not None
                self.moved(plan, change.task, "restored", change.target.generation, complete=True)
            elif change.action != "none":
                self.moved(plan, change.task, "ended", change.from_generation, complete=True)
        return plan

    def resume(self, plan: PlanDecided, change: TaskChange) -> None:
        """Report the interrupted stage as done, if the change has one."""
        if change.interrupted is not None:
            complete = change.action == "none"
            self.moved(plan, change.task, "resumed", change.interrupted.generation, complete=complete)


def change_of(plan: PlanDecided, task: str = "a") -> TaskChange:
    """The plan's change of a task."""
    return next(change for change in plan.changes if change.task == task)


def workers(stage: Stage | None) -> list[str]:
    """The stage's workers in rank order."""
    assert stage is not None
    return [m.worker for m in stage.members]


def sources(stage: Stage | None) -> list[str]:
    """Where the stage's members have their state from, in rank order."""
    assert stage is not None
    return [m.source for m in stage.members]


def running(nodes: int = 2, workers: int = 2, *, mtbf_node_s: float = 1e6, **fields: Any) -> World:
    """A world in which task ``a`` runs on all workers it may have."""
    world = World(mtbf_node_s=mtbf_node_s)
    for index in range(nodes):
        world.join(f"n{index}", workers)
    world.complete(world.submit("a", **fields))
    assert world.task().change is None
    return world


def recorded_answers(records: Iterable[Recorded]) -> dict[str, Recorded]:
    """Return, by event id, the records of the types that the planner answers with."""
    return {r.event.event_id: r for r in records if isinstance(r.event, PlanDecided | TaskStopped)}


def answers_to(cause: Recorded, answers: Mapping[str, Recorded]) -> list[Recorded]:
    """Return the planner's recorded answer to a cause, in the order of its events; empty if there is none.

    Args:
        cause: the record that may have been answered.
        answers: what ``recorded_answers`` returned for the log.
    """
    found: list[Recorded] = []
    while (record := answers.get(derived_id(cause.event.event_id, SERVICE, len(found)))) is not None:
        found.append(record)
    return found
