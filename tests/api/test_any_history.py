"""Laws of the fold that hold for every history, sensible or not."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.api.live import LiveState
from services.api.present import task as show
from services.planner.decide import DECIDER
from shared.costs.report import NO_COST
from shared.events.measurements import Measurement
from shared.events.plans import Response, TaskChange, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import (
    ErrorDetected,
    Event,
    IncidentAcknowledged,
    IncidentNoted,
    NodeAdopted,
    NodeCordoned,
    NodeDrained,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeMeasured,
    NodeReported,
    NodeReportHeld,
    NodeReturned,
    PlanDecided,
    Recorded,
    StateMoved,
    TaskChanged,
    TaskCheckpointed,
    TaskCheckpointFailed,
    TaskCopiesLacking,
    TaskDeleted,
    TaskFailed,
    TaskFinished,
    TaskIdentified,
    TaskProgressed,
    TaskResultUnwritten,
    TaskStopped,
    TaskStopRefused,
    TaskStopRequested,
    TaskSubmitted,
    TroubleAcknowledged,
    TroubleEnded,
)
from shared.projections.evolve import evolve
from shared.views.documents import ClusterView, PlanState, Views
from tests.api.accounting import allocated_worker_s
from tests.api.kit import START, cost_report, other_answers, spec, stage

TASKS = ["a", "b"]
WORKERS = ["n0/0", "n0/1", "n1/0"]
PLANS = ["p0", "p1", "p2", "p3"]
PHASES = ["held", "prepared", "resumed", "drained", "released", "restored", "ended", "failed"]

times = st.integers(0, 500).map(lambda seconds: START + timedelta(seconds=seconds))
names = st.sampled_from(TASKS)
generations = st.integers(1, 4)
workers = st.lists(st.sampled_from(WORKERS), unique=True)


def stages(kind: str) -> st.SearchStrategy[Any]:
    members = st.lists(st.sampled_from(WORKERS), unique=True, min_size=1)
    return st.none() | st.builds(lambda generation, who: stage(generation, who, kind=kind), generations, members)


changes = st.builds(
    TaskChange,
    task=names,
    reason=st.just("why"),
    action=st.sampled_from(["move", "stop", "pause", "end", "none"]),
    from_generation=generations,
    survivors=workers,
    failed=workers,
    hold=st.booleans(),
    interrupted=stages("interrupted"),
    release=workers,
    prepare=workers,
    target=stages("boundary"),
)
base = {"event_id": st.just("x"), "occurred_at": times}
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(lambda name, at: TaskSubmitted(event_id="x", occurred_at=at, task=name, spec=spec(name)), names, times),
    st.builds(TaskStopRequested, task=names, lose_steps=st.booleans(), at_once=st.booleans(), **base),
    st.builds(TaskStopRefused, task=names, generation=generations, step=st.integers(0, 9),
              plan=st.sampled_from(PLANS), reason=st.just("full"), **base),
    st.builds(TaskProgressed, task=names, generation=generations, step=st.integers(0, 9), workers=st.just(1),
              step_s=st.floats(0, 10), **base),
    st.builds(TaskCheckpointed, task=names, generation=generations, step=st.integers(0, 9), path=st.just("/c"), **base),
    st.builds(TaskIdentified, task=names, generation=generations, step=st.integers(0, 9),
              identity=st.just({"a": "c"}), changed=st.sampled_from([[], ["a: b -> c"]]), **base),
    st.builds(TaskCheckpointFailed, task=names, generation=generations, step=st.integers(0, 9),
              worker=st.just("n0/0"), reason=st.just("full"), **base),
    st.builds(TaskResultUnwritten, task=names, generation=generations, step=st.just(9), worker=st.just("n0/0"),
              reason=st.just("full"), retry_at=times, ended=st.booleans(), **base),
    st.builds(TaskCopiesLacking, task=names, generation=generations, step=st.integers(0, 9),
              worker=st.just("n0/0"), reason=st.just("gone"), ended=st.booleans(), **base),
    st.builds(TaskStopped, task=names, generation=generations, step=st.integers(0, 9), path=st.just("/c"), **base),
    st.builds(TaskFinished, task=names, generation=generations, step=st.just(9), samples_sha256=st.just("s"),
              parameters_path=st.just("/p"), **base),
    st.builds(TaskChanged, task=names, weight=st.sampled_from([0.5, 1.0, 3.0]), min_workers=st.just(1),
              max_workers=st.sampled_from([None, 1, 2]), **base),
    st.builds(TaskChanged, task=names, weight=st.just(1.0), min_workers=st.just(2),
              max_workers=st.sampled_from([None, 2]), **base),
    st.builds(TaskDeleted, task=names, **base),
    st.builds(IncidentNoted, incident=st.sampled_from(["i0", "i1"]), text=st.just("t"), **base),
    st.builds(IncidentAcknowledged, incident=st.sampled_from(["i0", "i1"]), **base),
    st.builds(TroubleAcknowledged, key=st.sampled_from(["queue", "control-plane"]), what=st.just("w"), **base),
    st.builds(TroubleEnded, key=st.sampled_from(["queue", "control-plane"]), **base),
    st.builds(TaskFailed, task=names, generation=generations, step=st.just(1), reason=st.just("r"),
              incident=st.sampled_from(["", "i0"]), **base),
    st.builds(NodeJoined, node=st.just("n0"), incarnation=st.just("x"), agent_pid=st.just(1), domain=st.just("d"),
              workers=workers, **base),
    st.builds(NodeCordoned, node=st.just("n0"), reason=st.just("r"), **base),
    st.builds(NodeDraining, node=st.just("n0"), by=st.sampled_from(["user", "agent"]), timeout_s=st.just(60.0), **base),
    st.builds(NodeDrained, node=st.just("n0"), **base),
    st.builds(NodeAdopted, node=st.just("n0"), incarnation=st.just("y"), predecessor=st.just("x"),
              agent_pid=st.just(2), **base),
    st.builds(NodeReturned, node=st.just("n0"), incarnation=st.just("x"), **base),
    st.builds(NodeReported, node=st.just("n0"), actor=st.just("token/a"), key=st.sampled_from(["a", "b"]),
              severity=st.sampled_from(["warning", "error"]), reason=st.just("r"), expires_at=times, **base),
    st.builds(NodeReportHeld, node=st.just("n0"), report=st.sampled_from(["token/a/a", "token/a/b"]),
              why=st.just("budget"), reason=st.just("r"), **base),
    st.builds(NodeMeasured, node=st.just("n0"), incarnation=st.sampled_from(["x", "y"]), agent_pid=st.just(1),
              domain=st.just("d"), workers=workers, measurement=st.just(Measurement(device="a", count=1)),
              verdict=st.sampled_from(["accepted", "refused", "reported"]), reason=st.just("r"), **base),
    st.builds(NodeLeft, node=st.just("n0"), incarnation=st.just("x"), reason=st.just("r"), **base),
    st.builds(ErrorDetected, incident=st.sampled_from(["i0", "i1"]), kind=st.sampled_from(ErrorKind),
              severity=st.sampled_from(Severity), method=st.sampled_from(Method), detected_at=times,
              node=st.sampled_from(["n0", None]), task=st.none() | names, **base),
    st.builds(PlanDecided, decider=st.just(DECIDER), plan=st.just("set later"), trigger=st.sampled_from(Trigger),
              cause=st.just("c"),
              incident=st.sampled_from(["i0", "i1", None]), response=st.sampled_from(Response),
              supersedes=st.lists(st.sampled_from(PLANS), unique=True),
              changes=st.lists(changes, max_size=2, unique_by=lambda change: change.task), **base),
    st.builds(StateMoved, plan=st.sampled_from(PLANS), task=names, generation=generations,
              phase=st.sampled_from(PHASES), started_at=times, step=st.integers(0, 9),
              steps_recomputed=st.integers(0, 3), complete=st.booleans(), **base),
)  # fmt: skip


def record(history: list[Event]) -> list[Recorded]:
    """Give events their places; a plan its id, which is never used twice."""
    versions: Counter[str] = Counter()
    records: list[Recorded] = []
    plans = 0
    for event in history:
        if isinstance(event, PlanDecided):
            event = event.model_copy(update={"plan": f"p{plans}"})
            plans += 1
        versions[event.stream] += 1
        position = len(records) + 1
        recorded_at: datetime = START + timedelta(seconds=10 * position)
        records.append(
            Recorded(
                position=position,
                stream=event.stream,
                stream_version=versions[event.stream],
                recorded_at=recorded_at,
                event=event,
                previous_hash="",
                hash="",
            )
        )
    return records


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(events, max_size=25))
def test_every_history_folds_and_its_costs_add_up(history: list[Event]) -> None:
    views = Views()
    records = record(history)
    for recorded in records:
        evolve(views, recorded)
    for name, task in views.tasks.items():
        assert show(task, LiveState()).state is task.state
        assert task.version == sum(event.stream == f"task/{name}" for event in history)
    for plan in views.plans.values():
        # A plan that is still outstanding has some task to do, and each of its tasks knows it.
        assert plan.state is not PlanState.OUTSTANDING or plan.outstanding
        assert set(plan.outstanding) <= set(plan.impacts)
    now = START + timedelta(seconds=600)
    costs = cost_report(views, now, ClusterView(price_per_worker_hour=1.0), period="day")
    assert costs.sum_check.ok
    allocated = allocated_worker_s(records, now)
    assert costs.allocated_worker_s == pytest.approx(allocated, abs=1e-6)
    shares = [[share.categories for share in part] for part in costs.breakdowns.values()]
    shares.append([bucket.categories for bucket in costs.buckets])
    for parts in ([costs.categories], *shares):
        assert sum(sum(kinds.values()) for kinds in parts) == pytest.approx(allocated, abs=1e-6)
        assert all(seconds >= 0.0 for kinds in parts for seconds in kinds.values())
    # A window has what lies in it, and two windows that meet have what both have together.
    middle = START + timedelta(seconds=123)
    halves = [cost_report(views, now, end=middle), cost_report(views, now, start=middle)]
    for kind, seconds in costs.categories.items():
        assert sum(half.categories[kind] for half in halves) == pytest.approx(seconds, abs=1e-6)
    assert all(half.sum_check.ok for half in halves)
    for level in ("achieved_flop", "healthy_flop"):
        whole = getattr(costs.service, level)
        assert sum(getattr(half.service, level) for half in halves) == pytest.approx(whole, rel=1e-6)
    assert all(row.worker_s >= 0 for row in costs.tasks)
    assert all(other.lost_flop >= 0 for i in views.incidents for other in other_answers(views, now, i, NO_COST))
    held = costs.totals.worker_s
    assert held <= costs.allocated_worker_s + 1e-6 <= len(WORKERS) * 600  # three workers, ten minutes
