"""Random small clusters, tasks and traces: seconds add up, plans are decided again, and every task goes on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.planner.replay.log_fold import Fold
from services.planner.replay.replay import Replayer
from shared.events.severities import ErrorKind
from shared.events.union import Event, PlanDecided, Recorded, TaskStopped
from simulator.policies import POLICIES, SOLVES
from simulator.policy import Policy
from simulator.run import recorder
from simulator.run.engine import simulate
from simulator.workloads.trace import Occurrence
from simulator.workloads.workload import Workload
from tests.examples import examples
from tests.simulator import small

HORIZON_S = 40_000.0
QUIET_S = 20_000.0
"""Behind this time nothing happens, so that every recovery of these policies ends: the longest takes 55 minutes."""

KINDS = [ErrorKind.PROCESS_EXIT, ErrorKind.CONNECTION, ErrorKind.HANG, ErrorKind.EXCEPTION, ErrorKind.DEVICE]

times = st.floats(0.0, QUIET_S).map(lambda at_s: round(at_s, 3))
node_names = st.sampled_from([f"n{index}" for index in range(4)])
occurrences = st.lists(
    st.one_of(
        st.builds(small.down, times, node_names),
        st.builds(small.up, times, node_names),
        st.builds(small.degraded, times, st.floats(1.2, 3.0), node_names),
        st.builds(small.error, times, st.sampled_from(KINDS), node_names),
    ),
    max_size=14,
)
round_policies = st.builds(
    lambda scope, lost, stop_s, meanwhile: small.policy(
        small.RoundTiming(lost=lost, stop_s=stop_s, meanwhile=meanwhile), scope=scope
    ),
    st.sampled_from(["cluster", "own", "fixed"]),
    st.sampled_from(["nothing", "step", "checkpoint"]),
    st.sampled_from([0.0, 30.0]),
    st.sampled_from([0.0, 0.7]),
)


def recorded(case: Workload, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Return the records of a run without a log."""
    records: list[Recorded] = []
    plain = recorder.Recorder.record

    def kept(self: recorder.Recorder, event: Event, at: object) -> Recorded:
        record = plain(self, event, at)  # type: ignore[arg-type]
        records.append(record)
        return record

    with monkeypatch.context() as patched:
        patched.setattr(recorder.Recorder, "record", kept)
        simulate(case, policy, 3, costs=False)
    return records


def check(case: Workload, policy: Policy, solves: dict[str, object]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        records = recorded(case, policy, patched)
    outcome = simulate(case, policy, 3)
    assert sum(outcome.worker_s.values()) == pytest.approx(outcome.allocated_worker_s, rel=1e-9)
    assert min(outcome.worker_s.values()) >= 0.0
    report = Replayer(records).verify(policies=solves)  # type: ignore[arg-type]
    assert report.ok, report.mismatches + report.problems
    assert outcome.accumulated_waf_flop >= 0.0
    goes_on(records)


def goes_on(records: Sequence[Recorded]) -> None:
    """Check that no plan is left half done at the end: tasks train, or wait for workers."""
    fold = Fold()
    {record.event.cause: [record.event] for record in records if isinstance(record.event, PlanDecided)}
    for record in records:
        answer = isinstance(record.event, PlanDecided | TaskStopped)
        if fold.take(record) and not answer:
            own = [
                r.event for r in records if isinstance(r.event, PlanDecided) and r.event.cause == record.event.event_id
            ]
            fold.answer(record, own)
    for task in fold.state.tasks.values():
        assert task.change is None, task.name
        assert task.members or task.queued


@settings(deadline=None, max_examples=examples(25))
@given(happens=occurrences, policy=round_policies, present=st.integers(1, 4))
def test_random_runs(happens: list[Occurrence], policy: Policy, present: int) -> None:
    tasks = small.task("a", min=2), small.task("b", weight=2.0)
    case = small.workload(*happens, tasks=tasks, nodes=4, present=present, horizon_s=HORIZON_S)
    check(case, policy, {"round": small.policy().solve})


AT_ONCE = [small.down(0.0, "n0"), small.up(0.0, "n0"), small.error(0.0, ErrorKind.PROCESS_EXIT, "n1")]
"""A plan for the lost node, and then a fault that it does not answer, in one moment."""

LEFT = [small.error(18_468.0, ErrorKind.DEVICE, "n0"), small.down(18_549.0, "n0")]
"""A node is lost that a plan is just leaving."""


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None, max_examples=examples(3))
@given(happens=occurrences)
@example(happens=AT_ONCE)
@example(happens=LEFT)
def test_random_runs_of_policies(name: str, happens: list[Occurrence]) -> None:
    tasks = small.task("a", min=2), small.task("b", weight=2.0)
    case = small.workload(*happens, tasks=tasks, nodes=4, horizon_s=HORIZON_S)
    check(case, POLICIES[name], dict(SOLVES))
