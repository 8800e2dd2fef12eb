"""Execution: plans of the planner are carried out in simulated time, and the log gets the events that report it.

A policy's ``Timing`` says how long a recovery takes and what it loses (``Course``). Where in that time each phase of
the transition ends is not modelled, since no decision depends on it: what leads to a stop is reported at the stop, what
leads to the stage at its begin. Its last event comes with the first step, as that of the transition service does.
Workers that change hands are there as soon as the task that gets them needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from services.planner.placement.transition_costs import bytes_per_parameter
from services.planner.state.cluster import State, node_of
from services.transition.state import Phase
from shared.events.plans import Stage, TaskChange
from shared.events.union import (
    ErrorDetected,
    Event,
    PlanDecided,
    StateMoved,
    TaskCheckpointed,
    TaskFinished,
    TaskProgressed,
    TaskStopped,
)
from shared.planning.performance import profile
from simulator.policy import Course, Policy, Recovery
from simulator.run.agenda import Agenda, time_of
from simulator.run.phases import Moved, moved_phases
from simulator.run.rates import Rates, slowdown_of
from simulator.run.stalls import Stalls
from simulator.run.training import Formation, Part, Training

DECISION_S = 0.02
"""From a trigger to its plan in the log: a plan of a thousand nodes takes about that long on one core (median of
``python -m benchmarks.planner``). The log has the plan at its trigger's time; what it asks for begins so much later."""


class Execution:
    """Carries out plans.

    Args:
        policy: how long things take.
        hardware: kind of all workers.
        agenda: simulated time.
        trainings: all tasks, by name.
        rates: how fast they train.
        slowdowns: of the nodes that are slower than others; read only here.
        dead: nodes that are lost, whether that is known or not; read only here.
        state: returns the planner's state.
        log: logs an event of the present, of a class and with fields.
        changed: called when a rate has changed.
    """

    def __init__(
        self,
        policy: Policy,
        hardware: str,
        agenda: Agenda,
        trainings: Mapping[str, Training],
        rates: Rates,
        slowdowns: Mapping[str, float],
        dead: Iterable[str],
        state: Callable[[], State],
        log: Callable[..., None],
        changed: Callable[[Training], None],
    ) -> None:
        self._policy = policy
        self._hardware = hardware
        self._agenda = agenda
        self._trainings = trainings
        self._rates = rates
        self._slowdowns = slowdowns
        self._dead = dead
        self._state = state
        self._log = log
        self._changed = changed
        self._starting = True
        self.transitions = 0
        self.stalls = Stalls()
        self.recovery_s: list[float] = []
        self.completed_s: dict[str, float] = {}

    # ---- plans

    def begin_trace(self) -> None:
        """Carry out at once what the plans of the start have left, so that all tasks train."""
        self._starting = False
        for training in self._trainings.values():
            if training.part is not None:
                self._schedule(training, training.part, Course(down_s=0.0), immediate=True)

    def carry_out(self, plan: PlanDecided, cause: Event) -> None:
        """Begin what a plan asks for; the parts of earlier plans that it takes over end."""
        for change in plan.changes:
            self._begin(plan, change, cause)

    def _begin(self, plan: PlanDecided, change: TaskChange, cause: Event) -> None:
        training, now_s = self._trainings[change.task], self._agenda.now_s
        training.advance(now_s)
        if training.part is not None:
            training.part.cancel()
        training.part = part = Part(plan.plan, plan.incident, change, _nodes_of(change), stopped=change.hold)
        if self._starting:
            return
        if change.action != "end":
            self.transitions += 1
        if change.hold:
            training.answers += 1
            if isinstance(cause, ErrorDetected):
                training.cause = cause.severity, cause.kind
            self._halt(training)
        if not part.nodes.isdisjoint(self._dead):
            return  # its members wait for a lost node, until that is found and another plan made
        self._schedule(training, part, self._course(training, change))

    def _course(self, training: Training, change: TaskChange) -> Course:
        if change.action == "end":
            return Course(down_s=0.0)  # its processes exit by themselves
        severity, kind = training.cause if change.hold and training.cause is not None else (None, None)
        recovery = Recovery(
            spec=training.spec,
            change=change,
            hardware=self._hardware,
            step_s=training.step_s,
            state_bytes_per_worker=self._state_bytes(training, change),
            affected=change.hold,
            severity=severity,
            kind=kind,
        )
        return self._policy.timing.course(recovery)

    def _state_bytes(self, training: Training, change: TaskChange) -> float:
        stage = _last_stage(change)
        layout = stage.layout if stage is not None else None
        parts = layout.tensor * layout.pipeline if layout is not None else 1
        return bytes_per_parameter(profile(self._hardware)) * training.spec.model.parameters() / parts

    # ---- the course of a part

    def _schedule(self, training: Training, part: Part, course: Course, *, immediate: bool = False) -> None:
        """Put the stop, the begin of the stage and all phases of a part on the agenda."""
        change = part.change
        start_s = self._agenda.now_s + (0.0 if immediate else DECISION_S)
        stop_s = start_s + (0.0 if change.hold else course.stop_s)
        begin_s = stop_s + course.down_s
        ends = change.action in ("stop", "pause", "end")

        def at(at_s: float, action: Callable[[], None]) -> None:
            part.entries.append(self._agenda.at(at_s, action))

        if change.hold or course.stop_s <= 0.0:
            self._stop(training, part, course)
        else:
            at(stop_s, lambda: self._stop(training, part, course))
        task = self._state().tasks.get(change.task)
        phases = moved_phases(part.plan, change, task.occupied if task is not None else ())
        stage = _last_stage(change)
        first_step_s = 0.0
        if stage is not None and not ends:
            formation = _formation(stage)
            rate = self._rates.steps_per_s(self._state(), training.spec, formation, self._slowdowns)
            first_step_s = 1.0 / rate if rate > 0.0 and not immediate else 0.0
            at(begin_s, lambda: self._train(training, formation, rate))
        elif ends:
            at(begin_s, lambda: self._leave(training, change))
        trained = False
        for moved in phases:
            last = moved is phases[-1]
            trained = trained or (moved.trains and not ends)
            at_s = begin_s + first_step_s if trained else _ends_at(moved, change, course, start_s, stop_s, begin_s)
            at(at_s, lambda moved=moved, last=last: self._moved(training, part, moved, start_s, last))  # type: ignore[misc]
        if stage is not None and not ends:
            at(begin_s + (first_step_s or training.step_s), lambda: self.report(training, measured=True))

    def _stop(self, training: Training, part: Part, course: Course) -> None:
        """Stop the task's progress, but for what the survivors achieve meanwhile; lose what the course loses."""
        training.advance(self._agenda.now_s)
        part.stopped = True
        change, target = part.change, part.change.target
        lost = course.lost
        if target is not None and all(
            member.source in ("checkpoint", "initial", "script") for member in target.members
        ):
            lost = "checkpoint"  # no process has the state, whatever the policy
        training.lose(lost)
        rate = 0.0
        if course.meanwhile > 0.0 and training.formation is not None and training.step_s > 0.0:
            before = len(training.formation.members)
            rate = course.meanwhile * min(len(change.survivors) / before, 1.0) / training.step_s
        self._set_rate(training, rate)

    def _train(self, training: Training, formation: Formation, rate: float) -> None:
        """Begin the first step of a stage."""
        now_s = self._agenda.now_s
        training.advance(now_s)
        if training.part is not None:
            training.part.stopped = False
        training.formation = formation
        training.step_s = 1.0 / rate if rate > 0.0 else 0.0
        self._set_rate(training, rate)
        self.recovery_s += [now_s - fault_s for fault_s in training.faults]
        training.faults, training.cause = [], None

    def _leave(self, training: Training, change: TaskChange) -> None:
        """End the processes of a task that pauses: with its state saved, or back to its newest checkpoint."""
        training.advance(self._agenda.now_s)
        if training.ended:
            return
        generation = training.formation.generation if training.formation is not None else 0
        if change.survivors:
            training.save()
            training.logged_step = training.steps
            self._log(
                TaskStopped,
                task=training.name,
                generation=generation,
                step=training.steps,
                path=_path(training),
            )
        else:
            training.lose("checkpoint")
        training.formation, training.step_s = None, 0.0
        self._set_rate(training, 0.0)

    def _moved(self, training: Training, part: Part, moved: Moved, start_s: float, last: bool) -> None:
        training.advance(self._agenda.now_s)
        recomputed = 0
        if moved.trains and part.change.action not in ("stop", "pause", "end"):  # a later plan has it made again
            recomputed, training.recomputed = training.recomputed, 0
        if last and training.part is part:
            training.part = None
        now = self._agenda.now
        self._log(
            StateMoved,
            plan=part.plan,
            task=training.name,
            incident=part.incident,
            generation=moved.generation,
            phase=moved.name,
            started_at=min(time_of(start_s), now),
            step=training.steps,
            steps_recomputed=recomputed,
            complete=last,
        )

    # ---- faults, and progress between plans

    def interrupt(self, training: Training, at_s: float) -> None:
        """Stop a task by a fault. What was planned for it does not happen: the fault's plan takes it over."""
        training.advance(at_s)
        training.faults.append(at_s)
        self.stalls.begin(training.name, at_s)
        if training.part is not None:
            training.part.cancel()
        self._halt(training)

    def lose_newcomer(self, training: Training) -> None:
        """Note that a node is lost on which a task was to train; it trains on without it until another plan is made."""
        if training.part is not None:
            training.part.cancel()

    def _halt(self, training: Training) -> None:
        self._set_rate(training, 0.0)

    def slow_down(self, training: Training) -> None:
        """Take up the present slowdowns of the task's nodes."""
        if training.formation is None or training.steps_per_s <= 0.0:
            return
        before = training.step_s
        rate = self._rates.steps_per_s(self._state(), training.spec, training.formation, self._slowdowns)
        share = training.steps_per_s * before
        training.step_s = 1.0 / rate if rate > 0.0 else 0.0
        self._set_rate(training, rate * share)

    def _set_rate(self, training: Training, steps_per_s: float) -> None:
        if steps_per_s > 0.0 or training.formation is None or training.ended:
            self.stalls.end(training.name, self._agenda.now_s)
        training.go_on(self._agenda.now_s, steps_per_s)
        if training.finish is not None:
            training.finish.cancel()
            training.finish = None
        remaining_s = training.remaining_s()
        if not training.ended and math.isfinite(remaining_s):
            training.finish = self._agenda.at(self._agenda.now_s + remaining_s, lambda: self._finish(training))
        self._changed(training)

    def _finish(self, training: Training) -> None:
        training.advance(self._agenda.now_s)
        training.step, training.ended = float(training.spec.steps), True
        if training.part is not None:
            training.part.cancel()
            training.part = None
        generation = training.formation.generation if training.formation is not None else 0
        self.completed_s[training.name] = self._agenda.now_s
        self._set_rate(training, 0.0)
        self._log(
            TaskFinished,
            task=training.name,
            generation=generation,
            step=training.spec.steps,
            samples_sha256="",
            parameters_path="",
        )

    def report(self, training: Training, *, measured: bool = False) -> None:
        """Log the task's progress, and its newest checkpoint. ``measured``: with the duration of a step.

        A task that has gone back to a checkpoint reports again once the log says so, with the first step. The step time
        of a task that slow nodes hold up is left out until they are known: the planner would take it for the rate of
        its layout.
        """
        training.advance(self._agenda.now_s)
        formation = training.formation
        if formation is None or training.ended or training.recomputed:
            return
        held_up = slowdown_of(formation, self._slowdowns) > 1.0
        self._log(
            TaskProgressed,
            task=training.name,
            generation=formation.generation,
            step=training.steps,
            workers=len(formation.members),
            step_s=training.step_s if measured and not held_up else 0.0,
        )
        if training.saved_step > training.logged_step:
            training.logged_step = training.saved_step
            self._log(
                TaskCheckpointed,
                task=training.name,
                generation=formation.generation,
                step=training.saved_step,
                path=_path(training),
            )


def _ends_at(moved: Moved, change: TaskChange, course: Course, start_s: float, stop_s: float, begin_s: float) -> float:
    """Return when a phase before the last stage ends.

    Survivors that achieve something meanwhile have finished the broken step first; others have it finished only when
    the stage begins.
    """
    if moved.phase is Phase.HOLD:
        return start_s
    if moved.phase is Phase.CONFIGURE_INTERRUPTED:
        return start_s if course.meanwhile > 0.0 else begin_s
    if change.hold or change.action in ("stop", "pause", "end"):
        return begin_s
    return stop_s


def _last_stage(change: TaskChange) -> Stage | None:
    return change.stages[-1] if change.stages else None


def _nodes_of(change: TaskChange) -> frozenset[str]:
    """Return the nodes of all processes that a change needs."""
    members = [member for stage in change.stages for member in stage.members]
    others = {*change.survivors}.difference([member.worker for member in members])
    return frozenset({*[member.node for member in members], *map(node_of, others)})


def _formation(stage: Stage) -> Formation:
    members = sorted(stage.members, key=lambda member: member.rank)
    return Formation(
        generation=stage.generation,
        members=tuple(member.worker for member in members),
        nodes=frozenset(member.node for member in members),
        layout=stage.layout,
        shares=tuple(stage.shares),
    )


def _path(training: Training) -> str:
    """Return a name for the newest checkpoint; there is no file."""
    return f"simulated/{training.name}/step-{training.saved_step}"
