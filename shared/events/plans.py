"""Plans: the problem that a plan solved, what it gives to each task, and the alternatives that it turned down.

The models are fields of the ``plan.decided`` event (``shared.events.union``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import datetime
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field

from shared.events.worker_runs import full_members, full_workers, short_members
from shared.model import Model, canonical_json

Workers = Annotated[list[str], BeforeValidator(full_workers)]
"""Worker ids. The text of a plan in the log has them as runs (``shared.events.worker_runs``)."""


class Trigger(StrEnum):
    """Why a plan was made. The last values extend the triggers of the Unicron paper: no error caused them."""

    ERROR = "error"
    NODE_JOINED = "node-joined"
    TASK_ENDED = "task-ended"
    TASK_SUBMITTED = "task-submitted"
    STOP_REQUESTED = "stop-requested"
    TASK_STARVING = "task-starving"
    STOP_REFUSED = "stop-refused"
    NODE_LEFT = "node-left"
    NODE_DRAINING = "node-draining"
    NODE_DRAINED = "node-drained"
    NODE_RETURNED = "node-returned"
    TASK_PAUSED = "task-paused"
    WORKER_SLOWED = "worker-slowed"
    TASK_CHANGED = "task-changed"
    RESUME_REQUESTED = "resume-requested"
    RESULT_UNWRITTEN = "result-unwritten"


class Response(StrEnum):
    """What the plan does about the trigger."""

    RETRY = "retry"
    RESTART = "restart"
    RECONFIGURE = "reconfigure"
    NONE = "none"


def _is_unset(value: object) -> bool:
    return value is None or value == "" or value == []


def _is_zero(value: object) -> bool:
    return value == 0.0


def _is_full_speed(value: object) -> bool:
    return value == 1.0


class LoggedTable(Model):
    """What a decision uses of a throughput table. The log has it once, in the first plan that names its digest.

    ``throughput``: achieved aggregate FLOP/s at each useful worker count. ``reloading``: the counts at which the task
    would have other tensor and pipeline sizes than it has, ascending.
    """

    throughput: dict[int, float]
    reloading: list[int] = Field(default_factory=list)

    def sha256(self) -> str:
        """Return the digest of the table's canonical JSON, by which plans name it."""
        return _digest(self)


class TaskProblem(Model):
    """One task of the planning problem (docs/planner.md, "The problem").

    The log has the problem without its throughput tables (``Problem.by_digest``): ``table`` names each, and
    ``current_flop_per_s`` and ``reload_s`` say what else the task's part has of it.

    Attributes:
        name: name of the task.
        weight: w, its priority.
        necessary: least workers at which it counts.
        maximum: most workers that it may have.
        current: workers before the fault.
        faulted: whether it has lost a worker or its step is broken.
        transition_s: D_transition(t, x -> x') in seconds for any changed count.
        transition_to_s: D_transition of single new counts, in place of ``transition_s`` and ``newcomers_s``.
        staying: workers that have the state and stay.
        newcomers_s: seconds added for counts above ``staying``: other workers have to start and take the state.
        running_s: D_running in seconds, at most the task's remaining work.
        throughput: achieved aggregate FLOP/s at each worker count; an absent count has zero.
        required: whether the task must get a count at which F is positive. A light task is not paused only because a
            heavy task would make more of its workers.
        pool: the kind of workers it runs on.
        correction: the task's general ratio of measured to modelled throughput, which the table contains already.
        table: digest of the ``LoggedTable`` from which ``throughput`` follows; empty in plans of decider 1.
        current_flop_per_s: T at ``current``, where the table has another value or none up to the pool's workers.
        reload_s: D_transition of the table's ``reloading`` counts, in ``transition_to_s`` already.
        slowdown: by how much a slow worker among those that the task is to have holds it up, at every count: it
            achieves T(t, x) / slowdown (docs/planner.md, "Slow workers").
        worker_cost_flop_per_s: c, what a worker costs, as weighted FLOP/s that are worth as much; 0: not weighed.
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
    # Left out where unset: the digests of problems in plans of decider 1 are those of problems without these fields.
    table: str = Field(default="", exclude_if=_is_unset)
    current_flop_per_s: float | None = Field(default=None, exclude_if=_is_unset)
    reload_s: float | None = Field(default=None, exclude_if=_is_unset)
    slowdown: float = Field(default=1.0, ge=1.0, exclude_if=_is_full_speed)
    worker_cost_flop_per_s: float = Field(default=0.0, ge=0, exclude_if=_is_zero)

    def with_table(self, table: LoggedTable, workers: int) -> TaskProblem:
        """Return the task's part with what its table says up to ``workers``, the workers of its pool."""
        throughput = {count: rate for count, rate in table.throughput.items() if count <= workers}
        if self.current_flop_per_s is not None:
            throughput[self.current] = self.current_flop_per_s
        to_s = dict(self.transition_to_s)
        if self.reload_s is not None:
            to_s |= dict.fromkeys(table.reloading, self.reload_s)
        return self.model_copy(update={"throughput": dict(sorted(throughput.items())), "transition_to_s": to_s})


class Problem(Model):
    """Everything that the solver needs, and nothing else.

    ``pools``: workers of each kind of hardware, where there are several; they add up to ``workers``. A task runs on
    workers of one kind, so each pool is a problem of its own, of the tasks that name it. Empty: one pool with all
    tasks.
    """

    workers: int = Field(ge=0)
    tasks: list[TaskProblem]
    pools: dict[str, int] = Field(default_factory=dict)

    def sha256(self) -> str:
        """Return the digest of the problem's canonical JSON; the plan's event has that of ``by_digest``."""
        return _digest(self)

    def by_digest(self, assignment: Mapping[str, int]) -> Problem:
        """Return the problem as the log has it: the digest of each table in place of what follows from the table.

        The costs of the counts in ``assignment`` stay, though they follow from the table, for a reader of the plan.
        """
        return self.model_copy(update={"tasks": [_by_digest(task, assignment.get(task.name)) for task in self.tasks]})

    def with_tables(self, tables: Mapping[str, LoggedTable]) -> Problem:
        """Return the problem that was solved, given the tables by digest. A problem of decider 1 names no table.

        Raises:
            KeyError: a table that the problem names is missing.
        """
        tasks = [
            task.with_table(tables[task.table], self.pools.get(task.pool, self.workers)) if task.table else task
            for task in self.tasks
        ]
        return self.model_copy(update={"tasks": tasks})


def _by_digest(task: TaskProblem, count: int | None) -> TaskProblem:
    if not task.table:
        return task
    to_s = task.transition_to_s
    if task.reload_s is not None:
        to_s = {x: seconds for x, seconds in to_s.items() if x in (0, count)}
    return task.model_copy(update={"throughput": {}, "transition_to_s": to_s})


def _digest(value: Model) -> str:
    return hashlib.sha256(canonical_json(value.model_dump(mode="json")).encode()).hexdigest()


class Term(Model):
    """A task's part of the objective: G = reward - penalty, in weighted FLOP."""

    name: str
    workers: int
    waf_flop_per_s: float
    reward: float
    penalty: float
    objective: float


class Solution(Model):
    """Worker counts and their objective. ``label``: ``best``, ``keep``, ``only-faulted-shrinks`` and others.

    ``terms``: the term of each task; an alternative in the log has none, but ``waf_flop_per_s``, their sum.
    """

    label: str
    assignment: dict[str, int]
    objective: float
    terms: list[Term]
    waf_flop_per_s: float | None = Field(default=None, exclude_if=_is_unset)

    @property
    def total_waf_flop_per_s(self) -> float:
        """The weighted FLOP/s of all tasks together."""
        return sum(term.waf_flop_per_s for term in self.terms) if self.waf_flop_per_s is None else self.waf_flop_per_s

    def without_terms(self) -> Solution:
        """Return the solution as the log has an alternative: without its terms, which follow from the problem."""
        return self.model_copy(update={"terms": [], "waf_flop_per_s": self.total_waf_flop_per_s})


class SlowChoice(Model):
    """One way to use the slow workers, and what it is worth.

    Attributes:
        label: ``keep``: as they are used now. ``without-slow``: tasks leave them out and shrink. ``spare``: others take
            their places. ``dealt-by-speed``: their replicas get fewer micro-batches. ``dealt-equally``: that ends.
            ``last-resort``: a task gets a slow worker that no task uses.
        used: the task that may have each slow worker; empty: none.
        assignment: the best worker counts if they are used so.
        objective: the value of these counts, weighted FLOP.
        waf_flop_per_s: the weighted FLOP/s of these counts.
    """

    label: Literal["keep", "without-slow", "spare", "dealt-by-speed", "dealt-equally", "last-resort"]
    used: dict[str, str]
    assignment: dict[str, int]
    objective: float
    waf_flop_per_s: float


class SlowWorkers(Model):
    """How a plan uses slow workers.

    ``slowdowns``: the slowdown of each slow worker. ``choices``: the way taken, then others, the most valuable first.
    ``margin``: by how much, in weighted FLOP, the way taken had to exceed ``keep``; 0 if it is ``keep`` or had nothing
    to exceed.
    """

    slowdowns: dict[str, float]
    choices: list[SlowChoice]
    margin: float = 0.0


class Layout(Model):
    """Parallel sizes of a generation: ``tensor * pipeline * data`` workers. ``micro_batch``: samples."""

    tensor: int = Field(ge=1)
    pipeline: int = Field(ge=1)
    data: int = Field(ge=1)
    micro_batch: int = Field(ge=1)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data

    def pipeline_stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank. Ranks are in the order tensor, data, pipeline."""
        return rank // (self.tensor * self.data)


class Member(Model):
    """One rank of a generation. ``source``: where it has its state from when the generation starts.

    ``live``: from its own memory. ``take``: from a live member. ``checkpoint``, ``initial``: no live process has the
    state. ``script``: it is started again (``loop: restart``), and goes on from a checkpoint of its own.
    """

    rank: int
    worker: str
    node: str
    source: Literal["live", "take", "checkpoint", "initial", "script"]


@lru_cache(maxsize=1 << 18)
def member(rank: int, worker: str, source: Literal["live", "take", "checkpoint", "initial", "script"]) -> Member:
    """Return a member, the same object for the same values.

    Of the thousands of members of a large task nearly all are the same in its stages and its next plans.
    """
    return Member(rank=rank, worker=worker, node=worker.rpartition("/")[0], source=source)


def _full_members(value: Any) -> Any:
    return full_members(value, cast("Callable[[int, str, str], Member]", member))


class Stage(Model):
    """One generation of a task: its members, and how it starts.

    Attributes:
        kind: ``interrupted``: the survivors finish the step that the fault broke. ``boundary``: all members start from
            a step boundary.
        generation: its number.
        layout: its layout.
        members: its ranks.
        checkpoint: the newest checkpoint, where live members do not have the whole state.
        complete: whether live members have the whole state, or the sources say that none has. If not, snapshots in the
            memory of their nodes have the missing part; or else the checkpoint is read; without one, the task begins
            anew.
        shares: how many micro-batches of a step each data-parallel replica computes; empty: equally many.
    """

    kind: Literal["interrupted", "boundary"]
    generation: int
    layout: Layout
    members: Annotated[list[Member], BeforeValidator(_full_members)]
    checkpoint: str = ""
    complete: bool = True
    shares: list[int] = Field(default_factory=list, exclude_if=_is_unset)

    @cached_property
    def nodes(self) -> frozenset[str]:
        """The nodes of the members."""
        return frozenset(member.node for member in self.members)

    @cached_property
    def short(self) -> dict[str, Any]:
        """The stage as JSON values, its members as runs (``shared.events.worker_runs``), which the model reads."""
        return {
            **self.model_dump(mode="json", exclude={"members"}),
            "members": short_members(self.members, over_nodes=True),
        }


class TaskChange(Model):
    """What a plan does to one task, in this order.

    1. ``interrupted``: if set, the live ranks are suspended (they leave the broken step) and finish it in this stage.
       If not set and ``hold`` is true, they are suspended without such a stage.
    2. ``action``: ``move`` goes on to ``target``; ``stop`` and ``pause`` drain, write a checkpoint and release all
       workers; ``end`` releases all workers of a task that has ended; ``none`` does nothing more.
    3. ``release``: workers whose processes are ended before ``prepare``. Failed ones are released before all others.
    4. ``prepare``: workers on which a process is started. Starts overlap with the work of the survivors where possible.
       ``not_before``: no process is started before this time, since the last ones have failed in the same way again;
       None: at once. If no process is to be started, no stage begins before it.
    5. ``target``: the stage that follows at the next step boundary.
    """

    task: str
    reason: str
    action: Literal["move", "stop", "pause", "end", "none"]
    from_generation: int
    survivors: Workers = Field(default_factory=list, description="workers whose processes live on and have state")
    failed: Workers = Field(default_factory=list, description="workers whose process is gone or must be ended first")
    hold: bool = False
    interrupted: Stage | None = None
    release: Workers = Field(default_factory=list)
    prepare: Workers = Field(default_factory=list)
    not_before: datetime | None = Field(default=None, exclude_if=_is_unset)
    target: Stage | None = None

    @property
    def stages(self) -> list[Stage]:
        """The stages of the change, in order."""
        return [stage for stage in (self.interrupted, self.target) if stage is not None]
