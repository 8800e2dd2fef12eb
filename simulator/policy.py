"""What a policy is: how a system finds a fault, decides, and recovers.

Every policy decides through the planner's own ``decide`` (``services.planner.decide``). What differs is what the solver
may choose (``Scope`` and ``solve``), what a healthy step costs (``efficiency``), and how long things take (``Timing``).
The log names the policy in ``cluster.configured``, so that a replay decides as the policy did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from services.planner.problem.problem import Solve
from shared.events.plans import TaskChange
from shared.events.severities import ErrorKind, Severity
from shared.tasks.specification import TaskSpec

Scope = Literal["fixed", "own", "cluster"]
"""Which worker counts the policy may choose. The *allotment* of a task is its count in the best plan of the healthy
cluster without spares. ``fixed``: the allotment or none; the task waits until it is whole. ``own``: up to the
allotment; no task gets another's workers. ``cluster``: any division of the cluster."""

Lost = Literal["nothing", "step", "checkpoint"]
"""Progress that a recovery loses: none, the interrupted step, or all steps since the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a task is to recover from, or move for.

    ``severity``, ``kind``: of the fault; None: the plan moves the task without one. ``change``: what the plan does to
    the task. ``state_bytes_per_worker``: parameters and optimizer. ``step_s``: duration of a step before. ``affected``:
    whether the task itself has lost a worker or its step is broken.
    """

    spec: TaskSpec
    change: TaskChange
    hardware: str
    step_s: float
    state_bytes_per_worker: float
    affected: bool
    severity: Severity | None = None
    kind: ErrorKind | None = None


@dataclass(frozen=True, slots=True)
class Course:
    """How a recovery goes.

    ``stop_s``: from the plan to the moment from which the task makes no progress (draining; 0 where the fault has
    stopped it already). ``down_s``: without progress, until the first step of the new stage begins. ``lost``: what is
    computed again afterwards. ``meanwhile``: rate of progress during ``down_s`` as a fraction of what the surviving
    workers achieve (0 where the task is stopped).
    """

    down_s: float
    stop_s: float = 0.0
    lost: Lost = "nothing"
    meanwhile: float = 0.0


class Timing(Protocol):
    """How long a system takes. Every constant behind it has its source."""

    @property
    def checkpoint_every_s(self) -> float:
        """Seconds between two checkpoints to storage."""
        ...

    def detection_s(self, kind: ErrorKind, step_s: float, micro_batches: int = 1) -> float:
        """Return the time from a fault to its detection, seconds.

        ``step_s``: duration of the task's step. ``micro_batches``: how many each replica computes in it.
        """
        ...

    def course(self, recovery: Recovery) -> Course:
        """Return how a task gets from a plan to training again."""
        ...


ONE_STEP: dict[str, float] = {"memory_copies": 0}
"""Fields of ``cluster.configured`` that switch off what plans do beyond the paper's objective."""


@dataclass(frozen=True)
class Policy:
    """A system whose answer to failures is simulated.

    Attributes:
        name: its name on the command line and in ``cluster.configured``.
        title: its name for people.
        source: the paper that describes it.
        scope: which counts it may choose.
        timing: how long it takes.
        solve: answers a planning problem within the scope, from what the problem itself says (pure, deterministic).
        efficiency: achieved throughput of a healthy task relative to what the throughput model says.
        spare_nodes: nodes that are kept free for replacements.
        detects_slow: whether it finds workers that compute slower than their peers.
        replica_granular: whether a task with x workers uses only whole replicas of its allotment's layout.
        parameters: fields of ``cluster.configured`` that differ from the workload's; if not given, ``ONE_STEP``.
        assumptions: what the papers leave open, and what is assumed; one sentence each.
    """

    name: str
    title: str
    source: str
    scope: Scope
    timing: Timing
    solve: Solve
    efficiency: float = 1.0
    spare_nodes: int = 0
    replica_granular: bool = False
    detects_slow: bool = True
    parameters: Mapping[str, float] = field(default_factory=lambda: dict(ONE_STEP))
    assumptions: tuple[str, ...] = ()
