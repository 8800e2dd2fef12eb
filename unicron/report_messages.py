"""Messages of ``unicron.protocol`` by which a rank reports what it, its threads and its collectives do.

An agent or a rank of an older version that does not know one of them drops it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from unicron.message_fields import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class AskGroups(Message):
    """Report the stacks of the threads, and what torch's flight recorder has of the process groups.

    The thread of the connection answers, which needs the GIL.
    """

    name: ClassVar[str] = "ask-groups"
    request: int
    """Repeated in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups(Message):
    """The answer."""

    name: ClassVar[str] = "groups"
    generation: int
    request: int
    groups: list[list[Any]] = field(default_factory=list)
    """``unicron.link.flight_record.groups``."""
    stacks: str = ""
    """``unicron.link.stacks.of_other_threads``; empty: this version of the library does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identified(Message):
    """What the members of a generation have agreed to be. Rank 0 sends it if none of them had trained before."""

    name: ClassVar[str] = "identified"
    generation: int
    rank: int
    step: int
    identity: dict[str, str]
    """Field -> value (``unicron.join.identity``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed(Message):
    """A checkpoint of this generation is complete. Rank 0 sends it, once all ranks have written their files."""

    name: ClassVar[str] = "checkpointed"
    generation: int
    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Message):
    """A checkpoint of this generation could not be written; training goes on. Behind the last step: or the result.

    Sent by the ranks whose part failed, and by rank 0 where the parts together are not a checkpoint. An agent that does
    not know the message drops it.
    """

    name: ClassVar[str] = "checkpoint-failed"
    generation: int
    rank: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Message):
    """The last step is done, and the result is written. Only rank 0 sends digest and path.

    A rank that runs a user's script sends the message twice: behind the last step, and at the end of the script.
    """

    name: ClassVar[str] = "finished"
    generation: int
    rank: int
    step: int
    samples_sha256: str = ""
    parameters_path: str = ""
    loss: float | None = None
    ended: bool = True
    """Whether the process exits with 0 now: its script has ended, and on rank 0 the scripts of all ranks."""
