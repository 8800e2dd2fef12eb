"""What the transition service asks of node agents: request/reply on ``unicron.commands.<node>``, idempotent by id.

An agent answers when the thing is done (or has failed), not when it has understood. A command whose generation is
older than the newest the agent has seen for that task is refused with the code ``fenced``. A repeated command (same
``command_id``) joins the first: it gets the same answer and has no second effect.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shared.model import Model
from shared.plans import Stage
from shared.tasks import TaskSpec

COMMANDS = "unicron.commands"
"""Subject prefix; the node's name follows."""


class CommandBase(Model):
    """``generation``: the task's generation that the command belongs to."""

    command_id: str
    plan: str
    task: str
    generation: int


class Prepare(CommandBase):
    """Start a process on each worker; answer when each has imported what it needs and said hello."""

    kind: Literal["prepare"] = "prepare"
    workers: list[str]
    spec: TaskSpec


class HoldTask(CommandBase):
    """Break the sockets of older generations on these workers; answer when each waits (``step`` in the result)."""

    kind: Literal["hold"] = "hold"
    workers: list[str]


class DrainTask(CommandBase):
    """Finish the present step on these workers; answer when each stands at the boundary (``step`` in the result)."""

    kind: Literal["drain"] = "drain"
    workers: list[str]


class OpenStore(CommandBase):
    """Run a rendezvous store for this generation in a process of its own; answer with its address."""

    kind: Literal["open-store"] = "open-store"


class ConfigureTask(CommandBase):
    """Join the stage with the node's members; answer when each has resumed (details in the result)."""

    kind: Literal["configure"] = "configure"
    stage: Stage
    store_host: str
    store_port: int
    fault_step: int = 0


class StopTask(CommandBase):
    """Finish the present step, write a checkpoint, exit; answer when the processes are gone."""

    kind: Literal["stop"] = "stop"
    workers: list[str]


class ReleaseTask(CommandBase):
    """End the task's processes on these workers (and its store, if ``all_workers``); answer when they are gone."""

    kind: Literal["release"] = "release"
    workers: list[str]
    all_workers: bool = False


Command = Annotated[
    Prepare | HoldTask | DrainTask | OpenStore | ConfigureTask | StopTask | ReleaseTask, Field(discriminator="kind")
]
COMMAND: TypeAdapter[Command] = TypeAdapter(Command)


class WorkerResult(Model):
    """What one worker reports. Which fields are set depends on the command (see ``unicron.protocol``)."""

    pid: int | None = None
    step: int = 0
    source: str = ""
    phases: dict[str, float] = Field(default_factory=dict)
    deal: dict[str, list[int]] = Field(default_factory=dict)
    steps_recomputed: int = 0


class Reply(Model):
    """The answer to a command."""

    command_id: str
    node: str
    ok: bool
    code: str = ""
    detail: str = ""
    seconds: float = 0.0
    workers: dict[str, WorkerResult] = Field(default_factory=dict)
    host: str = ""
    port: int = 0
