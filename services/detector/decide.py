"""decide: the detector's answer to each input. Pure; signals, heartbeats, ticks and records come in with their time.

``Monitor`` has the state (``state.py``) and one method for each kind of input. A method returns the events to append
and the requests to agents. The events are folded into the state at once (``decision.py``); the shell (``main.py``)
appends them, and skips them when the log delivers them. ``incidents.py`` decides on faults of tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

from services.detector.decisions import admission, devices, online_statistics, returns, status_events
from services.detector.decisions.admission import Ask, Liveness, Patience
from services.detector.decisions.decision import Decision, Revoke
from services.detector.decisions.incidents import Incidents
from services.detector.evolve import evolve
from services.detector.incidents import absences, causes, observations, script_ends
from services.detector.nodes import drains, isolation, kept_copies, leftovers, probing, silence
from services.detector.nodes.probing import DETECTOR, ProbeQuestion
from services.detector.nodes.silence_limits import SilenceLimits
from services.detector.progress import hangs, standstill
from services.detector.progress.standstill import StacksQuestion
from services.detector.state.cluster import Admitted, DetectorState
from services.detector.state.node import MonitoredNode
from services.detector.state.stalls import StallLimits
from services.detector.state.unlogged import SelfTestQuestion
from shared.events.union import Event
from shared.messages.admission import Answer, Departure, DepartureAnswer, Hello
from shared.messages.probes import Outcome
from shared.messages.self_test import SelfTestResult
from shared.messages.signals import RECONNECT_GRACE_S, DeviceFailed, Heartbeat, ProcessExited, RankRaised, Signal
from shared.messages.stacks import StacksReply
from shared.settings.escalation import EscalationLimits

ECHO_TIMEOUT_S = 0.5
"""The detector sends itself a message over NATS with every tick (0.1 s). While none arrives for this time, the bus or
the detector stands still, and the silence of the nodes proves nothing about the nodes."""


@dataclass(frozen=True, slots=True)
class DetectorLimits:
    """Thresholds of the detector, from the settings (``shared/settings/model.py`` gives the reasons); seconds."""

    heartbeat_interval_s: float
    node_timeout_s: float
    progress_interval_s: float
    restart_window_s: float
    stalls: StallLimits
    escalation: EscalationLimits = field(default_factory=EscalationLimits)


@dataclass(slots=True)
class Monitor:
    """State and decisions of the detector.

    Attributes:
        limits: thresholds.
        started_at: the time at which it began to listen; after the bus was away, the end of the reconnect grace.
        state: the fold of the log, and telemetry.
        echo_at: when its own message last arrived.
        network: the network stack of the detector (``shared.machine.network``); empty: unknown.
    """

    limits: DetectorLimits
    started_at: datetime
    state: DetectorState = field(default_factory=DetectorState)
    echo_at: datetime | None = None
    network: str = ""

    # ---- inputs

    def fold(self, event: Event) -> None:
        """Take an event of the log that needs no decision, or was decided on before."""
        evolve(self.state, event)

    def record(self, event: Event, now: datetime) -> Decision:
        """Take a new event of the log. A plan that could not be carried out escalates."""
        self.fold(event)
        observations.settle(self.state, event, now)
        return self.escalate(now)

    def escalate(self, now: datetime) -> Decision:
        """Answer the plans that could not be carried out. After a restart it is called once the log has been folded.

        A failure whose cause the log has already, or has as an error without a plan so far, escalates nothing.
        """
        decision = Decision()
        self._incidents(decision, now).escalate()
        return decision

    def echo(self, now: datetime) -> None:
        """Take the detector's own message: the bus works, and so does this process.

        A time without the message is taken off the silence of every node. After a long one the clients need time to
        reconnect, too.
        """
        if self.echo_at is not None and self._deaf(now):
            gap = now - self.echo_at
            away = gap.total_seconds() > self.limits.node_timeout_s
            grace = timedelta(seconds=RECONNECT_GRACE_S)
            for node in self.state.nodes.values():
                if (since := node.silent_since) is not None:
                    node.excused_until = now + grace if away else min(now, since + gap)
            if away:
                self.started_at = now + grace
        self.echo_at = now

    def signal(self, signal: Signal, now: datetime) -> Decision:
        """Take a signal of an agent."""
        decision = Decision()
        node = self.state.nodes.get(signal.node)
        if node is not None and not node.present and node.incarnation == signal.incarnation:
            return decision
        if node is not None and signal.incarnation in node.past:
            return decision
        if isinstance(signal, DeviceFailed):
            devices.failed(self._incidents(decision, now), signal)
            return decision
        task = self.state.tasks.get(signal.task)
        if task is None:
            return decision
        match signal:
            case ProcessExited():
                self._incidents(decision, now).exited(task, signal)
            case RankRaised():
                self._incidents(decision, now).raised(task, signal)
            case _ if task.is_current(signal.generation):
                event = status_events.of_signal(task, signal, now)
                # A repeated signal may have another time, and the log refuses another content under a known id.
                if event is not None and event.event_id not in task.recorded:
                    decision.add(self.state, event)
            case _:
                pass
        return decision

    def hello(self, hello: Hello, answers: Mapping[str, Liveness], now: datetime) -> Answer | Ask:
        """Take a hello of an agent that starts; return the answer, or which agent has to be asked first."""
        heard = (now - self.started_at).total_seconds() > admission.FIRST_HEARTBEATS * self.limits.heartbeat_interval_s
        patience = Patience(node_timeout_s=self.limits.node_timeout_s, all_heard=heard)
        answer = admission.judge(self.state, hello, answers, patience, now)
        if isinstance(answer, Answer) and answer.verdict == "admitted":
            self.state.admitted[hello.node] = Admitted(hello, now)
        return answer

    def departure(self, departure: Departure, now: datetime) -> tuple[Decision, DepartureAnswer]:
        """Take an agent's announcement that it leaves; return the answer, for when the decision is in the log.

        An agent that leaves once its node is drained asks again until that is so.
        """
        decision = Decision()
        node = self.state.nodes.get(departure.node)
        if node is None or not node.present or node.incarnation != departure.incarnation:
            return decision, DepartureAnswer(verdict="left")
        if departure.drain_s > 0.0 and not node.drained:
            if node.draining is None:
                decision.add(self.state, drains.began(node, departure, now))
            there = ", ".join(drains.tasks_on(self.state, node.name))
            return decision, DepartureAnswer(verdict="wait", detail=there)
        decision.add(self.state, status_events.node_left(node, departure.reason, now))
        return decision, DepartureAnswer(verdict="left")

    def heartbeat(self, heartbeat: Heartbeat, now: datetime) -> Decision:
        """Take a heartbeat that was received at ``now``; one that a later one has overtaken is dropped."""
        decision = Decision()
        node = self.state.nodes.get(heartbeat.node)
        if node is not None and node.has_newer(heartbeat):
            return decision
        if node is None or node.incarnation != heartbeat.incarnation:
            if not self._enter(decision, node, heartbeat, now):
                return decision
        elif node.left:
            return decision
        else:
            decision.notes += silence.heard(self.state, node, now)
            gone = isolation.cause(self.state, node)
            if gone and isolation.may_return(self.state, node.name) and self._clean(decision, node, heartbeat, now):
                self._join(decision, heartbeat, gone, now)
        node = self.state.nodes[heartbeat.node]
        node.receive(heartbeat, now)
        if node.present:
            decision.cleans += leftovers.requests(self.state, node, leftovers.find(self.state, node, now), now)
            decision.cleans += kept_copies.requests(self.state, node, now)
            devices.joined(self._incidents(decision, now), node.name)
        for status in heartbeat.workers:
            decision.add(self.state, status_events.of_rank(self.state, status, self.limits.progress_interval_s, now))
            for event in online_statistics.of_status(self.state, status, now):
                decision.add(self.state, event)
        return decision

    def probed(
        self,
        question: ProbeQuestion,
        outcomes: Mapping[str, Outcome],
        now: datetime,
        round_trips_s: Mapping[str, float] = MappingProxyType({}),
    ) -> Decision:
        """Take the answer to a request to probe. ``outcomes`` is empty if the witness did not answer.

        An agent that the detector itself has found to have ended need not wait for the next tick.
        """
        probing.take(self.state, question, outcomes, now, round_trips_s)
        decision = Decision()
        for event in list(online_statistics.of_probe(self.state, question, round_trips_s, now)):
            decision.add(self.state, event)
        if question.witness == DETECTOR and Outcome.ABSENT in outcomes.values() and not self._deaf(now):
            self._judge_silence(decision, now)
        return decision

    def stacks_answered(self, question: StacksQuestion, reply: StacksReply) -> None:
        """Take an agent's answer to a request for stacks."""
        standstill.take(self.state, question, reply)

    def tested(self, question: SelfTestQuestion, result: SelfTestResult | None) -> Decision:
        """Take the answer to a request for a self-test; None: there was none."""
        return Decision(notes=returns.take(self.state, question, result))

    def tick(self, now: datetime) -> Decision:
        """Find the faults that time shows: silent nodes, vanished and hanging ranks, broken sockets without a cause.

        What the log shows of drains does not depend on what is heard.
        """
        decision = Decision()
        for node in list(self.state.nodes.values()):
            decision.add(self.state, drains.progress(self.state, node, now))
        for observed in observations.due(self.state, now):
            decision.add(self.state, observed)
        if self._deaf(now):
            return decision
        self._judge_silence(decision, now)
        decision.stacks = standstill.suspect(self.state, self.limits.stalls, now)
        incidents = self._incidents(decision, now)
        for task in list(self.state.running()):
            absences.update(self.state, task, now)
            if (vanished := absences.find(self.state, task, self.started_at)) is not None:
                incidents.record(task, vanished)
            elif (overdue := script_ends.overdue(self.state, task, now)) is not None:
                decision.add(self.state, overdue)
            elif not incidents.broken_sockets(task):
                incidents.examine(task, hangs.of_training(self.state, task, self.limits.stalls, now))
        for task in list(self.state.moving()):
            absences.update(self.state, task, now)
            if (vanished := absences.find(self.state, task, self.started_at)) is not None:
                incidents.record(task, vanished)
            elif not incidents.broken_sockets(task):
                incidents.examine(task, hangs.of_moving(self.state, task, self.limits.stalls, now))
        incidents.escalate()
        decision.probes += isolation.ask(self.state, now) + online_statistics.ask(self.state, now)
        return decision

    # ---- parts

    @property
    def silence_limits(self) -> SilenceLimits:
        """For how long nodes may be silent."""
        limits = self.limits
        return SilenceLimits(limits.heartbeat_interval_s, limits.node_timeout_s, limits.stalls, self.network)

    def _judge_silence(self, decision: Decision, now: datetime) -> None:
        found = silence.judge(self.state, self.silence_limits, self.started_at, now)
        decision.probes += found.questions
        decision.notes += found.notes
        for lost in found.lost:
            self._lose(decision, lost.node, now, lost.reason, limit_s=lost.limit_s, **lost.details)

    def _enter(self, decision: Decision, node: MonitoredNode | None, heartbeat: Heartbeat, now: datetime) -> bool:
        """Take the first heartbeat of an agent; return whether the agent is its node's from now on."""
        successor = node is not None and admission.is_successor(node, heartbeat.supervisor)
        # Two agents that took turns as the newest one would append each other's loss for ever.
        if not admission.may_join(self.state, heartbeat):
            decision.revokes.append(Revoke(heartbeat.node, heartbeat.incarnation))
            return False
        if node is not None and successor:
            if node.present:
                self.state.admitted.pop(heartbeat.node, None)
                decision.add(self.state, status_events.node_adopted(node, heartbeat, now))
                decision.notes += silence.heard(self.state, node, now)
                return True
            if not self._clean(decision, node, heartbeat, now):
                return False
        elif node is not None and node.present:
            self._lose(decision, node, now, "a new incarnation of the agent")
        if not isolation.may_return(self.state, heartbeat.node, new_agent=not successor):
            return False
        return self._join(decision, heartbeat, heartbeat.incarnation, now)

    def _join(self, decision: Decision, heartbeat: Heartbeat, cause: str, now: datetime) -> bool:
        """Have a node join, an isolated one once it has passed its self-test; return whether it has joined."""
        if not returns.may_join(self.state, decision, heartbeat, now):
            return False
        checks = returns.passed(self.state, heartbeat.node)
        self.state.admitted.pop(heartbeat.node, None)
        decision.add(self.state, status_events.node_joined(heartbeat, cause, now, checks))
        return True

    def _clean(self, decision: Decision, node: MonitoredNode, heartbeat: Heartbeat, now: datetime) -> bool:
        """Have the processes ended that a node has kept while it was out of use; return whether there are none."""
        stale = leftovers.of_returned(heartbeat)
        decision.cleans += leftovers.requests(self.state, node, stale, now)
        return not stale

    def _deaf(self, now: datetime) -> bool:
        """Return whether a node's silence may be due to the bus or to the detector itself."""
        return self.echo_at is None or (now - self.echo_at).total_seconds() > ECHO_TIMEOUT_S

    def _lose(self, decision: Decision, node: MonitoredNode, now: datetime, reason: str, **details: Any) -> None:
        details = {"limit_s": self.limits.node_timeout_s, **details}
        lost = silence.node_lost(self.state, node, now=now, reason=reason, **details)
        decision.add(self.state, causes.escalate(self.state, lost, self.limits.escalation))

    def _incidents(self, decision: Decision, now: datetime) -> Incidents:
        return Incidents(self.state, decision, self.limits.restart_window_s, now, self.limits.escalation)
