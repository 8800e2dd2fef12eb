"""What-if replay: each cause that recorded a plan is decided again with changed inputs (``what_if_inputs``).

The log is folded as it was recorded, with the changed inputs in place of the recorded ones: causes come when they came,
and each recorded plan is carried out as recorded. So every decision is compared on its own, and the plan that is
decided in place of the recorded one changes no later cause. The numbers of workers go on: a plan that leaves a task's
number as it was, such as a restart in place, leaves the other number as it was, too. What the recorded plans gave each
task, and for how long, is measured; what the others would have given is a model, and so is the WAF of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from pydantic import Field

from services.planner.decide import DECIDER
from services.planner.evolve import evolve
from services.planner.replay.log_fold import NO_POLICIES, Fold, Policies
from services.planner.replay.sources import AnsweredRows, Source
from services.planner.replay.what_if_inputs import Inputs
from services.planner.state.cluster import State, Task, node_of
from services.planner.state.dealing import replica_slowdowns, slowdown_of_deal
from services.planner.state.slow_workers import slowdown_of
from services.planner.throughput.tables import throughput_of
from shared.errors import InvalidInput
from shared.events.plans import Response, Trigger
from shared.events.union import ClusterConfigured, Event, PlanDecided, Recorded, TaskSubmitted
from shared.log.scan import Scan
from shared.model import Model

ASSUMPTIONS = (
    "causes and consequences stay as recorded: a plan decided in place of a recorded one changes nothing that follows",
    "each plan's workers are compared until a plan gives some task another number: a restart or a retry, for which no "
    "distribution is sought, keeps the number that each side has",
    "FLOP: weighted, by the planner's model with the changed inputs for both plans; transitions cost nothing in it",
    "money: the price of the workers that plans give to tasks",
)

_SECONDS_PER_HOUR = 3600.0


class PlanDifference(Model):
    """A recorded plan and the one decided in its place.

    Attributes:
        position: of the recorded plan.
        plan: its name.
        trigger: why it was made.
        seconds: until a plan gives some task another number of workers, on one of the two sides, or the end of the log.
        recorded_response: what the recorded plan does.
        what_if_response: what the other one does.
        workers: whether some task has another number of workers; otherwise they are other workers, or used otherwise.
        recorded: task -> workers once the recorded plan is made.
        what_if: the same of the other plan.
        recorded_waf_flop_per_s: WAF of ``recorded``, by the model with the changed inputs.
        what_if_waf_flop_per_s: WAF of ``what_if``, by the same model.
    """

    position: int
    plan: str
    trigger: Trigger
    seconds: float
    recorded_response: Response
    what_if_response: Response
    workers: bool
    recorded: dict[str, int]
    what_if: dict[str, int]
    recorded_waf_flop_per_s: float
    what_if_waf_flop_per_s: float


class TaskDifference(Model):
    """Worker-seconds that plans gave a task."""

    task: str
    recorded_worker_s: float
    what_if_worker_s: float


class Measured(Model):
    """What the log has: the worker-seconds that the recorded plans gave to tasks, and their recorded price."""

    worker_s: float
    money: float


class Modelled(Model):
    """What the other plans would have given. ``waf_flop``: integral of their WAF, less that of the recorded plans."""

    worker_s: float
    money: float
    waf_flop: float


class Comparison(Model):
    """The result of a what-if replay.

    Attributes:
        plans: recorded plans.
        differing: those in whose place another one is decided.
        decided_anew: plans of another decider. They are compared with what this program decides of the recorded inputs.
        skipped: events of which a newer version wrote something that was left out.
        seconds: from the first recorded plan to the end of the log.
        differing_s: the part of it in which a plan is in force in whose place another one is decided.
        currency: of money.
        measured: what the log has.
        model: what the other plans would have given.
        assumptions: of the model, in words.
        tasks: the worker-seconds of each task that ever had workers, by name.
        differences: the plans that differ, by position.
    """

    plans: int
    differing: int
    decided_anew: int
    skipped: int
    seconds: float
    differing_s: float
    currency: str
    measured: Measured
    model: Modelled
    assumptions: list[str] = Field(default_factory=lambda: list(ASSUMPTIONS))
    tasks: list[TaskDifference]
    differences: list[PlanDifference]


class _Allocation(NamedTuple):
    """Workers by task once a plan is made, the kind of each task's workers, and by how much slow ones hold it up."""

    counts: dict[str, int]
    kinds: dict[str, str]
    slowdowns: dict[str, float]


def compare(source: Source, inputs: Inputs, policies: Policies = NO_POLICIES) -> Comparison:
    """Decide each cause that recorded a plan again, with changed inputs.

    Args:
        source: the log.
        inputs: what is changed.
        policies: how policies answer that simulated histories name.

    Raises:
        UnknownPolicy: a policy decided that is not among ``policies``.
        InvalidInput: a task is named that the log does not have, or is impossible with the changed inputs.
        Corrupt: the database is damaged.
    """
    return _Pass(source, inputs, policies).result()


class _Side:
    """The worker-seconds and the price of one of the two courses."""

    def __init__(self) -> None:
        self.counts: Mapping[str, int] = {}
        self.price = 0.0
        self.money = 0.0
        self._times: dict[str, timedelta] = {}

    def advance(self, time: timedelta) -> None:
        """Let time pass with the present workers."""
        for task, count in self.counts.items():
            # Whole microseconds: equal courses have equal sums, to the last bit.
            self._times[task] = self._times.get(task, timedelta()) + count * time
        self.money += (sum(self.counts.values()) * time).total_seconds() * self.price / _SECONDS_PER_HOUR

    def worker_s(self, task: str) -> float:
        return self._times.get(task, timedelta()).total_seconds()

    def total_worker_s(self) -> float:
        return sum(self._times.values(), timedelta()).total_seconds()

    def tasks(self) -> set[str]:
        return set(self._times)


class _Pass:
    """One pass over a log."""

    def __init__(self, source: Source, inputs: Inputs, policies: Policies) -> None:
        self._inputs = inputs
        answers = list(source.answers())
        self._rows = AnsweredRows(source.rows(Scan()), answers)
        self._fold = Fold(policies=policies)
        # What another decider recorded is no answer of this one: the recorded inputs are decided again, too.
        anew = any(answer.decider not in (None, DECIDER) for answer in answers)
        self._plain = Fold(policies=policies) if anew else None
        self._recorded, self._what_if = _Side(), _Side()
        self._at: datetime | None = None
        self._first_plan: datetime | None = None
        self._open: tuple[datetime, PlanDifference] | None = None
        """The newest plan, if it differs, and since when."""
        self._differences: list[PlanDifference] = []
        self._plans = self._anew = self._skipped = 0
        self._currency = ""
        self._submitted: set[str] = set()

    def result(self) -> Comparison:
        for row in self._rows:
            self._skipped += row.skipped is not None
            if row.record is not None:
                self._take(row.record)
        if self._at is not None:
            self._close(self._at)
        if unknown := sorted(self._inputs.tasks.keys() - self._submitted):
            has = ", ".join(sorted(self._submitted)) or "none"
            raise InvalidInput(f"what-if: tasks.{unknown[0]}: the log has no such task; it has: {has}")
        recorded, what_if = self._recorded, self._what_if
        return Comparison(
            plans=self._plans,
            differing=len(self._differences),
            decided_anew=self._anew,
            skipped=self._skipped,
            seconds=self._passed(self._first_plan).total_seconds(),
            differing_s=sum(difference.seconds for difference in self._differences),
            currency=self._currency,
            measured=Measured(worker_s=recorded.total_worker_s(), money=recorded.money),
            model=Modelled(worker_s=what_if.total_worker_s(), money=what_if.money, waf_flop=self._waf_flop()),
            tasks=[
                TaskDifference(
                    task=task, recorded_worker_s=recorded.worker_s(task), what_if_worker_s=what_if.worker_s(task)
                )
                for task in sorted(recorded.tasks() | what_if.tasks())
            ],
            differences=self._differences,
        )

    def _waf_flop(self) -> float:
        gains = ((d.what_if_waf_flop_per_s - d.recorded_waf_flop_per_s) * d.seconds for d in self._differences)
        return sum(gains, 0.0)

    def _take(self, record: Recorded) -> None:
        self._advance(record.recorded_at)
        changed = record.model_copy(update={"event": self._inputs.event(record.event)})
        if isinstance(record.event, TaskSubmitted):
            self._submitted.add(record.event.task)
        if isinstance(record.event, ClusterConfigured) and isinstance(changed.event, ClusterConfigured):
            self._currency = record.event.currency
            self._recorded.price = record.event.price_per_worker_hour
            self._what_if.price = changed.event.price_per_worker_hour
        if self._plain is not None:
            self._plain.take(record)
        if not self._fold.take(changed):
            return
        answer = self._rows.answers_to(record)
        events = [found.event for found in answer]
        for found in answer:
            if isinstance(found.event, PlanDecided):
                self._compare(record, changed, found.position, found.event, events)
        self._fold.answer(changed, events)
        if self._plain is not None:
            self._plain.answer(record, events)

    def _advance(self, at: datetime) -> None:
        """Let time pass with the plans as they are. ``recorded_at`` of a log that is right never falls."""
        before, self._at = self._at, at
        passed = self._passed(before)
        self._recorded.advance(passed)
        self._what_if.advance(passed)

    def _passed(self, since: datetime | None) -> timedelta:
        """Return the time from a moment, if there was one, to the present of the log."""
        return timedelta() if since is None or self._at is None else max(timedelta(), self._at - since)

    def _compare(
        self, record: Recorded, changed: Recorded, position: int, plan: PlanDecided, answer: Sequence[Event]
    ) -> None:
        """Decide a cause again, and compare with the recorded answer, which has a plan."""
        at = record.recorded_at
        self._first_plan = self._first_plan or at
        self._plans += 1
        if plan.decider != DECIDER and self._plain is not None:
            self._anew += 1
            answer = self._plain.decide(record)
        state, what_if = self._fold.state, self._fold.decide(changed)
        before, after = _allocation(state, answer, at), _allocation(state, what_if, at)
        same = _decision(answer) == _decision(what_if)
        carried = same and not _is_solved(answer)
        if carried:
            after = self._carried(before, after)
        counts = before.counts, after.counts
        if carried and counts == (self._recorded.counts, self._what_if.counts):
            return  # what differs goes on to do so
        self._close(at)
        self._recorded.counts, self._what_if.counts = counts
        if same and before.counts == after.counts:
            return
        found = PlanDifference(
            position=position,
            plan=plan.plan,
            trigger=plan.trigger,
            seconds=0.0,
            recorded_response=_response(answer),
            what_if_response=_response(what_if),
            workers=before.counts != after.counts,
            recorded=before.counts,
            what_if=after.counts,
            recorded_waf_flop_per_s=_waf_flop_per_s(state, before),
            what_if_waf_flop_per_s=_waf_flop_per_s(state, after),
        )
        self._open = at, found

    def _carried(self, before: _Allocation, after: _Allocation) -> _Allocation:
        """Return an allocation in which each task whose recorded number a plan has kept keeps the other number, too."""
        kept = {
            name: self._what_if.counts.get(name, count) if count == self._recorded.counts.get(name) else count
            for name, count in after.counts.items()
            if before.counts.get(name) == count
        }
        return after._replace(counts={**after.counts, **kept})

    def _close(self, at: datetime) -> None:
        """End the time of the newest plan, if it differs."""
        if self._open is not None:
            since, found = self._open
            seconds = max(timedelta(), at - since).total_seconds()
            self._differences.append(found.model_copy(update={"seconds": seconds}))
            self._open = None


def _allocation(state: State, answer: Sequence[Event], at: datetime) -> _Allocation:
    """Return the workers of each task that has some once an answer is made."""
    for event in answer:
        state = evolve(state, event, at)
    tasks = {name: task for name, task in sorted(state.tasks.items()) if task.members}
    kinds = {name: state.nodes[node_of(task.members[0])].hardware for name, task in tasks.items()}
    slowdowns = {name: _slowdown(state, task) for name, task in tasks.items()}
    return _Allocation({name: len(task.members) for name, task in tasks.items()}, kinds, slowdowns)


def _slowdown(state: State, task: Task) -> float:
    slowdowns = {worker: slowdown_of(state, worker) for worker in task.members}
    if task.shares and task.layout is not None:
        return slowdown_of_deal(task.shares, replica_slowdowns(task.layout, task.members, slowdowns))
    return max(slowdowns.values())


def _decision(answer: Sequence[Event]) -> object:
    """Return what an answer does, without the words and figures that explain it."""
    found: list[object] = []
    for event in answer:
        if not isinstance(event, PlanDecided):
            found.append(event.type)
            continue
        changes = [
            (
                change.task,
                change.action,
                [([member.worker for member in stage.members], stage.shares) for stage in change.stages],
            )
            for change in event.changes
        ]
        found.append((event.response, changes, sorted(event.queued)))
    return found


def _is_solved(answer: Sequence[Event]) -> bool:
    """Return whether a distribution of workers was sought for an answer."""
    return any(event.solution is not None for event in answer if isinstance(event, PlanDecided))


def _response(answer: Sequence[Event]) -> Response:
    return next((event.response for event in answer if isinstance(event, PlanDecided)), Response.NONE)


def _waf_flop_per_s(state: State, allocation: _Allocation) -> float:
    """Return the WAF of an allocation: weight times T of each task, by the tables and slowdowns of the moment.

    A task below its minimum has 0.

    Workers beyond a useful count add nothing.
    """
    total = 0.0
    for name, count in sorted(allocation.counts.items()):
        task = state.tasks[name].model_copy(update={"pool": allocation.kinds[name]})
        if count >= task.spec.workers.min:
            table = throughput_of(state, task, count)
            rate = max((table[useful] for useful in table if useful <= count), default=0.0)
            total += task.spec.weight * rate / allocation.slowdowns[name]
    return total
