"""Changes: what a plan does to one task, as stages, members, and the source of each member's state (``TaskChange``).

Replicas that a fault has left whole finish the interrupted step by themselves, in a stage of their own; the members of
a broken replica stand by. Then the target stage starts, in any layout: workers that have state bring it, chunks move
between memories, and newcomers take theirs. Where the staying workers do not have all of the state together (no whole
replica is left, or a part of a divided optimizer is gone), snapshots in the memory of their nodes usually have the
rest. Where a task makes no snapshots, or none of its processes is left, all members go back to stored state.

If a stage is not known to have formed, a process that was to join the stage may be anywhere between its start and its
first step. The change lists the worker of that process in ``prepare`` again: an agent keeps a process that is not yet
configured and replaces any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence, Set
from itertools import count
from typing import Literal

from services.planner.state.cluster import State, Task, without
from services.planner.state.deals_by_speed import shares_of
from services.planner.state.usable_nodes import usable_workers
from services.planner.throughput.tables import layout_of
from shared.events.plans import Layout, Stage, TaskChange, member

Source = Literal["live", "take", "checkpoint", "initial", "script"]
"""Where a member gets its state from when a stage starts; see ``Member``."""


def disturbed(task: Task) -> bool:
    """Return whether the ranks cannot simply be drained: their step is broken, or they are in a transition."""
    return task.broken or bool(task.lost) or task.change is not None


def move(state: State, task: Task, workers: Sequence[str], reason: str) -> TaskChange:
    """Return the change that brings the task onto ``workers``, given in rank order, owners of the state first.

    The state is live only if the staying workers have it. The worker of the last owner may have been given to another
    task.
    """
    layout = layout_of(state, task, len(workers))
    if task.spec.restarts_whole:
        return _move_from_storage(state, task, workers, layout, reason)
    complete = _covers(task, set(workers))
    if complete or _is_copied(task, set(workers)):
        return _move_live(state, task, workers, layout, reason, complete=complete)
    return _move_from_storage(state, task, workers, layout, reason)


def current(task: Task) -> list[str]:
    """Return the owners that have the newest step or can complete it, in the rank order of a stage of them alone.

    After a fault these are the members of the replicas that have lost nobody. Members of a broken replica have the
    state before that step.
    """
    layout, ranks = task.state_layout, task.ranks
    if layout is None or task.has_trained:
        return []
    there = [worker for worker in task.live_owners if worker in ranks]
    if disturbed(task):
        tensor, data = layout.tensor, layout.data
        replicas = [ranks[worker] // tensor % data for worker in there]
        size = Counter(replicas)
        complete = tensor * layout.pipeline
        there = [worker for worker, replica in zip(there, replicas, strict=True) if size[replica] == complete]
    return sorted(there, key=ranks.__getitem__)


def _place(layout: Layout, rank: int) -> tuple[int, int]:
    """Return the tensor and pipeline parallel rank of a rank in Megatron's order, ``tp-dp-pp``."""
    return rank % layout.tensor, rank // (layout.tensor * layout.data)


def keeps_state(task: Task, staying: Collection[str]) -> bool:
    """Return whether those of ``staying`` have the whole state of the newest step in their memory.

    A script that restarts whole loses nothing with a worker: the state that counts is in the script's storage.
    """
    return task.spec.restarts_whole or _covers(task, staying)


def _covers(task: Task, staying: Collection[str]) -> bool:
    """Return whether those of ``staying`` that are ``current`` have the whole state."""
    layout = task.state_layout
    if layout is None:
        return False
    having = [worker for worker in current(task) if worker in staying]
    if task.spec.parallel.distributed_optimizer:
        return len(having) == layout.world_size  # each has a part that no other worker has
    return len({_place(layout, task.ranks[worker]) for worker in having}) == layout.tensor * layout.pipeline


def _is_copied(task: Task, staying: Set[str]) -> bool:
    """Return whether snapshots in memory have, in all likelihood, what the staying workers lack of the state."""
    return (
        not task.has_trained
        and task.spec.checkpoint.in_memory
        and any(worker in task.ranks for worker in task.live_owners if worker in staying)
    )


def _are_replicas(task: Task) -> bool:
    """Return whether every survivor is a data-parallel replica by itself."""
    return task.replica_size == 1 and set(current(task)) == set(task.live_owners)


def _move_live(
    state: State, task: Task, workers: Sequence[str], layout: Layout, reason: str, *, complete: bool
) -> TaskChange:
    """Return the change in which the survivors bring the state, and whole replicas finish an interrupted step.

    Args:
        state: the cluster.
        task: the task.
        workers: its new workers, in rank order.
        layout: its new layout.
        reason: why it changes, in words.
        complete: whether the staying workers have all of the state. If not, the more nodes take part, the more
            snapshots are available, and the survivors finish the step in a stage of their own only if each of them is
            a replica.
    """
    kept = task.live_owners
    having = set(kept)
    alone = complete or _are_replicas(task)
    interrupted = _interrupted(task, complete=complete) if disturbed(task) and alone else None
    sources: dict[str, Source] = {worker: "live" if worker in having else "take" for worker in workers}
    shares = _shares(state, task, layout, workers)
    target = None
    if (
        interrupted is None
        or list(workers) != current(task)
        or not _same_split(interrupted.layout, layout)
        or interrupted.shares != shares
    ):
        generation = (interrupted.generation if interrupted else task.generation) + 1
        whole = complete or interrupted is not None
        target = _stage(task, "boundary", generation, layout, sources, complete=whole, shares=shares)
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
        prepare=list(without(workers, kept)),
        target=target,
    )


def _shares(state: State, task: Task, layout: Layout, workers: Sequence[str]) -> list[int]:
    """Return how the micro-batches of a stage are dealt: as the question says, or as before by the same members."""
    dealt = state.arrangement.dealt.get(task.name) if state.arrangement is not None else None
    if dealt is None:
        return list(task.shares) if tuple(workers) == task.members and layout == task.layout else []
    return shares_of(state, task, layout, workers) if dealt and len(workers) == len(task.members) else []


def _same_split(one: Layout, other: Layout) -> bool:
    """Return whether two layouts split the model in the same way."""
    return (one.tensor, one.pipeline) == (other.tensor, other.pipeline)


def _move_from_storage(state: State, task: Task, workers: Sequence[str], layout: Layout, reason: str) -> TaskChange:
    """Return the change in which all members read the newest checkpoint, or begin anew without one.

    Processes that are known to run are kept where the model or the optimizer is divided, and where they end a script
    and start it again. A data-parallel task that has whole replicas makes this change only if no replica stays.
    """
    divided = max(task.replica_size, layout.tensor * layout.pipeline) > 1 or task.spec.parallel.distributed_optimizer
    kept = task.live_owners if (divided or task.spec.restarts_whole) and not task.has_trained else ()
    source: Source = "script" if task.spec.restarts_whole else "checkpoint" if task.checkpoint else "initial"
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
        prepare=list(without(workers, kept)),
        target=_stage(task, "boundary", task.generation + 1, layout, dict.fromkeys(workers, source)),
    )


def leave(state: State, task: Task, action: Literal["stop", "pause"], reason: str) -> TaskChange:
    """Return the change that saves the task's state and releases its workers.

    Where the live processes do not have all of the state and snapshots do not complete it, the newest checkpoint
    remains and the processes only end.
    """
    saves = can_save(task)
    complete = _covers(task, set(task.live_owners))
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
    """Return whether the live processes of the task can still write a checkpoint of the step they are in.

    A script that restarts whole may write one when it is asked to end, if no fault has ended it.
    """
    if task.spec.restarts_whole:
        return bool(task.live_owners) and not disturbed(task)
    return _covers(task, set(task.live_owners)) or (_is_copied(task, set(task.live_owners)) and _are_replicas(task))


def end(state: State, task: Task, reason: str) -> TaskChange:
    """Return the change that ends all processes of a task that has ended."""
    return TaskChange(
        task=task.name,
        reason=reason,
        action="end",
        from_generation=task.generation,
        release=[worker for worker in task.occupied if state.usable(worker)],
    )


def _interrupted(task: Task, *, complete: bool) -> Stage:
    """Return the stage in which whole replicas finish the interrupted step."""
    members = current(task)
    before = task.state_layout
    tensor, pipeline = (before.tensor, before.pipeline) if before is not None else (1, 1)
    data = len(members) // (tensor * pipeline)
    layout = Layout(tensor=tensor, pipeline=pipeline, data=data, micro_batch=task.spec.batch.micro)
    sources: dict[str, Source] = dict.fromkeys(members, "live")
    shares = list(task.shares) if tuple(members) == task.members else []
    return _stage(task, "interrupted", task.generation + 1, layout, sources, complete=complete, shares=shares)


def _stage(
    task: Task,
    kind: Literal["interrupted", "boundary"],
    generation: int,
    layout: Layout,
    sources: dict[str, Source],
    *,
    complete: bool = True,
    shares: Sequence[int] = (),
) -> Stage:
    """Return a stage of these workers, in rank order.

    It names the newest checkpoint if its members may have to read it.
    """
    return Stage(
        kind=kind,
        generation=generation,
        layout=layout,
        members=list(map(member, count(), sources.keys(), sources.values())),
        checkpoint="" if complete and "checkpoint" not in sources.values() else task.checkpoint,
        complete=complete,
        shares=list(shares),
    )


def _failed(state: State, task: Task, kept: Sequence[str]) -> list[str]:
    """Return the workers whose process is gone or must end: lost ones, and all on nodes that are not usable."""
    isolated = set(task.occupied) - usable_workers(state.nodes)
    return sorted({*task.lost, *isolated} - set(kept))


def _release(state: State, task: Task, staying: Sequence[str]) -> list[str]:
    """Return the workers that may have a process of the task and are not to keep it."""
    return [worker for worker in without(task.occupied, staying) if state.usable(worker)]
