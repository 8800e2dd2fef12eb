"""Messages of ``unicron.protocol`` by which an agent asks a rank what its threads do and its collectives wait for.

An agent or a rank of an older version does not know them, and drops them.
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
