"""What an error event is about: the node, the task, and the workers whose processes it condemns.

``evolve.py`` applies the answers to the state, ``decide.py`` chooses the response by them.
"""

from __future__ import annotations

from services.planner.state.cluster import State, Task, node_of
from shared.events.evidence import Evidence
from shared.events.severities import Severity
from shared.events.union import ErrorDetected


def blamed_node(event: ErrorDetected) -> str | None:
    """Return the node that the error names, by itself or by its worker."""
    if event.node is not None:
        return event.node
    return node_of(event.worker) if event.worker is not None else None


def blamed_task(state: State, event: ErrorDetected) -> Task | None:
    """Return the task that the error names, else the task that has the worker; None if that task has ended."""
    task = state.tasks.get(event.task) if event.task is not None else None
    if event.task is None and event.worker is not None:
        having = [t for t in state.tasks.values() if event.worker in (*t.owners, *t.members)]
        task = having[0] if having else None
    return task if task is not None and task.life != "ended" else None


def blamed_workers(task: Task, event: ErrorDetected) -> list[str]:
    """Return the workers of the task whose processes the error condemns.

    These are the workers that the event names (``worker``, and ``workers`` in the evidence). An event that names none
    condemns, at SEV2, all but the lowest rank, so that the state survives if the cause lies elsewhere; at SEV1, where
    that answer has failed too, all.
    """
    workers = [event.worker] if event.worker is not None else []
    if "workers" in event.evidence:
        workers += [worker for worker in Evidence.read(event.evidence).workers if worker not in workers]
    if workers:
        return workers
    everyone = list(dict.fromkeys((*task.owners, *task.members)))
    spare_lowest = event.severity is Severity.SEV2 and task.replica_size == 1
    return [w for w in everyone if not (spare_lowest and w in task.live_owners[:1])]


def is_stale(task: Task, event: ErrorDetected) -> bool:
    """Return whether a SEV3 error belongs to a generation that has been replaced already."""
    return event.severity is Severity.SEV3 and event.generation is not None and event.generation < oldest_live(task)


def oldest_live(task: Task) -> int:
    """Return the oldest generation that may still train.

    It is the generation of the newest plan's first stage. If the plan does not suspend the survivors, they train on in
    the generation before until all processes are ready, and errors of that generation still count.
    """
    change = task.change
    if change is not None and change.survivors and not change.hold and change.interrupted is None:
        return change.from_generation
    stages = change.stages if change is not None else []
    return stages[0].generation if stages else task.generation
