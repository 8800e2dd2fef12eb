"""What a plan is made of: the problem it solved, what it gives each task, and what it turned down."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Literal

from pydantic import Field

from shared.model import Model, canonical_json


class Trigger(StrEnum):
    """Why a plan was made. The last three of the paper's six triggers are changes that no error caused."""

    ERROR = "error"
    NODE_JOINED = "node-joined"
    TASK_ENDED = "task-ended"
    TASK_SUBMITTED = "task-submitted"
    STOP_REQUESTED = "stop-requested"
    TASK_STARVING = "task-starving"


class Response(StrEnum):
    """What is done about the trigger."""

    RETRY = "retry"
    RESTART = "restart"
    RECONFIGURE = "reconfigure"
    NONE = "none"


class TaskProblem(Model):
    """One task of the planning problem (DESIGN section 3).

    ``throughput``: achieved aggregate FLOP/s at each worker count; a count that is absent has zero. ``transition_s``:
    D_transition(t, x -> x') for any changed count, unless ``transition_to_s`` has that of the new one; ``newcomers_s``
    is added to it for counts above ``staying``, the workers that hold the state and stay (others have to start and
    take it). ``running_s``: D_running capped by the task's remaining work. ``current``: the count before the fault.
    ``maximum``: most workers the task may have. ``required``: it must get a count at which F is positive: a light task
    is not paused because a heavy one would make more of its workers. ``pool``: the kind of workers it runs on.
    ``correction``: measured over modelled throughput of the task in general; the table has it already.
    """

    name: str
    weight: float = Field(ge=0)
    necessary: int = Field(ge=0)
    maximum: int = Field(ge=0)
    current: int = Field(ge=0)
    faulted: bool = False
    transition_s: float = Field(ge=0)
    transition_to_s: dict[int, float] = Field(default_factory=dict)
    staying: int = Field(default=0, ge=0)
    newcomers_s: float = Field(default=0.0, ge=0)
    running_s: float = Field(ge=0)
    throughput: dict[int, float]
    required: bool = False
    pool: str = ""
    correction: float = Field(default=1.0, gt=0)


class Problem(Model):
    """Everything the solver needs and nothing else.

    ``pools``: workers of each kind of hardware, where there are several; they add up to ``workers``. A task runs on
    workers of one kind, so each pool is a problem of its own, of the tasks that name it. Empty: one pool, all tasks.
    """

    workers: int = Field(ge=0)
    tasks: list[TaskProblem]
    pools: dict[str, int] = Field(default_factory=dict)

    def sha256(self) -> str:
        """Return the digest of the problem's canonical JSON, as it stands in the plan's event."""
        return hashlib.sha256(canonical_json(self.model_dump(mode="json")).encode()).hexdigest()


class Term(Model):
    """A task's part of the objective: G = reward - penalty, in weighted FLOP."""

    name: str
    workers: int
    waf_flop_per_s: float
    reward: float
    penalty: float
    objective: float


class Solution(Model):
    """An assignment of worker counts with its value. ``label``: ``best``, ``keep``, ``only-faulted-shrinks``, ..."""

    label: str
    assignment: dict[str, int]
    objective: float
    terms: list[Term]


class Layout(Model):
    """Parallel sizes; ``tensor * pipeline * data`` workers. ``micro_batch``: samples."""

    tensor: int = Field(ge=1)
    pipeline: int = Field(ge=1)
    data: int = Field(ge=1)
    micro_batch: int = Field(ge=1)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data


class Member(Model):
    """One rank of a generation. ``source``: where it has its state from when the generation starts.

    ``live``: in its own memory. ``take``: from a live member. ``checkpoint``, ``initial``: nobody holds it.
    """

    rank: int
    worker: str
    node: str
    source: Literal["live", "take", "checkpoint", "initial"]


class Stage(Model):
    """One generation of a task: who is in it and how it starts.

    ``interrupted``: the survivors finish the step that the fault broke. ``boundary``: all start from a step boundary.
    ``checkpoint``: the newest one, where live members do not hold the whole state. ``complete``: whether they do, or
    sources say that nobody does; if not, copies in their nodes' memory have what is missing, or the checkpoint is read
    or, without one, the task begins anew.
    """

    kind: Literal["interrupted", "boundary"]
    generation: int
    layout: Layout
    members: list[Member]
    checkpoint: str = ""
    complete: bool = True


class TaskChange(Model):
    """What a plan does to one task, in this order.

    1. ``interrupted``: if set, ranks that still live are held (their broken step is left) and finish it in this stage.
       If not set and ``hold`` is true, they are held without one.
    2. ``action``: ``move`` goes on to ``target``; ``stop`` and ``pause`` drain, write a checkpoint and release all;
       ``end`` releases all (the task is over); ``none`` leaves it at that.
    3. ``release``: workers whose processes are ended before ``prepare`` (failed ones are released first of all).
    4. ``prepare``: workers on which a process is started (its start overlaps what the survivors do where it can).
    5. ``target``: the stage that follows at the next step boundary.
    """

    task: str
    reason: str
    action: Literal["move", "stop", "pause", "end", "none"]
    from_generation: int
    survivors: list[str] = Field(default_factory=list, description="workers whose processes live on and hold state")
    failed: list[str] = Field(default_factory=list, description="workers whose process is gone or must be ended first")
    hold: bool = False
    interrupted: Stage | None = None
    release: list[str] = Field(default_factory=list)
    prepare: list[str] = Field(default_factory=list)
    target: Stage | None = None

    @property
    def stages(self) -> list[Stage]:
        """The stages it leads through, in order."""
        return [stage for stage in (self.interrupted, self.target) if stage is not None]
