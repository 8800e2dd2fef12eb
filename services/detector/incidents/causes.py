"""Escalation by cause: what the same cause that comes again at one place makes of an error. Pure.

``faults.py`` escalates where the response to an error failed. Here the response may have succeeded each time: a cause
that comes again within ``cause_window_s``, at whatever step, makes the error worse.

    on one worker   ``cause_worker_limit`` times: one severity worse; twice as often: two
    on one node     ``cause_node_limit`` times, over its workers and tasks: SEV1
    on one pair     ``cause_pair_limit`` breaks of its link: the isolated node stays out until an operator returns it
    in one task     ``cause_task_limit`` times on two nodes or more: the task has failed

A cause that *follows* the task (half as often on its other nodes as on this one) isolates no node: it is a bug of the
task. Faults that a user has injected count nowhere. At one step a cause counts once: there ``max_restarts`` counts.

A *lemon* is a node with more faults of its own within ``lemon_window_s`` than chance explains. If each node fails at
random with ``expected`` faults in a window, a node has its k-th one in a window, at any time, at most at the rate
expected * P(Poisson(expected) >= k - 1) a window: at the moment of a fault, the number of others in the window before
is Poisson (Slivnyak's theorem). A node is a lemon where this rate, times the number of nodes, is at most
``lemon_false_positives``; so that is the bound for the whole cluster. ``expected`` is the mean over the node's peers,
and not less than the window over ``mtbf_node_s``: what hits all nodes alike makes none of them a lemon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from services.detector.incidents.faults import SERVICE, last_line
from services.detector.state.back_off import cause_outside
from services.detector.state.cause_history import (
    FailedStart,
    Occurrence,
    failed_start,
    is_from_outside,
    may_be_of_machine,
    occurrence,
)
from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode
from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind, Severity
from shared.events.union import ErrorDetected, Event, TaskFailed, derived_id
from shared.settings.escalation import EscalationLimits

LEAST_FAULTS = 3
"""Fewest faults of a node that is a lemon, however rare faults are said to be: two may have one cause that no peer
shares."""

ANONYMOUS = (ErrorKind.CONNECTION, ErrorKind.COLLECTIVE_TIMEOUT)
"""Kinds whose worker is the first that reported. A worker that is the first again and again is started anew; no node is
isolated for it."""


def escalate(state: DetectorState, event: Event, limits: EscalationLimits, traceback: str = "") -> Event:
    """Return an event with what repetition makes of it: a worse severity, or the end of the task.

    Args:
        state: the detector's, without the event.
        event: of a fault. An event that is no first error of an incident is returned as it is.
        limits: the settings.
        traceback: of the fault.
    """
    if not isinstance(event, ErrorDetected):
        return event
    evidence = Evidence.read(event.evidence)
    if event.escalates is not None:
        return of_start(state, event, limits) if evidence.starting else event
    if state.causes.drill_of(event) is not None:
        return event
    found = occurrence(event, evidence)
    if event.task is not None and (failed := _failed(state, event, found, limits, traceback)) is not None:
        return failed
    if found.node is None or len(evidence.workers) > 1:
        return event
    if (lemon := _lemon(state, found, limits)) is not None:
        return _worse(state, event, Severity.SEV1, limits, rule="lemon", **lemon)
    if evidence.starting and (judged := of_start(state, event, limits)) is not event:
        return judged
    return event if is_from_outside(evidence) else _repeated(state, event, found, limits)


def of_start(state: DetectorState, event: ErrorDetected, limits: EscalationLimits) -> ErrorDetected:
    """Return the error of a process that a plan had started, judged by what failed and whether that follows the task.

    Where its restart has failed too, ``faults.judge`` gives the node up. That is right if the machine may have failed,
    and if nothing shows that the failure follows the task. An error that says nothing of the machine is no reason to
    give the node up, unless that node alone has failed another task as well.

    Args:
        state: the detector's, without the event.
        event: with ``starting`` in its evidence.
        limits: the settings.
    """
    evidence = Evidence.read(event.evidence)
    gives_up = event.severity is Severity.SEV1
    if event.node is None or event.kind is ErrorKind.DEVICE:
        return event
    failed = failed_start(event, evidence)
    if failed is None:
        return _kept(event, "somebody has ended the process") if gives_up else event
    known = [one for starts in state.causes.starts.values() for one in starts]
    recent = [one for one in known if _is_recent(one, failed.at, limits.cause_window_s)]
    if nodes := _also_failed_on(state, event, evidence, recent, limits):
        return _kept(event, "the cause follows the task", follows_task_on=nodes) if gives_up else event
    again = gives_up or any((one.node, one.task) == (failed.node, failed.task) for one in recent)
    others = sorted({one.task for one in recent if one.node == failed.node} - {failed.task})
    alone = [task for task in others if not _is_elsewhere(recent, task, failed.node)]
    if not (again and alone) and not (gives_up and may_be_of_machine(event, evidence)):
        return _kept(event, "what failed says nothing of the machine") if gives_up else event
    if (kind := _last_of_kind(state, event.node)) is not None:
        return _kept(event, f"it is the last node of kind {kind}") if gives_up else event
    if not (again and alone):
        return event
    return _with(event, Severity.SEV1, rule="starts", cause=failed.way, also_failed=alone)


def of_failed_plan(state: DetectorState, event: Event, limits: EscalationLimits) -> Event:
    """Return the event of a plan that could not be carried out, judged as ``of_start`` does; arguments as there."""
    if isinstance(event, ErrorDetected) and Evidence.read(event.evidence).starting:
        return of_start(state, event, limits)
    return event


def wrongly_given_up(state: DetectorState, event: ErrorDetected, limits: EscalationLimits) -> list[MonitoredNode]:
    """Return the nodes that were isolated since a process failed to start there, as it has now failed elsewhere.

    Args:
        state: the detector's, without the event.
        event: of a failed start.
        limits: the settings.
    """
    failed = failed_start(event, Evidence.read(event.evidence))
    if failed is None:
        return []
    nodes = []
    for name, condemned in state.condemned.items():
        of_this = any(
            (one.error, one.task, one.way) == (condemned.error, failed.task, failed.way)
            and _is_recent(one, failed.at, limits.cause_window_s)
            for one in state.causes.starts.get(name, ())
        )
        node = state.nodes.get(name)
        if of_this and name != failed.node and node is not None and node.present:
            nodes.append(node)
    return nodes


def _also_failed_on(
    state: DetectorState,
    event: ErrorDetected,
    evidence: Evidence,
    recent: list[FailedStart],
    limits: EscalationLimits,
) -> list[str]:
    """Return the other nodes on which the task has failed in the same way, sorted."""
    failed = failed_start(event, evidence)
    assert failed is not None
    nodes = {one.node for one in recent if (one.task, one.way) == (failed.task, failed.way)}
    same = _same_cause(state.causes.tasks.get(failed.task, ()), occurrence(event, evidence), limits.cause_window_s)
    nodes |= {one.node for one in same if one.node is not None and one.of_program}
    return sorted(nodes - {failed.node})


def _is_elsewhere(starts: Iterable[FailedStart], task: str, node: str) -> bool:
    """Return whether a task has failed to start on another node in a way in which it has on this one."""
    ways: dict[bool, set[str]] = {True: set(), False: set()}
    for one in starts:
        if one.task == task:
            ways[one.node == node].add(one.way)
    return not ways[True].isdisjoint(ways[False])


def _kept(event: ErrorDetected, why: str, **used: Any) -> ErrorDetected:
    """Return an error that does not isolate its node although a restart has failed."""
    return _with(event, Severity.SEV2, rule="", not_isolated=why, **used)


def with_pair_limit(state: DetectorState, event: ErrorDetected, limits: EscalationLimits) -> ErrorDetected:
    """Return the error of a broken link, so that its node stays out if one of its pairs has broken too often."""
    pairs = Evidence.read(event.evidence).pairs
    times = 1 + max((len(state.breaks.get(pair, ())) for pair in pairs), default=0)
    if not limits.cause_pair_limit or times < limits.cause_pair_limit:
        return event
    used = {"rule": "pair", "breaks": times, "limit": limits.cause_pair_limit}
    return event.model_copy(update={"evidence": {**event.evidence, **used}})


def _failed(
    state: DetectorState, event: ErrorDetected, found: Occurrence, limits: EscalationLimits, traceback: str
) -> TaskFailed | None:
    """Return the end of a task whose own bug follows it over several nodes; None: the task goes on."""
    assert event.task is not None
    if not limits.cause_task_limit or not found.of_program or cause_outside(event.kind, Evidence.read(event.evidence)):
        return None
    same = _same_cause(state.causes.tasks.get(event.task, ()), found, limits.cause_window_s)
    times = len({one.fault for one in same} | {found.fault})
    nodes = {one.node for one in (*same, found) if one.node is not None}
    if times <= limits.cause_task_limit or len(nodes) < 2:
        return None
    where = f"at {times} different steps on {len(nodes)} nodes within {limits.cause_window_s:g} s"
    error = last_line(traceback)
    return TaskFailed(
        event_id=derived_id(event.event_id, SERVICE, "failed by cause"),
        occurred_at=event.detected_at,
        task=event.task,
        generation=event.generation or 0,
        step=event.step or 0,
        reason=f"{found.cause} happened {where}; cause_task_limit is {limits.cause_task_limit}"
        f"{f': {error}' if error else ''}",
        traceback=traceback,
        incident=event.incident if event.repeats is not None else "",
    )


def _repeated(state: DetectorState, event: ErrorDetected, found: Occurrence, limits: EscalationLimits) -> ErrorDetected:
    """Return the error as the same cause on its worker, and on its node, makes it."""
    window_s = limits.cause_window_s
    on_node = _same_cause(state.causes.nodes.get(found.node or "", ()), found, window_s)
    if found.task is not None and any(one.fault == found.fault and one.worker == found.worker for one in on_node):
        return event  # if the same failure comes at the same step, ``max_restarts`` has counted it
    on_worker = len({one.fault for one in on_node if one.worker == found.worker} | {found.fault})
    at_all = len({one.fault for one in on_node} | {found.fault})
    severity, rule, times, limit = event.severity, "", 0, 0
    if limits.cause_worker_limit and found.worker is not None:
        rule, times, limit = "worker", on_worker, limits.cause_worker_limit
        for _ in range(on_worker // limits.cause_worker_limit):
            severity = severity.escalated()
    if event.kind in ANONYMOUS:
        severity = min(severity, Severity.SEV2, key=_badness)
    elif limits.cause_node_limit and at_all >= limits.cause_node_limit and severity is not Severity.SEV1:
        severity, rule, times, limit = Severity.SEV1, "node", at_all, limits.cause_node_limit
    if severity is event.severity:
        return event
    used = {"cause": found.cause, "times": times, "limit": limit, "window_s": window_s}
    used["first_at"] = min((one.at for one in on_node), default=found.at).isoformat()
    elsewhere = _same_cause(state.causes.tasks.get(found.task or "", ()), found, window_s)
    others = {one.node for one in elsewhere if one.node not in (None, found.node)}
    if 2 * len({one.fault for one in elsewhere if one.node in others}) >= times:
        # This is the task's cause, wherever its processes run: other nodes would be isolated one after the other.
        severity = min(severity, Severity.SEV2, key=_badness)
        used["follows_task_on"] = sorted(str(node) for node in others)
        if severity is event.severity:
            return _with(event, severity, rule="", not_isolated="the cause follows the task", **used)
    return _worse(
        state, event, severity, limits, rule=rule, place=found.worker if rule == "worker" else found.node, **used
    )


def _worse(
    state: DetectorState, event: ErrorDetected, severity: Severity, limits: EscalationLimits, *, rule: str, **used: Any
) -> ErrorDetected:
    """Return the error with a worse severity, unless its node may not be isolated because of a repetition.

    A node that is lost is out of use already; as a lemon it stays so when it is heard again.
    """
    assert event.node is not None
    if severity is Severity.SEV1 and (why := must_stay(state, event.node, limits)):
        if event.severity is Severity.SEV3:
            return _with(event, Severity.SEV2, rule=rule, not_isolated=why, **used)
        return _with(event, event.severity, rule="", not_isolated=why, **used)
    return _with(event, severity, rule=rule, **used)


def _with(event: ErrorDetected, severity: Severity, *, rule: str, **used: Any) -> ErrorDetected:
    """Return the error with a severity and with what was used to decide it.

    ``rule``: that holds the node back, or raised the severity; empty: none did in the end.
    """
    added = {**({"rule": rule} if rule else {}), "repetition": used}
    return event.model_copy(update={"severity": severity, "evidence": {**event.evidence, **added}})


def must_stay(state: DetectorState, name: str, limits: EscalationLimits) -> str:
    """Return why a node may not be isolated because of a repetition; empty if it may.

    Only nodes that take part in the cluster are counted: nobody has chosen to lose a node.
    """
    there = [node for node in state.nodes.values() if node.present or node.name == name]
    out = [node.name for node in there if is_out(state, node) and node.name != name]
    allowed = math.floor(limits.isolated_fraction * len(there))
    if len(out) + 1 > allowed:
        return f"{len(out)} of {len(there)} nodes are isolated, and isolated_fraction allows {allowed}"
    kind = _last_of_kind(state, name)
    return f"it is the last node of kind {kind}" if kind is not None else ""


def _last_of_kind(state: DetectorState, name: str) -> str | None:
    """Return the kind of a node that is the last of its kind in use; None if there are others."""
    kind = state.nodes[name].hardware if name in state.nodes else ""
    there = [node for node in state.nodes.values() if node.present and node.name != name and not is_out(state, node)]
    return None if any(node.hardware == kind for node in there) else kind


def is_out(state: DetectorState, node: MonitoredNode) -> bool:
    """Return whether a node is isolated, for whatever reason."""
    return node.name in state.isolated or node.name in state.condemned


def _lemon(state: DetectorState, found: Occurrence, limits: EscalationLimits) -> dict[str, Any] | None:
    """Return what makes a node a lemon with this fault; None: it is none."""
    assert found.node is not None
    if not found.own or not limits.lemon_false_positives:
        return None
    window_s = limits.lemon_window_s
    mine = [one for one in _own(state, found.node, found.at, window_s) if one.fault != found.fault]
    faults = len({one.fault for one in mine}) + 1
    if faults < LEAST_FAULTS:
        return None
    peers = [node.name for node in state.nodes.values() if not node.left and node.name != found.node]
    counts = [len({one.fault for one in _own(state, peer, found.at, window_s)}) for peer in peers]
    expected = max(window_s / state.mtbf_node_s, sum(counts) / len(counts) if counts else 0.0)
    nodes = len(peers) + 1
    mistaken = nodes * expected * poisson_tail(expected, faults - 1)
    if mistaken > limits.lemon_false_positives:
        return None
    return {
        "faults": faults,
        "window_s": window_s,
        "expected": expected,
        "nodes": nodes,
        "false_positives": mistaken,
        "limit": limits.lemon_false_positives,
        "first_at": min(one.at for one in mine).isoformat(),
        "causes": sorted({one.cause for one in (*mine, found)}),
    }


def _own(state: DetectorState, node: str, now: datetime, window_s: float) -> list[Occurrence]:
    """Return a node's own faults within a time before now, without faults whose cause a task has elsewhere as well."""
    recent = [one for one in state.causes.nodes.get(node, ()) if one.own and _is_recent(one, now, window_s)]
    return [one for one in recent if not _follows(state, one)]


def _follows(state: DetectorState, one: Occurrence) -> bool:
    """Return whether a task has a cause on several nodes."""
    elsewhere = state.causes.tasks.get(one.task, ()) if one.task is not None and one.of_program else ()
    return any(other.cause == one.cause and other.node not in (None, one.node) for other in elsewhere)


def _same_cause(known: Iterable[Occurrence], found: Occurrence, window_s: float) -> list[Occurrence]:
    """Return the occurrences of the same cause within a time before this one."""
    return [one for one in known if one.cause == found.cause and _is_recent(one, found.at, window_s)]


def _is_recent(one: Occurrence | FailedStart, now: datetime, window_s: float) -> bool:
    return (now - one.at).total_seconds() <= window_s


def poisson_tail(mean: float, least: int) -> float:
    """Return the probability that a Poisson variable is ``least`` or more: 1 - sum of e^-m m^i / i! for i below it."""
    if least <= 0:
        return 1.0
    # Summed from the far end where the tail is small: a difference from 1 would be lost in rounding.
    if mean < least:
        term = math.exp(least * math.log(mean) - mean - math.lgamma(least + 1)) if mean > 0.0 else 0.0
        total, index = 0.0, least
        while term > total * 1e-17 and term > 0.0:
            total, index = total + term, index + 1
            term *= mean / index
        return total
    return max(0.0, 1.0 - math.fsum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(least)))


def _badness(severity: Severity) -> int:
    return {Severity.SEV3: 0, Severity.SEV2: 1, Severity.SEV1: 2}[severity]
