"""The cluster monitor's decisions. Pure: signals, heartbeats, ticks and records come in with their time.

``decide`` answers one input with the events to append and what to ask of agents. The events are folded into the view
at once; the shell appends them and skips them when the log delivers them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from services.detector import facts, faults, hangs, stalls
from services.detector.view import NodeView, Suspicion, TaskView, View, evolve
from shared.events import Event
from shared.severities import ErrorKind
from shared.signals import (
    RECONNECT_GRACE_S,
    Heartbeat,
    ProcessExited,
    RankRaised,
    Signal,
)

ECHO_TIMEOUT_S = 0.5
"""The monitor hears itself over NATS with every tick (0.1 s). When it does not, the bus or the monitor stood still,
and the nodes' silence says nothing about the nodes."""

SETTLE_S = 0.25
"""A cause reaches the monitor within 50 ms, on a busy machine within this; only then are broken sockets a fault of
their own."""

CLEAN_INTERVAL_S = 1.0
"""How often a returned node is asked to end the ranks it should not have any more."""

TIMED_STEPS = 2
"""Steps of a generation before its rate is told: the first one includes what is done once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds in seconds, from the settings."""

    node_timeout_s: float
    progress_interval_s: float
    restart_window_s: float
    stalls: stalls.Limits


@dataclass(frozen=True, slots=True)
class Clean:
    """Ask a node to end ranks that a partition left behind: ``workers`` of ``task``, up to ``generation``."""

    node: str
    task: str
    generation: int
    workers: list[str]


@dataclass(slots=True)
class Decision:
    """Events to append, in order, and what to ask of agents."""

    events: list[Event] = field(default_factory=list)
    cleans: list[Clean] = field(default_factory=list)


@dataclass(slots=True)
class Monitor:
    """State and decisions of the cluster monitor. ``started_at``: when it began to listen."""

    limits: Limits
    started_at: datetime
    view: View = field(default_factory=View)
    echo_at: datetime | None = None

    # ---- inputs

    def fold(self, event: Event) -> None:
        """Take an event of the log that calls for no decision here (or was decided before)."""
        evolve(self.view, event)

    def record(self, event: Event, now: datetime) -> Decision:
        """Take a new event of the log; a plan that could not be carried out escalates."""
        self.fold(event)
        return self.escalate(now)

    def escalate(self, now: datetime) -> Decision:
        """Answer plans that could not be carried out. Called after the log was folded, so that none is answered twice.

        A failure whose cause the log already holds (or holds as an error without a plan so far) escalates nothing.
        """
        decision = Decision()
        for task in list(self.view.tasks.values()):
            if task.broken is not None:
                event = faults.escalation(self.view, task, window_s=self.limits.restart_window_s, now=now)
                task.broken = None
                self._decide(decision, event)
        return decision

    def echo(self, now: datetime) -> None:
        """Take the monitor's own message: the bus works, and so does this process.

        A time in which it did not is given back to every node; after a long one, clients need time to reconnect.
        """
        if self.echo_at is not None and self._deaf(now):
            gap = now - self.echo_at
            away = gap.total_seconds() > self.limits.node_timeout_s
            grace = timedelta(seconds=RECONNECT_GRACE_S)
            for node in self.view.nodes.values():
                if (since := node.silent_since) is not None:
                    node.excused_until = now + grace if away else min(now, since + gap)
            if away:
                self.started_at = now + grace
        self.echo_at = now

    def signal(self, signal: Signal, now: datetime) -> Decision:
        """Take a signal of an agent."""
        decision = Decision()
        task = self.view.tasks.get(signal.task)
        node = self.view.nodes.get(signal.node)
        if task is None or (node is not None and node.lost and node.incarnation == signal.incarnation):
            return decision
        match signal:
            case ProcessExited():
                if task.accepts(signal.worker, signal.generation):
                    suspicion = task.suspicion
                    known = suspicion is not None and suspicion.generation == signal.generation
                    suspects = suspicion.signals if suspicion is not None and known else []
                    self._fault(decision, task, faults.of_exit(signal, suspects), now)
            case RankRaised(cause="communication"):
                self._suspect(task, signal, now)
            case RankRaised():
                if task.accepts(signal.worker, signal.generation):
                    self._fault(decision, task, faults.of_exception(signal), now)
            case _ if task.current(signal.generation):
                event = facts.effect(signal, now)
                # A repeat may bear another time, and the log refuses one id with two contents.
                if event is not None and event.event_id not in task.told:
                    self._decide(decision, event)
            case _:
                pass
        return decision

    def heartbeat(self, heartbeat: Heartbeat, now: datetime) -> Decision:
        """Take a heartbeat, received at ``now``."""
        decision = Decision()
        node = self.view.nodes.get(heartbeat.node)
        if node is not None and node.incarnation != heartbeat.incarnation:
            if node.heartbeat is not None and heartbeat.sent_at < node.heartbeat.sent_at:
                return decision  # the last words of an older incarnation
            if node.lost is None:
                self._lose(decision, node, now, "a new incarnation of the agent")
        node = self.view.nodes.get(heartbeat.node)
        if node is None or node.incarnation != heartbeat.incarnation:
            self._decide(decision, facts.joined(heartbeat, heartbeat.incarnation, now))
        elif node.lost is not None and not self._clean(decision, node, heartbeat, now):
            self._decide(decision, facts.joined(heartbeat, node.lost, now))
        node = self.view.nodes[heartbeat.node]
        node.hear(heartbeat, now)
        self._progress(decision, heartbeat, now)
        return decision

    def tick(self, now: datetime) -> Decision:
        """Look for what time alone brings: silent nodes, stalled tasks, broken sockets without a cause."""
        decision = Decision()
        if self._deaf(now):
            return decision
        for node in list(self.view.nodes.values()):
            since = max(node.silent_since or self.started_at, self.started_at)
            if node.lost is None and (now - since).total_seconds() > self.limits.node_timeout_s:
                self._lose(decision, node, now, "no heartbeat")
        for task in list(self.view.running()):
            if not self._connection(decision, task, now):
                self._hang(decision, task, hangs.of_training(self.view, task, self.limits.stalls, now), now)
        for task in list(self.view.moving()):
            self._hang(decision, task, hangs.of_moving(self.view, task, self.limits.stalls, now), now)
        return decision

    # ---- nodes

    def _deaf(self, now: datetime) -> bool:
        """Whether the monitor cannot tell a silent node from its own deafness."""
        return self.echo_at is None or (now - self.echo_at).total_seconds() > ECHO_TIMEOUT_S

    def _lose(self, decision: Decision, node: NodeView, now: datetime, reason: str) -> None:
        limit_s = self.limits.node_timeout_s
        self._decide(decision, faults.node_lost(self.view, node, now=now, reason=reason, limit_s=limit_s))

    def _clean(self, decision: Decision, node: NodeView, heartbeat: Heartbeat, now: datetime) -> bool:
        """Have a returned node end ranks that it kept through its absence; return whether there are any."""
        stale: dict[str, list[str]] = {}
        for status in heartbeat.workers:
            if status.task is not None:
                stale.setdefault(status.task, []).append(status.worker)
        due = node.cleaned_at is None or (now - node.cleaned_at).total_seconds() >= CLEAN_INTERVAL_S
        if stale and due:
            node.cleaned_at = now
            for name, workers in stale.items():
                task = self.view.tasks.get(name)
                # Not that of the present plan: it may be a pause, which has none, and the node has seen the one before.
                generation = task.highest if task is not None else 0
                decision.cleans.append(Clean(node.name, name, generation, workers))
        return bool(stale)

    # ---- tasks

    def _fault(self, decision: Decision, task: TaskView, fault: faults.Fault, now: datetime) -> None:
        evidence = {**fault.evidence, "ranks": self._ranks(task), "mean_step_s": task.mean_step_s()}
        full = replace(fault, evidence=evidence)
        event = faults.judge(self.view, task, full, window_s=self.limits.restart_window_s, now=now)
        # A stall lasts until a plan ends it. One that was answered by none is no other event for lasting longer, and
        # under its id the log takes no other content.
        if event.event_id not in self.view.errors:
            self._decide(decision, event)

    def _suspect(self, task: TaskView, signal: RankRaised, now: datetime) -> None:
        """Note that a rank's collectives broke; not when a cause is known or a plan breaks them on purpose."""
        newest = task.newest_generation()
        expected = signal.generation == task.generation if task.change is None else signal.generation == newest
        if task.unanswered or not expected or not task.accepts(signal.worker, signal.generation):
            return
        if task.suspicion is None or task.suspicion.generation != signal.generation:
            task.suspicion = Suspicion(signal.generation, now, [])
        task.suspicion.signals.append(signal)

    def _connection(self, decision: Decision, task: TaskView, now: datetime) -> bool:
        """Turn broken sockets into a fault once every node of the task has reported all its ranks alive since."""
        suspicion = task.suspicion
        if suspicion is None or suspicion.generation != task.generation:
            return False
        for member in task.members.values():
            node = self.view.nodes.get(member.node)
            status = self.view.status(member.worker)
            heard_at = node.heard_at if node is not None else None
            settled = heard_at is not None and (heard_at - suspicion.at).total_seconds() >= SETTLE_S
            if not settled or status is None or status.task != task.name:
                return True  # too early to tell; no other verdict meanwhile
        first = suspicion.signals[0]
        fault = faults.Fault(
            cause=f"{task.name}/{suspicion.generation}",
            kind=ErrorKind.CONNECTION,
            error=first.error,
            occurred_at=min(s.occurred_at for s in suspicion.signals),
            generation=suspicion.generation,
            step=first.step,
            worker=first.worker,
            node=first.node,
            rank=first.rank,
            traceback=first.traceback,
            evidence={
                "error": first.error,
                "detail": first.detail,
                "traceback": first.traceback,
                "broken_sockets_of": [s.worker for s in suspicion.signals],
            },
        )
        self._fault(decision, task, fault, now)
        return True

    def _hang(self, decision: Decision, task: TaskView, fault: faults.Fault | None, now: datetime) -> None:
        if fault is not None:
            self._fault(decision, task, fault, now)

    def _progress(self, decision: Decision, heartbeat: Heartbeat, now: datetime) -> None:
        """Learn step and rate from rank 0, and summarise them into the log from time to time."""
        for status in heartbeat.workers:
            task = self.view.tasks.get(status.task) if status.task is not None else None
            if task is None or task.ended or status.rank != 0 or status.generation != task.generation:
                continue
            if status.worker not in task.members or status.state != "training":
                continue
            task.step = max(task.step, status.step)
            if status.step_s is not None and status.steps_timed > task.timed:
                task.timed = status.steps_timed
                task.durations_s.append(status.step_s)
            known = task.timed >= TIMED_STEPS and task.progressed_generation != task.generation
            last = task.progressed_at
            due = last is None or (now - last).total_seconds() >= self.limits.progress_interval_s
            moved = status.step > task.progressed_step or task.generation != task.progressed_generation
            if task.change is None and task.timed >= TIMED_STEPS and moved and (known or due):
                self._decide(decision, facts.progressed(task, status.loss, now))

    def _ranks(self, task: TaskView) -> dict[str, dict[str, object]]:
        """Return where each rank stood, for the reader of an incident."""
        ranks: dict[str, dict[str, object]] = {}
        for worker, member in task.members.items():
            status = self.view.status(worker)
            if status is not None and status.task == task.name:
                fields = {"state", "phase", "step", "micro_batch", "progress_age_s", "process_state", "pid"}
                ranks[worker] = {"rank": member.rank, **status.model_dump(include=fields)}
        return ranks

    def _decide(self, decision: Decision, event: Event | None) -> None:
        if event is not None:
            self.fold(event)
            decision.events.append(event)
