"""Messages of node agents to the detector over core NATS: urgent signals (requests) and heartbeats (published).

Signals are requests on ``SIGNALS``: the detector replies when the events that follow from a signal are in the log, and
an agent repeats a signal until it has a reply (the same ``signal_id``: a repeat has no effect). A signal that the
detector cannot read gets the reason for a reply, so that the agent's next signal is sent. Heartbeats are never
repeated. The api reads heartbeats as well. ``shared.bus.messages`` has the rules for programs of several versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from shared.bus.endpoints import NOTHING, Codec, Endpoint
from shared.bus.messages import REASON_CHARACTERS, Integer, Message, MessageId, Seconds, Time
from shared.model import Model
from shared.names import FilePath, Host, Label, Name, SocketAddress, WorkerName

RECONNECT_GRACE_S = 2.0
"""Time added to the time-outs of agents after an outage of the bus. Clients reconnect within about 0.2 s (measured); a
client that has to resolve a name or open a TCP connection on a busy machine takes longer."""


PHASES = ("begun", "compute", "reduce", "update", "ended", "checkpoint", "setup", "waiting", "aside", "tail", "script")
"""Phases of a rank that this version knows, as in ``unicron.protocol.messages.PHASES``."""


MAX_PHASES = 32
"""Most phases of which a status reports anything. The bound is a few times the number of phases, and limits a
message."""


STATES = ("idle", "starting", "ready", "training", "waiting")
"""States of a worker that this version knows."""


@dataclass(frozen=True)
class _OrElse:
    """Reads a value as ``usual`` (None: the annotated type), or, where that refuses it, what ``convert`` makes of it.

    A validator before the type would be a call for each of thousands of statuses a second, and nearly all are usual.
    """

    convert: Callable[[Any], Any]
    usual: CoreSchema | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        annotated = handler(source)
        converted = core_schema.no_info_before_validator_function(self.convert, annotated)
        return core_schema.union_schema([self.usual or annotated, converted], mode="left_to_right")

    def __get_pydantic_json_schema__(
        self, schema: core_schema.UnionSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(cast("CoreSchema", schema["choices"][-1]))


def _fallback(known: tuple[str, ...], otherwise: str | None) -> _OrElse:
    """Return a validator that reads a text of a newer version as ``otherwise``."""

    def convert(value: Any) -> Any:
        return otherwise if isinstance(value, str) and value not in known else value

    return _OrElse(convert, core_schema.literal_schema([*known, *([None] if otherwise is None else [])]))


class SignalBase(Message):
    """What all signals have.

    ``signal_id``: a UUID. ``occurred_at``: when the agent observed what it signals. ``sent_at``: when it sent the
    signal last; None from an agent of an older version. Both are by the node's own clock, so only their difference
    means anything to others (``received``).
    """

    signal_id: MessageId
    node: Name
    incarnation: MessageId
    occurred_at: Time
    sent_at: Time | None = None


class RankSignal(SignalBase):
    """A signal about one rank. ``step``: updates applied."""

    task: Name
    worker: WorkerName
    generation: Integer
    rank: Integer | None
    step: Integer

    @model_validator(mode="after")
    def _own_worker(self) -> Self:
        if not self.worker.startswith(f"{self.node}/"):
            raise ValueError(f"worker {self.worker} is not of node {self.node}")
        return self


class ProcessExited(RankSignal):
    """A rank's process ended unexpectedly. ``exit_code``: the exit status, or the negative number of a signal.

    ``last_output``: the end of the process's output, for the reader of the incident. ``oom_killed``: whether the kernel
    had just ended a process of the node because memory was used up. ``stack``: the stacks of its threads at the signal
    that native code ended it with (SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL). ``trained``: whether the last step was
    done, so that the script was to end.
    """

    kind: Literal["process-exited"] = "process-exited"
    pid: Integer
    exit_code: Integer
    last_output: str = ""
    oom_killed: bool = False
    stack: str = ""
    trained: bool = False


class RankRaised(RankSignal):
    """A rank caught an exception.

    ``cause``: exception, communication (a peer's sockets broke), non_finite, refused (the rank cannot run the task as
    specified; ``unicron.protocol.messages.REFUSED``), differs (it is not what the other members are;
    ``unicron.protocol.messages.DIFFERS``), or wrong_loop (its script uses the library wrongly; ``WRONG_LOOP`` there). A
    cause that this version does not know is read as ``exception``. ``parameter``, ``micro_batch``: details of the cause
    non_finite, and ``difference`` of differs, as in ``unicron.protocol.messages.Raised``. ``resource``, ``limit``: what
    the process lacks, as there. ``trained``: as in ``ProcessExited``.
    """

    kind: Literal["rank-raised"] = "rank-raised"
    cause: Annotated[
        Literal["exception", "communication", "non_finite", "refused", "differs", "wrong_loop"],
        _fallback(("exception", "communication", "non_finite", "refused", "differs", "wrong_loop"), "exception"),
    ]
    error: str
    detail: str
    traceback: str
    parameter: str = ""
    micro_batch: Integer | None = None
    difference: str = ""
    resource: str = ""
    limit: str = ""
    trained: bool = False


class RankIdentified(RankSignal):
    """What the members of a generation have agreed to be: field -> value (``unicron.join.identity``).

    The signal is sent for rank 0, if no member had trained before.
    """

    kind: Literal["rank-identified"] = "rank-identified"
    identity: dict[str, str]


class RankCheckpointed(RankSignal):
    """A checkpoint was written completely to ``path``."""

    kind: Literal["rank-checkpointed"] = "rank-checkpointed"
    path: FilePath


class RankCheckpointFailed(RankSignal):
    """A checkpoint of ``step`` could not be written; training goes on. ``reason``: in words, from the rank.

    ``lends``: whether other tasks may have the workers meanwhile, since all steps are done, the result could not be
    written for a while, and the state is kept without the processes.
    """

    kind: Literal["rank-checkpoint-failed"] = "rank-checkpoint-failed"
    reason: str
    lends: bool = False


class RankCopies(RankSignal):
    """In-memory copies that a recovery would rely on are missing. ``lack``: why, in words; empty: all are there."""

    kind: Literal["rank-copies"] = "rank-copies"
    lack: str = ""


class StorageReturned(RankSignal):
    """Folders take a file again for which a task waits that has lent its workers; before, they took none.

    The node of the worker that had reported them sends the signal.
    """

    kind: Literal["storage-returned"] = "storage-returned"


class RankStopped(RankSignal):
    """The task stopped at a step boundary on request (sent for rank 0). ``path``: its checkpoint."""

    kind: Literal["rank-stopped"] = "rank-stopped"
    path: FilePath


class RankFinished(RankSignal):
    """The task finished its last step, and its script has ended (sent for rank 0)."""

    kind: Literal["rank-finished"] = "rank-finished"
    samples_sha256: str
    parameters_path: FilePath
    loss: float | None


class DeviceFailed(SignalBase):
    """A device of the node reports a fault; it concerns no task by itself.

    ``fault``: its name (``shared.events.device_faults``), ``xid-79`` or a condition such as ``gpu-lost``. ``device``:
    NVML's index. ``uuid``, ``name``: NVML's; empty where the driver does not say. ``workers``: the workers of the
    device, or of a part of it (MIG) if the fault concerns that part. ``readings``: what NVML said of the device last
    before it. ``injected``: whether a user asked for it, and no device has failed.
    """

    kind: Literal["device-failed"] = "device-failed"
    fault: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
    device: Integer
    uuid: Label = ""
    name: Label = ""
    workers: list[WorkerName] = Field(default_factory=list)
    readings: dict[Label, Integer] = Field(default_factory=dict)
    injected: bool = False

    @model_validator(mode="after")
    def _own_workers(self) -> Self:
        if strangers := [worker for worker in self.workers if not worker.startswith(f"{self.node}/")]:
            raise ValueError(f"workers: {strangers[0]} is not of node {self.node}")
        return self


RankSignals = (
    ProcessExited
    | RankRaised
    | RankIdentified
    | RankCheckpointed
    | RankCheckpointFailed
    | RankCopies
    | StorageReturned
    | RankStopped
    | RankFinished
)
"""The signals about one rank."""

Signal = Annotated[
    RankSignals | DeviceFailed,
    Field(discriminator="kind"),
]


class _Verdicts(Codec[str | None]):
    """``+`` if the events of a signal are in the log; ``-`` and the reason if the signal was dropped."""

    def __init__(self) -> None:
        super().__init__(str, "`+`, or `-` and the reason")

    def encode(self, message: str | None) -> bytes:
        return b"+" if message is None else f"- {message[:REASON_CHARACTERS]}".encode(errors="replace")

    def decode(self, data: bytes) -> str | None:
        return data[1:].decode(errors="replace").strip()[:REASON_CHARACTERS] if data.startswith(b"-") else None


SIGNALS = Endpoint(
    "unicron.signals.*",
    Codec[Signal](Signal, "Signal"),
    _Verdicts(),
    by=("node",),
    to=("detector",),
    timeout_s=1.0,
    names_sender=True,
)
"""The reply says why a signal was dropped; None: its events are in the log. The detector answers after one append to
the log, in about 5 ms. A request without an answer is repeated after the time-out."""


def received(signal: Signal, at: datetime) -> Signal:
    """Return a signal that was received at ``at``, with ``occurred_at`` by the receiver's clock.

    The wall clock of a node may be wrong by any time. What occurred some seconds before the signal was sent, occurred
    as long before it was received; the time that it was on the way is not known and left out.
    """
    if signal.sent_at is None:
        return signal
    age = max(signal.sent_at - signal.occurred_at, timedelta())
    return signal.model_copy(update={"occurred_at": at - age})


MAX_STEPS = 16
"""Most steps that a heartbeat reports of a worker, beside the one with the largest loss: all, if steps take 40 ms or
longer. A step takes some 30 bytes: 16 workers add 300 bytes to a heartbeat where steps take a second, and 8 KB where
they are as short as can be; without them it has 5 KB."""


class StepReport(NamedTuple):
    """A step that has ended on a rank; on the wire a list, of which a reader ignores what is behind its own fields.

    ``compute_s``: the rank's own compute time (``unicron.protocol.messages.Progress``), for its ``micro_batches``;
    None: not measured. ``duration_s``, ``loss``: those of the whole step; None except on rank 0.
    """

    step: Integer
    compute_s: Seconds | None = None
    micro_batches: Integer | None = None
    duration_s: Seconds | None = None
    loss: float | None = None


def _known_fields(value: Any) -> Any:
    """Return a step report of a newer version without the fields that this version does not know."""
    return value[: len(StepReport._fields)] if isinstance(value, list) else value


class WorkerStatus(Model):
    """The state of one worker; ages are seconds before ``Heartbeat.sent_at``.

    ``step``: updates applied. ``phase``: one of ``unicron.protocol.messages.PHASES``. ``micro_batch``: the micro-batch
    finished last, in phase ``compute``. ``setup_parts``: the parts of joining a generation that are done, in phase
    ``setup``. ``sections``: boundary sections that the rank has entered behind its newest step, in this generation;
    None: not known. ``section``: the place in the script of the newest of them. ``progress_age_s``: since the rank's
    last progress. ``starved_s``: the part of ``progress_age_s``, at most, in which the main thread was ready to run and
    had no CPU. ``idle_s``: the part of ``progress_age_s`` in which neither the process, with its children, nor its
    device was at work; None: not known. ``steps_done``: completed steps of the process's life, over all generations;
    None from an agent of an older version. ``hold_age_s``: since the rank was asked to leave its step; None if it was
    not asked, or has left it. ``step_s``: duration of the last completed step. ``steps_timed``: completed steps of this
    generation. ``process_state``: the kernel's letter for the process (R, S, D, T, Z; proc(5)), evidence of a hang.
    ``steps``: steps of this generation that have ended of late; heartbeats overlap and repeat them. ``gaps_s``: phase
    -> the longest time without progress that has ended since the heartbeat before, without the time in which the main
    thread lacked a CPU; only for phases within a step and for ``ended``. ``memory_every``: steps between the rank's
    snapshots at present; 0: none. ``replicated``: whether ranks in other failure domains have each part of the state
    too. Both are None if the rank has not said so.

    A state from a newer agent that this version does not know is read as ``waiting``, which no rule takes for a hang;
    an unknown phase as None, which has the limit of a slow region.
    """

    worker: WorkerName
    state: Annotated[Literal["idle", "starting", "ready", "training", "waiting"], _fallback(STATES, "waiting")] = "idle"
    task: Name | None = None
    generation: Integer | None = None
    rank: Integer | None = None
    pid: Integer | None = None
    step: Integer = 0
    phase: Annotated[str | None, _fallback(PHASES, None)] = None
    micro_batch: Integer | None = None
    setup_parts: Integer | None = None
    sections: Integer | None = None
    section: Label | None = None
    progress_age_s: Seconds | None = None
    starved_s: Seconds = 0.0
    idle_s: Seconds | None = None
    steps_done: Integer | None = None
    gaps_s: dict[Label, Seconds] = Field(default_factory=dict, max_length=MAX_PHASES)
    hold_age_s: Seconds | None = None
    step_s: Seconds | None = None
    steps_timed: Integer = 0
    loss: float | None = None
    memory_every: Integer | None = None
    replicated: bool | None = None
    process_state: str | None = None
    steps: list[Annotated[StepReport, _OrElse(_known_fields)]] = Field(default_factory=list)


class DeviceStatus(Model):
    """A report on a device. Heartbeats list only devices about which there is something to say.

    ``device``: NVML's index. ``notes``: what is unusual and breaks nothing: why its clocks are reduced, a temperature,
    a remapping that waits for a reset. ``faults``: how often each fault has come since the agent started, by name.
    """

    device: Integer
    uuid: Label = ""
    notes: list[Label] = Field(default_factory=list)
    faults: dict[Label, Integer] = Field(default_factory=dict)


class DeviceReading(Model):
    """What a device is, and how it was at the agent's newest look at it; None: the driver does not say.

    ``device``, ``uuid``, ``name``: NVML's. ``workers``: workers of the node that have the device, or a part of it.
    ``memory_bytes``: all that it has, of which all processes together use ``memory_used_bytes``. ``driver``: its
    version. ``utilisation_percent``: the part of the time in which a kernel ran.
    """

    device: Integer
    uuid: Label = ""
    name: Label = ""
    workers: list[WorkerName] = Field(default_factory=list)
    memory_bytes: Integer | None = None
    driver: Label = ""
    temperature_c: Integer | None = None
    utilisation_percent: Integer | None = None
    memory_used_bytes: Integer | None = None


class KeptCopies(Model):
    """Copies in memory of a task that has no process on the node. ``size_bytes``: the shared memory that they take."""

    task: Name
    size_bytes: Integer


class Heartbeat(Message):
    """The sign of life of a node.

    ``incarnation``: new for every start of an agent. ``interval_s``: seconds between two heartbeats. ``domain``:
    failure domain of the node (rack, zone). ``hardware``: kind of the node's workers. ``addresses``, ``network``: as in
    ``shared.messages.admission.Hello``. ``counters``: the agent's numbers by name (``shared.bus.dropped``). ``probe``:
    where the agent answers probes (``shared.messages.probes``), as ``ip:port``; empty from an agent of an older
    version. ``supervisor``: as in ``shared.messages.admission.Hello``. ``devices``: devices about which there is
    something to say. ``device_readings``: the readings of all devices of the node, in the heartbeat after each look at
    them (every few seconds); empty in all others, since they are a third of a heartbeat: a reader keeps the newest.
    ``copies``: copies in memory that the node keeps for tasks without a process there.
    """

    node: Name
    incarnation: MessageId
    agent_pid: Integer
    sequence: Integer
    sent_at: Time
    interval_s: Seconds
    domain: Label = "default"
    hardware: Label = "cpu"
    addresses: dict[Label, Host] = Field(default_factory=dict)
    network: Label = ""
    probe: SocketAddress = ""
    supervisor: Label = ""
    workers: list[WorkerStatus]
    counters: dict[str, Integer] = Field(default_factory=dict)
    devices: list[DeviceStatus] = Field(default_factory=list)
    device_readings: list[DeviceReading] = Field(default_factory=list)
    copies: list[KeptCopies] = Field(default_factory=list)

    @model_validator(mode="after")
    def _own_workers(self) -> Self:
        own = f"{self.node}/"
        names = [status.worker for status in self.workers]
        if strangers := [name for name in names if not name.startswith(own)]:
            raise ValueError(f"workers: {strangers[0]} is not of node {self.node}")
        if len(set(names)) < len(names):
            raise ValueError(f"workers: a worker of {self.node} is listed twice")
        return self

    @cached_property
    def statuses(self) -> dict[str, WorkerStatus]:
        """The statuses by the names of their workers: the detector looks for every worker several times a tick."""
        return {status.worker: status for status in self.workers}


HEARTBEATS = Endpoint(
    "unicron.heartbeats.*", Heartbeat, NOTHING, by=("node",), to=("detector", "api"), names_sender=True
)
