"""Small workloads with round times, so that a test can say by hand what happens when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.events.severities import ErrorKind
from shared.events.union import Event, Recorded
from shared.log.log import EventLog
from shared.planning.solver import solve_with_alternatives
from shared.tasks.specification import TaskSpec, parse_spec
from simulator.outcome import Outcome
from simulator.policy import Course, Lost, Policy, Recovery
from simulator.run.engine import simulate
from simulator.workloads.trace import Occurrence, Trace
from simulator.workloads.workload import Workload

DETECTION_S = 10.0
DOWN_S = 50.0


@dataclass(frozen=True)
class RoundTiming:
    """Every fault is found after 10 s, and every recovery takes 50 s."""

    checkpoint_every_s: float = 100.0
    down_s: float = DOWN_S
    stop_s: float = 0.0
    lost: Lost = "nothing"
    meanwhile: float = 0.0
    seen: list[Recovery] = field(default_factory=list, compare=False)

    def detection_s(self, kind: ErrorKind, step_s: float, micro_batches: int = 1) -> float:
        return DETECTION_S

    def course(self, recovery: Recovery) -> Course:
        self.seen.append(recovery)
        return Course(down_s=self.down_s, stop_s=self.stop_s, lost=self.lost, meanwhile=self.meanwhile)


def policy(timing: RoundTiming | None = None, **fields: Any) -> Policy:
    """Return a policy that divides the cluster as the live planner does; ``fields``: of ``Policy``."""
    values: dict[str, Any] = {
        "name": "round",
        "title": "Round",
        "source": "test",
        "scope": "cluster",
        "timing": timing or RoundTiming(),
        "solve": solve_with_alternatives,
    }
    return Policy(**{**values, **fields})


def task(name: str = "a", *, steps: int = 1_000_000, weight: float = 1.0, **workers: int) -> TaskSpec:
    """Return a task that trains on any number of CPU workers, of steps of a second or so."""
    return parse_spec(
        {
            "name": name,
            "model": {"layers": 2, "hidden": 256, "heads": 4, "sequence_length": 128},
            "batch": {"global": 48},
            "steps": steps,
            "data": "corpus.txt",
            "weight": weight,
            "workers": workers,
            "parallel": {"tensor": 1, "pipeline": 1},
        }
    )


def workload(
    *occurrences: Occurrence,
    tasks: Sequence[TaskSpec] = (),
    nodes: int = 3,
    present: int | None = None,
    horizon_s: float = 1000.0,
    endless: bool = True,
    workers_per_node: int = 2,
    **parameters: float,
) -> Workload:
    """Return a workload on nodes ``n0``, ``n1``, ... of CPU workers; all of them are there, unless ``present`` says."""
    names = tuple(f"n{index}" for index in range(nodes))
    trace = Trace("small", names, nodes if present is None else present, tuple(sorted(occurrences)), horizon_s)
    return Workload(
        "small", trace, tuple(tasks) or (task(),), "cpu", workers_per_node, parameters=parameters, endless=endless
    )


def down(at_s: float, node: str = "n2") -> Occurrence:
    return Occurrence(at_s, node, "down")


def up(at_s: float, node: str = "n2") -> Occurrence:
    return Occurrence(at_s, node, "up")


def error(at_s: float, kind: ErrorKind, node: str = "n2") -> Occurrence:
    return Occurrence(at_s, node, "error", kind.value)


def degraded(at_s: float, slowdown: float, node: str = "n2") -> Occurrence:
    return Occurrence(at_s, node, "degraded", slowdown=slowdown)


def run(case: Workload, with_policy: Policy, folder: Path, seed: int = 0) -> tuple[Outcome, list[Recorded]]:
    """Return the outcome of a run and its log."""
    log = EventLog(f"sqlite:///{folder / 'log.db'}")
    try:
        outcome = simulate(case, with_policy, seed, log=log)
        assert log.verify().ok
        return outcome, list(log.read_all())
    finally:
        log.close()


def events(records: Sequence[Recorded], kind: type[Event]) -> list[Any]:
    """Return the events of a type."""
    return [record.event for record in records if isinstance(record.event, kind)]
