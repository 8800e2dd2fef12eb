"""What if, as a whole history: a log as it was measured, simulated as it was configured, and simulated with changes.

Three columns, of which only the first is measured:

    measured   the ledger of the log (``shared.costs.ledger``), from the first submission to the last event
    model      the same faults and tasks in the simulator, with the log's policy, settings and calibration
    what_if    the same with the changes

What a change is worth is the difference of the two simulations: both leave out the same. How much they leave out shows
in the difference of model and measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from services.planner.replay.replay import Replayer
from services.planner.throughput.model import flop_per_step
from shared.events.union import ClusterConfigured, Recorded, TaskSubmitted
from shared.model import Model
from simulator.log_traces import calibration_of_log, workload_of_records
from simulator.policies import POLICIES
from simulator.policy import Policy
from simulator.run.accounting import Accounting
from simulator.run.engine import LIVE, simulate
from simulator.run.measured_times import on_cluster
from simulator.runs import checked_policy
from simulator.what_if.changes import Changes
from simulator.what_if.history_totals import (
    Difference,
    Pair,
    Scale,
    TaskTotals,
    Totals,
    intervals_of,
    less,
    mean_of,
    totals_of,
    waf_parts,
)
from simulator.what_if.notes import ASSUMPTIONS, Answer, History, Parameter, assumptions_of, notes_of, parameters_of
from simulator.workloads.workload import Workload

RUN_NAME = "log"
"""The workload's name, from which ids of events are derived, and of them what plans draw: not the file's, so that a
copy of a log under another name has the same answer."""


class HistoryComparison(Model):
    """The answer.

    Attributes:
        log: its name.
        changes: key -> value, as they were given.
        started_at: the first submission.
        seconds: from then to the last event of the log; all columns are of that time.
        occurrences: how often each kind of thing happens to nodes and tasks in that time.
        currency: of money.
        price_per_worker_hour: of ``measured`` and ``model``.
        what_if_price_per_worker_hour: of ``what_if``.
        measured: what the log has.
        model: the log's history, simulated as it was configured.
        what_if: the same with the changes.
        difference: ``what_if`` less ``model``: what the changes are worth.
        waf_difference: the same of accumulated WAF, by the parts that add up to it (``history_totals.waf_parts``).
        seeds: pairs of runs of which ``model``, ``what_if`` and ``difference`` are means.
        intervals: of ``accumulated_waf_flop`` and ``failure_worker_s`` of the difference, the 95% interval of the mean
            over the seeds; of one seed its value twice.
        model_error: ``model`` less ``measured``: how far the simulation is from what happened.
        parameters: of the simulation, and where each is from.
        notes: what holds of this log in particular.
        assumptions: what holds of every such simulation, and of the policy that is asked about, with its sources.
    """

    log: str
    changes: dict[str, str]
    started_at: datetime
    seconds: float
    occurrences: dict[str, int]
    currency: str
    price_per_worker_hour: float
    what_if_price_per_worker_hour: float
    measured: Totals
    model: Totals
    what_if: Totals
    difference: Difference
    waf_difference: dict[str, float]
    seeds: int
    intervals: dict[str, tuple[float, float]]
    model_error: Difference
    parameters: list[Parameter]
    notes: list[str]
    assumptions: list[str]


def compare_histories(
    replayer: Replayer,
    name: str,
    changes: Changes,
    seeds: int = 1,
    progress: Callable[[float], None] = lambda share: None,
) -> HistoryComparison:
    """Return what a log's history comes to: as measured, as simulated, and simulated with changes. Deterministic.

    Args:
        replayer: the log.
        name: of the log, for reports.
        changes: what is changed.
        seeds: pairs of runs. A seed draws what the log leaves open.
        progress: called with the share of the work that is done.

    Raises:
        InvalidInput: the log has no task or no node, or nodes that differ in kind or size; or the changes name a task
            that it does not have.
        Archived: the log begins behind archived segments, which were not given.
        Corrupt: the database is damaged.
    """
    replayer.place_at(0)  # refuses a log without its beginning
    records = replayer.records
    base = replace(workload_of_records(records, name), name=RUN_NAME)
    changed = changes.of_workload(base)
    logged = checked_policy(_policy(records))
    policy = on_cluster(POLICIES[logged], base.times)
    other = on_cluster(POLICIES[changes.policy or logged], base.times)
    accounting = Accounting()
    for record in records:
        accounting.fold(record)
    price = accounting.cluster.price_per_worker_hour
    waf = {spec.name: flop_per_step(spec) * spec.weight for spec in changed.tasks}
    here = Scale(waf, price)
    there = here if changes.price_per_worker_hour is None else Scale(waf, changes.price_per_worker_hour)
    pairs = []
    for seed in range(seeds):
        model = _simulated(base, policy, seed, here)
        progress((seed + 0.5) / seeds)
        pairs.append(Pair(model, _simulated(changed, changes.of_policy(other), seed, there)))
        progress((seed + 1) / seeds)
    measured = _measured(records, base, accounting, logged, here)
    calibration = calibration_of_log([record.event for record in records], name)
    history = History(_submitted(records), changed, calibration, seeds)
    model, what_if = mean_of([pair.model for pair in pairs]), mean_of([pair.what_if for pair in pairs])
    return HistoryComparison(
        log=name,
        changes=dict(changes.given),
        started_at=_began(records),
        seconds=base.trace.horizon_s,
        occurrences=_occurrences(base),
        currency=accounting.cluster.currency,
        price_per_worker_hour=here.price,
        what_if_price_per_worker_hour=there.price,
        measured=measured,
        model=model,
        what_if=what_if,
        difference=less(what_if, model),
        waf_difference=(parts := waf_parts(what_if, model)),
        seeds=seeds,
        intervals=intervals_of(pairs),
        model_error=less(model, measured),
        parameters=parameters_of(calibration, base, other, changes),
        notes=notes_of(history, changes, Answer(model, what_if, parts)),
        assumptions=[*ASSUMPTIONS, *assumptions_of(changes.of_policy(other))],
    )


def _submitted(records: list[Recorded]) -> dict[str, datetime]:
    """Return when each task was submitted, the last time."""
    return {r.event.task: r.event.occurred_at for r in records if isinstance(r.event, TaskSubmitted)}


def _policy(records: list[Recorded]) -> str:
    """Return the policy that the log names; the live planner's where it names none."""
    named = (r.event.policy for r in records if isinstance(r.event, ClusterConfigured))
    return next(named, "") or LIVE


def _began(records: list[Recorded]) -> datetime:
    """Return when the trace of the log begins, as ``log_traces`` has it."""
    return min(record.event.occurred_at for record in records if isinstance(record.event, TaskSubmitted))


def _occurrences(workload: Workload) -> dict[str, int]:
    """Return how often each kind of change is in the trace, but for nodes that come or are as fast as others again."""
    found: dict[str, int] = {}
    for each in workload.trace.occurrences:
        if each.change != "up":
            kind = each.kind or each.change
            found[kind] = found.get(kind, 0) + 1
    return dict(sorted(found.items()))


def _measured(records: list[Recorded], workload: Workload, accounting: Accounting, policy: str, scale: Scale) -> Totals:
    """Return what the log has, in the time that is simulated."""
    began = _began(records)
    kinds = accounting.kinds(began, began + timedelta(seconds=workload.trace.horizon_s))
    tasks = {}
    for spec in workload.tasks:
        view = accounting.tasks[spec.name]
        done, end = max(view.step - view.first_step, 0), view.ended_at
        ended_s = None if end is None or done < spec.steps else (end - began).total_seconds()
        tasks[spec.name] = TaskTotals(steps=done, ended_s=ended_s)
    return totals_of("measured", policy, len(workload.trace.nodes), kinds, tasks, scale)


def _simulated(workload: Workload, policy: Policy, seed: int, scale: Scale) -> Totals:
    """Return what a run comes to."""
    outcome = simulate(workload, policy, seed)
    tasks = {
        name: TaskTotals(steps=steps, ended_s=outcome.completed_s.get(name)) for name, steps in outcome.steps.items()
    }
    return totals_of(
        "modelled",
        policy.name,
        len(workload.trace.nodes),
        outcome.worker_s,
        tasks,
        scale,
        efficiency=policy.efficiency,
        unfound=outcome.unfound,
    )
