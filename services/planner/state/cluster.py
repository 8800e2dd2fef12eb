"""The planner's state: the fold of the log (``evolve.py``), and the input of every decision (``decide.py``).

All models are immutable. Tuples have the order that decisions depend on. ``unicron replay --at`` prints the state.

What an event costs does not grow with the number of tasks that the log has ever had: tasks that have ended, and left
nothing behind, are kept apart from the others (``State.ended``), and a new state shares them with the one before. They
are kept as text, since decisions look at one of them only if its name is used again or an event comes too late.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic import Field

from shared.events.plans import Layout, LoggedTable, TaskChange
from shared.events.union import ClusterConfigured
from shared.model import Model
from shared.service.state_codec import PairMap, StateCodec, Unlogged
from shared.settings.model import Settings
from shared.tasks.specification import TaskSpec

TransitionKind: TypeAlias = Literal["survivors", "newcomers", "restore", "pause"]
"""Kinds of changes by what they cost (``transition_costs.py``)."""

DEFAULT_HARDWARE = "cpu"
"""Kind of the workers of a node that reports no kind."""


class HardwareLayout(NamedTuple):
    """A kind of workers, and the tensor, pipeline and data parallel sizes of a task on them."""

    hardware: str
    tensor: int
    pipeline: int
    data: int


class Node(Model):
    """A node. ``hardware``: the kind of its workers.

    ``usable``: false once the node is lost, isolated or left. ``since``: when ``usable`` changed last. ``reason``: why
    it is not usable. ``away``: its agent is lost or has left, so only ``node.joined`` makes it usable again.
    ``cordoned``: a user wants no new work on it; that holds over incarnations. ``draining``: tasks are to leave it.
    """

    name: str
    incarnation: str
    domain: str
    workers: tuple[str, ...]
    usable: bool
    since: datetime
    reason: str = ""
    hardware: str = DEFAULT_HARDWARE
    away: bool = False
    cordoned: bool = False
    draining: bool = False

    @property
    def open(self) -> bool:
        """Whether new work may be placed on the node."""
        return self.usable and not self.cordoned and not self.draining


class Trial(Model):
    """The time in which a worker that is as fast again is not trusted yet.

    ``ends_at``: when it is trusted. ``cause``: id of the event that called it as fast. ``task``, ``generation``: those
    of the event.
    """

    ends_at: datetime
    cause: str
    task: str
    generation: int


class SlowWorker(Model):
    """A worker that is slow, or was within the time for which that is remembered (``slow_workers.py``).

    ``slowdown``: what decisions use; 1.0: it is as fast as its peers. ``began``: when it became slow, the remembered
    times, ascending. ``trial``: set while it is as fast again and not trusted yet.
    """

    slowdown: float
    began: tuple[datetime, ...] = ()
    trial: Trial | None = None


class Arrangement(Model):
    """One way to use the slow workers, as a question to the solver poses it (``slow_choices.py``).

    ``used``: the task that may have each slow worker; empty: none. ``dealt``: tasks whose micro-batches are dealt anew:
    by speed, or else equally.
    """

    used: dict[str, str] = Field(default_factory=dict)
    dealt: dict[str, bool] = Field(default_factory=dict)


class Wait(Model):
    """A task's wait for workers, and its turn after that.

    ``since``: when the plan that queued the task was made. ``cause``: id of the event from which the id of the next
    ``task.starving`` is derived: the plan that queued the task, then the last ``task.starving``. ``called_at``: time of
    the last ``task.starving``. ``ended_at``: when the task got workers after it had starved, which began its turn.
    """

    since: datetime
    cause: str
    called_at: datetime | None = None
    ended_at: datetime | None = None


class Unwritten(Model):
    """Why a task cannot write its result, and waits without workers, which others may have.

    ``retry_at``: when it is to have workers again, to write only. ``cause``: id of the event that says so. ``worker``:
    the worker that reported it.
    """

    reason: str
    retry_at: datetime
    cause: str
    worker: str


class Task(Model):
    """A task.

    Attributes:
        spec: what was submitted.
        life: ``stopping`` from the request to stop until the task has stopped, or its state could not be saved.
        generation: the newest number given to one of its stages. It only rises, also over resubmission.
        members: workers planned for the task, in rank order; empty while it is queued, pausing or stopping.
        owners: workers whose process is known to have the task's state, in rank order. A process that is to take the
            state becomes an owner when its stage is known to have formed.
        occupied: workers that may still have a process of the task.
        lost: workers whose process ended, or must end, since the newest plan.
        broken: whether the step in progress was interrupted.
        plan: the newest plan that changes the task, made at ``planned_at``.
        change: what that plan does to the task, until all of it is done.
        idle_since: the time since which the task makes no progress in its present transition.
        idle_s: seconds without progress in that transition before ``idle_since``.
        queued: why the task has no workers; empty if it has some.
        wait: its wait for workers, and its turn after that.
        step: the newest reported step; ``step_s``: the time of one step.
        memory_every: reported steps between two copies in memory; None: not known.
        checkpoint: path of the newest checkpoint, of step ``checkpoint_step``.
        pool: the kind of workers on which it is to run, if that is not the kind of its members (``pools.py``).
        layout: the layout of its newest stage; None before the first.
        state_layout: the layout in which the owners got the state.
        ranks: the owners' ranks in ``state_layout``, which determine the shard that each has. A worker that is to read
            its state from storage has none.
        trained: the hardware and layout of its newest generations.
        measured: throughput corrections: measured is 1.1 ** exponent times the modelled throughput.
        lose_steps: whether a user wants it to stop also if its state cannot be saved.
        at_once: whether a user wants its processes to end without a checkpoint.
        closed: why the task takes no newcomers: their processes would differ from those that train; empty: it takes
            some.
        needs_operator: why it is not tried again until an operator resumes it; empty: it is tried again.
        unwritten: set while it waits without workers because it cannot write its result.
        home: the workers that it had when that wait began, in rank order: what it has done may be in the memory of
            their nodes alone.
        shares: how many micro-batches each data-parallel replica of its newest stage computes; empty: equally many.
        number: of the task's first submission, among all tasks.
    """

    spec: TaskSpec
    life: Literal["active", "stopping", "ended"] = "active"
    generation: int = 0
    members: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    occupied: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    broken: bool = False
    plan: str = ""
    planned_at: datetime | None = None
    change: TaskChange | None = None
    idle_since: datetime | None = None
    idle_s: float = 0.0
    queued: str = ""
    wait: Wait | None = None
    step: int = 0
    step_s: float = 0.0
    memory_every: int | None = None
    checkpoint: str = ""
    checkpoint_step: int = 0
    pool: str = ""
    layout: Layout | None = None
    state_layout: Layout | None = None
    ranks: dict[str, int] = Field(default_factory=dict)
    trained: dict[int, HardwareLayout] = Field(default_factory=dict)
    measured: PairMap[HardwareLayout, int] = Field(default_factory=dict)
    lose_steps: bool = False
    at_once: bool = False
    closed: str = Field(default="", exclude_if=lambda closed: not closed)
    needs_operator: str = Field(default="", exclude_if=lambda reason: not reason)
    unwritten: Unwritten | None = Field(default=None, exclude_if=lambda value: value is None)
    home: tuple[str, ...] = Field(default=(), exclude_if=lambda home: not home)
    shares: tuple[int, ...] = ()
    number: int = 0

    @property
    def name(self) -> str:
        """The task's name, its identity."""
        return self.spec.name

    @property
    def replica_size(self) -> int:
        """Workers of one data-parallel replica in the newest stage; before the first stage, as pinned."""
        if self.layout is None:
            return self.spec.tensor * self.spec.pipeline
        return self.layout.tensor * self.layout.pipeline

    @property
    def live_owners(self) -> tuple[str, ...]:
        """Owners that have not been lost, in rank order."""
        return without(self.owners, self.lost) if self.lost else self.owners

    @property
    def has_trained(self) -> bool:
        """Whether the state behind the last step is saved, so that only the end of its script is left to run.

        Its processes have left the training loop: no process can be held, and each can start anew from that state.
        """
        return self.checkpoint_step >= self.spec.steps

    @property
    def leaving(self) -> bool:
        """Whether the task is being stopped or paused: it still occupies its workers and gets no others."""
        return self.life == "stopping" or (self.change is not None and self.change.action == "pause")

    @property
    def settled(self) -> bool:
        """Whether the task has ended and nothing of it is left: no process, no plan under way, no wait."""
        if self.life != "ended" or self.occupied or self.change is not None:
            return False
        return self.wait is None or self.wait.ended_at is not None

    def general_exponent(self, hardware: str) -> int | None:
        """Return the mean of the corrections measured on that kind of hardware; None if there are none."""
        return rounded_mean([exponent for layout, exponent in self.measured.items() if layout.hardware == hardware])


_CODEC = StateCodec(Task)


def _read(text: str) -> Task:
    return _CODEC.load(text.encode())


class Corrections(NamedTuple):
    """General corrections of settled tasks on one kind of hardware: how many, and the sum of their exponents."""

    number: int
    total: int


class State(Model):
    """The whole cluster.

    Attributes:
        config: the newest parameters of decisions.
        nodes: all nodes ever seen, by name.
        kinds: for each kind of hardware, how many of the nodes ever seen have how many workers (workers -> nodes).
        tasks: all tasks but settled ones, by name, in the order of their first submission.
        ended: settled tasks as JSON, by name; ``find`` reads one.
        ended_corrections: their general corrections, by kind of hardware.
        plans: number of plans made.
        beside: incidents of losses that the plan for the last of them is to answer too.
        losses: number of node failures, without those that a user asked for.
        node_s: seconds that nodes were usable, up to their loss.
        injected: when a user last asked for a fault on each node.
        incidents: number of SEV1 and SEV2 incidents of each node over all its incarnations.
        transitions: number of measured transitions of running tasks, and the sum of their seconds, by kind.
        tables: the throughput tables of the newest problem, by digest; the log has them (``throughput/tables.py``).
        slow: workers that are slow, or were.
        arrangement: how a question uses slow workers; None outside questions.
    """

    config: ClusterConfigured | None = None
    nodes: dict[str, Node] = Field(default_factory=dict)
    kinds: dict[str, dict[int, int]] = Field(default_factory=dict)
    tasks: dict[str, Task] = Field(default_factory=dict)
    ended: dict[str, str] = Field(default_factory=dict)
    ended_corrections: dict[str, Corrections] = Field(default_factory=dict)
    plans: int = 0
    beside: tuple[str, ...] = ()
    losses: int = 0
    node_s: float = 0.0
    injected: dict[str, datetime] = Field(default_factory=dict)
    incidents: dict[str, int] = Field(default_factory=dict)
    transitions: dict[TransitionKind, tuple[int, float]] = Field(default_factory=dict)
    tables: dict[str, LoggedTable] = Field(default_factory=dict)
    slow: dict[str, SlowWorker] = Field(default_factory=dict)
    arrangement: Unlogged[Arrangement | None] = None

    def parameter(self, name: str) -> float:
        """Return a parameter of decisions: the logged value, or the default before any configuration was logged."""
        value = getattr(self.config, name) if self.config is not None else Settings.model_fields[name].default
        return float(value)

    def usable_workers(self) -> list[str]:
        """Return the workers of usable nodes, in the order of the nodes' names and the slots."""
        return [worker for name in sorted(self.nodes) if self.nodes[name].usable for worker in self.nodes[name].workers]

    def find(self, name: str) -> Task | None:
        """Return a task by its name, whether it has ended or not; None if it was never submitted."""
        task = self.tasks.get(name)
        if task is None and (text := self.ended.get(name)) is not None:
            return _read(text)
        return task

    def every_task(self) -> list[Task]:
        """Return all tasks that were ever submitted, in the order of their submission."""
        ended = (_read(text) for text in self.ended.values())
        return sorted((*ended, *self.tasks.values()), key=lambda task: task.number)

    def with_task(self, task: Task) -> State:
        """Return the state with the task added or replaced."""
        name = task.name
        if task.settled or name in self.ended:
            return self._with_moved(task)
        tasks = {**self.tasks, name: task}
        return self.model_copy(update={"tasks": tasks})

    def _with_moved(self, task: Task) -> State:
        """Return the state with another version of a task, which is settled now or was before."""
        tasks, ended = dict(self.tasks), dict(self.ended)
        text = ended.pop(task.name, None)
        before = _read(text) if text is not None else None
        tasks.pop(task.name, None)
        if task.settled:
            ended[task.name] = _CODEC.dump(task, defaults=False).decode()
        else:
            tasks[task.name] = task
            tasks = {each.name: each for each in sorted(tasks.values(), key=lambda each: each.number)}
        corrections = dict(self.ended_corrections)
        for each, sign in ((before, -1), (task if task.settled else None, 1)):
            if each is None or not each.spec.model_known:
                continue
            for hardware in {layout.hardware for layout in each.measured}:
                number, total = corrections.get(hardware, Corrections(0, 0))
                exponent = each.general_exponent(hardware) or 0
                corrections[hardware] = Corrections(number + sign, total + sign * exponent)
        return self.model_copy(update={"tasks": tasks, "ended": ended, "ended_corrections": corrections})

    def with_changed(self, name: str, **changes: Any) -> State:
        """Return the state with these attributes of a task changed; the state itself if it has no such task."""
        task = self.find(name)
        return self if task is None else self.with_task(task.model_copy(update=changes))

    def usable(self, worker: str) -> bool:
        """Return whether the worker's node is usable and has such a worker."""
        node = self.nodes.get(node_of(worker))
        return node is not None and node.usable and worker in node.workers


def rounded_mean(exponents: Sequence[int]) -> int | None:
    """Return the rounded mean; None for no exponents. One more exponent that equals the mean does not change it."""
    return mean_of(Corrections(len(exponents), sum(exponents)))


def mean_of(corrections: Corrections) -> int | None:
    """Return the rounded mean of corrections; None for none."""
    number, total = corrections
    return (2 * total + number) // (2 * number) if number else None


def node_of(worker: str) -> str:
    """Return the node of a worker id, ``<node>/<slot>``."""
    return worker.rpartition("/")[0]


def without(workers: Iterable[str], left_out: Iterable[str]) -> tuple[str, ...]:
    """Return the workers that are not left out, in their order."""
    gone = set(left_out)
    return tuple(worker for worker in workers if worker not in gone)
