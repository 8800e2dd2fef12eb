"""Incidents: whether a fault of a task is judged now, later or never, and the events that follow. Pure.

``decide.py`` passes in the faults that signals report, and those that a tick finds (``absences.py``, ``hangs.py``). A
fault that a link may have caused waits for its inquiry (``links.py``); broken sockets wait for another cause;
``faults.py`` judges what is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from services.detector.decisions import status_events
from services.detector.decisions.decision import Decision
from services.detector.incidents import causes, faults, observations, script_ends
from services.detector.incidents.faults import Fault
from services.detector.nodes import links
from services.detector.progress import standstill
from services.detector.state.cluster import DetectorState
from services.detector.state.task import MonitoredTask, Suspicion
from shared.events.codes import FailureCode
from shared.events.evidence import Evidence
from shared.events.severities import SEVERITY, ErrorKind
from shared.events.union import ErrorDetected, Event, derived_id
from shared.messages.signals import ProcessExited, RankRaised
from shared.settings.escalation import EscalationLimits

SETTLE_S = 0.25
"""The signal of a cause arrives within 50 ms, and on a busy machine within this time. Broken sockets count as a fault
of their own only after that."""

_RANK_FIELDS = {"state", "phase", "step", "micro_batch", "setup_parts", "progress_age_s", "process_state", "pid"}
"""What the evidence of a fault contains of each rank's status."""

STANDS_STILL = (ErrorKind.HANG, ErrorKind.COLLECTIVE_TIMEOUT)
"""Kinds of errors of ranks that stand still, whose evidence says what they do."""


@dataclass(frozen=True, slots=True)
class Incidents:
    """Decides on the faults of tasks, for one input.

    Attributes:
        state: the detector's; events are folded into it at once.
        decision: of the input; takes the events and the questions.
        window_s: ``restart_window_s`` of the settings.
        now: the time of the input.
        limits: of escalation by cause.
    """

    state: DetectorState
    decision: Decision
    window_s: float
    now: datetime
    limits: EscalationLimits

    def exited(self, task: MonitoredTask, exited: ProcessExited) -> None:
        """Take the end of a process."""
        if not task.accepts(exited.worker, exited.generation):
            observations.note(self.state, task, exited)
            return
        if script_ends.is_failure(exited):
            self.decision.add(self.state, script_ends.failed(task, exited, self.now))
            return
        suspicion = task.suspicion
        known = suspicion is not None and suspicion.generation == exited.generation
        suspects = suspicion.signals if suspicion is not None and known else []
        self.record(task, faults.of_exit(exited, suspects))

    def raised(self, task: MonitoredTask, raised: RankRaised) -> None:
        """Take what a rank raised.

        A refusal (an error that shows that the task cannot run as specified) ends a task that has never trained, and so
        does a rank that is not what the others are: it is not known which of them is meant. A task that has trained can
        run: then the fault lies with this worker, and is answered like any exception. A script that restarts whole
        refuses only at its first start: whether it trains by then, nobody else knows.
        """
        if raised.cause == "communication":
            self._suspect(task, raised)
        elif task.accepts(raised.worker, raised.generation):
            if raised.cause in ("refused", "differs") and (task.restarts_whole or not task.has_trained):
                self.decision.add(self.state, faults.refusal(task, raised, now=self.now))
            elif script_ends.is_failure(raised):
                self.decision.add(self.state, script_ends.failed(task, raised, self.now))
            else:
                self.record(task, faults.of_exception(raised))
        else:
            observations.note(self.state, task, raised)

    def escalate(self) -> None:
        """Answer the plans that could not be carried out."""
        for task in list(self.state.tasks.values()):
            if task.ended or task.unanswered:
                task.failed_transition = None
            if (moved := task.failed_transition) is None:
                continue
            if moved.code is FailureCode.CHECKPOINT_FAILED:
                task.failed_transition = None
                self.decision.add(self.state, status_events.stop_refused(task, moved, self.now))
                continue
            fault = self._after_inquiry(task, faults.of_transition(task, moved))
            if fault is not None:
                event = faults.escalation(task, moved, fault, window_s=self.window_s, now=self.now)
                task.failed_transition = None
                self._add(causes.of_failed_plan(self.state, event, self.limits))

    def examine(self, task: MonitoredTask, fault: Fault | None) -> None:
        """Decide on a fault of the task, if there is one, once its nodes have said whether a link is its cause."""
        self.record(task, self._after_inquiry(task, fault))

    def record(self, task: MonitoredTask, fault: Fault | None) -> None:
        """Decide on a fault of the task, if there is one."""
        if fault is None:
            return
        evidence = {**fault.evidence, "ranks": self._ranks(task), "mean_step_s": task.mean_step_s()}
        if fault.kind in STANDS_STILL:
            known = self.state.standstills.get(task.name)
            evidence |= standstill.evidence(known, fault.generation, Evidence.read(fault.evidence).workers)
        full = replace(fault, evidence=evidence)
        if fault.kind is ErrorKind.DIFFERENCE:
            event: Event = _difference(task, full, now=self.now)
        else:
            event = faults.judge(task, full, window_s=self.window_s, now=self.now)
            event = causes.escalate(self.state, event, self.limits, full.traceback)
        # A stall that its plan did not end is found again, with the same id and another duration. The log refuses
        # another content under a known id.
        if event.event_id not in task.recorded:
            self._add(event)

    def _add(self, event: Event) -> None:
        """Add an event of a fault. Nodes that were given up for what now follows its task are used again."""
        returned = causes.wrongly_given_up(self.state, event, self.limits) if isinstance(event, ErrorDetected) else []
        self.decision.add(self.state, event)
        for node in returned:
            self.decision.add(self.state, status_events.node_returned(node, event, self.now))

    def broken_sockets(self, task: MonitoredTask) -> bool:
        """Decide on collectives that broke; return whether there are any, since nothing else is judged meanwhile.

        They count also while a task is to save its state and exit: nothing else would say that its ranks wait for ever.
        """
        suspicion, change = task.suspicion, task.change
        if suspicion is None or suspicion.generation != task.generation:
            return False
        if change is not None and (change.hold or change.action not in ("stop", "pause")):
            return False  # the plan breaks them off by itself, or its next stage shows whether they work
        if self._all_alive_since(task, suspicion.at):
            self.examine(task, faults.of_broken_sockets(task, suspicion))
        return True

    def _after_inquiry(self, task: MonitoredTask, fault: Fault | None) -> Fault | None:
        """Return the fault if it is to be judged now, and not to wait, or part of the isolation of a node."""
        found = links.examine(self.state, task, fault, self.now)
        self.decision.probes += found.questions
        for error in found.errors:
            self.decision.add(self.state, causes.with_pair_limit(self.state, error, self.limits))
        return found.fault

    def _suspect(self, task: MonitoredTask, raised: RankRaised) -> None:
        """Note that a rank's collectives broke, unless a cause is known or a plan breaks them on purpose."""
        newest = task.newest_generation()
        expected = raised.generation == task.generation if task.change is None else raised.generation == newest
        if task.unanswered or not expected or not task.accepts(raised.worker, raised.generation):
            observations.note(self.state, task, raised)
            return
        if task.suspicion is None or task.suspicion.generation != raised.generation:
            task.suspicion = Suspicion(raised.generation, self.now, [])
        task.suspicion.signals.append(raised)

    def _all_alive_since(self, task: MonitoredTask, at: datetime) -> bool:
        """Return whether every node of the task has reported its ranks alive ``SETTLE_S`` after ``at``, or later."""
        for member in task.members.values():
            node = self.state.nodes.get(member.node)
            status = self.state.status(member.worker)
            heard_at = node.heard_at if node is not None else None
            settled = heard_at is not None and (heard_at - at).total_seconds() >= SETTLE_S
            if not settled or status is None or status.task != task.name:
                return False
        return True

    def _ranks(self, task: MonitoredTask) -> dict[str, dict[str, object]]:
        """Return where each rank stands, for the reader of an incident."""
        ranks: dict[str, dict[str, object]] = {}
        for worker, member in task.members.items():
            status = self.state.status(worker)
            if status is not None and status.task == task.name:
                ranks[worker] = {"rank": member.rank, **status.model_dump(include=_RANK_FIELDS)}
        return ranks


def _difference(task: MonitoredTask, fault: Fault, *, now: datetime) -> ErrorDetected:
    """Return the event of a rank that is not what the other members of its generation are, and has left them.

    No node is to blame: whoever starts there differs in the same way. A second one accuses the task.
    """
    event_id = derived_id(fault.cause, faults.SERVICE, f"{task.name}/{fault.kind.value}")
    before = task.failures.incident(fault.key)
    known = Evidence(failure=fault.key, rule="task") if before else Evidence(failure=fault.key)
    return ErrorDetected(
        event_id=event_id,
        occurred_at=min(fault.occurred_at, now),
        incident=before or event_id,
        kind=fault.kind,
        severity=SEVERITY[fault.kind],
        method=faults.METHOD[fault.kind],
        detected_at=now,
        node=fault.node,
        worker=fault.worker,
        task=task.name,
        rank=fault.rank,
        generation=fault.generation,
        step=fault.step,
        evidence={**fault.evidence, **known.mapping()},
        escalates=before or None,
    )
