"""The limits by which the detector judges at this moment: asked for by the api, answered by the detector.

They follow from what the detector has heard of late, so they are in no log. The evidence of an error has the limit by
which that error was decided.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.bus.endpoints import Endpoint
from shared.bus.messages import Integer, Message, Seconds
from shared.model import Model
from shared.names import Label, Name, WorkerName

NODES_LIMIT = 100
"""Most nodes of one request: with 16 workers each, the reply has 0.3 MB, a third of the largest message that NATS
allows by default."""

Degree = Annotated[float, Field(ge=0, le=1e9)]


class HangLimitInForce(Model):
    """For how long one rank may make no progress in the phase in which it is.

    ``age_s``: for how long it has made none, without the time in which it lacked a CPU. ``source``: what the limit
    comes from (docs/detector.md, Limits); ``quantile_s``: the 99th percentile from which it was made, if it was made
    from one; ``samples``: the number of values.
    """

    worker: WorkerName
    task: Name
    rank: Integer
    phase: Label | None
    age_s: Seconds | None
    limit_s: Seconds
    source: Label
    quantile_s: Seconds | None = None
    samples: Integer = 0


class NodeLimits(Model):
    """For how long one node may be silent, and its ranks may make no progress.

    ``silence_s``: the time since its newest heartbeat. ``phi``: how suspicious that is. ``ask_s``: silence from which
    other nodes are asked about it. ``limit_s``: silence that counts. ``source``: what that comes from
    (docs/detector.md). ``samples``: heartbeats whose delay is known; ``median_delay_s``, ``longest_delay_s``: how late
    they came, None if there are none.
    """

    node: Name
    silence_s: Seconds | None
    phi: Degree
    ask_s: Seconds
    limit_s: Seconds
    source: Label
    samples: Integer
    median_delay_s: Seconds | None
    longest_delay_s: Seconds | None
    ranks: list[HangLimitInForce] = Field(default_factory=list)


class TaskLimits(Model):
    """For how long the ranks of one task may make no progress, by what they do.

    ``step_s``: in a step, the longest of its ranks; None while none trains. ``first_steps_s``: in the first steps of a
    process and the first step of a group, ``longest_start_s`` being the longest that a fresh process has needed for its
    first step; None: there was none. ``between_steps_s``: between two steps, if the rank is idle. ``hard_s``: the limit
    of a rank that is at work there, or in its first steps outside of collectives.
    """

    task: Name
    step_s: Seconds | None
    first_steps_s: Seconds
    longest_start_s: Seconds | None
    between_steps_s: Seconds
    hard_s: Seconds


class LimitsRequest(Message):
    """A request for the limits of some nodes and tasks."""

    nodes: Annotated[list[Name], Field(max_length=NODES_LIMIT)]
    tasks: Annotated[list[Name], Field(max_length=NODES_LIMIT)] = Field(default_factory=list)


class LimitsReply(Message):
    """The limits of those of the nodes that take part in the cluster, in the order of the request, and of the tasks.

    Tasks that have ended or are not known are left out; an older detector leaves out all.
    """

    nodes: list[NodeLimits]
    tasks: list[TaskLimits] = Field(default_factory=list)


LIMITS = Endpoint("unicron.limits", LimitsRequest, LimitsReply, by=("api",), to=("detector",), timeout_s=3.0)
"""An answer takes milliseconds; a busy machine has a hundred times that."""
