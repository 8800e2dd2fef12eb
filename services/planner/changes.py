"""What a plan does to one task: stages, members and where each gets its state (see ``TaskChange``).

Replicas that a fault has left whole finish the interrupted step by themselves, in a stage of their own; members of a
broken one stand by. Then the target stage starts, in whatever layout: who holds state brings it, pieces move between
memories, newcomers take theirs. Where those that stay do not hold all of the state together (no whole replica is left,
or a part of a divided optimizer is gone) the copies in their nodes' memory have the rest, as a rule of the same step.
Only where a task takes no such copies, or no process of it is left, everybody goes back to what is stored.

A process that was to join a stage which is not known to have formed may stand anywhere between its start and its
first step. It is on ``prepare`` again: an agent keeps a process not yet configured and replaces any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
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

    The state is live only if those that stay hold it: a last holder may be one whose worker was given to another task.
    """
    layout = layout_of(state, task, len(workers))
    complete = _covers(task, set(workers))
    if complete or _is_copied(task, set(workers)):
        return _move_live(state, task, workers, layout, reason, complete=complete)
    return _move_from_storage(state, task, workers, layout, reason)


def current(task: Task) -> list[str]:
    """Return the workers whose process holds, or can complete, the newest step, in the order of a stage of them alone.

    After a fault these are the members of the replicas that nobody is lost of: members of a broken one have the state
    before that step.
    """
    layout = task.held
    if layout is None:
        return []
    held = {worker: _place(layout, task.ranks[worker]) for worker in task.kept if worker in task.ranks}
    size = Counter(place[1] for place in held.values())
    whole = {data for data, count in size.items() if count == layout.tensor * layout.pipeline}
    found = [worker for worker in held if not disturbed(task) or held[worker][1] in whole]
    return sorted(found, key=task.ranks.__getitem__)


def _place(layout: Layout, rank: int) -> tuple[int, int, int]:
    """Return tensor-, data- and pipeline-parallel rank, in Megatron's order."""
    rest, tensor = divmod(rank, layout.tensor)
    stage, data = divmod(rest, layout.data)
    return tensor, data, stage


def _covers(task: Task, staying: Collection[str]) -> bool:
    """Return whether those of ``staying`` that are ``current`` hold the whole state."""
    layout = task.held
    if layout is None:
        return False
    places = [_place(layout, task.ranks[worker]) for worker in current(task) if worker in staying]
    if task.spec.parallel.distributed_optimizer:
        return len(places) == layout.world_size  # each holds a part that nobody else does
    return len({(tensor, stage) for tensor, _, stage in places}) == layout.tensor * layout.pipeline


def _is_copied(task: Task, staying: Set[str]) -> bool:
    """Return whether copies in memory have, in all likelihood, what those that stay lack of the state."""
    return task.spec.checkpoint.memory_every > 0 and any(
        worker in task.ranks for worker in task.kept if worker in staying
    )


def _are_replicas(task: Task) -> bool:
    """Return whether every survivor is a replica of its own."""
    return task.replica == 1 and set(current(task)) == set(task.kept)


def _move_live(
    state: State, task: Task, workers: Sequence[str], layout: Layout, reason: str, *, complete: bool
) -> TaskChange:
    """The survivors hold the state; whole replicas finish the step that was interrupted, if one was.

    ``complete``: whether those that stay hold all of it. If not, the more nodes take part the more copies are at hand:
    only where every survivor is a replica of its own do they finish the step in a stage of theirs.
    """
    kept = task.kept
    alone = complete or _are_replicas(task)
    interrupted = _interrupted(task, complete=complete) if disturbed(task) and alone else None
    sources: dict[str, Source] = {worker: "live" if worker in kept else "take" for worker in workers}
    target = None
    if interrupted is None or list(workers) != current(task) or not _same_split(interrupted.layout, layout):
        generation = (interrupted.generation if interrupted else task.generation) + 1
        whole = complete or interrupted is not None
        target = _stage(task, "boundary", generation, layout, sources, complete=whole)
    failed = _failed(state, task, kept)
    return TaskChange(
        task=task.name,
        reason=reason,
        action="move" if target else "none",
        from_generation=task.generation,
        survivors=list(kept),
        failed=failed,
        hold=disturbed(task),
        interrupted=interrupted,
        release=_release(state, task, [*workers, *failed]),
        prepare=_without(workers, kept),
        target=target,
    )


def _same_split(one: Layout, other: Layout) -> bool:
    """Return whether a model is split in the same way."""
    return (one.tensor, one.pipeline) == (other.tensor, other.pipeline)


def _move_from_storage(state: State, task: Task, workers: Sequence[str], layout: Layout, reason: str) -> TaskChange:
    """All members take the newest checkpoint, or begin anew; processes that are known to be up are kept.

    A data-parallel task that stays one, and whose replicas are whole each, is here only because none of them stays.
    """
    divided = max(task.replica, layout.tensor * layout.pipeline) > 1 or task.spec.parallel.distributed_optimizer
    kept = task.kept if divided else ()
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

    Where neither those that live hold all of it nor copies make it whole (no survivor, or shards of a broken step) the
    newest checkpoint is all there is; then its processes only end.
    """
    saves = can_save(task)
    complete = _covers(task, task.kept)
    kept = current(task) if saves else []
    return TaskChange(
        task=task.name,
        reason=reason,
        action=action,
        from_generation=task.generation,
        survivors=kept,
        failed=sorted({*task.lost, *task.occupied} - set(kept)),
        hold=disturbed(task),
        interrupted=_interrupted(task, complete=complete) if saves and disturbed(task) else None,
        release=[worker for worker in kept if state.usable(worker)],
    )


def can_save(task: Task) -> bool:
    """Return whether the task's live processes can still write a checkpoint of the step they are in."""
    return _covers(task, task.kept) or (_is_copied(task, set(task.kept)) and _are_replicas(task))


def end(state: State, task: Task, reason: str) -> TaskChange:
    """Return the change that ends all processes of a task that is over."""
    return TaskChange(
        task=task.name,
        reason=reason,
        action="end",
        from_generation=task.generation,
        release=[worker for worker in task.occupied if state.usable(worker)],
    )


def _interrupted(task: Task, *, complete: bool) -> Stage:
    """Return the stage in which whole replicas finish the step."""
    members = current(task)
    tensor, pipeline = (task.held.tensor, task.held.pipeline) if task.held is not None else (1, 1)
    data = len(members) // (tensor * pipeline)
    layout = Layout(tensor=tensor, pipeline=pipeline, data=data, micro_batch=task.spec.batch.micro)
    sources: dict[str, Source] = dict.fromkeys(members, "live")
    return _stage(task, "interrupted", task.generation + 1, layout, sources, complete=complete)


def _stage(
    task: Task,
    kind: Literal["interrupted", "boundary"],
    generation: int,
    layout: Layout,
    sources: dict[str, Source],
    *,
    complete: bool = True,
) -> Stage:
    return Stage(
        kind=kind,
        generation=generation,
        layout=layout,
        members=[
            Member(rank=rank, worker=worker, node=node_of(worker), source=source)
            for rank, (worker, source) in enumerate(sources.items())
        ],
        checkpoint="" if complete and "checkpoint" not in sources.values() else task.checkpoint,
        complete=complete,
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
