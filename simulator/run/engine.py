"""The engine: simulated time, in which a trace happens, the policy answers, and tasks train.

``agenda`` is simulated time, ``nodes`` what a trace does to nodes and when it is found, ``execution`` how plans are
carried out, ``training`` and ``rates`` how tasks advance, ``recorder`` the log, ``accounting`` the costs.

Every event goes through the planner's fold, and is answered by the planner's ``decide`` with the policy's ``solve``. An
answer is in the log right behind its cause. The planner's timers fire in simulated time.

The allotment is each task's workers in the best plan of the healthy cluster; a policy may pin them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from services.planner.evolve import evolve
from services.planner.problem.problem import build_problem
from services.planner.replay.log_fold import Fold
from services.planner.state.cluster import State
from services.planner.throughput.tables import layout_of
from services.planner.timers import Timer, next_timer
from shared.events.plans import Layout
from shared.events.union import ClusterConfigured, Event, NodeJoined, PlanDecided, TaskSubmitted
from shared.log.log import EventLog
from shared.machine.process import seldom_collecting
from shared.planning.instance import TableCache
from shared.planning.solver import solve_with_alternatives
from shared.settings.model import Settings
from shared.tasks.specification import TaskSpec
from simulator.outcome import Outcome, WafPoint
from simulator.policy import Policy, Scope
from simulator.run.accounting import Accounting
from simulator.run.agenda import START, Agenda, Entry, time_of
from simulator.run.execution import Execution
from simulator.run.nodes import Nodes
from simulator.run.rates import Rates
from simulator.run.recorder import Recorder
from simulator.run.training import Training
from simulator.workloads.workload import Workload

LIVE = "unicron"
"""Name of the policy that the live planner follows; its logs name none."""

PROGRESS_S = 86_400.0
"""Simulated seconds between two calls that tell how far a run is."""

_MOST_TABLES = 512
"""Throughput tables as arrays that a run remembers: some for each task of a large cluster, of about 100 kB each."""

REPORT_S = 3600.0
"""Simulated seconds between two reports of the progress of tasks that end within the horizon: decisions depend on the
work that is left, and an hour of it is little. Where tasks outlast the horizon, only faults and plans report it."""


class Allotment(NamedTuple):
    """The best plan of the healthy cluster without spares: workers and layout of each task that gets some."""

    workers: dict[str, int]
    layouts: dict[str, Layout]


def allot(tasks: Sequence[TaskSpec], cluster: Sequence[Event]) -> Allotment:
    """Return the allotment.

    Args:
        tasks: specifications as they were submitted.
        cluster: the configuration, and the nodes that join, without spares.
    """
    state = State()
    for event in cluster:
        state = evolve(state, event, START)
    for spec in tasks:
        submitted = TaskSubmitted(event_id=spec.name, occurred_at=START, task=spec.name, spec=spec)
        state = evolve(state, submitted, START)
    found, _ = solve_with_alternatives(build_problem(state, START))
    workers = {name: count for name, count in found.assignment.items() if count > 0}
    layouts = {name: layout_of(state, state.tasks[name], count) for name, count in workers.items()}
    return Allotment(workers, layouts)


def pinned(spec: TaskSpec, scope: Scope, allotment: Allotment) -> TaskSpec:
    """Return the specification as the policy submits it; a task without an allotment stays as it is."""
    count = allotment.workers.get(spec.name)
    if scope == "cluster" or count is None:
        return spec
    least = count if scope == "fixed" else spec.workers.min
    return spec.model_copy(update={"workers": spec.workers.model_copy(update={"min": least, "max": count})})


def simulate(
    workload: Workload,
    policy: Policy,
    seed: int = 0,
    *,
    log: EventLog | None = None,
    costs: bool = True,
    progress: Callable[[float], None] = lambda simulated_s: None,
) -> Outcome:
    """Run a workload under a policy. Deterministic: equal arguments give equal events and an equal outcome.

    Args:
        workload: the cluster, its tasks and its trace.
        policy: the system that is simulated.
        seed: of what the run itself draws.
        log: an empty log that gets all events; None: they are kept nowhere.
        costs: whether to account for worker-seconds by kind; without, ``worker_s`` is empty and the run is faster.
        progress: called with the simulated seconds, first when the trace begins, and then about once a simulated day.
    """
    with seldom_collecting():
        return _Run(workload, policy, seed, log, Accounting() if costs else None, progress).outcome()


class _Run:
    """One run."""

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        seed: int,
        log: EventLog | None,
        accounting: Accounting | None,
        progress: Callable[[float], None],
    ) -> None:
        self._workload = workload
        self._policy = policy
        self._seed = seed
        self._accounting = accounting
        self._progress = progress
        self._agenda = Agenda()
        name = f"{workload.name}/{policy.name}/{seed}"
        self._recorder = Recorder(name, log, accounting.fold if accounting is not None else None)
        solve = policy.solve
        if solve is solve_with_alternatives:
            solve = partial(solve_with_alternatives, cache=TableCache(most=_MOST_TABLES))
        self._fold = Fold(solve, policies={policy.name: solve})
        self._trainings: dict[str, Training] = {}
        self._nodes = Nodes(
            workload.workers_per_node,
            workload.hardware,
            policy,
            self._agenda,
            self._trainings,
            seed,
            self._emit,
            self._recorder.new_id,
        )
        self._timer: tuple[Timer, Entry] | None = None
        self._reported_s = 0.0
        self._waf: list[WafPoint] = []

    def outcome(self) -> Outcome:
        """Run to the horizon."""
        horizon_s = self._workload.trace.horizon_s
        self._start()
        self._progress(0.0)
        for occurrence in self._workload.trace.occurrences:
            self._agenda.at(occurrence.at_s, lambda happened=occurrence: self._nodes.happen(happened))  # type: ignore[misc]
        if not self._workload.endless:
            self._agenda.at(REPORT_S, self._report)
        self._agenda.run(horizon_s, self._passed)
        for training in self._trainings.values():
            self._execution.report(training)
        self._recorder.flush()
        outcome = self._achieved(horizon_s)
        if self._accounting is None:
            return outcome
        lost_worker_s = sum(training.lost_worker_s() for training in self._trainings.values())
        kinds, allocated = self._accounting.totals(time_of(horizon_s), self._execution.stalls.up_to(horizon_s))
        lost_worker_s = min(lost_worker_s, kinds["useful"])
        kinds["useful"] -= lost_worker_s
        kinds["recompute"] += lost_worker_s  # the ledger has it once it is computed again, behind the end
        return outcome.model_copy(update={"worker_s": kinds, "allocated_worker_s": allocated})

    def _achieved(self, horizon_s: float) -> Outcome:
        """Return the outcome at the end, without the costs."""
        return Outcome(
            policy=self._policy.name,
            seed=self._seed,
            horizon_s=horizon_s,
            accumulated_waf_flop=sum(training.waf_flop for training in self._trainings.values()),
            worker_s={},
            allocated_worker_s=0.0,
            transitions=self._execution.transitions,
            recovery_s=self._execution.recovery_s,
            waf=self._waf,
            completed_s=self._execution.completed_s,
            steps={t.name: min(t.step, float(t.spec.steps)) for t in self._trainings.values()},
            events=self._recorder.events,
            unfound=self._nodes.unfound,
        )

    def _start(self) -> None:
        """Have all nodes join and all tasks submitted, and carry out the plans at once."""
        trace, policy = self._workload.trace, self._policy
        configured = self._configuration()
        joined = [self._nodes.joined(node) for node in trace.nodes[: trace.present]]
        allotment = allot(self._workload.tasks, [configured, *joined[: len(joined) - policy.spare_nodes]])
        specs = [pinned(spec, policy.scope, allotment) for spec in self._workload.tasks]
        self._trainings.update((spec.name, Training(spec, policy.timing.checkpoint_every_s)) for spec in specs)
        self._nodes.execution = self._execution = Execution(
            policy,
            self._workload.hardware,
            self._agenda,
            self._trainings,
            Rates(policy, self._workload.hardware, allotment.layouts, self._workload.throughput),
            self._nodes.slowdowns,
            self._nodes.dead,
            lambda: self._fold.state,
            self._log,
            self._rate_changed,
        )
        first: list[ClusterConfigured | NodeJoined] = [configured, *joined]
        for event in first:
            self._emit(event)
        for spec in specs:
            self._log(TaskSubmitted, task=spec.name, spec=spec)
        self._execution.begin_trace()
        self._recorder.flush()  # so that what the start has cost is over when the trace begins

    def _configuration(self) -> ClusterConfigured:
        """Return the parameters of decisions: the defaults of the settings, the workload's, then the policy's."""
        changed = {**self._workload.parameters, **self._policy.parameters}
        fields = Settings.model_fields.keys() & ClusterConfigured.model_fields.keys()
        values = {name: Settings.model_fields[name].default for name in fields} | changed
        return ClusterConfigured(
            event_id=self._recorder.new_id(),
            occurred_at=self._agenda.now,
            policy="" if self._policy.name == LIVE else self._policy.name,
            **values,
        )

    def _log(self, kind: Callable[..., Event], **fields: Any) -> None:
        """Log an event of the present."""
        self._emit(kind(event_id=self._recorder.new_id(), occurred_at=self._agenda.now, **fields))

    def _emit(self, event: Event) -> None:
        """Log an event with the planner's answer to it, and begin what that asks for."""
        at = self._agenda.now
        record = self._recorder.record(event, at)
        self._fold.take(record)
        answer = self._fold.decide(record)
        self._fold.answer(record, answer)
        for each in answer:
            self._fold.take(self._recorder.record(each, at))  # delivered: nothing is left to skip
        for each in answer:
            if isinstance(each, PlanDecided):
                self._execution.carry_out(each, event)
        self._set_timer()

    def _set_timer(self) -> None:
        """Have the planner's next timer fire when its time has come."""
        timer = next_timer(self._fold.state)
        if self._timer is not None:
            if timer is not None and timer.event.event_id == self._timer[0].event.event_id:
                return
            self._timer[1].cancel()
            self._timer = None
        if timer is not None:
            at_s = (timer.at - time_of(0.0)).total_seconds()
            self._timer = timer, self._agenda.at(at_s, self._fire)

    def _fire(self) -> None:
        assert self._timer is not None
        timer, self._timer = self._timer[0], None
        self._emit(timer.event)

    def _rate_changed(self, training: Training) -> None:
        now_s = self._agenda.now_s
        rate = sum(each.waf_flop_per_s for each in self._trainings.values())
        if self._waf and self._waf[-1].at_s == now_s:
            self._waf.pop()
        if not self._waf or self._waf[-1].waf_flop_per_s != rate:
            self._waf.append(WafPoint(now_s, rate))
        if training.formation is not None and training.steps_per_s > 0.0 and self._nodes.slowdowns:
            for node in sorted(training.formation.nodes & self._nodes.slowdowns.keys()):
                self._nodes.watch(node)

    def _report(self) -> None:
        for training in self._trainings.values():
            if training.steps_per_s > 0.0:
                self._execution.report(training)
        self._agenda.at(self._agenda.now_s + REPORT_S, self._report)

    def _passed(self, now_s: float) -> None:
        if now_s - self._reported_s >= PROGRESS_S:
            self._reported_s = now_s
            self._progress(now_s)
