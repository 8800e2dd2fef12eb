"""Ratios of accumulated WAF as the paper has them, and what would have to differ where ours are others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.evaluation_runs import make_groups, mean_waf
from benchmarks.evaluation_targets import PublishedRatio
from benchmarks.report import Report
from simulator.outcome import Outcome
from simulator.policies import POLICIES
from simulator.report.summary import ORACLE
from simulator.runs import Run
from simulator.workloads.paper_workloads import workload

CASES = range(1, 6)
"""Of tasks and weights: the paper's table 3."""

WITHIN = 0.15
"""Relative deviation from a published ratio that needs no explanation."""

PAPER = "unicron-paper"


@dataclass(frozen=True)
class Setting:
    """One policy on one trace, in all cases: ``efficiency`` of a healthy step, None: the policy's own."""

    trace: str
    policy: str
    efficiency: float | None = None

    def run(self, case: int, seed: int) -> Run:
        """Return the run of a case and a seed; costs are not accounted for."""
        workload_of = partial(workload, self.trace, case=case)
        return Run(workload_of, self.policy, seed, efficiency=self.efficiency, costs=False)


Found = dict[Setting, list[list[Outcome]]]
"""The outcomes of a setting: case by case, in the order of the seeds."""


def run_cases(settings: Sequence[Setting], seeds: int, jobs: int) -> Found:
    """Run each setting in every case with so many seeds."""
    groups = {
        (setting, case): [setting.run(case, seed) for seed in range(seeds)]
        for case in CASES  # outermost: a process works out the tables of few models at a time
        for setting in settings
    }
    outcomes = make_groups(groups, jobs)
    return {setting: [outcomes[setting, case] for case in CASES] for setting in settings}


def ratio(ours: list[list[Outcome]], theirs: list[list[Outcome]]) -> float:
    """Return the mean over the cases of the ratio of mean accumulated WAF."""
    return math.fsum(mean_waf(a) / mean_waf(b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


def measure_ratios(report: Report, published: Sequence[PublishedRatio], seeds: int, jobs: int) -> None:
    """Report each ratio beside the published one, with an explanation where it is more than 15% off."""
    traces = dict.fromkeys(each.trace for each in published)
    settings = {Setting(trace, policy): None for trace in traces for policy in (PAPER, ORACLE)}
    settings |= {Setting(each.trace, each.policy): None for each in published}
    found = run_cases(list(settings), seeds, jobs)
    off = {}
    for each in published:
        setting = Setting(each.trace, each.policy)
        value = ratio(found[Setting(each.trace, PAPER)], found[setting])
        deviation = value / each.ratio - 1.0
        if abs(deviation) > WITHIN:
            own = POLICIES[each.policy].efficiency
            off[each] = replace(setting, efficiency=own * value / each.ratio)
        report.line(
            "ratio", trace=each.trace, policy=each.policy, ratio=value, published=each.ratio, known=each.known,
            deviation=deviation, within=each not in off,
        )  # fmt: skip
    changed = run_cases(list(off.values()), seeds, jobs)
    for each in published:
        name = f"{each.trace}: {PAPER} to {each.policy}: within 15%, or with another healthy efficiency"
        if each not in off:
            report.equal(name, True, True)
            continue
        setting = off[each]
        with_it = ratio(found[Setting(each.trace, PAPER)], changed[setting])
        report.line(
            "explanation", trace=each.trace, policy=each.policy, parameter="efficiency of a healthy step",
            value=POLICIES[each.policy].efficiency, needed=setting.efficiency, ratio_with_it=with_it,
            losses_times=losses_times(each, found),
        )  # fmt: skip
        report.at_most(f"{name}, deviation with it", abs(with_it / each.ratio - 1.0), WITHIN)


def losses_times(published: PublishedRatio, found: Found) -> float:
    """Return by which factor all that a system loses to failures would have to be greater for the published ratio.

    Losses are what it has less than its healthy tasks would have on the oracle's capacity: e O - W, of its efficiency
    e, the oracle's WAF O and its own W. The factor k solves e O - k (e O - W) = U / r, where U is Unicron's WAF and r
    the published ratio. Below 0: no losses at all would still be too much.
    """
    efficiency = POLICIES[published.policy].efficiency
    factors = []
    for case in range(len(CASES)):
        bound, ours, theirs = (
            mean_waf(found[Setting(published.trace, policy)][case]) for policy in (ORACLE, PAPER, published.policy)
        )
        healthy = efficiency * bound
        factors.append((healthy - ours / published.ratio) / (healthy - theirs))
    return math.fsum(factors) / len(factors)
