"""What the planner knows: the fold of the log. Immutable; tuples keep the order that decisions use."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, NamedTuple, TypeAlias

from pydantic import Field

from shared.events import ClusterConfigured
from shared.model import Model
from shared.plans import Layout, TaskChange
from shared.settings import Settings
from shared.tasks import TaskSpec

TransitionKind: TypeAlias = Literal["survivors", "newcomers", "restore", "pause"]
"""Kinds of changes by what they cost (``transitions.py``)."""

DEFAULT_HARDWARE = "cpu"
"""Kind of workers of which nothing is said."""


class Size(NamedTuple):
    """What a step time was measured on: the kind of workers, and how they shared the model."""

    hardware: str
    tensor: int
    pipeline: int
    data: int


class Node(Model):
    """A node. ``usable`` is false once it is lost or isolated; only a new incarnation makes it usable again.

    ``hardware``: the kind of its workers.
    """

    name: str
    incarnation: str
    domain: str
    workers: tuple[str, ...]
    usable: bool
    since: datetime
    reason: str = ""
    hardware: str = DEFAULT_HARDWARE


class Wait(Model):
    """A wait for workers. ``since``: from the plan that queued the task. ``called_at``: when it was too long, newest.

    ``ended_at``: when a task that had been called got workers: its turn began. ``cause``: id of the event that the next
    call is derived from: the plan that queued it, then the last call.
    """

    since: datetime
    cause: str
    called_at: datetime | None = None
    ended_at: datetime | None = None


class Task(Model):
    """A task.

    ``generation``: the newest number given to one of its stages; it only rises, also over resubmission.
    ``members``: workers planned for it, in rank order; empty while it is queued, pausing or stopping.
    ``holders``: workers whose process is known to hold its state, in rank order. A process that is to take its state
    becomes a holder when its stage is known to have formed.
    ``held``: the layout in which they came to hold it; ``ranks``: theirs in it, which say what shard each holds. One
    that is to take its state from storage has none.
    ``occupied``: workers that may still have a process of it.
    ``lost``: workers whose process ended, or must end, since the newest plan; ``broken``: its step was interrupted.
    ``change``: what the newest plan does to it, while that is not complete.
    ``pool``: the kind of workers it is to run on, where that is not the kind of its members (``pools.py``).
    ``layout``: of its newest stage; None before the first. ``trained``: what its newest generations train on.
    ``measured``: on these its throughput is 1.1 ** exponent times the model's.
    ``stands_since``: since when it stands still in its transition, ``stood_s`` for how long before that, seconds.
    ``wait``: its wait for workers, and its turn after that.
    """

    spec: TaskSpec
    life: Literal["active", "stopping", "ended"] = "active"
    generation: int = 0
    members: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    occupied: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    broken: bool = False
    plan: str = ""
    planned_at: datetime | None = None
    change: TaskChange | None = None
    stands_since: datetime | None = None
    stood_s: float = 0.0
    queued: str = ""
    wait: Wait | None = None
    step: int = 0
    step_s: float = 0.0
    checkpoint: str = ""
    checkpoint_step: int = 0
    pool: str = ""
    layout: Layout | None = None
    held: Layout | None = None
    ranks: dict[str, int] = Field(default_factory=dict)
    trained: dict[int, Size] = Field(default_factory=dict)
    measured: dict[Size, int] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """The task's name, its identity."""
        return self.spec.name

    @property
    def replica(self) -> int:
        """Workers of one model replica, in its newest stage; before the first, as pinned."""
        if self.layout is None:
            return self.spec.tensor * self.spec.pipeline
        return self.layout.tensor * self.layout.pipeline

    @property
    def kept(self) -> tuple[str, ...]:
        """Holders that have not been lost, in rank order."""
        return tuple(worker for worker in self.holders if worker not in self.lost) if self.lost else self.holders

    @property
    def leaving(self) -> bool:
        """Whether it is being stopped or paused: its workers are not yet free, and it is given none."""
        return self.life == "stopping" or (self.change is not None and self.change.action == "pause")


class State(Model):
    """The whole cluster. ``losses`` and ``node_s``: node failures seen, over the time nodes were seen usable.

    ``incidents``: SEV1 and SEV2 incidents of each node, whatever its incarnation.
    ``kinds``: of each kind of hardware, how many of the nodes ever seen offer how many workers (workers -> nodes).
    ``transitions``: how many transitions of running tasks were measured, and the sum of their seconds, by kind.
    """

    config: ClusterConfigured | None = None
    nodes: dict[str, Node] = Field(default_factory=dict)
    kinds: dict[str, dict[int, int]] = Field(default_factory=dict)
    tasks: dict[str, Task] = Field(default_factory=dict)
    plans: int = 0
    losses: int = 0
    node_s: float = 0.0
    incidents: dict[str, int] = Field(default_factory=dict)
    transitions: dict[TransitionKind, tuple[int, float]] = Field(default_factory=dict)

    def parameter(self, name: str) -> float:
        """Return a parameter of decisions: as logged, or its default where no configuration was logged yet."""
        value = getattr(self.config, name) if self.config is not None else Settings.model_fields[name].default
        return float(value)

    def usable_workers(self) -> list[str]:
        """Return the workers of usable nodes, in the order of nodes' names and slots."""
        return [worker for name in sorted(self.nodes) if self.nodes[name].usable for worker in self.nodes[name].workers]

    def usable(self, worker: str) -> bool:
        """Return whether the worker's node is usable."""
        node = self.nodes.get(node_of(worker))
        return node is not None and node.usable and worker in node.workers


def node_of(worker: str) -> str:
    """Return the node of a worker id, ``<node>/<slot>``."""
    return worker.rpartition("/")[0]
