"""Contradictions between an event and what the log says before it, for all events but plans, and how they are reported.

Only what no honest log has is a contradiction: services race with one another, so an event may be late, but not
impossible. What an event says that nothing else in the log depends on (a price, the evidence of an error, a loss)
cannot be judged here; that takes an anchor (``shared.log.anchors``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from services.planner.state.cluster import State, node_of
from shared.events import union as events
from shared.events.base import TaskEvent
from shared.events.union import Event, EventBase, Recorded
from shared.model import Model


class Contradictions:
    """The check, event by event, in log order."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[int, int]] = {}
        """Generation and step of each task's last progress."""
        self._ends: dict[str, type[EventBase]] = {}
        """How each task has ended since it was submitted last."""
        self._incidents: dict[str, str] = {}
        """Error event -> its incident, by the event's id."""
        self._open: set[str] = set()
        """Ids of all incidents."""
        self._measured: set[str] = set()
        """Names of the nodes that a preflight has measured."""
        self._unknown: set[str] = set()
        """Names of tasks and nodes that were named before the log has them: each is reported once."""

    def of(self, state: State, event: Event) -> list[str]:
        """Return what contradicts the log up to here, in words.

        Args:
            state: the planner's fold of everything before the event.
            event: the event.
        """
        found: list[str] = []
        if isinstance(event, TaskEvent):
            found += self._task(state, event)
        match event:
            case events.TaskProgressed():
                found += self._progressed(event)
            case events.TaskFinished() | events.TaskFailed() | events.TaskStopped():
                found += self._ended(state, event)
            case events.NodeEvent():
                found += self._node(state, event)
            case events.ErrorDetected():
                found += self._error(event)
            case events.StateMoved():
                found += self._moved(state, event)
            case _:
                pass
        return found

    def _task(self, state: State, event: TaskEvent) -> Iterator[str]:
        task = state.find(event.task)
        if isinstance(event, events.TaskSubmitted):
            if task is not None and task.life != "ended":
                yield f"task {event.task} is submitted again before it has ended"
            self._ends.pop(event.task, None)
            self._steps.pop(event.task, None)
            return
        if task is None:
            yield from self._never(f"task {event.task} was never submitted")
            return
        generation, step = getattr(event, "generation", None), getattr(event, "step", 0)
        if generation is not None and generation > task.generation:
            yield f"generation {generation} of task {event.task}; plans have given it {task.generation} at most"
        if step > task.spec.steps:
            yield f"step {step} of task {event.task}, which has {task.spec.steps}"

    def _progressed(self, event: events.TaskProgressed) -> Iterator[str]:
        generation, step = self._steps.get(event.task, (0, 0))
        if event.generation == generation and event.step < step:
            yield f"task {event.task} is at step {event.step} of generation {generation}, after step {step} of it"
        self._steps[event.task] = event.generation, event.step

    def _ended(
        self, state: State, event: events.TaskFinished | events.TaskFailed | events.TaskStopped
    ) -> Iterator[str]:
        task = state.find(event.task)
        if task is None or (task.life == "active" and task.change is not None and task.change.action == "pause"):
            return  # a pause is reported with the same event as a stop
        if task.life == "ended" and self._ends.get(event.task) is type(event):
            yield f"task {event.task} ends twice"
        self._ends[event.task] = type(event)

    def _node(self, state: State, event: events.NodeEvent) -> Iterator[str]:
        if isinstance(event, events.NodeMeasured):
            self._measured.add(event.node)  # one that is refused is returned, or leaves, without having joined
        elif not (isinstance(event, events.NodeJoined) or event.node in state.nodes or event.node in self._measured):
            yield from self._never(f"node {event.node} has never joined")

    def _error(self, event: events.ErrorDetected) -> Iterator[str]:
        if event.detected_at < event.occurred_at:
            yield "the fault was detected before it occurred"
        if event.node is not None and event.worker is not None and node_of(event.worker) != event.node:
            yield f"worker {event.worker} is not on node {event.node}"
        if event.escalates is None and event.repeats is None and event.incident in self._open:
            yield f"incident {event.incident} was opened before"
        if event.repeats is not None and self._incidents.get(event.repeats) != event.incident:
            yield f"it repeats {event.repeats}, which is no error of incident {event.incident} before it"
        if event.escalates is not None and self._incidents.get(event.escalates) != event.incident:
            yield f"it escalates {event.escalates}, which is no error of incident {event.incident} before it"
        self._open.add(event.incident)
        self._incidents[event.event_id] = event.incident

    def _moved(self, state: State, event: events.StateMoved) -> Iterator[str]:
        if event.started_at > event.occurred_at:
            yield "the phase ended before it started"
        number = event.plan[1:]
        if not (event.plan[:1] == "p" and number.isdecimal() and 1 <= int(number) <= state.plans):
            yield f"no plan before it is named {event.plan}"
        task = state.find(event.task)
        if task is None:
            yield from self._never(f"task {event.task} was never submitted")
        elif event.generation > task.generation:
            yield f"generation {event.generation} of task {event.task}; plans have given it {task.generation} at most"
        elif task.change is not None and task.plan == event.plan and event.phase != "failed":
            known = {task.change.from_generation, *(stage.generation for stage in task.change.stages)}
            if event.generation not in known:
                yield f"generation {event.generation} of task {event.task}, which plan {event.plan} does not have"

    def _never(self, problem: str) -> Iterator[str]:
        if problem not in self._unknown:
            self._unknown.add(problem)
            yield problem


class Mismatch(Model):
    """A place where the log contradicts the planner.

    ``position``: of the plan, or of the cause where the log has no plan. ``plan``: the plan's name, empty if there is
    none. ``problem``: the contradiction, in words.
    """

    position: int
    plan: str
    problem: str


def differences(cause: Recorded, recorded: Sequence[Recorded], decided: Sequence[Event]) -> list[Mismatch]:
    """Return the differences between the recorded answer to a cause and the answer decided now."""
    found = []
    for there, here in zip_longest(recorded, decided):
        if there is None:
            found.append(
                Mismatch(position=cause.position, plan=plan_name(here), problem="decided again, not in the log")
            )
        elif here is None:
            found.append(Mismatch(position=there.position, plan=plan_name(there.event), problem="not decided again"))
        elif there.event.canonical() != here.canonical():
            problem = _difference(there.event.canonical(), here.canonical())
            found.append(Mismatch(position=there.position, plan=plan_name(there.event), problem=problem))
    return found


def plan_name(event: Event | None) -> str:
    """Return the name of a plan; empty for other events."""
    return event.plan if isinstance(event, events.PlanDecided) else ""


def _difference(there: str, here: str) -> str:
    """Return the first place at which two canonical texts differ, with the text around that place."""
    at = next((i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here)))
    start = max(0, at - 40)
    return f"byte {at}: recorded ...{there[start : at + 40]!r}, decided again ...{here[start : at + 40]!r}"
