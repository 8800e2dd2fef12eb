"""Answers of the interface (``shared/interface/models.py``), made from views and live state. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from services.api.live import LiveState
from shared.events.plans import Member
from shared.interface import models
from shared.messages.reachability import Reachability
from shared.messages.signals import DeviceReading, DeviceStatus, Heartbeat, WorkerStatus
from shared.model import filled
from shared.projections.nodes import AGENT_LIVES, AWAY
from shared.tasks.specification import ENDED, TaskState
from shared.views.documents import IncidentView, NodeReport, NodeState, NodeView, PlanView, TaskView
from shared.views.incident_parts import FailureAttempt
from shared.views.observed_views import SlowdownView
from shared.views.task_parts import AttemptView

UNREACHABLE: Final = "unreachable"
"""State of a node that takes part by the log (``AGENT_LIVES``), and that the detector does not hear."""

_TRAINS = frozenset({TaskState.RUNNING, TaskState.DEGRADED, TaskState.TRANSITIONING, TaskState.STOPPING})


def task(view: TaskView, live: LiveState, *, ranks: bool = True) -> models.Task:
    """Return a task; step, loss and step time come from heartbeats where these are newer than the log.

    ``ranks``: whether to name its ranks; a list of many large tasks is some megabytes with them.
    """
    ended = view.state in ENDED
    now = None if ended else live.task(view.name, view.generation)
    step_s = (now.step_s if now else 0.0) or view.step_s
    loss = now.loss if now is not None and now.loss is not None else view.loss
    step = max(view.step, now.step if now else 0)
    active = view.state in _TRAINS and bool(view.members)
    throughput = view.update_flop / step_s if active and step_s > 0.0 else 0.0
    return filled(
        models.Task,
        view,
        id=view.submission_id,
        reason=view.reason or waits_for_storage(view, live) or _script_goes_on(view),
        step=min(step, view.spec.steps),
        steps=view.spec.steps if view.spec.steps_known else None,
        weight=view.spec.weight,
        workers=0 if ended else len(view.members),
        ranks=[_rank(member, view, live) for member in view.members] if ranks and not ended else [],
        loss=loss,
        step_s=step_s or None,
        throughput_flop_per_s=throughput,
        waf_flop_per_s=throughput * view.spec.weight,
        plan=view.plan or None,
        checkpoint=view.checkpoint or None,
        saved_step=view.checkpoint_step,
        memory_every=None if ended else view.memory_every,
        replicated=None if ended else view.replicated,
        checkpoint_failure=_checkpoint_failure(view),
        copies_lacking=None if ended else _copies_lacking(view),
        copies_kept=dict(sorted(live.copies.get(view.name, {}).items())),
        stop_refused=models.StopRefusal(**view.stop_refused.model_dump()) if view.stop_refused is not None else None,
        newcomers_refused=None if ended else view.newcomers_refused or None,
        wait=None if ended or view.wait is None else models.TaskWait(**view.wait.model_dump()),
        anomalies=[] if ended else [models.Anomaly(**one.model_dump(exclude={"generation"})) for one in view.anomalies],
        slow_workers={} if ended else {m.worker: view.slow[m.worker] for m in view.members if m.worker in view.slow},
        traceback=view.traceback or None,
    )


def waits_for_storage(view: TaskView, live: LiveState) -> str:
    """Return why a task waits whose steps are all done, and which cannot write what it has; empty: it does not."""
    if view.unwritten and view.wait is not None and view.state not in ENDED:
        return view.wait.reason
    failure = view.checkpoint_failure
    if view.state not in _TRAINS or failure is None or failure.step < view.spec.steps:
        return ""
    statuses = (live.worker(member.worker) for member in view.members)
    if any(status is not None and (status.task, status.phase) == (view.name, "tail") for status in statuses):
        return ""  # it is written, and the script goes on
    return f"waits for its storage: {failure.reason}"


def _script_goes_on(view: TaskView) -> str:
    """Return what a task does that has saved the state behind its last step; empty: it has not, or has ended."""
    if view.state is not TaskState.RUNNING or view.checkpoint_step < view.spec.steps:
        return ""
    most = f"at most {view.spec.finish_timeout_s:g} s (finish_timeout_s)"
    return f"all steps are done and saved; its script goes on behind the last one, for {most}"


def _checkpoint_failure(view: TaskView) -> models.CheckpointFailure | None:
    failure = view.checkpoint_failure
    return models.CheckpointFailure(**failure.model_dump()) if failure is not None else None


def _copies_lacking(view: TaskView) -> models.CopiesLack | None:
    return models.CopiesLack(**view.copies_lacking.model_dump()) if view.copies_lacking is not None else None


def _rank(member: Member, view: TaskView, live: LiveState) -> models.Rank:
    status = live.worker(member.worker)
    if status is not None and status.task != view.name:
        status = None
    state: str = status.state if status else "unknown"
    if member.worker in view.failed_workers and (status is None or status.state != "training"):
        state = "failed"
    pid = status.pid if status and status.pid is not None else view.pids.get(member.worker)
    slowdown = view.slow.get(member.worker, 1.0)
    return models.Rank(
        rank=member.rank, worker=member.worker, node=member.node, pid=pid, state=state, slowdown=slowdown
    )


def attempt(view: AttemptView, now: models.Task | None) -> models.Attempt:
    """Return a submission of a name. ``now``: the task, of the latest one."""
    own = {"task", "submission_id", "checkpoint", "traceback", "last_step", "spec", "result"}
    fields = view.model_dump(exclude=own)
    return models.Attempt(
        **fields,
        id=view.submission_id,
        spec=view.spec,
        result=view.result,
        checkpoint=view.checkpoint or None,
        last_step=view.last_step if now is None else now.step,
        traceback=view.traceback or None,
    )


def incident_facts(view: IncidentView) -> models.IncidentFacts:
    """Return an incident without its cost."""
    fields = view.model_dump(
        exclude={"position", "response", "state_source", "shortfalls", "past_shortfalls", "other_answers", "attempts"}
    )
    attempts = [
        FailureAttempt(
            **one.model_dump(exclude={"event", "plan", "response"}),
            plan=one.plan or None,
            response=one.response or None,
        )
        for one in view.attempts
    ]
    return models.IncidentFacts(
        **fields,
        response=view.response or None,
        state_source=view.state_source or None,
        attempts=attempts,
    )


def slow_worker(view: SlowdownView) -> models.SlowWorker:
    """Return a slowdown of a worker."""
    return models.SlowWorker(**view.model_dump(exclude={"ended"}), ended=view.ended or None)


def plan_summary(view: PlanView) -> models.PlanSummary:
    """Return a plan without its milestones."""
    return filled(models.PlanSummary, view, tasks=sorted({*view.impacts, *view.queued}))


def assigned_ranks(tasks: Iterable[TaskView]) -> dict[str, tuple[str, int]]:
    """Return the task and the rank of each worker that the log gives to a task."""
    return {
        member.worker: (task.name, member.rank) for task in tasks if task.state not in ENDED for member in task.members
    }


def node(view: NodeView, live: LiveState, assigned: Mapping[str, tuple[str, int]], now: datetime) -> models.Node:
    """Return a node; the tasks of its workers come from its heartbeat, or while there is none from the log.

    ``assigned``: as ``assigned_ranks`` returns it, of which the nodes of a list need one together. ``now``: the time.
    """
    heartbeat = live.heartbeats.get(view.name) if view.state not in AWAY else None
    devices = _devices(heartbeat, live.device_readings.get(view.name, [])) if heartbeat is not None else []
    device_of = {worker: device.device for device in devices for worker in device.workers}
    workers = []
    slow = {one.worker: one.slowdown for one in view.slow}
    for worker in view.workers:
        status = live.worker(worker) if view.state in AGENT_LIVES else None
        state, task_name, rank = _use(worker, view, status, assigned)
        workers.append(
            models.NodeWorker(
                worker=worker,
                task=task_name,
                rank=rank,
                state=state,
                slowdown=slow.get(worker, 1.0),
                device=device_of.get(worker),
            )
        )
    shown_state, reason = _node_state(view, live.reachability)
    return filled(
        models.Node,
        view,
        state=shown_state,
        recorded_state=view.state,
        reason=reason,
        workers=workers,
        last_heartbeat_at=live.last_heartbeat_at(view.name),
        devices=devices,
        reports=[report(one) for one in live_reports(view, now)],
    )


def live_reports(view: NodeView, now: datetime) -> list[NodeReport]:
    """Return the reports of a node that have not expired."""
    return [one for one in view.reports if one.expires_at > now]


def report(one: NodeReport) -> models.NodeReport:
    """Return what a monitor has reported of a node."""
    return models.NodeReport(**one.model_dump())


def _devices(heartbeat: Heartbeat, readings: Sequence[DeviceReading]) -> list[models.NodeDevice]:
    """Return the devices of a node: those that were read, and those of which there is something to say."""
    said = {status.device: status for status in heartbeat.devices}
    read = {reading.device: reading for reading in readings}
    found = []
    for device in sorted({*said, *read}):
        status = said.get(device, DeviceStatus(device=device))
        reading = read.get(device, DeviceReading(device=device, uuid=status.uuid))
        found.append(models.NodeDevice(**reading.model_dump(), notes=status.notes, faults=status.faults))
    return found


def node_state(view: NodeView, live: LiveState) -> models.ShownNodeState:
    """Return a node's state: that of the log, or ``unreachable`` if it takes part and the detector does not hear it."""
    return shown_state(view, live)[0]


def shown_state(view: NodeView, live: LiveState) -> tuple[models.ShownNodeState, str]:
    """Return a node's state, as ``node_state``, and the reason for it."""
    return _node_state(view, live.reachability)


def uses(view: NodeView, live: LiveState, assigned: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str | None, str]]:
    """Yield the task and the state of each worker of a node, as ``node`` shows them."""
    heartbeat = live.heartbeats.get(view.name) if view.state in AGENT_LIVES else None
    statuses = {status.worker: status for status in heartbeat.workers} if heartbeat is not None else {}
    for worker in view.workers:
        state, task_name, _ = _use(worker, view, statuses.get(worker), assigned)
        yield task_name, state


def _node_state(view: NodeView, seen: Reachability) -> tuple[models.ShownNodeState, str]:
    """Return a node's state and the reason for it.

    A node that is closed to new work and silent is ``unreachable``, with what users want of it in the reason. One that
    is isolated stays so: none of its ranks is waited for.
    """
    found = seen.unreachable.get(view.name)
    verdict = "was refused" if view.state is NodeState.ISOLATED else "has found it slow"
    slow = f"its preflight {verdict}: {view.preflight}" if view.preflight else ""
    reason = "; ".join(part for part in (view.reason, slow) if part)
    if found is None or view.state in AWAY:
        return view.state, reason
    silent = f"no heartbeat arrives since {found.since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    if view.state not in AGENT_LIVES:
        return view.state, f"{reason}; {silent}"
    silent += "; its ranks are kept"
    if view.state is not NodeState.READY:
        silent = f"{view.state.value}{f' ({reason})' if reason else ''}; {silent}"
    if seen.cut_off_since is not None:
        return UNREACHABLE, f"{silent}: the control plane is cut off from all nodes"
    if found.reached_by:
        witnesses = ", ".join(f"the {name[1:]}" if name.startswith("@") else name for name in found.reached_by)
        return UNREACHABLE, f"{silent}: its agent is reached by {witnesses}"
    return UNREACHABLE, f"{silent}: nothing shows that it is lost"


def _use(
    worker: str, node: NodeView, status: WorkerStatus | None, assigned: Mapping[str, tuple[str, int]]
) -> tuple[str, str | None, int | None]:
    """Return a worker's state, and the task and the rank that it has."""
    if node.state not in AGENT_LIVES:
        return node.state.value, None, None
    if status is not None:
        return status.state, status.task, status.rank
    return "unknown", *assigned.get(worker, (None, None))
