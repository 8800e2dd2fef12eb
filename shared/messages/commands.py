"""Commands of the transition service to node agents: requests on ``unicron.commands.<node>``, idempotent by id.

An agent replies when the command is done or has failed, not when it was received. An agent refuses a command whose
generation is older than the newest that it has seen for the task, or whose token is older than the newest that it has
seen at all, with the code ``fenced``. A repeated command (same ``command_id``) joins the first one: it gets the same
reply and has no second effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, field_serializer, model_validator

from shared.bus.endpoints import Codec, Endpoint
from shared.bus.messages import MAX_INTEGER, Integer, Message, MessageId, Seconds, shown
from shared.events.codes import FailureCode, ReceivedCode, known_code
from shared.events.plans import Stage
from shared.model import Model
from shared.names import FilePath, Host, Name, WorkerName, is_name, is_worker_of
from shared.tasks.specification import TaskSpec

_PATH: TypeAdapter[str] = TypeAdapter(FilePath)


def _strict_spec(value: Any) -> Any:
    """Return the specification in a message; refuse a field that this version does not know.

    An option that an agent ignores would train another task than the one submitted.
    """
    if not isinstance(value, dict):
        return value
    try:
        return TaskSpec.model_validate(value, extra="forbid")
    except ValidationError as err:
        found = err.errors(include_url=False, include_context=False, include_input=False)
        raise ValueError("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in found[:3])) from err


class CommandBase(Message):
    """What all commands have.

    ``generation``: the generation of the task that the command leads to. ``token``: that of the lease of the transition
    service that sends it; 0: a service without a lease sends it.
    """

    command_id: MessageId
    plan: MessageId
    task: Name
    generation: Integer
    token: Integer = 0


class Prepare(CommandBase):
    """Start a process on each worker; reply when each has imported what it needs and attached to the agent.

    ``spec`` is sent without the fields that have their default, so that an agent of an older version carries out the
    task unless the task uses an option that the agent does not know. Such an option is refused, not ignored.
    """

    kind: Literal["prepare"] = "prepare"
    workers: list[WorkerName]
    spec: Annotated[TaskSpec, BeforeValidator(_strict_spec)]

    @field_serializer("spec")
    def _given_fields(self, spec: TaskSpec) -> dict[str, Any]:
        return spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)


class HoldTask(CommandBase):
    """Break the sockets of older generations on these workers; reply when each waits (``step`` in the result).

    ``lost``: workers whose ranks are lost: those of the replicas of the node's ranks, and at least one if there are
    any. Replicas without a lost worker finish their micro-batches first. Empty: it is not known who is lost.
    """

    kind: Literal["hold"] = "hold"
    workers: list[WorkerName]
    lost: list[WorkerName] = Field(default_factory=list)


class DrainTask(CommandBase):
    """Finish the present step on these workers; reply when each waits at the boundary (``step`` in the result)."""

    kind: Literal["drain"] = "drain"
    workers: list[WorkerName]


class OpenStore(CommandBase):
    """Run a rendezvous store for this generation in a process of its own; reply with its address."""

    kind: Literal["open-store"] = "open-store"


class ConfigureTask(CommandBase):
    """Have the node's members join the stage; reply when each has resumed (details in the result).

    ``fault_step``: the newest step known for the task, in updates applied. ``resumes``: whether the task was asked to
    go on, so that copies of the task that has ended are its own. ``identity``: what the log has recorded of the task
    (``task.identified``), where no member is live; else empty.
    """

    kind: Literal["configure"] = "configure"
    stage: Stage
    store_host: Host
    store_port: Integer
    fault_step: Integer = 0
    resumes: bool = False
    identity: dict[str, str] = Field(default_factory=dict)

    @field_serializer("stage", when_used="json")
    def _short(self, stage: Stage) -> dict[str, Any]:
        """Write the members as runs: the command of each node names all members of the stage."""
        return stage.short

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        numbers = [self.stage.generation, *(member.rank for member in self.stage.members)]
        if max(map(abs, numbers)) > MAX_INTEGER:
            raise ValueError(f"stage: generation and ranks are at most {MAX_INTEGER}")
        return self

    @model_validator(mode="after")
    def _named(self) -> Self:
        """Refuse what is no name: the models of a stage are the log's, too, which has names as they were accepted."""
        for member in self.stage.members:
            if not is_name(member.node) or not is_worker_of(member.node, member.worker):
                raise ValueError(f"stage: {shown(member.worker)} is no worker of node {shown(member.node)}")
        _PATH.validate_python(self.stage.checkpoint)
        return self


class StopTask(CommandBase):
    """Finish the present step, write a checkpoint and exit; reply when the processes are gone.

    If the checkpoint cannot be written the ranks train on, and the reply has the code ``checkpoint-failed``.
    ``lose_steps``: whether to exit also without a checkpoint.
    """

    kind: Literal["stop"] = "stop"
    workers: list[WorkerName]
    lose_steps: bool = False


class ReleaseTask(CommandBase):
    """End the task's processes on these workers; reply when they are gone.

    ``all_workers``: the task leaves the node, so end its store and delete its in-memory copies, too. ``keep_copies``:
    keep the copies: they may be all that there is of its steps since its newest checkpoint. ``delete_copies``: delete
    the copies although no worker leaves the node, unless the task has a process there: it is over.
    """

    kind: Literal["release"] = "release"
    workers: list[WorkerName]
    all_workers: bool = False
    keep_copies: bool = False
    delete_copies: bool = False


def _with_kind(value: Any) -> Any:
    """Refuse a command without a kind, as ``COMMANDS`` does: any other command would be read as a release."""
    if isinstance(value, dict) and "kind" not in value:
        raise ValueError("kind: is needed")
    return value


Command = Annotated[
    Prepare | HoldTask | DrainTask | OpenStore | ConfigureTask | StopTask | ReleaseTask, Field(discriminator="kind")
]


class WorkerResult(Model):
    """What one worker reports. The fields that are set depend on the command (see ``protocol.Resumed``).

    ``step``: updates applied. ``source``: where the rank's state came from. ``phases``: seconds of each sub-phase.
    ``deal``: rank -> the missing micro-batches that it computes.
    """

    pid: Integer | None = None
    step: Integer = 0
    source: str = ""
    phases: dict[str, Seconds] = Field(default_factory=dict)
    deal: dict[str, list[Integer]] = Field(default_factory=dict)
    steps_recomputed: Integer = 0


class Reply(Message):
    """The reply to a command.

    ``code``: why the command failed; an agent of another version may send a code that is not known here: it is read as
    ``unknown``, and ``detail`` begins with the code's text. ``detail``: the failure as text for people. ``workers``:
    the results of the workers; for a failed command, the workers that are not to blame. ``host``, ``port``: the answer
    to ``OpenStore``.
    """

    command_id: Annotated[str, Field(max_length=256)]
    node: Name
    ok: bool
    code: ReceivedCode = None
    detail: str = ""
    seconds: Seconds = 0.0
    workers: dict[WorkerName, WorkerResult] = Field(default_factory=dict)
    host: Host = ""
    port: Integer = 0

    @model_validator(mode="before")
    @classmethod
    def _keep_unknown_code(cls, data: Any) -> Any:
        """Keep the text of a code that this version does not know."""
        code = data.get("code") if isinstance(data, dict) else None
        if isinstance(code, str) and known_code(code) is FailureCode.UNKNOWN and code != FailureCode.UNKNOWN:
            return {**data, "code": FailureCode.UNKNOWN, "detail": f"{code}: {data.get('detail', '')}"}
        return data

    @field_serializer("code")
    def _code_text(self, code: FailureCode | None) -> str:
        """Write the absence of a code as empty text, which agents and services of every version read."""
        return code.value if code is not None else ""


COMMANDS = Endpoint(
    "unicron.commands.*", Codec[Command](Command, "Command"), Reply, by=("transition",), to=("node",), timeout_s=5.0
)
"""After the time-out the command is sent again. An agent joins the repeated command to the first; its successor answers
what was carried out, and carries out the rest. The agent of a new supervisor knows neither."""

LEFTOVERS = Endpoint(
    "unicron.leftovers.*",
    Codec[ReleaseTask](Annotated[ReleaseTask, BeforeValidator(_with_kind)], "ReleaseTask"),
    Reply,
    by=("detector",),
    to=("node",),
    timeout_s=5.0,
)
"""The detector's request to end ranks that a node has left over: all other commands are the transition service's. The
agent kills them, and answers within its own grace."""
