"""The language a training process and its node agent speak over a Unix socket.

One JSON object per line, UTF-8, both ways. The first line of a process is ``Hello`` with the protocol's version; an
agent refuses any other version. Every message about training carries the task's *generation*: a side that has moved
on ignores what is older (DESIGN section 6, fencing).

Standard library only: this module runs inside the user's process and is the one module of ``unicron`` that the node
agent imports.

    rank -> agent                          agent -> rank
    Hello      attach                      Configure  join a generation (rebuild communicators, take state, train)
    Held       out of the broken step      Hold       break the sockets of a generation, leave the step, wait
    Drained    at a step boundary          Drain      finish the step all ranks are in, keep the state, wait
    Progress   step, phase, micro-batch    Stop       as Drain, then write a checkpoint and exit
    Resumed    first step of a generation  Quit       exit now, nothing is worth keeping
    Raised     exception or broken link
    Checkpointed, Stopped, Finished
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

VERSION = 1
"""Raised whenever a message changes its meaning; ``Hello`` carries it."""

SOCKET_VARIABLE = "UNICRON_SOCKET"
"""Environment variable that holds the agent's socket (a leading ``@`` marks Linux's abstract namespace: no file, and
no limit from a long run directory)."""

MEMORY_VARIABLE = "UNICRON_MEMORY"
"""Environment variable: the folder in shared memory for the task's in-memory copies on this node; without it none are
taken. The agent deletes it, never a rank."""

NODE_VARIABLE, DOMAIN_VARIABLE, HOST_VARIABLE = "UNICRON_NODE", "UNICRON_DOMAIN", "UNICRON_STORE_HOST"
"""Environment variables: the rank's node, its failure domain, and the address under which peers reach the node."""

MAX_LINE_BYTES = 1 << 20
"""Longest accepted line. A traceback is the largest thing sent (the runtime cuts it at 16 KiB)."""


class ProtocolError(Exception):
    """A line that is not a message of this protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages; ``name`` is the tag on the wire."""

    name: ClassVar[str] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """A process attaches: ``worker`` is the slot it occupies (an id that outlives rank renumbering)."""

    name: ClassVar[str] = "hello"
    version: int
    task: str
    worker: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Message):
    """Where a rank is. ``step`` counts from 1 (the step being computed); ``phase`` is one of ``PHASES``."""

    name: ClassVar[str] = "progress"
    generation: int
    rank: int
    step: int
    phase: str
    micro_batch: int | None = None
    """The micro-batch just finished, for phase ``compute``; for ``setup`` how many of its parts are (1: the groups are
    made, 2: model and optimizer too)."""
    loss: float | None = None
    """Mean loss over the global batch, with phase ``ended``."""
    duration_s: float | None = None
    """Wall time of the step, with phase ``ended``."""
    buckets: int | None = None
    """How many buckets of gradients are reduced, for phase ``reduce``."""


PHASES = ("begun", "compute", "reduce", "update", "ended", "checkpoint", "setup", "waiting", "aside")
"""``reduce`` is waiting for peers. ``setup``, ``checkpoint`` and ``aside`` (the script does something else between two
steps) are known slow regions, with limits of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Message):
    """The rank has left the broken step and waits for ``Configure``. ``step``: updates applied so far."""

    name: ClassVar[str] = "held"
    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Message):
    """The rank stands at a step boundary and waits for ``Configure``. ``step``: updates applied so far."""

    name: ClassVar[str] = "drained"
    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Message):
    """The first step of a generation is done (or there was none left to do).

    ``phases`` in seconds: ``rebuild`` (communicators), ``agree`` (what was done), ``move`` (state), ``redistribute``
    (micro-batches dealt again, computed and reduced), ``first_step``. ``source``: where this rank's state came from
    (``own``, ``live``, ``memory`` and ``peer-memory``: in-memory copies of this and of another node, ``checkpoint``,
    ``initial``). ``deal``: rank -> micro-batches it computed for the interrupted step (told by rank 0).
    ``steps_recomputed``: updates that had been applied before the fault and had to be computed again. Of the
    interrupted step: ``computed``, how many micro-batches this rank computed to complete it; ``buckets_kept``, how many
    of its ``buckets`` of gradients had been reduced before and were kept.
    """

    name: ClassVar[str] = "resumed"
    generation: int
    step: int
    source: str
    phases: dict[str, float] = field(default_factory=dict)
    deal: dict[str, list[int]] = field(default_factory=dict)
    steps_recomputed: int = 0
    computed: int = 0
    buckets_kept: int = 0
    buckets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised(Message):
    """Something was raised inside a step. ``kind``: ``exception``, ``communication`` or ``non_finite``."""

    name: ClassVar[str] = "raised"
    generation: int
    rank: int
    step: int
    kind: str
    error: str
    """The exception's type name."""
    detail: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed(Message):
    """A complete checkpoint of this generation was written (rank 0 only, after all ranks have)."""

    name: ClassVar[str] = "checkpointed"
    generation: int
    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Message):
    """The rank has stopped at a boundary as asked; the process exits with 0 after this."""

    name: ClassVar[str] = "stopped"
    generation: int
    rank: int
    step: int
    path: str
    """The checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Message):
    """The last step is done; the process exits with 0 after this. Paths and digest only from rank 0."""

    name: ClassVar[str] = "finished"
    generation: int
    rank: int
    step: int
    samples_sha256: str = ""
    parameters_path: str = ""
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure(Message):
    """Join a generation.

    ``stage``: ``interrupted`` (finish the step the fault broke, from what the survivors hold) or ``boundary`` (start
    from a step boundary). ``members``: one ``[rank, worker, source]`` a member in rank order; ``source`` is ``live``
    for one that holds the state in its memory, ``take`` for one that takes it from such a member, ``checkpoint`` or
    ``initial`` when nobody holds it. ``checkpoint``: the folder to read where memory does not hold the whole state.
    ``complete``: whether live members hold it for certain; if they do not, and there is no checkpoint, the task begins
    anew. ``directory``: where this generation writes. ``fault_step``: the newest step known before a fault (0 if
    none), to count what is recomputed.
    """

    name: ClassVar[str] = "configure"
    generation: int
    stage: str
    rank: int
    world_size: int
    tensor: int
    pipeline: int
    store_host: str
    store_port: int
    members: list[list[Any]]
    checkpoint: str = ""
    complete: bool = True
    directory: str = ""
    fault_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Message):
    """Break every socket of collectives of ``generation`` and older, leave the step, answer ``Held``."""

    name: ClassVar[str] = "hold"
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Message):
    """Finish the step that all ranks agree on, then wait; answer ``Drained``."""

    name: ClassVar[str] = "drain"
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Message):
    """As ``Drain``, then write a checkpoint, answer ``Stopped`` and exit with 0."""

    name: ClassVar[str] = "stop"
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit(Message):
    """Exit now."""

    name: ClassVar[str] = "quit"


_MESSAGES: dict[str, type[Message]] = {
    m.name: m
    for m in (
        Hello,
        Progress,
        Held,
        Drained,
        Resumed,
        Raised,
        Checkpointed,
        Stopped,
        Finished,
        Configure,
        Hold,
        Drain,
        Stop,
        Quit,
    )
}


def encode(message: Message) -> bytes:
    """Return the message as one line."""
    return json.dumps({"message": message.name, **asdict(message)}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message in one line.

    Raises:
        ProtocolError: the line is too long, not JSON, not a known message, or lacks a field.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"a line of {len(line)} bytes; at most {MAX_LINE_BYTES} are allowed")
    try:
        data = json.loads(line)
        kind = _MESSAGES[data.pop("message")]
        return kind(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ProtocolError(f"not a message: {line[:200]!r} ({err})") from err
