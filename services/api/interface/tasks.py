"""Parts of the answer about a task (``services/api/interface/models.py``)."""

from __future__ import annotations

from pydantic import BaseModel

from services.api.times import Time


class CheckpointFailure(BaseModel):
    """A checkpoint that could not be written. ``worker``: the one that reported it."""

    step: int
    worker: str
    reason: str
    at: Time


class StopRefusal(BaseModel):
    """Why a task has not stopped as asked: the checkpoint of ``step`` could not be written."""

    step: int
    reason: str
    at: Time


class TaskWait(BaseModel):
    """Why no process of a task is started. ``until``: when that ends by itself; null: when an operator resumes it."""

    reason: str
    until: Time | None
