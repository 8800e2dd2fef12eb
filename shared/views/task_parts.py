"""Parts of the view of a task, and the view of an earlier submission of its name."""

from __future__ import annotations

from datetime import datetime

from shared.model import Model
from shared.tasks.specification import TaskSpec, TaskState


class Result(Model):
    """The result of a task that succeeded.

    ``samples_sha256``: digest of the sample ids of all steps. ``parameters_path``: on ``node``, written by ranks of
    ``generation``; the node is empty if the log does not say which it is.
    """

    steps: int
    samples_sha256: str
    parameters_path: str
    generation: int = 0
    node: str = ""


class CheckpointFailure(Model):
    """A checkpoint that could not be written. ``worker``: the one that reported it."""

    step: int
    worker: str
    reason: str
    at: datetime


class CopiesLack(Model):
    """Why in-memory copies are missing. ``worker``: the one that reported it first, at ``step``."""

    step: int
    worker: str
    reason: str
    at: datetime


class StopRefusal(Model):
    """Why a task has not stopped as asked: the checkpoint of ``step`` could not be written."""

    step: int
    reason: str
    at: datetime


class TaskWait(Model):
    """Why no process of a task is started. ``until``: when that ends by itself; None: when an operator resumes it."""

    reason: str
    until: datetime | None


class RateSample(Model):
    """One measured rate of a task: model FLOP/s of its ``workers`` together."""

    workers: int
    flop_per_s: float


class Weighting(Model):
    """The weight of a task's updates behind ``step``, until another weighting holds."""

    step: int
    weight: float


class AttemptView(Model):
    """An earlier submission of a task's name, as it was when the name was submitted again.

    ``position``: that of the submission in the log. ``number``: its number among the submissions of the name, from 1
    on. ``first_step``: the step at which it began; ``last_step``: the step at which it ended. ``checkpoint``: the
    checkpoint from which it began; empty: it began from nothing. ``flop``, ``weighted_flop``: model FLOP of its own
    updates, and times the weight that each had. ``generation``: the newest that a plan gave it; 0: none did.
    """

    task: str
    position: int
    number: int
    submission_id: str
    owner: str
    spec: TaskSpec
    state: TaskState
    reason: str
    checkpoint: str
    first_step: int
    last_step: int
    generation: int
    flop: float
    weighted_flop: float
    submitted_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    deleted_at: datetime | None
    result: Result | None
    traceback: str


def attempt_key(task: str, number: int) -> str:
    """Return the key of a submission of a name; names have no slash."""
    return f"{task}/{number}"


def weighted_steps(weightings: list[Weighting], first_step: int, last_step: int, weight: float) -> float:
    """Return the sum of the weights of the updates from one step to another.

    Args:
        weightings: in the order of the log; where one begins at an earlier step than the one before it, it holds from
            there on. Empty: ``weight`` holds for all.
        first_step: the updates behind it count.
        last_step: the last update that counts.
        weight: the present weight.
    """
    total, end = 0.0, last_step
    for one in reversed(weightings):
        begin = max(one.step, first_step)
        if end > begin:
            total += (end - begin) * one.weight
            end = begin
    return total + max(end - first_step, 0) * (weightings[0].weight if weightings else weight)
