"""Events for the tests of the log: real ones, fixed and drawn."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

from hypothesis import strategies as st

from services.planner.decide import DECIDER
from shared.events.codes import FailureCode
from shared.events.measurements import Measurement, Quantity, Rate, Verdict
from shared.events.plans import Problem, Response, Solution, TaskProblem, Term, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import (
    AnomalyObserved,
    ErrorDetected,
    Event,
    FaultInjected,
    IncidentAcknowledged,
    IncidentNoted,
    IncidentObserved,
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
    Observation,
    PlanDecided,
    StateMoved,
    TaskChanged,
    TaskCheckpointFailed,
    TaskCopiesLacking,
    TaskDeleted,
    TaskFailed,
    TaskIdentified,
    TaskProgressed,
    TaskResultUnwritten,
    TaskResumeRequested,
    TaskStopRefused,
    TaskStopRequested,
    TaskSubmitted,
    TroubleAcknowledged,
    TroubleEnded,
    WorkerSlowed,
)
from shared.tasks.specification import TaskSpec

EPOCH = datetime(2024, 1, 1, tzinfo=UTC)


def event_id(number: int) -> str:
    return str(uuid.UUID(int=number))


def node_joined(number: int, node: str = "n0") -> NodeJoined:
    return NodeJoined(
        event_id=event_id(number),
        occurred_at=EPOCH + timedelta(seconds=number),
        node=node,
        incarnation=f"incarnation-{number}",
        agent_pid=number,
        domain="default",
        workers=[f"{node}/0", f"{node}/1"],
    )


def spec(name: str) -> TaskSpec:
    return TaskSpec.model_validate(
        {
            "name": name,
            "model": {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": 16},
            "batch": {"global": 12, "micro": 1},
            "steps": 40,
            "data": "synthetic",
        }
    )


def plan(number: int, throughput: dict[int, float]) -> PlanDecided:
    """A plan with tables, whose integer keys JSON turns into text."""
    problem = TaskProblem(
        name="a",
        weight=1.5,
        necessary=1,
        maximum=8,
        current=4,
        faulted=True,
        transition_s=0.1,
        running_s=1e5,
        throughput=throughput,
    )
    term = Term(name="a", workers=3, waf_flop_per_s=0.1 + 0.2, reward=1e300, penalty=5e-324, objective=-0.0)
    best = Solution(label="best", assignment={"a": 3}, objective=1 / 3, terms=[term])
    return PlanDecided(
        event_id=event_id(number),
        occurred_at=EPOCH,
        decider=DECIDER,
        plan=f"p{number}",
        trigger=Trigger.ERROR,
        cause=event_id(0),
        response=Response.RECONFIGURE,
        changes=[],
        problem=Problem(workers=7, tasks=[problem]),
        solution=best,
    )


_ids = st.uuids(version=4).map(str)
_times = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
_names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
_counts = st.integers(0, 2**62)
_finite = st.floats(allow_nan=False, allow_infinity=False)
_text = st.text(st.characters(codec="utf-8"), max_size=40)
_json: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | _finite | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)

_observations = st.builds(
    Observation,
    method=st.sampled_from(Method),
    kind=st.sampled_from(ErrorKind),
    node=st.none() | _names,
    worker=st.none() | _names.map("{}/0".format),
    rank=st.none() | _counts,
    error=_text,
    detail=_text,
    at=_times,
)

events: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        IncidentObserved,
        event_id=_ids,
        occurred_at=_times,
        incident=_ids,
        task=st.none() | _names,
        observations=st.lists(_observations, max_size=3),
        omitted=_counts,
        root_cause=_observations,
    ),
    st.builds(
        TaskStopRequested,
        event_id=_ids,
        occurred_at=_times,
        task=_names,
        lose_steps=st.booleans(),
        at_once=st.booleans(),
    ),
    st.builds(
        TaskStopRefused,
        event_id=_ids,
        occurred_at=_times,
        task=_names,
        generation=_counts,
        step=_counts,
        plan=_names,
        reason=_text,
    ),
    st.builds(TaskSubmitted, event_id=_ids, occurred_at=_times, task=_names, spec=_names.map(spec)),
    *(
        st.builds(
            TaskChanged,
            event_id=_ids,
            occurred_at=_times,
            task=_names,
            weight=_finite,
            min_workers=least,
            max_workers=most,
            requested_by=_text,
        )
        for least, most in ((_counts, st.none()), (st.just(0), _counts))
    ),
    st.builds(TaskResumeRequested, event_id=_ids, occurred_at=_times, task=_names, actor=_text),
    st.builds(TaskDeleted, event_id=_ids, occurred_at=_times, task=_names, actor=_text),
    st.builds(IncidentNoted, event_id=_ids, occurred_at=_times, incident=_ids, text=_text, actor=_text),
    st.builds(IncidentAcknowledged, event_id=_ids, occurred_at=_times, incident=_ids, actor=_text),
    st.builds(TroubleAcknowledged, event_id=_ids, occurred_at=_times, key=_ids, what=_text, actor=_text),
    st.builds(TroubleEnded, event_id=_ids, occurred_at=_times, key=_ids),
    st.builds(
        TaskCheckpointFailed,
        event_id=_ids,
        occurred_at=_times,
        task=_names,
        generation=_counts,
        step=_counts,
        worker=_names.map("{}/0".format),
        reason=_text,
    ),
    st.builds(
        TaskCopiesLacking,
        event_id=_ids,
        occurred_at=_times,
        task=_names,
        generation=_counts,
        step=_counts,
        worker=_names.map("{}/0".format),
        reason=_text,
        ended=st.booleans(),
    ),
    st.builds(
        TaskResultUnwritten,
        event_id=_ids,
        occurred_at=_times,
        task=_names,
        generation=_counts,
        step=_counts,
        worker=_names.map("{}/0".format),
        reason=_text,
        retry_at=_times,
        ended=st.booleans(),
    ),
    st.builds(
        TaskIdentified,
        event_id=_ids,
        occurred_at=_times,
        task=_names,
        generation=_counts,
        step=_counts,
        identity=st.dictionaries(_text, _text, max_size=3),
        changed=st.lists(_text, max_size=2),
    ),
    st.builds(
        TaskProgressed,
        event_id=_ids,
        occurred_at=_times,
        task=_names,
        generation=_counts,
        step=_counts,
        workers=_counts,
        step_s=_finite,
        loss=st.none() | _finite,
        memory_every=st.none() | _counts,
        replicated=st.none() | st.booleans(),
    ),
    st.builds(
        TaskFailed,
        event_id=_ids,
        occurred_at=_times,
        task=_names,
        generation=_counts,
        step=_counts,
        reason=_text,
        traceback=_text,
    ),
    st.builds(
        ErrorDetected,
        event_id=_ids,
        occurred_at=_times,
        incident=_ids,
        kind=st.sampled_from(ErrorKind),
        severity=st.sampled_from(Severity),
        method=st.sampled_from(Method),
        detected_at=_times,
        node=st.none() | _text,
        evidence=st.dictionaries(_text, _json, max_size=4),
    ),
    st.builds(
        StateMoved,
        event_id=_ids,
        occurred_at=_times,
        plan=_ids,
        task=_names,
        generation=_counts,
        phase=st.sampled_from(["held", "resumed", "restored", "failed"]),
        code=st.none() | st.sampled_from(FailureCode),
        started_at=_times,
        durations_s=st.dictionaries(_text, _finite, max_size=3),
        deal=st.dictionaries(_text, st.lists(_counts, max_size=3), max_size=3),
    ),
    st.builds(plan, number=_counts, throughput=st.dictionaries(st.integers(0, 64), _finite, max_size=5)),
    st.builds(node_joined, number=st.integers(0, 10**6), node=_names),
    st.builds(NodeCordoned, event_id=_ids, occurred_at=_times, node=_names, reason=_text),
    st.builds(
        NodeDraining,
        event_id=_ids,
        occurred_at=_times,
        node=_names,
        by=st.sampled_from(["user", "agent"]),
        timeout_s=_finite,
        save=st.booleans(),
        reason=_text,
        report=_text,
    ),
    st.builds(
        NodeReported,
        event_id=_ids,
        occurred_at=_times,
        node=_names,
        actor=_text,
        key=_names,
        severity=st.sampled_from(["warning", "error"]),
        reason=_text,
        evidence=st.dictionaries(_text, _json, max_size=3),
        expires_at=_times,
        deadline_at=st.none() | _times,
    ),
    st.builds(
        NodeMeasured,
        event_id=_ids,
        occurred_at=_times,
        node=_names,
        incarnation=_text,
        agent_pid=st.integers(1, 10**6),
        supervisor=_text,
        domain=_text,
        workers=st.lists(_names, max_size=3),
        measurement=st.builds(
            Measurement,
            device=_names,
            count=st.integers(0, 64),
            rates=st.lists(
                st.builds(
                    Rate,
                    quantity=st.sampled_from(get_args(Quantity)),
                    device=st.none() | st.integers(0, 15),
                    value=st.floats(0, 1e18),
                    bound=st.none() | st.floats(0, 1e18),
                    basis=_text,
                ),
                max_size=3,
            ),
            problems=st.lists(_names, max_size=2),
        ),
        verdict=st.sampled_from(get_args(Verdict)),
        reason=_text,
    ),
    st.builds(
        NodeReportHeld,
        event_id=_ids,
        occurred_at=_times,
        node=_names,
        report=_text,
        why=st.sampled_from(["budget", "minimum"]),
        reason=_text,
    ),
    st.builds(NodeDrained, event_id=_ids, occurred_at=_times, node=_names),
    st.builds(
        NodeAdopted,
        event_id=_ids,
        occurred_at=_times,
        node=_names,
        incarnation=_text,
        predecessor=_text,
        agent_pid=st.integers(1, 1 << 22),
    ),
    st.builds(NodeReturned, event_id=_ids, occurred_at=_times, node=_names, incarnation=_text),
    st.builds(NodeLeft, event_id=_ids, occurred_at=_times, node=_names, incarnation=_text, reason=_text),
    st.builds(
        WorkerSlowed,
        event_id=_ids,
        occurred_at=_times,
        node=_names,
        worker=_names.map("{}/0".format),
        slowdown=st.floats(1.0, 1e6),
        task=_names,
        generation=_counts,
        rank=st.none() | _counts,
        step=_counts,
        evidence=st.dictionaries(_text, _json, max_size=4),
    ),
    st.builds(
        AnomalyObserved,
        event_id=_ids,
        occurred_at=_times,
        task=_names,
        kind=st.sampled_from(["loss-spike", "throughput-regression", "slow-link"]),
        generation=_counts,
        step=_counts,
        value=_finite,
        expected=_finite,
        detected_at=_times,
        ended=st.booleans(),
        evidence=st.dictionaries(_text, _json, max_size=4),
    ),
    st.builds(FaultInjected, event_id=_ids, occurred_at=_times, fault=_text, task=_names, rank=_counts, actor=_text),
)
