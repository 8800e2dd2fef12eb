"""The messages between a training process and its node agent, and their encoding on a Unix socket.

Each message is one line of JSON in UTF-8, in both directions. The first message of a process is ``Hello`` with the
versions that it speaks (``unicron.protocol.versions``); an agent that speaks none of them answers ``Incompatible``.
Every message about training has the number of the task's *generation*, and both sides ignore those of generations older
than their own (fencing).

Ranks outlive their agent, so the two sides may be of different versions. Both ignore unknown fields, and drop a line
that is not readable; the connection stays.

Standard library only: the node agent imports this module too, and of ``unicron`` only this package.

    rank -> agent                              agent -> rank
    Hello         attach                       Configure  join a generation: rebuild groups, receive state, train
    Held          left the broken step         Hold       break the collectives of a generation, leave the step, wait
    Drained       at a step boundary           Drain      finish the present step, keep the state, wait
    Progress      step, phase, micro-batch     Stop       as Drain, then write a checkpoint and exit
    Resumed       first step of a generation   Quit       exit now, keep nothing
    Identified    what its members agree to be Inject     have a fault happen at a step, as a test
    Raised        exception, broken collective Incompatible  they have no version of the protocol in common
    Checkpointed  a checkpoint is complete
    CheckpointFailed  a checkpoint could not be written
    Stopped       stopped at a boundary
    StopRefused   the state cannot be saved: trains on
    Groups        answer to AskGroups          AskGroups  report what the collectives wait for
    Finished      the last step is done, or    Received   the agent has noted a message
                  the script behind it

The agent answers each message but ``Hello`` and ``Progress`` with ``Received`` once it would survive the agent's end. A
process keeps what has not been answered, and sends it again to the agent's successor, before anything else. So each of
these messages arrives at least once.
"""

from __future__ import annotations

import json
import math
import re
import types
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

MAX_INTEGER = 1 << 53
"""Largest integer in a message: readers of JSON agree up to here (RFC 8259, section 6)."""

UNREADABLE = object()
"""The value that stands for one of another type than its field's."""

MAX_LINE_BYTES = 1 << 20
"""Longest accepted line. The largest field is a traceback, at most 16 KiB (``unicron.link.reporting``)."""

REFUSED = "refused"
"""``Raised.kind`` of an error that shows before a task trains that the task cannot run as specified: a specification or
model that the library refuses; a missing module or file, or a syntax error, at start-up. A restart would not help."""

DIFFERS = "differs"
"""``Raised.kind`` of a process that is not what the other members of its generation are, and leaves it: its code, its
settings, its hyperparameters (``unicron.join.identity``). Another process with the same difference will leave, too."""

WRONG_LOOP = "wrong_loop"
"""``Raised.kind`` of a process whose script uses the library wrongly: it would again, in whatever generation."""


class ProtocolError(Exception):
    """A line that is not a message of this protocol. ``name``: the message's, if the line has one."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages; ``name``: the tag on the wire, which is that of the class, as ``stop-refused``."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


_ENCODER = json.JSONEncoder(separators=(",", ":"))
"""One encoder for all lines: ``json.dumps`` would make one for each."""


def encode(message: Message) -> bytes:
    """Return a message as one line, with its line feed; fields that are None are left out where None is the default."""
    content: dict[str, Any] = {"message": message.name}
    kind: Any = type(message)
    for name, has_default in _names(kind):
        value = getattr(message, name)
        if value is not None or not has_default:
            content[name] = value
    return _ENCODER.encode(content).encode() + b"\n"


@cache
def _names(kind: Any) -> list[tuple[str, bool]]:
    """Return the fields of a message's class, each with whether None is its default."""
    return [(item.name, item.default is None) for item in fields(kind)]


def field_types(kind: type) -> dict[str, Any]:
    """Return the type of each field of a message's class."""
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def read_field(value: Any, of: Any, *, free_text: bool) -> Any:
    """Return a value as a field of type ``of`` has it, or ``UNREADABLE``."""
    origin, arguments = _parts(of)
    if origin in (Union, types.UnionType):
        return _read_optional(value, arguments, free_text=free_text)
    if origin in (list, dict):
        return _read_all(value, origin, arguments[-1], free_text=free_text)
    if of is Any:
        return value
    if of is str:
        return value if isinstance(value, str) and (free_text or _encodable(value)) else UNREADABLE
    if of is bool or isinstance(value, bool):
        return value if of is bool and isinstance(value, bool) else UNREADABLE
    if of is int:
        return value if isinstance(value, int) and 0 <= value <= MAX_INTEGER else UNREADABLE
    small = isinstance(value, int) and abs(value) <= MAX_INTEGER
    return value if small or _finite(value) else UNREADABLE


@cache
def _parts(of: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what a generic type is made of; a rank's agent reads fields of the same types many times a second."""
    return get_origin(of), get_args(of)


def _read_optional(value: Any, arguments: tuple[Any, ...], *, free_text: bool) -> Any:
    if value is None or (float in arguments and isinstance(value, float) and not math.isfinite(value)):
        return None
    return read_field(value, next(a for a in arguments if a is not type(None)), free_text=free_text)


def _read_all(value: Any, container: Any, of: Any, *, free_text: bool) -> Any:
    """Return a list, or a mapping with text for keys, whose values are all of type ``of``; or ``UNREADABLE``."""
    if not isinstance(value, container):
        return UNREADABLE
    keys, values = (list(value), list(value.values())) if isinstance(value, dict) else ([], value)
    read = [read_field(item, of, free_text=free_text) for item in values]
    if any(item is UNREADABLE for item in read) or not all(isinstance(k, str) and _encodable(k) for k in keys):
        return UNREADABLE
    return dict(zip(keys, read, strict=True)) if isinstance(value, dict) else read


def _finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def printable(name: object) -> str:
    """Return a message's name if it is a short line of text, else empty text."""
    return name if isinstance(name, str) and name.isprintable() and len(name) <= 60 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskGroups(Message):
    """Report the stacks of the threads, and what torch's flight recorder has of the process groups.

    The thread of the connection answers, which needs the GIL.
    """

    request: int
    """Number of the request, which the answer repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups(Message):
    """The answer to ``AskGroups``."""

    generation: int
    request: int
    groups: list[list[Any]] = field(default_factory=list)
    """The answer of ``unicron.link.flight_record.groups``."""
    stacks: str = ""
    """The answer of ``unicron.link.stacks.of_other_threads``; empty: this version of the library does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identified(Message):
    """What the members of a generation have agreed to be. Rank 0 sends it if none of them had trained before."""

    generation: int
    rank: int
    step: int
    identity: dict[str, str]
    """Field -> value (``unicron.join.identity``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed(Message):
    """A checkpoint of this generation is complete. Rank 0 sends it, once all ranks have written their files."""

    generation: int
    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Message):
    """A checkpoint of this generation (or behind the last step: the result) could not be written; training goes on.

    The ranks whose part failed send the message, and rank 0 does if the parts together are not a checkpoint. An agent
    that does not know the message drops it.
    """

    generation: int
    rank: int
    step: int
    reason: str
    lends: bool = False
    """Whether other tasks may have the workers until the result can be written: all steps are done, tries were in vain
    for a while, and the state is kept without the processes."""
    folders: list[str] = field(default_factory=list)
    """The local folders that could not be written to; set with ``lends``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies(Message):
    """In-memory copies that a recovery would rely on are missing, or are there again. An older agent drops it."""

    generation: int
    rank: int
    step: int
    lack: str = ""
    """Why this rank's copies are missing. Empty, and sent by rank 0 alone: all ranks have stored their copies, for the
    first time in the generation, or since some were missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Message):
    """The last step is done, and the result is written. Only rank 0 sends digest and path.

    A rank that runs a user's script sends the message twice: behind the last step, and at the end of the script.
    """

    generation: int
    rank: int
    step: int
    samples_sha256: str = ""
    parameters_path: str = ""
    loss: float | None = None
    ended: bool = True
    """Whether the process exits with 0 now: its script has ended, and on rank 0 the scripts of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """A process attaches to the agent."""

    version: int
    """The oldest version of the protocol that the process speaks."""
    task: str
    worker: str
    """The worker that the process occupies; unlike the rank it stays the same through all generations."""
    pid: int
    newest: int | None = None
    """The newest version that it speaks; None: ``version`` alone."""
    library: str = ""
    """The version of its library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Message):
    """What a rank is doing; of the phases inside a step not every one is sent (``unicron.link.connection``)."""

    generation: int
    rank: int
    step: int
    """The step that the rank computes, counted from 1."""
    phase: str
    """One of ``PHASES``."""
    micro_batch: int | None = None
    """The micro-batch just finished, for phase ``compute``."""
    setup_parts: int | None = None
    """Parts of joining a generation that are done, for phase ``setup``: 1: the groups are made; 2: also model and
    optimizer."""
    loss: float | None = None
    """Mean loss over the global batch, for phase ``ended``."""
    duration_s: float | None = None
    """Wall-clock time of the step, for phase ``ended``."""
    buckets: int | None = None
    """Number of buckets of gradients that are reduced, for phase ``reduce``; not every one is reported."""
    compute_s: float | None = None
    """Own compute time of the step (``unicron.training.compute_time``), for phase ``ended``; None: not measured."""
    micro_batches: int | None = None
    """Number of micro-batches in that time."""
    memory_every: int | None = None
    """Steps between two snapshots at present, for phase ``ended``; 0: none are taken."""
    replicated: bool | None = None
    """Whether ranks in other failure domains have each part of the state too, for phase ``ended``."""
    sections: int | None = None
    """How many boundary sections the rank has entered behind the newest step that it has done, in this generation."""
    section: str | None = None
    """The place in the script of the newest of them."""


PHASES = ("begun", "compute", "reduce", "update", "ended", "checkpoint", "setup", "waiting", "aside", "tail", "script")
"""Phases of a rank. In ``reduce`` the rank waits for its peers, in ``waiting`` for ``Configure``; in ``aside`` a script
does something else between two steps, in ``tail`` behind the last one. ``setup``, ``checkpoint`` and ``aside`` may be
slow; their limits are longer. ``tail`` has the limit of the task's specification (``finish_timeout_s``). In ``script``
a rank runs a script that restarts whole; ``step`` is then the newest known of its updates, and there is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Message):
    """The rank has left the broken step and waits for ``Configure``."""

    generation: int
    step: int
    """Updates applied so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Message):
    """The rank is at a step boundary and waits for ``Configure``."""

    generation: int
    step: int
    """Updates applied so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Message):
    """The first step of a generation is done, or there was no step left to do."""

    generation: int
    step: int
    """Updates applied so far."""
    source: str
    """Where this rank's state came from: ``own``, ``live`` (another rank), ``memory`` (a snapshot on this node),
    ``peer-memory`` (a snapshot on another node), ``checkpoint``, ``loaded`` (a checkpoint that the script was given),
    ``initial``, or ``script`` (known to the script)."""
    phases: dict[str, float] = field(default_factory=dict)
    """Duration in seconds of ``rebuild`` (process groups), ``agree`` (on what is done), ``move`` (state),
    ``redistribute`` (missing micro-batches computed and reduced) and ``first_step``."""
    deal: dict[str, list[int]] = field(default_factory=dict)
    """Rank -> micro-batches of the interrupted step that the rank kept or computed. Rank 0 sends it; else empty."""
    steps_recomputed: int = 0
    """Updates that had been applied before the fault and had to be computed again."""
    computed: int = 0
    """How many micro-batches this rank computed to complete the interrupted step."""
    buckets_kept: int = 0
    """How many buckets of the interrupted step had been reduced before the fault and were kept."""
    buckets: int = 0
    """How many buckets of gradients there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised(Message):
    """An error was raised.

    ``kind``: ``exception``, ``communication``, ``non_finite``, ``REFUSED``, ``DIFFERS`` or ``WRONG_LOOP``. A process
    that refuses its task before it has joined a generation sends generation 0.
    """

    generation: int
    rank: int
    step: int
    kind: str
    error: str
    """The exception's type name."""
    detail: str
    traceback: str
    parameter: str = ""
    """The first parameter of the rank's model whose gradient is not finite, for kind ``non_finite``; empty: unknown."""
    micro_batch: int | None = None
    """The micro-batch that brought it, for kind ``non_finite``, if that is known."""
    difference: str = ""
    """Text that is equal for two processes that differ in the same way, for kind ``DIFFERS``."""
    resource: str = ""
    """What the process lacks whose own call failed (``unicron.link.lacks``), with how much there may be."""
    limit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Message):
    """The rank has stopped at a step boundary as requested; the process then exits with 0."""

    generation: int
    rank: int
    step: int
    path: str
    """The checkpoint; empty: none was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRefused(Message):
    """The state cannot be saved, so the task has not stopped as requested. All its ranks say so, and train on."""

    generation: int
    rank: int
    step: int
    reason: str
    """The reason, on a rank that knows it; otherwise that a peer knows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure(Message):
    """Join a generation."""

    generation: int
    stage: str
    """``interrupted``: the survivors finish the step that the fault broke; ``boundary``: start at a step boundary."""
    rank: int
    """The receiver's rank."""
    world_size: int
    tensor: int
    """Tensor-parallel size."""
    pipeline: int
    """Pipeline-parallel size."""
    store_host: str
    """Address of the store in which the members meet."""
    store_port: int
    """0: there is no store, which is possible for a single member."""
    members: list[list[Any]]
    """``[rank, worker, source]`` of each member, in rank order. ``source`` is ``live`` (the member has its part of the
    state), ``take`` (it receives the state from live members), ``checkpoint`` or ``initial``."""
    checkpoint: str = ""
    """The checkpoint to read where neither members nor snapshots have the whole state; empty: none."""
    complete: bool = True
    """Whether the live members are certain to have the whole state. If not, and without snapshots or a checkpoint, the
    task begins anew."""
    directory: str = ""
    """The folder to which this generation writes."""
    fault_step: int = 0
    """The newest step known before a fault, to count recomputed updates; 0: there was no fault."""
    resumes: bool = False
    """Whether the task was asked to go on, so that snapshots of the ended task are its own."""
    shares: list[int] = field(default_factory=list)
    """How many micro-batches of a step each data-parallel replica computes; empty: equally many, up to one."""
    identity: dict[str, str] = field(default_factory=dict)
    """What the log has recorded of the task (``Identified``), which counts where no member has trained; empty: nothing.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Message):
    """Break the collectives of ``generation`` and older ones off, leave the step, answer ``Held``.

    A rank whose replica has lost no member computes the rest of its micro-batches first, in its replica's groups.
    """

    generation: int
    lost: list[str] = field(default_factory=list)
    """The workers whose ranks are lost; empty: it is not known who is, so all collectives are broken off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Message):
    """Finish the step that all ranks agree on, answer ``Drained``, and wait."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Message):
    """Finish the step that all ranks agree on, write a checkpoint, answer ``Stopped`` and exit with 0.

    If the checkpoint cannot be written: answer ``StopRefused`` and go on, unless steps may be lost.
    """

    generation: int
    lose_steps: bool = False
    """Whether to stop also without a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit(Message):
    """Exit now, without a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inject(Message):
    """Have a fault happen once (``process.faults`` has the kinds). A process that does not know the message drops it.

    ``id``: the request's; a further message with the same id changes nothing. ``step``: 0: the next step that the rank
    begins.
    """

    id: str
    kind: str
    argument: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Incompatible(Message):
    """The agent and the process, which is to end, have no version of the protocol in common."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Message):
    """The oldest message without an answer is noted: neither the agent nor its successor needs it again."""


_OF_RANKS = (
    Hello,
    Progress,
    Held,
    Drained,
    Resumed,
    Identified,
    Raised,
    Checkpointed,
    CheckpointFailed,
    Copies,
    Stopped,
    StopRefused,
    Finished,
    Groups,
)
_OF_AGENTS = (Configure, Hold, Drain, Stop, Quit, Inject, AskGroups, Incompatible, Received)
_MESSAGES: dict[str, type[Message]] = {m.name: m for m in (*_OF_RANKS, *_OF_AGENTS)}


def decode(line: bytes) -> Message:
    """Return the message in one line. Fields that this version does not know are ignored.

    An optional number that is not finite is read as None.

    Raises:
        ProtocolError: the line is too long, not JSON, not a known message, lacks a field or has one of another type.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"a line of {len(line)} bytes; at most {MAX_LINE_BYTES} are allowed")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise ProtocolError(f"not JSON: {line[:200]!r} ({err})") from err
    name = data.get("message") if isinstance(data, dict) else None
    kind = _MESSAGES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"not a known message: {line[:200]!r}", printable(name))
    free = kind in _FREE_TEXT
    known = {item: read_field(data[item], of, free_text=free) for item, of in _TYPES[kind.name].items() if item in data}
    for field_name, value in known.items():
        if value is UNREADABLE:
            raise ProtocolError(f"{kind.name}: field {field_name} has another type: {line[:200]!r}", kind.name)
    try:
        return kind(**known)
    except TypeError as err:
        raise ProtocolError(f"{kind.name}: {err}", kind.name) from err


_FREE_TEXT = (Raised, CheckpointFailed, Copies, StopRefused)
"""Messages whose texts may quote anything, also lone surrogates, which UTF-8 cannot encode; the agent replaces them."""

_TYPES = {name: field_types(kind) for name, kind in _MESSAGES.items()}
"""Message -> field -> type."""
