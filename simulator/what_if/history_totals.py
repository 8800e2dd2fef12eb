"""What a history comes to over a length of time: worker-seconds by kind, work done and money, measured or simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from shared.costs.charges import money
from shared.costs.claims import FAILURE_PARTS
from shared.costs.ledger import CATEGORIES
from shared.model import Model
from simulator.report.intervals import mean_interval

FAILURES = tuple(CATEGORIES[part] for part in FAILURE_PARTS)
"""Kinds of time that failures cost."""

OVERHEAD = "policy_overhead"
"""The kind of time that a policy's healthy steps take longer than those of the throughput model, which are the live
planner's: 1 less its efficiency, of the time in which workers train."""

PER_USEFUL = "waf_per_useful_worker_s"
"""The part of a difference in accumulated WAF that follows from no kind of time: what a useful worker-second achieves,
which depends on the tasks that have the workers, and on their layouts."""

_AMOUNTS = ("allocated_worker_s", "failure_worker_s", "accumulated_waf_flop", "money", "failure_money")


class TaskTotals(Model):
    """A task: updates that exist at the end, and seconds from the start until the last of them (null: it goes on).

    As simulated, with the part of the next update that is done.
    """

    steps: float
    ended_s: float | None


class Totals(Model):
    """What one history comes to, over the same length of time.

    Attributes:
        basis: whether the figures were measured or simulated.
        policy: that answered.
        nodes: that there were at one time or another.
        worker_s: by kind, as the cost report has them; beside these, ``OVERHEAD``, which is nothing as measured.
        allocated_worker_s: their sum.
        failure_worker_s: of the kinds that failures cost.
        accumulated_waf_flop: model FLOP of the updates that exist at the end, each times its task's weight: in all
            columns the changed one.
        money: the price of ``allocated_worker_s``.
        failure_money: the price of ``failure_worker_s``.
        tasks: by name.
        unfound_faults: that had occurred by the end and were not found; None as measured.
    """

    basis: Literal["measured", "modelled"]
    policy: str
    nodes: int
    worker_s: dict[str, float]
    allocated_worker_s: float
    failure_worker_s: float
    accumulated_waf_flop: float
    money: float
    failure_money: float
    tasks: dict[str, TaskTotals]
    unfound_faults: float | None = None


class Difference(Model):
    """One history less another, figure by figure."""

    worker_s: dict[str, float]
    allocated_worker_s: float
    failure_worker_s: float
    accumulated_waf_flop: float
    money: float
    failure_money: float


class Scale(NamedTuple):
    """By what a history is valued: FLOP of an update times its weight, by task, and the price of a worker-hour."""

    waf_flop: Mapping[str, float]
    price: float


class Pair(NamedTuple):
    """The two simulations of one seed."""

    model: Totals
    what_if: Totals


def totals_of(
    basis: Literal["measured", "modelled"],
    policy: str,
    nodes: int,
    kinds: dict[str, float],
    tasks: dict[str, TaskTotals],
    scale: Scale,
    *,
    efficiency: float = 1.0,
    unfound: int | None = None,
) -> Totals:
    """Return the totals of worker-seconds by kind and of tasks; the rest is as ``Totals`` and ``Scale`` have it.

    What the ``efficiency`` of healthy steps under the policy lacks is taken from the useful time. ``unfound``: faults
    that were not found by the end; None: not known.
    """
    overhead = kinds["useful"] * (1.0 - efficiency)
    kinds = {**kinds, "useful": kinds["useful"] - overhead, OVERHEAD: overhead}
    allocated, failures = sum(kinds.values()), sum(kinds[kind] for kind in FAILURES)
    return Totals(
        basis=basis,
        policy=policy,
        nodes=nodes,
        worker_s=kinds,
        allocated_worker_s=allocated,
        failure_worker_s=failures,
        accumulated_waf_flop=sum(task.steps * scale.waf_flop[name] for name, task in tasks.items()),
        money=money(allocated, scale.price),
        failure_money=money(failures, scale.price),
        tasks=tasks,
        unfound_faults=unfound,
    )


def less(one: Totals, other: Totals) -> Difference:
    """Return one history less another."""
    return Difference(
        worker_s={kind: seconds - other.worker_s[kind] for kind, seconds in one.worker_s.items()},
        allocated_worker_s=one.allocated_worker_s - other.allocated_worker_s,
        failure_worker_s=one.failure_worker_s - other.failure_worker_s,
        accumulated_waf_flop=one.accumulated_waf_flop - other.accumulated_waf_flop,
        money=one.money - other.money,
        failure_money=one.failure_money - other.failure_money,
    )


def waf_parts(one: Totals, other: Totals) -> dict[str, float]:
    """Return the difference in accumulated WAF of one history less another by its parts, FLOP; they add up to it.

    More time of any kind is less useful time, and that counts with what a useful worker-second of ``other`` achieves;
    so does more allocated time. The rest is ``PER_USEFUL``.
    """
    useful = other.worker_s["useful"]
    rate = other.accumulated_waf_flop / useful if useful else 0.0
    parts = {
        kind: rate * (other.worker_s[kind] - seconds) for kind, seconds in one.worker_s.items() if kind != "useful"
    }
    parts["allocated"] = rate * (one.allocated_worker_s - other.allocated_worker_s)
    parts[PER_USEFUL] = one.accumulated_waf_flop - rate * one.worker_s["useful"]
    return parts


def mean_of(runs: Sequence[Totals]) -> Totals:
    """Return the mean of runs that differ in nothing but the seed. A task has ended that has in all of them."""
    if len(runs) == 1:
        return runs[0]
    first = runs[0]
    tasks = {}
    for name in first.tasks:
        ends = [run.tasks[name].ended_s for run in runs]
        known = [end for end in ends if end is not None]
        tasks[name] = TaskTotals(
            steps=fmean(run.tasks[name].steps for run in runs),
            ended_s=fmean(known) if len(known) == len(ends) else None,
        )
    return first.model_copy(
        update={
            "worker_s": {kind: fmean(run.worker_s[kind] for run in runs) for kind in first.worker_s},
            "tasks": tasks,
            "unfound_faults": fmean(run.unfound_faults or 0.0 for run in runs),
            **{name: fmean(getattr(run, name) for run in runs) for name in _AMOUNTS},
        }
    )


def intervals_of(pairs: Sequence[Pair]) -> dict[str, tuple[float, float]]:
    """Return the 95% interval of the mean difference over the seeds, for WAF and for the time that failures cost."""
    found = {}
    for name in ("accumulated_waf_flop", "failure_worker_s"):
        each = mean_interval([getattr(pair.what_if, name) - getattr(pair.model, name) for pair in pairs])
        found[name] = each.low, each.high
    return found
