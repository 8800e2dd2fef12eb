"""A log of any length that the real planner answers: a fixed mix of events, from a fixed seed.

Small tasks come and end on a small cluster, one after the other, so that a log of a million events has 5,000 tasks and
100,000 incidents, of which a tenth are lost nodes. The rest are reports of plans' execution and of progress.
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from services.planner.replay.log_fold import Fold
from services.planner.state.cluster import Task, node_of
from shared.events.severities import SEVERITY, ErrorKind, Method, Severity
from shared.events.union import (
    ClusterConfigured,
    ErrorDetected,
    Event,
    NodeJoined,
    PlanDecided,
    Recorded,
    StateMoved,
    TaskCheckpointed,
    TaskFinished,
    TaskProgressed,
    TaskSubmitted,
)
from shared.log.base import FIRST_HASH
from shared.log.chain import row_hash
from shared.log.log import EventLog
from shared.log.scan import utc_text
from shared.log.schema import COLUMNS
from shared.tasks.specification import parse_spec

SEED = 20261122


@dataclass(frozen=True)
class Cluster:
    """A cluster of the course: its nodes, the workers of each, tasks at a time and the most workers of one."""

    nodes: int
    node_workers: int
    tasks: int
    task_workers: int


SMALL = Cluster(nodes=8, node_workers=4, tasks=6, task_workers=8)
LARGE = Cluster(nodes=2000, node_workers=8, tasks=64, task_workers=240)
"""As large as the gateway's bounds are for. No plan moves several tasks: each has the workers that it can use."""

INCIDENTS_PER_TASK = 20
SEV1_SHARE = 0.1
CHECKPOINTS_PER_TASK = 5
PROGRESS_PER_TASK = 80
"""An incident makes five events, with its plan and that plan's execution: with these a task has 200."""

START = datetime(2026, 1, 1, tzinfo=UTC)
STEP = timedelta(milliseconds=500)
"""Time between two events: a million of them are six days."""

_BATCH = 5000


class Course:
    """Makes events, has the planner answer them, and yields records in log order.

    Args:
        events: about how many.
        seed: of everything that is drawn.
        start: time of the first event.
        step: time between two events.
        ends: whether all tasks end at last, and all nodes are there.
        detection: from the occurrence of a fault until it is detected.
        cluster: on which tasks run.
    """

    def __init__(
        self,
        events: int,
        seed: int = SEED,
        *,
        step: timedelta = STEP,
        ends: bool = False,
        detection: timedelta = timedelta(),
        cluster: Cluster = SMALL,
    ) -> None:
        self._cluster = cluster
        self._step, self._ends, self._detection = step, ends, detection
        self._random = random.Random(seed)
        self._wanted = events
        self._fold = Fold()
        self._position = 0
        self._pending: list[Recorded] = []
        self._submitted = 0
        self._steps: dict[str, int] = {}
        self._down: list[str] = []
        self._ids = 0

    def records(self) -> Iterator[Recorded]:
        """Yield the records."""
        self._log(
            ClusterConfigured(
                **self._base(),
                mtbf_node_s=1e6,
                throughput_hysteresis=0.2,
                transition_prior_s=2.0,
                worker_flop_per_s=5e9,
                price_per_worker_hour=2.0,
                currency="USD",
            )
        )
        for index in range(self._cluster.nodes):
            self._join(f"n{index}")
        while self._position < self._wanted:
            running = self._running()
            if len(running) < self._cluster.tasks:
                self._submit()
            else:
                self._happens(self._random.choice(running))
            yield from self._pending
            self._pending = []
        if self._ends:
            self._end()
            yield from self._pending
            self._pending = []

    def _end(self) -> None:
        while self._down:
            self._join(self._down.pop())
        while running := [task for task in self._running() if task.members and task.change is None]:
            self._finish(running[0])

    def _running(self) -> list[Task]:
        return [task for task in self._fold.state.tasks.values() if task.life == "active"]

    def _happens(self, task: Task) -> None:
        """One of the things that happen to a task."""
        if task.change is not None or not task.members:
            if self._down:
                self._join(self._down.pop())
            return
        drawn = self._random.random() * (INCIDENTS_PER_TASK + 1 + CHECKPOINTS_PER_TASK + PROGRESS_PER_TASK)
        if drawn < INCIDENTS_PER_TASK * SEV1_SHARE:
            self._lose(task)
        elif drawn < INCIDENTS_PER_TASK:
            self._fail(task)
        elif drawn < INCIDENTS_PER_TASK + 1:
            self._finish(task)
        elif drawn < INCIDENTS_PER_TASK + 1 + CHECKPOINTS_PER_TASK:
            path = f"checkpoints/{task.name}/{task.step}"
            self._log(self._of_task(TaskCheckpointed, task, step=self._steps[task.name], path=path))
        else:
            self._progress(task)
        if self._down and self._random.random() < 0.2:
            self._join(self._down.pop())

    def _progress(self, task: Task) -> None:
        step = self._steps[task.name] = self._steps[task.name] + 10
        step_s = round(0.1 * self._random.uniform(0.97, 1.03), 6)
        workers = len(task.members)
        self._log(self._of_task(TaskProgressed, task, step=step, workers=workers, step_s=step_s, loss=2.5))

    def _fail(self, task: Task) -> None:
        kind = self._random.choice([ErrorKind.PROCESS_EXIT, ErrorKind.CONNECTION])
        worker = self._random.choice(task.members)
        evidence = {"exit_code": -9, "last_output": "the last line of a rank's output"}
        rank = {"worker": worker, "task": task.name, "rank": 0, "generation": task.generation}
        self._carry_out(self._error(kind, node=node_of(worker), **rank, evidence=evidence))

    def _lose(self, task: Task) -> None:
        node = node_of(self._random.choice(task.members))
        self._down.append(node)
        self._carry_out(self._error(ErrorKind.NODE_LOST, node=node))

    def _error(self, kind: ErrorKind, **fields: Any) -> PlanDecided | None:
        base = self._base()
        severity, method = SEVERITY[kind], Method.PROCESS_SUPERVISION
        return self._log(
            ErrorDetected(
                **(base | {"occurred_at": base["occurred_at"] - self._detection}),
                incident=base["event_id"],
                kind=kind,
                severity=severity,
                method=method,
                detected_at=base["occurred_at"],
                **fields,
            )
        )

    def _join(self, node: str) -> None:
        workers = [f"{node}/{slot}" for slot in range(self._cluster.node_workers)]
        incarnation = f"{self._random.getrandbits(128):032x}"
        joined = NodeJoined(
            **self._base(), node=node, incarnation=incarnation, agent_pid=1, domain="default", workers=workers
        )
        self._carry_out(self._log(joined))

    def _submit(self) -> None:
        name = f"task-{self._submitted:06d}"
        self._submitted += 1
        self._steps[name] = 0
        spec = parse_spec(
            {
                "name": name,
                "model": {"layers": 4, "hidden": 64, "heads": 4, "sequence_length": 64},
                "batch": {"global": 3 * self._cluster.task_workers, "micro": 1},
                "steps": 100_000,
                "data": "corpus",
                "weight": self._random.choice([0.5, 1.0, 2.0]),
                "workers": {"min": 1, "max": self._cluster.task_workers},
            }
        )
        self._carry_out(self._log(TaskSubmitted(**self._base(), task=name, spec=spec)))

    def _finish(self, task: Task) -> None:
        del self._steps[task.name]
        ended = self._of_task(
            TaskFinished, task, step=task.spec.steps, samples_sha256="0" * 64, parameters_path="parameters"
        )
        self._carry_out(self._log(ended))

    def _carry_out(self, plan: PlanDecided | None) -> None:
        """Report every change of a plan as carried out."""
        for change in plan.changes if plan is not None else ():
            if change.interrupted is not None:
                self._moved(plan, change.task, "resumed", change.interrupted.generation, change.action == "none")
            if change.action == "move" and change.target is not None:
                self._moved(plan, change.task, "prepared", change.target.generation, False)
                self._moved(plan, change.task, "restored", change.target.generation, True)
            elif change.action != "none":
                self._moved(plan, change.task, "ended", change.from_generation, True)

    def _moved(self, plan: PlanDecided | None, task: str, phase: Any, generation: int, complete: bool) -> None:
        assert plan is not None
        base = self._base()
        self._log(
            StateMoved(
                **base,
                plan=plan.plan,
                task=task,
                incident=plan.incident,
                generation=generation,
                phase=phase,
                started_at=base["occurred_at"],
                step=self._steps.get(task, 0),
                durations_s={"hold": 0.0125, "connect": 0.25, "first-step": 0.5},
                complete=complete,
            )
        )

    def _of_task(self, kind: type[Any], task: Task, **fields: Any) -> Any:
        return kind(**self._base(), task=task.name, generation=task.generation, **fields)

    def _base(self) -> dict[str, Any]:
        self._ids += 1
        return {"event_id": f"{self._ids:08x}-0000-4000-8000-000000000000", "occurred_at": self._now}

    @property
    def _now(self) -> datetime:
        return START + (self._position + 1) * self._step

    def _log(self, event: Event) -> PlanDecided | None:
        record = self._record(event)
        self._fold.take(record)
        decided = self._fold.decide(record)
        self._fold.answer(record, decided)
        for answer in decided:
            self._fold.take(self._record(answer))
        return next((answer for answer in decided if isinstance(answer, PlanDecided)), None)

    def _record(self, event: Event) -> Recorded:
        record = Recorded.model_construct(
            position=self._position + 1,
            stream=event.stream,
            stream_version=0,
            recorded_at=self._now,
            event=event,
            previous_hash="",
            hash="",
        )
        self._position += 1
        self._pending.append(record)
        return record


def prepare(run_dir: Path, events: int, report: Report) -> None:
    """Write a log of about so many events into a run directory, and say what it has, if there is none yet."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / "log.db").exists():
        began_s = time.process_time()
        counts = write(run_dir / "log.db", events)
        report.line("log", seed=SEED, cpu_s=round(time.process_time() - began_s, 1), **counts)


def write(path: Path, events: int, seed: int = SEED) -> dict[str, int]:
    """Write a log of about so many events; return how many of what kind it has.

    The rows go into the table at once, in few transactions: a million appends would take most of the time.
    """
    counts = {"events": 0, "tasks": 0, "incidents": 0, "sev1": 0, "plans": 0}

    def counted() -> Iterator[list[Any]]:
        for row, event in _rows(Course(events, seed).records()):
            counts["events"] += 1
            counts["tasks"] += isinstance(event, TaskSubmitted)
            counts["plans"] += isinstance(event, PlanDecided)
            if isinstance(event, ErrorDetected):
                counts["incidents"] += 1
                counts["sev1"] += event.severity is Severity.SEV1
            yield row

    write_rows(path, counted())
    return counts


def write_rows(path: Path, rows: Iterable[list[Any]]) -> None:
    """Make a log of rows of its table, in few transactions."""
    EventLog(f"sqlite:///{path}").close()
    places = ", ".join("?" for _ in COLUMNS)
    left = iter(rows)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous=OFF")
        while batch := list(islice(left, _BATCH)):
            connection.executemany(f"INSERT INTO log VALUES ({places})", batch)
            connection.commit()


def _rows(records: Iterator[Recorded]) -> Iterator[tuple[list[Any], Event]]:
    previous_hash, versions = FIRST_HASH, dict[str, int]()
    for record in records:
        event = record.event
        versions[record.stream] = versions.get(record.stream, 0) + 1
        row = {
            "position": record.position,
            "event_id": event.event_id,
            "stream": record.stream,
            "stream_version": versions[record.stream],
            "type": event.type,
            "schema_version": event.schema_version,
            "occurred_at": utc_text(event.occurred_at),
            "recorded_at": utc_text(record.recorded_at),
            "data": event.canonical(),
            "previous_hash": previous_hash,
        }
        row["hash"] = previous_hash = row_hash(row)
        yield [row[name] for name in COLUMNS], event
