"""The paper's figures as plain data: its numbers, as far as they are known, beside ours.

    fig1        causes of terminations: the generator's output against the table
    fig2        a manual recovery, and the same fault under other policies
    fig4        achieved FLOP/s of GPT-3 1.3B to 175B over GPU counts, from the throughput model
    detection   times to detection, by what finds the fault

Figure 3 and the comparison of systems are runs of workloads (``paper_workloads``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from services.planner.throughput.model import pins_of
from shared.events.severities import ErrorKind
from shared.planning.performance import profile
from shared.planning.performance.gpt import Shape, model_flop
from shared.planning.performance.search import best
from shared.tasks.specification import TaskSpec
from simulator import published
from simulator.policy import Policy
from simulator.run.engine import simulate
from simulator.workloads import failure_mix, generators
from simulator.workloads.paper_tasks import SIZES, task
from simulator.workloads.paper_workloads import HARDWARE
from simulator.workloads.trace import Occurrence, Trace
from simulator.workloads.workload import Workload

GPU_COUNTS = (8, 16, 32, 48, 64, 96, 128)
"""Counts of figure 4's table. Which ones the paper has is not known."""

FAULTY = generators.node_names(generators.FIG3.nodes)[0]
"""The node at which figure 2's fault happens."""

MIDDAY_S = generators.DAY_S / 2


class CauseShare(NamedTuple):
    """A cause of figure 1 with its share of all failures, 0 to 1: as published, and in generated traces.

    Lighter causes that the simulator takes for the same kind of error are one row.
    """

    cause: str
    published: float
    ours: float


class RecoveryTimes(NamedTuple):
    """What one fault costs a task under a policy, in seconds.

    ``stopped_s``: from the fault to the next training step. ``lost_s``: training time lost altogether, with the steps
    that are computed again.
    """

    policy: str
    stopped_s: float
    lost_s: float


class Achieved(NamedTuple):
    """A point of figure 4. ``ratio``: of the GPUs' peak, 0 to 1. ``layout``: tensor, pipeline and data parallel."""

    size: str
    gpus: int
    flop_per_s: float
    ratio: float
    layout: tuple[int, int, int]


class DetectionTime(NamedTuple):
    """Time to detection by one method of table 2, in seconds; ``published_s``: of the paper, ``ours_s``: of a policy.

    ``known``: how the published number is known.
    """

    method: str
    kind: ErrorKind
    published_s: float
    known: str
    ours_s: float


def fig1(seeds: Sequence[int] = range(100)) -> list[CauseShare]:
    """Return the causes of failures in trace-a over some seeds, beside those of figure 1.

    The trace's share of lost nodes is fixed by its counts, 10 of 43; figure 1's causes of SEV1 make up 28%.
    """
    ours: Counter[str] = Counter()
    for seed in seeds:
        for each in generators.trace_a(seed).occurrences:
            if each.change in ("down", "error"):
                ours[each.kind] += 1
    shares: dict[str, float] = {}
    for cause in failure_mix.causes():
        name = cause.name if cause.kind is None else cause.kind.value
        shares[name] = shares.get(name, 0.0) + cause.share
    total = sum(ours.values())
    return [CauseShare(name, share, ours[name] / total if total else 0.0) for name, share in shares.items()]


def fig2(policies: Sequence[Policy], kind: ErrorKind = ErrorKind.COLLECTIVE_TIMEOUT) -> list[RecoveryTimes]:
    """Return what one fault of GPT-3 7B on 64 A800 costs, beside ``published.manual_recovery_min``.

    The task is simulated for a day, and a rank fails halfway between two checkpoints, so that as many steps are
    computed again as after an average fault.
    """
    found = []
    for policy in policies:
        every_s = policy.timing.checkpoint_every_s
        at_s = (math.floor(MIDDAY_S / every_s) + 0.5) * every_s
        calm, faulty = (
            simulate(_one_task(occurrences), policy, costs=False)
            for occurrences in ((), (Occurrence(at_s, FAULTY, "error", kind.value),))
        )
        lost_flop = calm.accumulated_waf_flop - faulty.accumulated_waf_flop
        rate = calm.accumulated_waf_flop / calm.horizon_s
        found.append(RecoveryTimes(policy.name, max(faulty.recovery_s, default=0.0), lost_flop / rate))
    return found


def fig4(sizes: Sequence[str] = tuple(SIZES), counts: Sequence[int] = GPU_COUNTS) -> list[Achieved]:
    """Return achieved FLOP/s of each size on each count of A800, where it fits: model FLOP, without recomputation."""
    return list(_points(sizes, counts))


def achieved(spec: TaskSpec, workers: int) -> Achieved | None:
    """Return what a task achieves in the best layout on exactly so many A800; None if none fits."""
    hardware, shape = profile(HARDWARE), Shape.of(spec.model)
    found, _ = best(shape, spec.batch.global_, workers, hardware, pins_of(spec))
    if found is None:
        return None
    rate = model_flop(shape, spec.batch.global_) / found.iteration_s
    layout = (found.config.tensor, found.config.pipeline, found.config.data)
    return Achieved(spec.name, workers, rate, rate / (workers * hardware.peak_flop_per_s), layout)


def detection(policy: Policy, step_s: float, micro_batches: int = 1) -> list[DetectionTime]:
    """Return the times of the paper's table 2 beside a policy's.

    ``step_s``: duration of the task's step; ``micro_batches``: how many each replica computes in it.
    """
    methods = {
        "node health": ErrorKind.NODE_LOST,
        "process supervision": ErrorKind.PROCESS_EXIT,
        "exception propagation": ErrorKind.EXCEPTION,
        "online statistics": ErrorKind.HANG,
    }
    found = []
    for method, kind in methods.items():
        row = published.row("detection (Table 2)", method)
        # That of online statistics is in steps.
        published_s = float(row.value) * (1.0 if row.unit.startswith("s ") else step_s)
        ours_s = policy.timing.detection_s(kind, step_s, micro_batches)
        found.append(DetectionTime(method, kind, published_s, row.known, ours_s))
    return found


def _one_task(occurrences: tuple[Occurrence, ...]) -> Workload:
    """Return figure 3's cluster and task for a day."""
    nodes = generators.node_names(generators.FIG3.nodes)
    trace = Trace("fig2", nodes, len(nodes), occurrences, generators.DAY_S)
    return Workload("fig2", trace, (task("gpt-7b", "7B"),), HARDWARE)


def _points(sizes: Sequence[str], counts: Sequence[int]) -> Iterator[Achieved]:
    for size in sizes:
        spec = task("task", size)
        for count in counts:
            if (found := achieved(spec, count)) is not None:
                yield found._replace(size=size)
