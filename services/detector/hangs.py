"""Who holds a task up: ranks that train, ranks that are to leave a step, ranks that begin a stage of a plan.

From what the monitor sees (``view``) and the rules for one set of ranks (``stalls``) to the fault. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from services.detector import stalls
from services.detector.faults import Fault
from services.detector.stalls import Limits, Stall
from services.detector.view import TaskView, View
from shared.plans import Layout, Stage
from shared.severities import ErrorKind
from shared.signals import WorkerStatus


def of_training(view: View, task: TaskView, limits: Limits, now: datetime) -> Fault | None:
    """Return the fault of a task that trains and stands still, if it does."""
    statuses = {w: s for w in task.members if (s := view.status(w)) is not None and s.task == task.name}
    own = {w: s for w, s in statuses.items() if s.generation == task.generation}
    found = _stopped(view, task, own, limits, now)
    if found is None and len(own) == len(task.members):
        found = stalls.find(
            own,
            mean_s=task.mean_step_s(),
            deviation_s=task.deviation_step_s(),
            previous_mean_s=task.previous_mean_s,
            growth=task.previous_size / len(task.members),
            data_parallel_only=_data_parallel_only(task.layout),
            limits=limits,
        )
    return _fault(task, found, own, now) if found is not None else None


def of_moving(view: View, task: TaskView, limits: Limits, now: datetime) -> Fault | None:
    """Return the fault of a rank that holds up a plan, if one does: its commands would wait for it for minutes."""
    statuses = {
        w: s
        for w in sorted(task.concerned())
        if (s := view.status(w)) is not None
        and s.task == task.name
        and s.generation is not None
        and task.accepts(w, s.generation)
    }
    found = (
        _stopped(view, task, statuses, limits, now)
        or _held_in_vain(task, statuses, limits)
        or _of_stage(task, statuses, limits)
    )
    return _fault(task, found, statuses, now) if found is not None else None


def _stopped(
    view: View, task: TaskView, statuses: Mapping[str, WorkerStatus], limits: Limits, now: datetime
) -> Stall | None:
    """Return the stall of processes that were stopped, whatever the others do."""
    limit_s = stalls.stopped_limit_s(task.mean_step_s() or task.previous_mean_s, limits)
    stopped_s = {w: seconds for w in statuses if (seconds := view.stopped_s(w, now)) > limit_s}
    if not stopped_s:
        return None
    return Stall(ErrorKind.HANG, tuple(stopped_s), min(stopped_s.values()), limit_s)


def _held_in_vain(task: TaskView, statuses: Mapping[str, WorkerStatus], limits: Limits) -> Stall | None:
    """Return the stall of ranks that were told to leave their step and do not get to the end of a micro-batch."""
    mean_s = task.mean_step_s() or task.previous_mean_s
    if mean_s is None:
        return None
    step_limit_s = limits.step_limit_s(mean_s, task.deviation_step_s())
    late: dict[str, float] = {}
    for worker, status in statuses.items():
        if status.phase == "setup" and task.setup_s is not None:
            limit_s = max(step_limit_s, stalls.setup_limit_s(task.setup_s))  # it may be in the user's ``build``
        elif status.phase in stalls.SLOW_PHASES:
            continue
        else:
            limit_s = step_limit_s
        if (held_s := stalls.held_s(status)) > limit_s:
            late[worker] = held_s
    return Stall(ErrorKind.HANG, tuple(late), min(late.values()), step_limit_s) if late else None


def _of_stage(task: TaskView, statuses: Mapping[str, WorkerStatus], limits: Limits) -> Stall | None:
    """Return the stall of those who drain, or who begin a stage of the plan, if all of them are at it."""
    assert task.change is not None
    newest = max((s.generation or 0 for s in statuses.values() if s.state == "training"), default=-1)
    stage = next((s for s in task.stages() if s.generation == newest), None)
    layout: Layout | None
    if stage is not None:
        workers, layout = [m.worker for m in stage.members], stage.layout
        mean_s, previous_s, before = None, task.mean_step_s() or task.previous_mean_s, len(task.members)
    elif newest == task.generation and not task.change.hold and task.change.interrupted is None:
        workers, layout = list(task.members), task.layout
        mean_s, previous_s, before = task.mean_step_s(), task.previous_mean_s, task.previous_size
    else:
        return None  # held: see _held_in_vain
    own = {w: statuses[w] for w in workers if w in statuses and statuses[w].generation == newest}
    if len(own) < len(workers) or any(s.state != "training" for s in own.values()):
        return None
    return stalls.find(
        own,
        mean_s=mean_s,
        deviation_s=task.deviation_step_s() if mean_s is not None else 0.0,
        previous_mean_s=previous_s,
        growth=before / len(workers),
        data_parallel_only=_data_parallel_only(layout),
        limits=limits,
        setup_s=task.setup_s if stage is not None and _from_memory(stage) else None,
    )


def _from_memory(stage: Stage) -> bool:
    """Whether its members take their state from one another: what storage takes is another matter."""
    return all(member.source in ("live", "take") for member in stage.members)


def _fault(task: TaskView, stall: Stall, statuses: Mapping[str, WorkerStatus], now: datetime) -> Fault:
    worker = stall.workers[0] if stall.workers else None
    status = statuses[worker] if worker is not None else next(iter(statuses.values()))
    generation = status.generation if status.generation is not None else task.generation
    step = status.step if worker is not None else task.step
    # On the way from one stage to the next several ranks may hang at the same step, one after the other.
    which = f"/{','.join(stall.workers)}" if task.change is not None else ""
    return Fault(
        cause=f"{task.name}/{generation}/{step}{which}",
        kind=stall.kind,
        error=(status.phase or "") if worker is not None else "",
        occurred_at=now - timedelta(seconds=stall.stalled_s),
        generation=generation,
        step=step,
        worker=worker,
        node=worker.rpartition("/")[0] if worker is not None else None,
        rank=status.rank if worker is not None else None,
        evidence={"workers": list(stall.workers), "stalled_s": stall.stalled_s, "limit_s": stall.limit_s},
    )


def _data_parallel_only(layout: Layout | None) -> bool:
    return layout is not None and layout.tensor == layout.pipeline == 1
