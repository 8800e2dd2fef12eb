"""Bodies of changes of tasks, and of notes about incidents: how the OpenAPI document describes them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from shared.events.request_events import NoteText
from shared.tasks.specification import Count


class WorkersChange(BaseModel):
    """``min``, ``max``: of the task's workers; ``max`` null: any number. What is left out stays."""

    model_config = ConfigDict(extra="forbid")

    min: Count = 1
    max: Count | None = None


class TaskChange(BaseModel):
    """A JSON merge patch (RFC 7396) of a task's specification. What is left out stays."""

    model_config = ConfigDict(extra="forbid")

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    workers: WorkersChange = WorkersChange()


class NoteRequest(BaseModel):
    """A note about an incident."""

    model_config = ConfigDict(extra="forbid")

    text: NoteText
