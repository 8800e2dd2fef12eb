"""The faults of tasks that stand still: ranks that train, are to leave a step, or begin a stage of a plan.

The functions choose the ranks to compare from the detector's state, let ``stalls.py`` judge them, and return the fault.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from services.detector.incidents.faults import Fault
from services.detector.state import stalls
from services.detector.state.cluster import DetectorState
from services.detector.state.progress_gaps import HangLimit
from services.detector.state.stalls import Stall, StallLimits
from services.detector.state.task import MonitoredTask
from shared.events.evidence import Evidence
from shared.events.plans import Layout, Stage
from shared.events.severities import ErrorKind
from shared.messages.signals import WorkerStatus

BETWEEN_STEPS_ADVICE = (
    "the rank was between two steps, in the code of the script: what takes longer there (an evaluation, an export) has "
    "to call run.heartbeat() before it begins, and again within each limit"
)
"""What the reader of a hang between two steps should know."""


def of_training(state: DetectorState, task: MonitoredTask, limits: StallLimits, now: datetime) -> Fault | None:
    """Return the fault of a task that trains; None if the task makes progress.

    While a member's node is unreachable, the task may stand still because of that member (``silence.py`` decides), but
    for ranks that compute alone.
    """
    own = _own(state, task)
    stall, certain = _stopped(state, task, own, limits, now), True
    if stall is None:
        stall = _of_heard(state, task, own, limits)
        if stall is None and not task.durations_s:
            stall, certain = _of_heard(state, task, own, limits, cold=False), False
        waits = stall is None or stall.kind is not ErrorKind.HANG or not _data_parallel_only(task.layout)
        if waits and (away := state.unreachable()) and any(m.node in away for m in task.members.values()):
            return None
    return _judged(task, stall, own, now, certain=certain) if stall is not None else None


def of_heard(state: DetectorState, task: MonitoredTask, limits: StallLimits) -> Stall | None:
    """Return the stall of a task's members, without those on unreachable nodes; None if the others make progress."""
    return _of_heard(state, task, _own(state, task), limits)


def _of_heard(
    state: DetectorState,
    task: MonitoredTask,
    own: Mapping[str, WorkerStatus],
    limits: StallLimits,
    *,
    cold: bool = True,
) -> Stall | None:
    """Return the stall of the members that are heard, as ``of_heard`` does.

    ``own``: the members' statuses; ``cold``: whether fresh starts have a limit of their own.
    """
    away = state.unreachable()
    members = {w for w, member in task.members.items() if member.node not in away} if away else task.members.keys()
    own = {w: s for w, s in own.items() if w in members} if away else own
    return _of_step(state, task, own, limits, cold=cold) if members and len(own) == len(members) else None


def _of_step(
    state: DetectorState,
    task: MonitoredTask,
    own: Mapping[str, WorkerStatus],
    limits: StallLimits,
    part: float = 1.0,
    *,
    cold: bool = True,
) -> Stall | None:
    """Return the stall of members that train, of all or of those that are heard, after a part of its limit."""
    return stalls.find(
        own,
        mean_s=task.mean_step_s(),
        deviation_s=task.deviation_step_s(),
        previous_mean_s=task.previous_mean_s,
        growth=task.previous_size / len(task.members),
        data_parallel_only=_data_parallel_only(task.layout),
        limits=limits,
        gaps=task.gaps,
        cold=stalls.cold_limit(task.cold_s, limits) if cold else None,
        in_collective=_in_collective(state, task),
        whole=len(own) == len(task.members),
        part=part,
    )


def suspected(
    state: DetectorState, task: MonitoredTask, limits: StallLimits, part: float, now: datetime
) -> tuple[dict[str, WorkerStatus], float] | None:
    """Return the ranks of a task that may stand still, and for how long they have; None: they make progress.

    Args:
        state: the detector's.
        task: running, or with a plan in progress.
        limits: thresholds.
        part: the part of its limit for which the ranks have made no progress.
        now: the time.
    """
    own = _own(state, task) if task.change is None else _concerned(state, task)
    stopped_s = part * _stopped_limit_s(task, limits)
    stopped = any(s.process_state in stalls.STOPPED and state.stopped_s(w, now) > stopped_s for w, s in own.items())
    ages = [age for s in own.values() if (age := stalls.own_age_s(s)) is not None]
    if stopped:
        return own, min(ages, default=0.0)
    # Most tasks have just made progress, and no limit is below its floor.
    if max(ages, default=0.0) < part * limits.hang_floor_s:
        return None
    if task.change is None:
        stall = _of_step(state, task, own, limits, part) if len(own) == len(task.members) else None
        return (own, stall.stalled_s) if stall is not None else None
    aged = {worker: _aged(status, 1.0 / part) for worker, status in own.items()}
    stall = _deaf_to_hold(state, task, aged, limits) or _of_stage(state, task, aged, limits)
    return (own, min(ages)) if stall is not None else None


def _aged(status: WorkerStatus, factor: float) -> WorkerStatus:
    """Return a status with ages that are ``factor`` times as long: what exceeds a limit then exceeds a part of it."""
    ages = {
        name: value * factor
        for name in ("progress_age_s", "starved_s", "idle_s", "hold_age_s")
        if (value := getattr(status, name)) is not None
    }
    return status.model_copy(update=ages)


def limit_of(task: MonitoredTask, status: WorkerStatus, limits: StallLimits) -> HangLimit:
    """Return for how long a rank that trains may make no progress where it is."""
    if status.phase == "setup" and task.setup_s is not None:
        return HangLimit(stalls.setup_limit_s(task.setup_s), "setup")
    mean_s, deviation_s = task.mean_step_s(), task.deviation_step_s()
    growth = task.previous_size / max(1, len(task.members))
    own = {status.worker: status}
    cold = stalls.cold_limit(task.cold_s, limits)
    return stalls.limit_of(own, mean_s, deviation_s, task.previous_mean_s, growth, list(own), limits, task.gaps, cold)


def _own(state: DetectorState, task: MonitoredTask) -> dict[str, WorkerStatus]:
    """Return the status of each member that reports to be in the task's present generation."""
    name, generation = task.name, task.generation
    return {w: s for w, s in state.statuses(task).items() if s.task == name and s.generation == generation}


def _concerned(state: DetectorState, task: MonitoredTask) -> dict[str, WorkerStatus]:
    """Return the status of each worker that the plan in progress concerns, as far as a failure of it would be news."""
    return {
        w: s
        for w in sorted(task.concerned())
        if (s := state.status(w)) is not None
        and s.task == task.name
        and s.generation is not None
        and task.accepts(w, s.generation)
    }


def of_moving(state: DetectorState, task: MonitoredTask, limits: StallLimits, now: datetime) -> Fault | None:
    """Return the fault of a rank that delays a plan; None if no rank does.

    Without the fault, the plan's commands would wait for the rank until they time out, for minutes. Ranks that join for
    long where nothing is known of how long that may take are a fault that is not certain; so are those in a first step
    that would be long if nothing in it had to be compiled or read anew.
    """
    statuses = _concerned(state, task)
    stall = (
        _stopped(state, task, statuses, limits, now)
        or _deaf_to_hold(state, task, statuses, limits)
        or _of_stage(state, task, statuses, limits)
    )
    if stall is not None:
        return _fault(task, stall, statuses, now)
    if (stall := _of_stage(state, task, statuses, limits, cold=False)) is not None:
        return _judged(task, stall, statuses, now, certain=False)
    if not any(status.phase == "setup" for status in statuses.values()):
        return None
    stall = _of_stage(state, task, statuses, replace(limits, slow_region_timeout_s=stalls.SETUP_FLOOR_S))
    return replace(_fault(task, stall, statuses, now), certain=False) if stall is not None else None


def _stopped(
    state: DetectorState, task: MonitoredTask, statuses: Mapping[str, WorkerStatus], limits: StallLimits, now: datetime
) -> Stall | None:
    """Return the stall of processes that were stopped by a signal, in any phase."""
    limit_s = _stopped_limit_s(task, limits)
    stopped = [worker for worker, status in statuses.items() if status.process_state in stalls.STOPPED]
    stopped_s = {w: seconds for w in stopped if (seconds := state.stopped_s(w, now)) > limit_s}
    if not stopped_s:
        return None
    return Stall(ErrorKind.HANG, tuple(stopped_s), min(stopped_s.values()), HangLimit(limit_s, "stopped"))


def _stopped_limit_s(task: MonitoredTask, limits: StallLimits) -> float:
    return stalls.stopped_limit_s(task.mean_step_s() or task.previous_mean_s, limits, task.gaps)


def _deaf_to_hold(
    state: DetectorState, task: MonitoredTask, statuses: Mapping[str, WorkerStatus], limits: StallLimits
) -> Stall | None:
    """Return the stall of ranks that were asked to leave their step and do not reach the end of a micro-batch."""
    mean_s = task.mean_step_s() or task.previous_mean_s
    if mean_s is None:
        return None
    step_limit = HangLimit(limits.step_limit_s(mean_s, task.deviation_step_s()), "mean")
    waits = _in_collective(state, task)
    late: dict[str, tuple[float, HangLimit]] = {}  # worker -> for how long it has not heeded the request, and its limit
    for worker, status in statuses.items():
        if status.phase in ("checkpoint", "waiting", "script") or (status.phase == "setup" and task.setup_s is None):
            continue
        limit, first = _limit_to_leave(task, status, step_limit, limits)
        works = worker not in waits and stalls.may_work(status, first=first)
        unheeded_s = stalls.unheeded_hold_s(status)
        if stalls.exceeds(status, limit, limits, works=works, own_s=unheeded_s):
            late[worker] = unheeded_s, limit
    if not late:
        return None
    unheeded_s, limit = min(late.values(), key=lambda found: found[0])
    return Stall(ErrorKind.HANG, tuple(late), unheeded_s, limit)


def _limit_to_leave(
    task: MonitoredTask, status: WorkerStatus, step_limit: HangLimit, limits: StallLimits
) -> tuple[HangLimit, bool]:
    """Return for how long a rank may take to leave its step, and whether that is the first one of its generation."""
    first = stalls.in_first_step(status) and (status.generation != task.generation or not task.durations_s)
    limit = step_limit
    if status.phase == "setup" and task.setup_s is not None:
        # The rank may run the user's ``build``.
        limit = HangLimit(max(limit.limit_s, stalls.setup_limit_s(task.setup_s)), limit.source)
    elif status.phase in stalls.BETWEEN_STEPS:
        limit = stalls.longer(limit, HangLimit(limits.slow_region_timeout_s, "slow-region"))
    elif first:
        limit = stalls.longer(limit, stalls.cold_limit(task.cold_s, limits))
    if stalls.is_fresh(status):
        limit = stalls.longer(limit, stalls.cold_limit(task.cold_s, limits))
    return limit, first


def _in_collective(state: DetectorState, task: MonitoredTask) -> frozenset[str]:
    """Return the workers whose newest report, while the task stands still, has a collective that has not ended."""
    known = state.standstills.get(task.name)
    reports = known.reports.items() if known is not None else ()
    return frozenset(worker for worker, report in reports if any(group.waits for group in report.groups or ()))


def _of_stage(
    state: DetectorState,
    task: MonitoredTask,
    statuses: Mapping[str, WorkerStatus],
    limits: StallLimits,
    *,
    cold: bool = True,
) -> Stall | None:
    """Return the stall of ranks that drain, or that begin a stage of the plan, once all of them do."""
    assert task.change is not None
    newest = _newest_generation(statuses)
    stage = next((s for s in task.stages() if s.generation == newest), None)
    layout: Layout | None
    if stage is not None:
        workers, layout = [m.worker for m in stage.members], stage.layout
        mean_s, previous_s, before = None, task.mean_step_s() or task.previous_mean_s, len(task.members)
    elif newest == task.generation and not task.change.hold and task.change.interrupted is None:
        workers, layout = list(task.members), task.layout
        mean_s, previous_s, before = task.mean_step_s(), task.previous_mean_s, task.previous_size
    else:
        return None  # if the ranks are held, see _deaf_to_hold
    own = {w: statuses[w] for w in workers if w in statuses and statuses[w].generation == newest}
    # A task that has stopped has no members, while heartbeats from before still have its ranks.
    if not workers or len(own) < len(workers) or any(s.state != "training" for s in own.values()):
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
        cold=stalls.cold_limit(task.cold_s, limits) if cold else None,
        in_collective=_in_collective(state, task),
    )


def _from_memory(stage: Stage) -> bool:
    """Return whether the members take their state from one another. A read from storage has no known duration."""
    return all(member.source in ("live", "take") for member in stage.members)


def _newest_generation(statuses: Mapping[str, WorkerStatus]) -> int | None:
    """Return the newest generation in which a rank trains; None if none trains."""
    return max((s.generation or 0 for s in statuses.values() if s.state == "training"), default=None)


def _fault(task: MonitoredTask, stall: Stall, statuses: Mapping[str, WorkerStatus], now: datetime) -> Fault:
    worker = stall.workers[0] if stall.workers else None
    status = statuses[worker] if worker is not None else None
    # No rank is to blame for a collective. It is of the ranks that train, and not of processes that a plan has started
    # beside them.
    generation = status.generation if status is not None else _newest_generation(statuses)
    if generation is None:
        generation = task.generation
    step = status.step if status is not None else task.step
    # Between two stages several ranks may hang at the same step, one after the other: each has an event of its own.
    which = f"/{','.join(stall.workers)}" if task.change is not None else ""
    evidence = Evidence(workers=list(stall.workers))
    return Fault(
        cause=f"{task.name}/{generation}/{step}{which}",
        kind=stall.kind,
        error=(status.phase or "") if status is not None else "",
        occurred_at=now - timedelta(seconds=stall.stalled_s),
        generation=generation,
        step=step,
        worker=worker,
        node=worker.rpartition("/")[0] if worker is not None else None,
        rank=status.rank if status is not None else None,
        evidence=evidence.mapping(stalled_s=stall.stalled_s, **stall.limit.evidence(), **_advice(status)),
        by_peers=_waits_for_peers(task, stall, statuses),
        stalled_s=stall.stalled_s,
        in_setup=any(s.phase == "setup" for s in statuses.values()),
    )


def _advice(status: WorkerStatus | None) -> dict[str, str]:
    """Return the entry of the evidence that says what to look at, or to do, by where the rank to blame stands."""
    if status is None or status.phase not in stalls.BETWEEN_STEPS:
        return {}
    return {"advice": BETWEEN_STEPS_ADVICE}


def _judged(
    task: MonitoredTask, stall: Stall, statuses: Mapping[str, WorkerStatus], now: datetime, *, certain: bool
) -> Fault | None:
    """Return the fault of a stall.

    If a fresh start may take longer, the stall is a fault only if a link is found broken.
    """
    fault = _fault(task, stall, statuses, now)
    if certain:
        return fault
    return replace(fault, certain=False) if fault.by_peers else None


def _waits_for_peers(task: MonitoredTask, stall: Stall, statuses: Mapping[str, WorkerStatus]) -> bool:
    """Return whether the ranks to blame may wait for others, so that a broken link may be the cause of the stall.

    A stopped process waits for nobody, and in a data-parallel task a rank that computes does not either.
    """
    alone = ("compute",) if _data_parallel_only(task.layout) else ()
    blamed = [statuses[worker] for worker in stall.workers]
    return not any(status.process_state in stalls.STOPPED or status.phase in alone for status in blamed)


def _data_parallel_only(layout: Layout | None) -> bool:
    return layout is not None and layout.tensor == layout.pipeline == 1
