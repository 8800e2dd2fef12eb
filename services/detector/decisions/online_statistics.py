"""From telemetry to events: slow workers and anomalies of tasks that train. Pure.

The tests are in ``stragglers.py``, ``loss_spikes.py``, ``regressions.py`` and ``slow_links.py``. An event's id derives
from the task, the generation and the step, so that a detector that has started anew finds the same event, not another
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from services.detector.incidents.faults import SERVICE
from services.detector.nodes import probing
from services.detector.nodes.probing import ProbeQuestion
from services.detector.state import regressions
from services.detector.state.anomalies import OpenAnomaly, key_of
from services.detector.state.cluster import DetectorState
from services.detector.state.loss_spikes import Spike
from services.detector.state.slow_links import SlowLink
from services.detector.state.stragglers import Change
from services.detector.state.task import MonitoredTask
from shared.events.observed_events import AnomalyKind
from shared.events.union import AnomalyObserved, WorkerSlowed, derived_id
from shared.messages.signals import WorkerStatus


def of_status(
    state: DetectorState, task: MonitoredTask, status: WorkerStatus, now: datetime
) -> Iterator[WorkerSlowed | AnomalyObserved]:
    """Take the steps of a task's member; yield the events that follow. Each is to be folded before the next one.

    Args:
        state: the detector's.
        task: the task.
        status: of a member, in the task's generation.
        now: the time.
    """
    if task.layout is None:
        return
    statistics = task.statistics
    statistics.enter(task.generation, task.layout, task.members)
    statistics.add(status)
    for change in statistics.changes(task.members, task.layout, state.slowed):
        yield _slowed(task, change, now)
    if status.rank == 0:
        yield from _of_losses(task, status, now)
        yield from _of_step_times(task, now)


def of_probe(
    state: DetectorState, question: ProbeQuestion, round_trips_s: Mapping[str, float], now: datetime
) -> Iterator[AnomalyObserved]:
    """Take the round trips that a node has measured; yield the links that became slow, or fast again.

    A slow link belongs to each task that has a rank on both nodes.
    """
    if question.witness not in state.nodes:
        return  # the detector's own way to a node is not a link between nodes
    known = frozenset(
        (open_.node, open_.peer)
        for task in state.tasks.values()
        for open_ in task.anomalies.values()
        if open_.node is not None and open_.peer is not None
    )
    for link in state.round_trips.take(question.witness, round_trips_s, known):
        for task in state.tasks.values():
            on = {member.node for member in task.members.values()}
            is_open = key_of("slow-link", *link.nodes) in task.anomalies
            if not task.ended and (is_open if link.ended else on.issuperset(link.nodes)):
                yield _slow_link(task, link, now)


def ask(state: DetectorState, now: datetime) -> list[ProbeQuestion]:
    """Return the rare probes between nodes of near ranks that are due now."""
    state.round_trips.forget(state.tasks)
    questions = []
    for task in state.running():
        for one, other in state.round_trips.due(task.name, task.generation, task.nodes(), now.timestamp()):
            questions += probing.ask(state, [one], [other], now)
    return questions


def _slowed(task: MonitoredTask, change: Change, now: datetime) -> WorkerSlowed:
    member = task.members[change.worker]
    cause = f"{task.name}/{task.generation}/{change.step}/{change.worker}/{change.slowdown}"
    return WorkerSlowed(
        event_id=derived_id(cause, SERVICE, "slowed"),
        occurred_at=now,
        node=member.node,
        worker=change.worker,
        slowdown=change.slowdown,
        task=task.name,
        generation=task.generation,
        rank=member.rank,
        step=change.step,
        evidence={
            "measured": round(change.measured, 4),
            "spread": round(change.spread, 4),
            "steps": change.steps,
            "peers": change.peers,
        },
    )


def _of_losses(task: MonitoredTask, status: WorkerStatus, now: datetime) -> Iterator[AnomalyObserved]:
    for report in sorted(status.steps):
        if report.loss is None:
            continue
        lasting = task.anomalies.get("loss-spike")
        spike = task.statistics.losses.take(report.step, report.loss, lasting.expected if lasting else None)
        if spike is not None:
            yield _spike(task, spike, now)


def _spike(task: MonitoredTask, spike: Spike, now: datetime) -> AnomalyObserved:
    evidence = {"unit": "mean loss of a step", "deviations": round(spike.deviations, 2)}
    return _anomaly(task, "loss-spike", spike.step, spike.loss, spike.expected, now, evidence, ended=spike.ended)


def _of_step_times(task: MonitoredTask, now: datetime) -> Iterator[AnomalyObserved]:
    lasting = task.anomalies.get("throughput-regression")
    if lasting is not None and lasting.generation != task.generation:
        yield _superseded(task, lasting, now)
        lasting = None
    if task.timed < regressions.WARM_UP + regressions.WINDOW:
        return
    before_s = task.rates.before(task.layout, task.generation)
    found = regressions.judge(task.durations_s, before_s, known=lasting is not None)
    begins = found is not None and not found.ended
    since = task.statistics.regressed_since = (task.statistics.regressed_since or now) if begins else None
    if found is not None and (since is None or regressions.has_lasted(task.durations_s, since, now)):
        evidence = {"unit": "seconds of a step", "steps": regressions.WINDOW, "workers": len(task.members)}
        kind: AnomalyKind = "throughput-regression"
        yield _anomaly(task, kind, task.step, found.step_s, found.expected_s, now, evidence, ended=found.ended)


def _superseded(task: MonitoredTask, lasting: OpenAnomaly, now: datetime) -> AnomalyObserved:
    """Return the end of a regression of an earlier generation: the present generation is judged anew."""
    evidence = {"unit": "seconds of a step", "reason": f"generation {task.generation} is judged anew"}
    kind: AnomalyKind = "throughput-regression"
    return _anomaly(task, kind, task.step, lasting.expected, lasting.expected, now, evidence, ended=True)


def _slow_link(task: MonitoredTask, link: SlowLink, now: datetime) -> AnomalyObserved:
    first, second = link.nodes
    value, expected = link.round_trip_s, link.expected_s
    # The time is a part of the cause: a link may become slow and fast again within one step.
    cause = f"{first}/{second}/{now.isoformat()}"
    evidence = {"unit": "seconds"}
    found = _anomaly(task, "slow-link", task.step, value, expected, now, evidence, ended=link.ended, cause=cause)
    return found.model_copy(update={"node": first, "peer": second})


def _anomaly(
    task: MonitoredTask,
    kind: AnomalyKind,
    step: int,
    value: float,
    expected: float,
    now: datetime,
    evidence: Mapping[str, Any],
    *,
    ended: bool,
    cause: str = "",
) -> AnomalyObserved:
    about = f"{task.name}/{task.generation}/{step}/{kind}/{cause}/{ended}"
    return AnomalyObserved(
        event_id=derived_id(about, SERVICE, "anomaly"),
        occurred_at=now,
        task=task.name,
        kind=kind,
        generation=task.generation,
        step=step,
        value=value,
        expected=expected,
        detected_at=now,
        ended=ended,
        evidence=dict(evidence),
    )
