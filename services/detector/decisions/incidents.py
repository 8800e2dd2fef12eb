"""Incidents: whether a fault of a task is judged now, later or never, and the events that follow. Pure.

``decide.py`` passes in the faults that signals report, and those that a tick finds (``absences.py``, ``hangs.py``). A
fault that a link may have caused waits for its inquiry (``links.py``); broken sockets wait for another cause;
``faults.py`` judges what is left.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from services.detector.decisions import status_events
from services.detector.decisions.decision import Decision
from services.detector.incidents import causes, faults, observations, script_ends
from services.detector.incidents.faults import Fault
from services.detector.nodes import links
from services.detector.progress import calm, standstill
from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode, Stand
from services.detector.state.task import MonitoredTask, Suspicion
from shared.events.codes import FailureCode
from shared.events.evidence import Evidence
from shared.events.severities import SEVERITY, ErrorKind
from shared.events.union import ErrorDetected, Event, derived_id
from shared.messages.signals import ProcessExited, RankRaised
from shared.model import filled

SETTLE_S = 0.25
"""Time within which the signal of a cause arrives on a busy machine; usually that takes 50 ms. Broken sockets count as
a fault of their own only after this time."""

_RANK_FIELDS = {"state", "phase", "step", "micro_batch", "setup_parts", "progress_age_s", "process_state", "pid"}
"""What the evidence of a fault contains about the status of each rank."""

_PLACE = ("state", "phase", "step", "micro_batch", "process_state")
"""Fields by which it is judged whether ranks stand at the same place."""

MOST_RANKS = 64
"""Ranks whose status is in the evidence of one fault, 10 kB: that of all of 16,000 ranks would be 2.4 MB."""

STANDS_STILL = (ErrorKind.HANG, ErrorKind.COLLECTIVE_TIMEOUT)
"""Kinds of errors of ranks that stand still, whose evidence says what they do."""


def exited(decision: Decision, task: MonitoredTask, signal: ProcessExited) -> None:
    """Take the end of a process."""
    if not task.accepts(signal.worker, signal.generation):
        observations.note(decision.state, task, signal)
        return
    if script_ends.is_failure(signal):
        decision.add(script_ends.failed(task, signal, decision.now))
        return
    suspicion = task.suspicion
    known = suspicion is not None and suspicion.generation == signal.generation
    suspects = suspicion.signals if suspicion is not None and known else []
    record(decision, task, faults.of_exit(signal, suspects))


def raised(decision: Decision, task: MonitoredTask, signal: RankRaised) -> None:
    """Take what a rank raised.

    A refusal (an error that shows that the task cannot run as specified) ends a task that has never trained, and so
    does a rank that is not what the others are: it is not known which of them is meant. A task that has trained can
    run: then the fault lies with this worker, and is answered like any exception. A script that restarts whole refuses
    only at its first start: nobody else knows whether it trains later. A loop that uses the library wrongly would do so
    again in each process, however long the task has trained.
    """
    if signal.cause == "communication":
        _suspect(decision, task, signal)
    elif task.accepts(signal.worker, signal.generation):
        refuses = signal.cause in ("refused", "differs") and (task.restarts_whole or not task.has_trained)
        if refuses or (signal.cause == "wrong_loop" and not signal.trained):
            decision.add(faults.refusal(task, signal, now=decision.now))
        elif script_ends.is_failure(signal):
            decision.add(script_ends.failed(task, signal, decision.now))
        else:
            record(decision, task, faults.of_exception(signal))
    else:
        observations.note(decision.state, task, signal)


def escalate(decision: Decision) -> None:
    """Answer the plans that could not be carried out.

    The plan that answers another error of the task changes the task, as a rule, and so supersedes the one that has
    failed. If it does not, nothing else would, and the failure is judged.
    """
    for task in list(decision.state.tasks.values()):
        if task.ended:
            task.failed_transition = None
        if (moved := task.failed_transition) is None or task.unanswered:
            continue
        if moved.code is FailureCode.CHECKPOINT_FAILED:
            task.failed_transition = None
            decision.add(status_events.stop_refused(task, moved, decision.now))
            continue
        fault = _after_inquiry(decision, task, faults.of_transition(task, moved))
        if fault is not None:
            event = faults.escalation(task, moved, fault, window_s=decision.limits.restart_window_s, now=decision.now)
            task.failed_transition = None
            if event.event_id not in task.recorded:
                _add(decision, causes.of_failed_plan(decision.state, event, decision.limits.escalation))


def examine(decision: Decision, task: MonitoredTask, fault: Fault | None) -> None:
    """Decide on a fault of the task, if there is one, once its nodes have said whether a link is its cause."""
    record(decision, task, _after_inquiry(decision, task, fault))


def record(decision: Decision, task: MonitoredTask, fault: Fault | None) -> None:
    """Decide on a fault of the task, if there is one."""
    if fault is None:
        return
    ranks = _ranks(decision.state, task, [fault.worker or "", *Evidence.read(fault.evidence).workers])
    evidence = {**fault.evidence, **ranks, "mean_step_s": task.mean_step_s()}
    if fault.kind in STANDS_STILL:
        known = decision.state.standstills.get(task.name)
        evidence |= standstill.evidence(known, fault.generation, Evidence.read(fault.evidence).workers)
    full = replace(fault, evidence=evidence)
    if fault.kind is ErrorKind.DIFFERENCE:
        event: Event = _difference(task, full, now=decision.now)
    else:
        event = faults.judge(task, full, window_s=decision.limits.restart_window_s, now=decision.now)
        event = causes.escalate(decision.state, event, decision.limits.escalation, full.traceback)
    # A stall that its plan did not end is found again, with the same id and another duration. The log refuses
    # another content under a known id.
    if event.event_id not in task.recorded:
        _add(decision, event)


def _add(decision: Decision, event: Event) -> None:
    """Add an event of a fault.

    Nodes that were given up for a failure that turns out to follow its task are used again.
    """
    returned: list[MonitoredNode] = []
    if isinstance(event, ErrorDetected):
        returned = causes.wrongly_given_up(decision.state, event, decision.limits.escalation)
    decision.add(event)
    for node in returned:
        decision.add(status_events.node_returned(node, event, decision.now))


def broken_sockets(decision: Decision, task: MonitoredTask) -> bool:
    """Decide on collectives that broke; return whether there are any, since nothing else is judged meanwhile.

    Broken collectives count also while a task is to save its state and exit: nothing else would say that its ranks wait
    for ever.
    """
    suspicion, change = task.suspicion, task.change
    if suspicion is None or suspicion.generation != task.generation:
        return False
    if change is not None and (change.hold or change.action not in ("stop", "pause")):
        return False  # the plan breaks the collectives off by itself, or its next stage shows whether they work
    if _all_alive_since(decision.state, task, suspicion.at):
        examine(decision, task, faults.of_broken_sockets(task, suspicion))
    return True


def _after_inquiry(decision: Decision, task: MonitoredTask, fault: Fault | None) -> Fault | None:
    """Return the fault if it is to be judged now, and not to wait, or part of the isolation of a node."""
    found = links.examine(decision.state, task, fault, decision.now)
    decision.others += found.questions
    for error in found.errors:
        decision.add(causes.with_pair_limit(decision.state, error, decision.limits.escalation))
    return found.fault


def _suspect(decision: Decision, task: MonitoredTask, raised: RankRaised) -> None:
    """Note that a rank's collectives broke, unless a cause is known or a plan breaks them on purpose."""
    newest = task.newest_generation()
    expected = raised.generation == task.generation if task.change is None else raised.generation == newest
    if task.unanswered or not expected or not task.accepts(raised.worker, raised.generation):
        observations.note(decision.state, task, raised)
        return
    if task.suspicion is None or task.suspicion.generation != raised.generation:
        task.suspicion = Suspicion(raised.generation, decision.now, [])
    task.suspicion.signals.append(raised)


def _all_alive_since(state: DetectorState, task: MonitoredTask, at: datetime) -> bool:
    """Return whether every node of the task has reported its ranks alive ``SETTLE_S`` after ``at``, or later."""
    for member in task.members.values():
        node = state.nodes.get(member.node)
        status = state.status(member.worker)
        heard_at = node.heard_at if node is not None else None
        settled = heard_at is not None and (heard_at - at).total_seconds() >= SETTLE_S
        if not settled or status is None or status.task != task.name:
            return False
    return True


def _ranks(state: DetectorState, task: MonitoredTask, blamed: Sequence[str]) -> dict[str, Any]:
    """Return the entries of an error's evidence that say where the ranks stand, for its reader.

    If there are more than ``MOST_RANKS`` ranks, the entries have the ranks to blame and then those that do something
    else than most; what most ranks do is said once.
    """
    found: dict[str, Any] = {}
    if len(task.members) > MOST_RANKS:
        shown, found = _telling(state, task, blamed)
    else:
        shown = [w for w, status in state.statuses(task).items() if status.task == task.name]
    statuses = {worker: status for worker in shown if (status := state.status(worker)) is not None}
    ranks = {
        worker: {"rank": task.members[worker].rank, **status.model_dump(include=_RANK_FIELDS)}
        for worker, status in statuses.items()
    }
    return {**found, "ranks": ranks}


def _telling(state: DetectorState, task: MonitoredTask, blamed: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return ``MOST_RANKS`` ranks of a large task, the most telling first, and the entries about the others.

    What each node says of its ranks is summed up already, as a rule, so this looks at nodes and not at all ranks.
    """
    stands = [stand for summary in calm.summaries(state, task) for stand in summary.stands.items()]
    counts = Counter[Stand]()
    for stand, workers in stands:
        counts[stand] += len(workers)
    if counts.total() <= MOST_RANKS:
        return sorted((w for _, workers in stands for w in workers), key=lambda w: task.members[w].rank), {}
    (most, count), *_ = counts.most_common(1)
    named = [member.worker for member in sorted(task.members_of(set(blamed)), key=lambda member: member.rank)]
    named = [w for w in named if (status := state.status(w)) is not None and status.task == task.name]
    known = frozenset(named)
    unlike_first = [*(ws for stand, ws in stands if stand != most), *(ws for stand, ws in stands if stand == most)]
    others = (w for workers in unlike_first for w in workers if w not in known)
    shown = list(itertools.islice(itertools.chain(named, others), MOST_RANKS))
    most_ranks = {"count": count, **dict(zip(_PLACE, most, strict=True))}
    return shown, {"most_ranks": most_ranks, "ranks_left_out": counts.total() - len(shown)}


def _difference(task: MonitoredTask, fault: Fault, *, now: datetime) -> ErrorDetected:
    """Return the event of a rank that is not what the other members of its generation are, and has left them.

    No node is to blame: whoever starts there differs in the same way. A second one accuses the task.
    """
    event_id = derived_id(fault.cause, faults.SERVICE, f"{task.name}/{fault.kind.value}")
    before = task.failures.incident(fault.key)
    known = Evidence(failure=fault.key, rule="task") if before else Evidence(failure=fault.key)
    return filled(
        ErrorDetected,
        fault,
        event_id=event_id,
        occurred_at=min(fault.occurred_at, now),
        incident=before or event_id,
        severity=SEVERITY[fault.kind],
        method=faults.METHOD[fault.kind],
        detected_at=now,
        task=task.name,
        evidence={**fault.evidence, **known.mapping()},
        escalates=before or None,
    )
