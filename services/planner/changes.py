"""What a plan does to one task: stages, members and where each gets its state (see ``TaskChange``).

Data-parallel tasks (tensor = pipeline = 1): survivors of a fault finish the interrupted step by themselves, then the
target stage starts, its newcomers taking the state from them. Other layouts: whoever is left takes its state from the
newest checkpoint, since no single survivor holds a whole model. So does everybody where the new count has another
layout than the present one: a checkpoint can be read in any.

A process that was to join a stage which is not known to have formed may stand anywhere between its start and its
first step. It is on ``prepare`` again: an agent keeps a process not yet configured and replaces any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from services.planner.state import State, Task, node_of
from services.planner.tables import layout_of
from shared.plans import Layout, Member, Stage, TaskChange

Source = Literal["live", "take", "checkpoint", "initial"]


def disturbed(task: Task) -> bool:
    """Return whether its ranks cannot simply be drained: a step is broken, or they are in the midst of a transition."""
    return task.broken or bool(task.lost) or task.change is not None


def move(state: State, task: Task, workers: Sequence[str], reason: str) -> TaskChange:
    """Return the change that brings the task onto ``workers``, given in rank order (those that hold state first).

    The state is live only if one that stays holds it: a last holder may be one whose worker was given to another task.
    """
    layout = layout_of(state, task, len(workers))
    data_parallel = task.replica == 1 and layout.tensor * layout.pipeline == 1
    if data_parallel and any(worker in task.kept for worker in workers):
        return _move_live(state, task, workers, layout, reason)
    return _move_from_storage(state, task, workers, layout, reason)


def _move_live(state: State, task: Task, workers: Sequence[str], layout: Layout, reason: str) -> TaskChange:
    """The survivors hold the state and finish the step that was interrupted, if one was."""
    kept = task.kept
    interrupted = _interrupted(task) if disturbed(task) else None
    holding = set(kept)
    sources: dict[str, Source] = {worker: "live" if worker in holding else "take" for worker in workers}
    target = None
    if interrupted is None or list(workers) != list(kept):
        generation = (interrupted.generation if interrupted else task.generation) + 1
        target = _stage(task, "boundary", generation, layout, sources)
    failed = _failed(state, task, kept)
    return TaskChange(
        task=task.name,
        reason=reason,
        action="move" if target else "none",
        from_generation=task.generation,
        survivors=list(kept),
        failed=failed,
        hold=interrupted is not None,
        interrupted=interrupted,
        release=_release(state, task, [*workers, *failed]),
        prepare=_without(workers, kept),
        target=target,
    )


def _move_from_storage(state: State, task: Task, workers: Sequence[str], layout: Layout, reason: str) -> TaskChange:
    """All members take the newest checkpoint, or begin anew; processes that are known to be up are kept.

    A data-parallel task that stays one is here only because none of those that hold its state stays.
    """
    kept = task.kept if max(task.replica, layout.tensor * layout.pipeline) > 1 else ()
    source: Source = "checkpoint" if task.checkpoint else "initial"
    failed = _failed(state, task, kept)
    return TaskChange(
        task=task.name,
        reason=reason,
        action="move",
        from_generation=task.generation,
        survivors=list(kept),
        failed=failed,
        hold=disturbed(task),
        release=_release(state, task, [*workers, *failed]),
        prepare=_without(workers, kept),
        target=_stage(task, "boundary", task.generation + 1, layout, dict.fromkeys(workers, source)),
    )


def leave(state: State, task: Task, action: Literal["stop", "pause"], reason: str) -> TaskChange:
    """Return the change that saves the task's state and releases its workers.

    Without a whole live state at a step boundary (no survivor, or shards of a broken step) the newest checkpoint is
    all there is; then its processes only end.
    """
    saves = can_save(task)
    kept = task.kept if saves else ()
    return TaskChange(
        task=task.name,
        reason=reason,
        action=action,
        from_generation=task.generation,
        survivors=list(kept),
        failed=sorted({*task.lost, *task.occupied} - set(kept)),
        hold=disturbed(task),
        interrupted=_interrupted(task) if saves and disturbed(task) else None,
        release=[worker for worker in kept if state.usable(worker)],
    )


def can_save(task: Task) -> bool:
    """Return whether the task's live processes can still write a checkpoint of the step they are in."""
    return bool(task.kept) and (task.replica == 1 or not disturbed(task))


def end(state: State, task: Task, reason: str) -> TaskChange:
    """Return the change that ends all processes of a task that is over."""
    return TaskChange(
        task=task.name,
        reason=reason,
        action="end",
        from_generation=task.generation,
        release=[worker for worker in task.occupied if state.usable(worker)],
    )


def _interrupted(task: Task) -> Stage:
    """Only data-parallel tasks have one: each survivor is a replica."""
    layout = Layout(tensor=1, pipeline=1, data=len(task.kept), micro_batch=task.spec.batch.micro)
    return _stage(task, "interrupted", task.generation + 1, layout, dict.fromkeys(task.kept, "live"))


def _stage(
    task: Task, kind: Literal["interrupted", "boundary"], generation: int, layout: Layout, sources: dict[str, Source]
) -> Stage:
    return Stage(
        kind=kind,
        generation=generation,
        layout=layout,
        members=[
            Member(rank=rank, worker=worker, node=node_of(worker), source=source)
            for rank, (worker, source) in enumerate(sources.items())
        ],
        checkpoint=task.checkpoint if "checkpoint" in sources.values() else "",
    )


def _failed(state: State, task: Task, kept: Sequence[str]) -> list[str]:
    """Return the workers whose process is gone, or must end in any case: lost ones, and all on isolated nodes."""
    isolated = (worker for worker in task.occupied if not state.usable(worker))
    return sorted({*task.lost, *isolated} - set(kept))


def _release(state: State, task: Task, staying: Sequence[str]) -> list[str]:
    """Return the workers on which the task may have a process and shall have none."""
    return [worker for worker in _without(task.occupied, staying) if state.usable(worker)]


def _without(workers: Sequence[str], left_out: Iterable[str]) -> list[str]:
    gone = set(left_out)
    return [worker for worker in workers if worker not in gone]
