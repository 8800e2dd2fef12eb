"""Events of what users ask of tasks that exist, and of what they say about incidents and other troubles."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shared.events.base import ClusterEvent, TaskEvent

NOTE_CHARACTERS = 2000
"""Longest note about an incident: a paragraph or two. A longer text belongs into a document that a note names."""

NoteText = Annotated[str, Field(min_length=1, max_length=NOTE_CHARACTERS)]


class TaskStopRequested(TaskEvent):
    """A user asked for the task to stop at the next step boundary, with a checkpoint.

    ``lose_steps``: whether it is to stop also if the checkpoint cannot be written. ``at_once``: whether its processes
    are to end in the midst of a step, without a checkpoint. ``actor``: who asked, as in a submission.
    """

    type: Literal["task.stop-requested"] = "task.stop-requested"
    schema_version: Literal[1] = 1
    lose_steps: bool = False
    at_once: bool = False
    actor: str = ""


class TaskResumeRequested(TaskEvent):
    """A user asked for a task that has not ended to be tried again at once, where it waits after failures.

    ``actor``: who asked, as in a submission.
    """

    type: Literal["task.resume-requested"] = "task.resume-requested"
    schema_version: Literal[1] = 1
    actor: str = ""


class TaskChanged(TaskEvent):
    """A user has changed what a task that has not ended may have. The planner plans anew.

    ``weight``, ``min_workers``, ``max_workers``: those of the task from this event on, the unchanged ones included;
    ``max_workers`` None: any number. ``requested_by``: who asked, as the ``actor`` of a submission.
    """

    type: Literal["task.changed"] = "task.changed"
    schema_version: Literal[1] = 1
    weight: float
    min_workers: int
    max_workers: int | None = None
    requested_by: str = ""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        """Refuse what no specification may have: the views of such a task could not be read back."""
        if self.max_workers is not None and self.min_workers > self.max_workers:
            raise ValueError(f"min_workers: {self.min_workers} must not exceed max_workers, {self.max_workers}")
        return self


class TaskDeleted(TaskEvent):
    """A user has removed a task that has ended from the list. Its events and its files stay.

    A later submission of the name is listed again, and goes on from the newest checkpoint. ``actor``: who asked, as in
    a submission.
    """

    type: Literal["task.deleted"] = "task.deleted"
    schema_version: Literal[1] = 1
    actor: str = ""


class IncidentNoted(ClusterEvent):
    """A user has written something about an incident. ``actor``: the user, ``uid/<uid>`` or ``token/<name>``."""

    type: Literal["incident.noted"] = "incident.noted"
    schema_version: Literal[1] = 1
    incident: str
    text: str
    actor: str = ""


class TroubleAcknowledged(ClusterEvent):
    """A user takes care of a cause of trouble that is no incident. ``key``: of the cause; ``what``: it, in a sentence.

    ``actor``: the user, as in a note.
    """

    type: Literal["trouble.acknowledged"] = "trouble.acknowledged"
    schema_version: Literal[1] = 1
    key: str
    what: str
    actor: str = ""


class TroubleEnded(ClusterEvent):
    """A cause of trouble that somebody had acknowledged is no more: if it comes again, nobody takes care of it."""

    type: Literal["trouble.ended"] = "trouble.ended"
    schema_version: Literal[1] = 1
    key: str


class IncidentAcknowledged(ClusterEvent):
    """A user has seen an incident and takes care of it. ``actor``: the user, as in a note."""

    type: Literal["incident.acknowledged"] = "incident.acknowledged"
    schema_version: Literal[1] = 1
    incident: str
    actor: str = ""
