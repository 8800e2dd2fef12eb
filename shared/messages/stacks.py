"""Requests for the stacks of ranks: what each rank of a task that makes no progress is doing (``STACKS``).

The detector asks the agents of a task's nodes once the task is suspected to hang
(``services/detector/progress/standstill.py``), so that the answers are there when the hang is judged; nobody waits for
them. ``services/agent/ranks/stacks.py`` answers.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.bus.endpoints import Endpoint
from shared.bus.messages import Integer, Message
from shared.events.evidence import COLLECTIVE_GROUPS, OPERATIONS, STACK_CHARACTERS
from shared.model import Model
from shared.names import Name, WorkerName

MAX_TIMEOUT_S = 2.0
"""Longest time-out that an agent accepts. A rank that can write its stacks at all does within milliseconds, and on a
busy machine as soon as it gets a CPU."""

_Text = Annotated[str, Field(max_length=STACK_CHARACTERS)]
_Short = Annotated[str, Field(max_length=200)]


class StacksRequest(Message):
    """A request to an agent: the stacks of its ranks of a task, in one generation.

    ``timeout_s``: how long a rank may take; what it has not said by then is left out.
    """

    task: Name
    generation: Integer
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] = 0.1


class Operation(Model):
    """A collective that a rank has entered and that has not ended. ``sequence``: its number in its group."""

    sequence: Integer
    name: _Short


class GroupRecord(Model):
    """What torch's flight recorder has of one process group, on one rank.

    ``group``: the group's name, equal on all its ranks. ``ranks``: the ranks of the group, in the generation.
    ``entered``: the number of the newest collective that the rank has entered, counted from 1; 0: none. ``waits``:
    entered collectives that have not ended, the oldest first.
    """

    group: _Short
    ranks: list[Integer]
    entered: Integer
    waits: Annotated[list[Operation], Field(max_length=OPERATIONS)] = Field(default_factory=list)


class RankReport(Model):
    """What one rank is doing.

    ``state``: the kernel's letter for the process (proc(5)). ``waits_in``: where in the kernel it waits, if the kernel
    says so. ``stack``: the Python stacks of its threads; empty: it wrote none, ``detail`` says why. ``groups``: what
    torch's flight recorder has; None: the rank did not answer in time.
    """

    rank: Integer | None = None
    state: _Short = ""
    waits_in: _Short = ""
    stack: _Text = ""
    detail: _Short = ""
    groups: Annotated[list[GroupRecord], Field(max_length=COLLECTIVE_GROUPS)] | None = None


class StacksReply(Message):
    """An agent's answer: worker -> what its rank is doing."""

    node: Name
    workers: dict[WorkerName, RankReport] = Field(default_factory=dict)


STACKS = Endpoint("unicron.stacks.*", StacksRequest, StacksReply, by=("detector",), to=("node",), timeout_s=1.0)
"""The time-out is beside that of the request itself, as that of ``PROBE``."""
