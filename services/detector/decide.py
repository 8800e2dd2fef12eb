"""decide: the detector's answer to each input. Pure; what comes in comes with its time.

``decisions/inputs.py`` has the inputs, ``decisions/decision.py`` the effects: events to append, and requests to agents.
The events are folded into the state at once; the runner appends them, and skips them when the log delivers them.
``decisions/incidents.py`` decides on faults of tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from services.detector.decisions import (
    admission,
    devices,
    incidents,
    online_statistics,
    preflights,
    returns,
    status_events,
)
from services.detector.decisions.admission import Patience
from services.detector.decisions.decision import Decision, DetectorLimits, Effect, Revoke
from services.detector.decisions.inputs import Echo, Greeting, Input, NodeTested, Probed, StacksGiven, Tick
from services.detector.incidents import absences, causes, observations, script_ends, sections
from services.detector.incidents.faults import Fault
from services.detector.nodes import drains, isolation, kept_copies, leftovers, probing, reports, silence
from services.detector.nodes.probing import DETECTOR
from services.detector.progress import calm, hangs, standstill
from services.detector.state.cluster import Admitted, DetectorState
from services.detector.state.node import MonitoredNode
from services.detector.state.task import MonitoredTask
from shared.events.union import Event
from shared.messages.admission import Answer, Departure, DepartureAnswer
from shared.messages.preflight import PreflightAnswer, PreflightReport
from shared.messages.probes import Outcome
from shared.messages.signals import RECONNECT_GRACE_S, DeviceFailed, Heartbeat, ProcessExited, RankRaised, Signal
from shared.messages.stacks import StacksReply
from shared.service.core import Logged, Started

ECHO_TIMEOUT_S = 0.5
"""The detector sends itself a message over NATS every 0.1 s, also while its ticks come late. While no such message
arrives for this long, the bus or the detector stands still, and the silence of the nodes proves nothing."""


def decide(
    state: DetectorState, item: Input, now: datetime, limits: DetectorLimits
) -> tuple[DetectorState, list[Effect]]:
    """Return the state, which is changed in place, and what follows from an input.

    Args:
        state: the fold of the log, with the record that ``item`` may be; and telemetry.
        item: the input.
        now: its time.
        limits: thresholds.
    """
    decision = Decision(state, now, limits)
    match item:
        case Heartbeat():
            _heartbeat(decision, item)
        case Tick():
            with state.look():
                _tick(decision)
        case Echo():
            _echo(decision)
        case Logged(record=record):
            observations.settle(state, record.event, now)
            incidents.escalate(decision)
        case Started():
            # If the cause of a failed plan is in the log, or is there as an error without a plan so far, nothing is
            # escalated.
            state.listening_since = now
            incidents.escalate(decision)
        case Greeting():
            _greeting(decision, item)
        case Departure():
            decision.others.append(_departure(decision, item))
        case PreflightReport():
            decision.others.append(_preflight(decision, item))
        case Probed():
            _probed(decision, item)
        case StacksGiven(question=question, reply=StacksReply() as reply):
            standstill.take(state, question, reply)
        case NodeTested(question=test, result=result):
            decision.note(returns.take(state, test, result))
        case StacksGiven():
            pass
        case _:
            _signal(decision, item)
    return state, decision.effects()


# ---- inputs


def _echo(decision: Decision) -> None:
    """Take the detector's own message.

    The time without a message is taken off the silence of every node. After a long time without one the clients also
    need time to reconnect.
    """
    state, now = decision.state, decision.now
    if state.echo_at is not None and _is_deaf(state, now):
        gap = now - state.echo_at
        away = gap.total_seconds() > decision.limits.node_timeout_s
        grace = timedelta(seconds=RECONNECT_GRACE_S)
        for node in state.nodes.values():
            if (since := node.silent_since) is not None:
                node.excused_until = now + grace if away else min(now, since + gap)
        if away:
            state.listening_since = now + grace
    state.echo_at = now


def _signal(decision: Decision, signal: Signal) -> None:
    node = decision.state.nodes.get(signal.node)
    if node is not None and not node.present and node.incarnation == signal.incarnation:
        return
    if node is not None and signal.incarnation in node.past:
        return
    if isinstance(signal, DeviceFailed):
        devices.failed(decision, signal)
        return
    task = decision.state.tasks.get(signal.task)
    if task is None:
        return
    match signal:
        case ProcessExited():
            incidents.exited(decision, task, signal)
        case RankRaised():
            incidents.raised(decision, task, signal)
        case _ if task.is_current(signal.generation):
            event = status_events.of_signal(task, signal, decision.now)
            # A repeated signal may have another time, and the log refuses other content under a known id.
            if event is not None and event.event_id not in task.recorded:
                decision.add(event)
        case _:
            pass


def _greeting(decision: Decision, greeting: Greeting) -> None:
    """Answer the hello of an agent that starts, or say which agent has to be asked first."""
    state, now, limits, hello = decision.state, decision.now, decision.limits, greeting.hello
    heard = (now - state.listening_since).total_seconds() > admission.FIRST_HEARTBEATS * limits.heartbeat_interval_s
    patience = Patience(node_timeout_s=limits.node_timeout_s, all_heard=heard)
    answer = admission.judge(state, hello, greeting.answers, patience, now)
    if isinstance(answer, Answer) and answer.verdict == "admitted":
        state.admitted[hello.node] = Admitted(hello, now)
    decision.others.append(answer)


def _preflight(decision: Decision, report: PreflightReport) -> PreflightAnswer:
    """Take what a node has measured; return the answer, for when the decision is in the log.

    An agent that measures before it joins was admitted, so the one that the node had before is gone.
    """
    node = decision.state.nodes.get(report.node)
    if node is not None and node.present and report.incarnation not in {node.incarnation, *node.past}:
        if not admission.is_successor(node, report.supervisor):
            decision.add(_lost(decision, node, "a new incarnation of the agent"))
    return preflights.take(decision, report)


def _departure(decision: Decision, departure: Departure) -> DepartureAnswer:
    """Take an agent's announcement that it leaves; return the answer, for when the decision is in the log.

    An agent that leaves once its node is drained asks again until that is so.
    """
    state, now = decision.state, decision.now
    node = state.nodes.get(departure.node)
    if node is None or not node.present or node.incarnation != departure.incarnation:
        preflights.left(decision, departure)
        return DepartureAnswer(verdict="left")
    if departure.drain_s > 0.0 and not node.drained:
        if node.draining is None:
            decision.add(drains.began(node, departure, now))
        return DepartureAnswer(verdict="wait", detail=", ".join(drains.tasks_on(state, node.name)))
    decision.add(status_events.node_left(node, departure.reason, now))
    return DepartureAnswer(verdict="left")


def _heartbeat(decision: Decision, heartbeat: Heartbeat) -> None:
    """Take a heartbeat; drop one that a later heartbeat has overtaken."""
    state, now = decision.state, decision.now
    node = state.nodes.get(heartbeat.node)
    if node is not None and node.has_newer(heartbeat):
        return
    if node is None or node.incarnation != heartbeat.incarnation:
        if not _enter(decision, node, heartbeat):
            return
    elif node.left:
        return
    else:
        decision.note(silence.heard(state, node, now))
        gone = isolation.cause(state, node)
        if gone and isolation.may_return(state, node.name) and _clean(decision, node, heartbeat):
            _join(decision, heartbeat, gone)
    node = state.nodes[heartbeat.node]
    node.receive(heartbeat, now)
    if node.present:
        decision.others += leftovers.requests(state, node, leftovers.find(state, node, now), now)
        decision.others += kept_copies.requests(state, node, now)
        devices.joined(decision, node.name)
    for status in heartbeat.workers:
        # Most of what thousands of ranks say of a generation that is over, or is being formed, is for nobody.
        if (task := state.trained_by(status)) is None:
            continue
        decision.add(status_events.of_rank(task, status, decision.limits.progress_interval_s, now))
        if status.steps:
            for event in online_statistics.of_status(state, task, status, now):
                decision.add(event)


def _probed(decision: Decision, probed: Probed) -> None:
    """Take the answer to a request to probe.

    An agent that the detector itself has found to have ended need not wait for the next tick, unless others that are
    lost wait for the tick already.
    """
    state, now, question = decision.state, decision.now, probed.question
    probing.take(state, question, probed.outcomes, now, probed.round_trips_s)
    for event in list(online_statistics.of_probe(state, question, probed.round_trips_s, now)):
        decision.add(event)
    found = question.witness == DETECTOR and Outcome.ABSENT in probed.outcomes.values()
    if found and state.losing_since is None and not _is_deaf(state, now):
        _judge_silence(decision)


def _tick(decision: Decision) -> None:
    """Find the faults that time shows: silent nodes, vanished and hanging ranks, broken sockets without a cause.

    What the log shows of drains does not depend on what is heard.
    """
    state, now, stalls = decision.state, decision.now, decision.limits.stalls
    for node in [node for node in state.nodes.values() if node.draining is not None]:
        decision.add(drains.progress(state, node, now))
    for observed in observations.due(state, now):
        decision.add(observed)
    if _is_deaf(state, now):
        return
    _judge_silence(decision)
    for answer in reports.answers(state, decision.limits.drain_timeout_s, now):
        decision.add(answer)
    decision.others += standstill.suspect(state, stalls, now)
    for task in list(state.running()):
        _examine(decision, task, lambda task: hangs.of_training(state, task, stalls, now), ends=True)
    for task in list(state.moving()):
        _examine(decision, task, lambda task: hangs.of_moving(state, task, stalls, now), ends=False)
    incidents.escalate(decision)
    decision.others += isolation.ask(state, now) + online_statistics.ask(state, now)


# ---- parts


def _examine(
    decision: Decision, task: MonitoredTask, find: Callable[[MonitoredTask], Fault | None], *, ends: bool
) -> None:
    """Find a fault of a task's ranks. ``find``: looks for a hang; ``ends``: the task's script may end."""
    state, now = decision.state, decision.now
    if calm.is_calm(state, task, decision.limits.stalls):
        task.absent_since = {}
        if not incidents.broken_sockets(decision, task):
            incidents.examine(decision, task, None)
        return
    absences.update(state, task, now)
    if (vanished := absences.find(state, task, state.listening_since)) is not None:
        incidents.record(decision, task, vanished)
    elif ends and (overdue := script_ends.overdue(state, task, now)) is not None:
        decision.add(overdue)
    elif ends and (alone := sections.entered_alone(state, task, now)) is not None:
        decision.add(alone)
    elif not incidents.broken_sockets(decision, task):
        incidents.examine(decision, task, find(task))


def _judge_silence(decision: Decision) -> None:
    state, limits = decision.state, decision.limits
    found = silence.judge(state, limits.silence, state.listening_since, decision.now)
    decision.others += found.questions
    decision.note(found.notes)
    last = silence.event_id_of_loss(found.lost[-1].node) if found.lost else ""
    for lost in found.lost:
        event = _lost(decision, lost.node, lost.reason, limit_s=lost.limit_s, **lost.details)
        decision.add(event.model_copy(update={"answered_with": last}) if event.event_id != last else event)


def _enter(decision: Decision, node: MonitoredNode | None, heartbeat: Heartbeat) -> bool:
    """Take the first heartbeat of an agent; return whether the agent is its node's from now on."""
    state, now = decision.state, decision.now
    successor = node is not None and admission.is_successor(node, heartbeat.supervisor)
    # Two agents that took turns as the newest one would append each other's loss for ever.
    if not admission.may_join(state, heartbeat):
        decision.others.append(Revoke(heartbeat.node, heartbeat.incarnation))
        return False
    if node is not None and successor:
        if node.present:
            state.admitted.pop(heartbeat.node, None)
            decision.add(status_events.node_adopted(node, heartbeat, now))
            decision.note(silence.heard(state, node, now))
            return True
        if not _clean(decision, node, heartbeat):
            return False
    elif node is not None and node.present:
        decision.add(_lost(decision, node, "a new incarnation of the agent"))
    if not isolation.may_return(state, heartbeat.node, new_agent=not successor):
        return False
    if not preflights.may_join(decision, heartbeat):
        return False
    return _join(decision, heartbeat, heartbeat.incarnation)


def _join(decision: Decision, heartbeat: Heartbeat, cause: str) -> bool:
    """Have a node join, an isolated one once it has passed its self-test; return whether it has joined."""
    if not returns.may_join(decision, heartbeat):
        return False
    checks = returns.passed(decision.state, heartbeat.node)
    decision.state.admitted.pop(heartbeat.node, None)
    decision.add(status_events.node_joined(heartbeat, cause, decision.now, checks))
    return True


def _clean(decision: Decision, node: MonitoredNode, heartbeat: Heartbeat) -> bool:
    """Have the processes ended that a node has kept while it was out of use; return whether there are none."""
    stale = leftovers.of_returned(heartbeat)
    decision.others += leftovers.requests(decision.state, node, stale, decision.now)
    return not stale


def _is_deaf(state: DetectorState, now: datetime) -> bool:
    """Return whether a node's silence may be due to the bus or to the detector itself."""
    return state.echo_at is None or (now - state.echo_at).total_seconds() > ECHO_TIMEOUT_S


def _lost(decision: Decision, node: MonitoredNode, reason: str, **details: Any) -> Event:
    """Return the event of a lost node; of a node that is lost again and again it says so."""
    details = {"limit_s": decision.limits.node_timeout_s, **details}
    lost = silence.node_lost(decision.state, node, now=decision.now, reason=reason, **details)
    return causes.escalate(decision.state, lost, decision.limits.escalation)
