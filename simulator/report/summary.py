"""What the seeds of each policy come to, as a line; and the document of ``unicron simulate -o json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shared.model import Model
from simulator.outcome import Outcome
from simulator.report.intervals import mean_interval

MEGATRON, ORACLE = "megatron", "oracle"
"""The policies with which the others are compared: the usual practice, and the bound."""


class PolicyLine(Model):
    """One policy over all seeds. Amounts are means of one run.

    Attributes:
        name: the policy's.
        accumulated_waf_flop: weighted model FLOP of the updates that exist at the horizon.
        ratio_to_megatron: of the means; None where that policy was not run.
        ratio_to_oracle: the same; None also where tasks end.
        interval: 95% interval of the mean of ``accumulated_waf_flop`` over the seeds (Student's t); of one seed, the
            value itself twice.
        worker_s: worker-seconds by kind.
        transitions: how often a task moved, restarted or was retried; whole where each seed has as many.
        recovery_p50_s: median over the recoveries of all seeds; None where there is none.
        recovery_p99_s: the time that 99% of them do not exceed.
        completed_s: by task that ended in each run, when; empty where tasks outlast the horizon.
    """

    name: str
    accumulated_waf_flop: float
    ratio_to_megatron: float | None
    ratio_to_oracle: float | None
    interval: tuple[float, float]
    worker_s: dict[str, float]
    transitions: int | float
    recovery_p50_s: float | None
    recovery_p99_s: float | None
    completed_s: dict[str, float]


class Comparison(Model):
    """All policies on one workload. ``seeds``: their number. ``endless``: whether tasks outlast the horizon."""

    trace: str
    seeds: int
    policies: list[PolicyLine]
    wall_s: float
    endless: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON document. Completion times are in it where tasks end."""
        left_out = {"endless": True}
        if self.endless:
            return self.model_dump(exclude={**left_out, "policies": {"__all__": {"completed_s"}}})
        return self.model_dump(exclude=left_out)


def compare(trace: str, outcomes: Mapping[str, Sequence[Outcome]], wall_s: float, *, endless: bool) -> Comparison:
    """Summarize the outcomes of each policy, one for each seed.

    Raises:
        ValueError: a policy has no outcome.
    """
    means = {name: mean_interval([run.accumulated_waf_flop for run in runs]).mean for name, runs in outcomes.items()}
    lines = [_line(name, runs, means, endless=endless) for name, runs in outcomes.items()]
    seeds = max((len(runs) for runs in outcomes.values()), default=0)
    return Comparison(trace=trace, seeds=seeds, policies=lines, wall_s=wall_s, endless=endless)


def _line(name: str, runs: Sequence[Outcome], means: Mapping[str, float], *, endless: bool) -> PolicyLine:
    mean, low, high = mean_interval([run.accumulated_waf_flop for run in runs])
    recoveries = sorted(recovery for run in runs for recovery in run.recovery_s)
    transitions = _mean([run.transitions for run in runs])
    ended = set.intersection(*(set(run.completed_s) for run in runs))
    return PolicyLine(
        name=name,
        accumulated_waf_flop=mean,
        ratio_to_megatron=_ratio(mean, means.get(MEGATRON)),
        ratio_to_oracle=_ratio(mean, means.get(ORACLE)) if endless else None,
        interval=(low, high),
        worker_s=mean_worker_s(runs),
        transitions=int(transitions) if transitions.is_integer() else transitions,
        recovery_p50_s=percentile(recoveries, 50),
        recovery_p99_s=percentile(recoveries, 99),
        completed_s={task: _mean([run.completed_s[task] for run in runs]) for task in sorted(ended)},
    )


def mean_worker_s(runs: Sequence[Outcome]) -> dict[str, float]:
    """Return the mean worker-seconds of each kind, in the order of the first run that has it."""
    kinds = dict.fromkeys(kind for run in runs for kind in run.worker_s)
    return {kind: _mean([run.worker_s.get(kind, 0.0) for run in runs]) for kind in kinds}


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """Return the smallest of some ordered values that so many percent do not exceed (nearest rank); None of none."""
    if not ordered:
        return None
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _ratio(value: float, reference: float | None) -> float | None:
    return value / reference if reference else None
