"""What a task's script does behind the last step, and how that fails. Pure.

The result is written, and the state behind the last step is saved. So no failure here loses a step: the planner starts
all processes anew from that state, and only this part of the script runs again.
"""

from __future__ import annotations

from datetime import datetime

from services.detector.incidents.faults import SERVICE, last_line
from services.detector.state.cluster import DetectorState
from services.detector.state.error_classes import exit_name
from services.detector.state.task import MonitoredTask
from shared.events.union import TaskFailed, derived_id
from shared.messages.signals import ProcessExited, RankRaised, WorkerStatus

KEPT = "the result is written, and resuming the task runs only what its script does behind the last step"


def going_on(state: DetectorState, task: MonitoredTask) -> list[WorkerStatus]:
    """Return the ranks of the task's present generation whose scripts go on behind the last step."""
    found = state.statuses(task).values()
    return [s for s in found if s.phase == "tail" and (s.task, s.generation) == (task.name, task.generation)]


def is_failure(signal: ProcessExited | RankRaised) -> bool:
    """Return whether a script has failed by itself behind the last step, and would again: it has raised an error.

    A process that a signal has ended has met a fault, and so has one whose peers are lost.
    """
    return signal.trained and (isinstance(signal, RankRaised) or signal.exit_code > 0)


def failed(task: MonitoredTask, signal: ProcessExited | RankRaised, now: datetime) -> TaskFailed:
    """Return the end of a task whose script has failed behind the last step."""
    if isinstance(signal, RankRaised):
        what, text = f"{signal.error}: {signal.detail}", signal.traceback
    else:
        what, text = exit_name(signal.exit_code), signal.last_output
        what = f"{what}: {last_line(text)}" if last_line(text) else what
    return TaskFailed(
        event_id=derived_id(signal.signal_id, SERVICE, f"{task.name}/script"),
        occurred_at=now,
        task=task.name,
        generation=signal.generation,
        step=signal.step,
        reason=f"its script failed behind the last step, on worker {signal.worker}: {what}; {KEPT}",
        traceback=text,
    )


def overdue(state: DetectorState, task: MonitoredTask, now: datetime) -> TaskFailed | None:
    """Return the end of a task whose script has gone on for too long behind the last step; None if it has not."""
    late = [s for s in going_on(state, task) if (s.progress_age_s or 0.0) > task.finish_timeout_s]
    if not late:
        return None
    return TaskFailed(
        event_id=derived_id(f"{task.name}/{task.generation}", SERVICE, "script overdue"),
        occurred_at=now,
        task=task.name,
        generation=task.generation,
        step=task.step,
        reason=f"its script did not end within {task.finish_timeout_s:g} s behind the last step (finish_timeout_s), "
        f"on worker {late[0].worker}; {KEPT}",
    )
