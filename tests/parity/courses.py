"""Courses of faults: what is lost when, and in which layout the task goes on. Planned ahead, without any process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

POINTS = ("1", "1.forward", "1.backward", "reduce", "reduce:1", "update", "apply", "checkpoint")
"""Where a rank fails: see ``unicron.process.faults``."""

KILLED = ("shrink", "same", "grow", "relayout")
CHANGES = (*KILLED, "retry")
"""What follows: a replica less, a new process in the lost one's place, that and a replica more, another layout; or, of
a communication error, the same processes once more."""

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"model": {"qk_layernorm": True}, "parallel": {"sequence_parallel": True}},
    "bf16": {"bf16": True, "parallel": {"recompute": "full"}},
}
"""Fields of a specification that differ from the defaults."""

FIRST_FAULT, BETWEEN_FAULTS = 2, 2
"""Steps: the first fault's, and from one to the next. Even, as are the steps of checkpoints."""


@dataclass(frozen=True, slots=True)
class TaskLayout:
    """Sizes of tensor, pipeline and data parallelism."""

    tensor: int
    pipeline: int
    replicas: int
    interleave: int = 1
    """Model chunks of each rank, where there are several pipeline stages. The task's, in all of its layouts."""

    def __str__(self) -> str:
        interleaved = f"vp{self.interleave}" if self.interleave > 1 else ""
        return f"tp{self.tensor}pp{self.pipeline}{interleaved}dp{self.replicas}"

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline * self.replicas

    def replica_of(self, rank: int) -> int:
        """Return the data-parallel rank, in Megatron's order: tensor, data, pipeline."""
        return rank // self.tensor % self.replicas


@dataclass(frozen=True, slots=True)
class Course:
    """A task, from its start through some faults to its end."""

    layout: TaskLayout
    sharded: bool
    """Whether the optimizer's state is divided among replicas: then what is lost with one is in copies only."""
    faults: tuple[tuple[str, str], ...]
    """(point, change) of each."""
    exact: bool = True
    settings: str = "plain"
    """Of the model: one of ``SETTINGS``."""

    def __str__(self) -> str:
        kind = f"{'sharded' if self.sharded else 'replicated'}-{self.settings}"
        return f"{self.layout}-{kind}-{'exact' if self.exact else 'default'}-" + ",".join(map("/".join, self.faults))

    @property
    def steps(self) -> int:
        """How many there must be for all faults to happen, and two after the last."""
        return FIRST_FAULT + BETWEEN_FAULTS * len(self.faults)


@dataclass(frozen=True, slots=True)
class Stage:
    """A fault, and the generation that follows it."""

    victim: str
    fault: str
    """As ``UNICRON_FAIL_AT`` has it."""
    layout: TaskLayout
    members: dict[str, str]
    """Worker -> source of its state, in the order of ranks."""
    started: tuple[str, ...]
    dropped: tuple[str, ...]
    """Workers that are still there and no longer needed."""
    lost: bool
    """Whether the victim's process is gone, and its node with it."""
    complete: bool
    """Whether those who are left hold the whole state."""


@dataclass(slots=True)
class _Names:
    count: Iterator[int] = field(default_factory=itertools.count)

    def take(self, count: int) -> list[str]:
        return [f"w{next(self.count)}" for _ in range(count)]


def plan(course: Course) -> tuple[list[str], list[Stage]]:
    """Return the workers that begin, in the order of ranks, and what happens then."""
    names = _Names()
    layout = course.layout
    workers = names.take(layout.size)
    first = workers
    stages = []
    for number, (at, change) in enumerate(course.faults):
        rank = (3 * number + 1) % layout.size
        victim, lost = workers[rank], change != "retry"
        after = _next_layout(layout, change)
        # One replica is all there is, or each has a part of the optimizer's state that no other has; a half-applied
        # update is as good as lost.
        complete = not ((lost or at == "apply") and (layout.replicas == 1 or course.sharded))
        placed = _placed(workers, layout, rank, after, change, names)
        started = tuple(worker for worker in placed if worker not in workers)
        members = {worker: "take" if worker in started else "live" for worker in placed}
        step = FIRST_FAULT + BETWEEN_FAULTS * number
        stages.append(
            Stage(
                victim=victim,
                fault=f"*:{step}:{at}:{'kill' if lost else 'communication'}:always",
                layout=after,
                members=members,
                started=started,
                dropped=tuple(w for w in workers if w not in placed and not (lost and w == victim)),
                lost=lost,
                complete=complete,
            )
        )
        workers, layout = placed, after
    return first, stages


def _next_layout(layout: TaskLayout, change: str) -> TaskLayout:
    p, d = layout.pipeline, layout.replicas
    match change:
        case "shrink":
            return replace(layout, replicas=max(1, d - 1))
        case "grow":
            return replace(layout, replicas=d + 1)
        case "relayout":
            # The tensor-parallel size stays: results are the same to the last bit only then.
            return replace(layout, pipeline=2) if p == 1 else replace(layout, pipeline=1, replicas=d + 1)
    return layout


def _placed(
    workers: Sequence[str], layout: TaskLayout, lost: int, after: TaskLayout, change: str, names: _Names
) -> list[str]:
    """Return who has which rank in the next layout: whoever can stays where it is."""
    if change == "retry":
        return list(workers)
    if change == "relayout":
        left = [worker for rank, worker in enumerate(workers) if rank != lost]
        return (left + names.take(max(0, after.size - len(left))))[: after.size]
    by_replica: list[list[str]] = [[] for _ in range(layout.replicas)]
    for rank, worker in enumerate(workers):
        replica = by_replica[layout.replica_of(rank)]
        replica.append(names.take(1)[0] if rank == lost and (change != "shrink" or layout.replicas == 1) else worker)
    if change == "shrink" and layout.replicas > 1:
        del by_replica[layout.replica_of(lost)]
    if change == "grow":
        by_replica.append(names.take(layout.tensor * layout.pipeline))
    t = layout.tensor
    return [
        w for stage in range(layout.pipeline) for replica in by_replica for w in replica[stage * t : (stage + 1) * t]
    ]


LAYOUTS = (
    TaskLayout(1, 1, 3),
    TaskLayout(2, 1, 1),
    TaskLayout(1, 2, 1),
    TaskLayout(1, 2, 2),
    TaskLayout(2, 1, 2),
    TaskLayout(1, 2, 1, interleave=2),
    TaskLayout(1, 2, 2, interleave=2),
)

IMPOSSIBLE_POINTS = {"checkpoint": ("retry",)}
"""A fault before a checkpoint has nothing to retry: the step is over."""


def _settings(layout: TaskLayout) -> str:
    """Return the settings with which a layout is tried: those of split layers, or bfloat16 where stages send."""
    return "sequence" if layout.tensor > 1 else "bf16" if layout.pipeline > 1 else "plain"


def matrix() -> list[Course]:
    """Return every point with every layout, optimizer and change, one fault each. New ones go into the tuples above."""
    return [
        Course(layout, sharded, ((at, change),), settings=_settings(layout))
        for layout in LAYOUTS
        for sharded in (False, True)
        for at in POINTS
        for change in CHANGES
        if change not in IMPOSSIBLE_POINTS.get(at, ())
    ]


def pairwise() -> list[Course]:
    """Return a few courses of many faults: every two values of point, layout, optimizer and change meet in one."""
    courses = []
    for row, (layout, sharded) in enumerate(itertools.product(LAYOUTS, (False, True))):
        # Growing is last: two cores have to do with few processes. Pairs of point and change go round with the rows.
        points = POINTS[row % len(POINTS) :] + POINTS[: row % len(POINTS)]
        changes = ("retry", "same", "shrink", "same", "relayout", "retry", "shrink", "grow")
        if "checkpoint" == points[0]:
            points = (*points[1:], points[0])
        elif points[5] == "checkpoint":
            points = (*points[:5], points[6], points[5], *points[7:])
        courses.append(Course(layout, sharded, tuple(zip(points, changes, strict=True)), settings=_settings(layout)))
    return courses
