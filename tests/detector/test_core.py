"""The cluster monitor's decisions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detector.core import Clean
from services.detector.node import Node
from services.detector.view import View, evolve
from shared.events import ErrorDetected, NodeJoined, TaskCheckpointed, TaskFailed, TaskFinished, TaskProgressed
from shared.plans import Response, TaskChange
from shared.severities import ErrorKind, Method, Severity
from shared.signals import RankCheckpointed, RankFinished, Signal
from tests.detector.kit import START, Cluster, at, moved, only_error, plan, restart_plan, stage


def complete(name: str, cluster: Cluster, generation: int, step: int = 17) -> None:
    cluster.fold(moved(name, generation - 1, "resumed", step=step))
    cluster.fold(moved(name, generation, "restored", step=step, complete=True))
    cluster.generation = generation


# ---- nodes


def test_a_node_joins_with_its_first_heartbeat_and_not_again() -> None:
    cluster = Cluster(1)
    assert cluster.beat("n0", 1.0).events == []
    joined = cluster.beat("n1", 1.0, task=None).events
    assert [type(e) for e in joined] == [NodeJoined]
    assert joined[0].node == "n1"
    assert joined[0].workers == ["n1/0"]
    assert cluster.beat("n1", 1.2, task=None).events == []


def test_a_silent_node_is_lost_with_all_its_tasks() -> None:
    cluster = Cluster()
    cluster.listen_until(10.0)
    for node in ("n0", "n1", "n2"):
        cluster.beat(node, 10.0)
    for node in ("n0", "n1"):
        cluster.beat(node, 11.4)
    for tenth in range(1, 15):
        assert cluster.tick(10.0 + tenth / 10) == []
    error = only_error(cluster.tick(11.6))
    assert (error.kind, error.severity, error.method) == (ErrorKind.NODE_LOST, Severity.SEV1, Method.NODE_HEALTH)
    assert (error.node, error.task, error.worker) == ("n2", None, None)
    assert error.occurred_at == at(10.0)
    assert error.detected_at == at(11.6)
    assert error.evidence["tasks"]["gpt"]["workers"] == ["n2/0"]
    assert cluster.tick(11.7) == []


def test_the_end_of_ranks_on_a_lost_node_is_no_incident_of_its_own() -> None:
    cluster = Cluster()
    lost = only_error(lose(cluster, "n2"))
    assert cluster.signal(cluster.exited("n2/0", 12.0), 12.0) == []
    # The survivors' broken sockets are explained by it.
    assert cluster.signal(cluster.raised("n0/0", 12.0, "communication"), 12.0) == []
    for node in ("n0", "n1"):
        cluster.beat(node, 12.3)
        cluster.beat(node, 13.0)
    assert cluster.tick(13.0) == []
    assert lost.evidence["incarnation"] == "first n2"


def test_a_node_that_comes_back_is_cleaned_before_it_joins() -> None:
    cluster = Cluster()
    lose(cluster, "n2")
    back = cluster.beat("n2", 20.0)
    assert back.events == []
    assert back.cleans == [Clean(node="n2", task="gpt", generation=1, workers=["n2/0"])]
    assert cluster.beat("n2", 20.2).cleans == []  # not with every heartbeat
    assert [type(e) for e in cluster.beat("n2", 20.4, task=None).events] == [NodeJoined]
    assert cluster.beat("n2", 20.6, task=None).events == []


def test_a_node_that_a_paused_plan_had_reached_is_cleaned_with_a_generation_it_accepts() -> None:
    cluster = Cluster()
    growing = TaskChange(
        task="gpt",
        reason="grows",
        action="move",
        from_generation=1,
        survivors=cluster.workers[:2],
        prepare=["n2/0"],
        target=stage(2, cluster.workers),
    )
    cluster.fold(plan("p2", "e", growing))
    # Its agent has been told to prepare for generation 2; the answer to its loss leads to no generation.
    agent = Node.create("n2", "first n2", 1)
    assert agent.admit("gpt", 2, "p2")
    lost = only_error(lose(cluster, "n2"))
    pausing = TaskChange(task="gpt", reason="too few", action="pause", from_generation=1, survivors=cluster.workers[:2])
    cluster.fold(plan("p3", lost.event_id, pausing))
    [clean] = cluster.beat("n2", 20.0, state="ready", generation=2).cleans
    assert clean == Clean(node="n2", task="gpt", generation=2, workers=["n2/0"])
    assert agent.admit(clean.task, clean.generation, "clean/n2")


def test_a_new_incarnation_means_that_the_old_one_is_lost() -> None:
    cluster = Cluster()
    cluster.beat("n2", 5.0)
    events = cluster.beat("n2", 5.3, task=None, incarnation="second").events
    assert [type(e) for e in events] == [ErrorDetected, NodeJoined]
    assert events[0].kind is ErrorKind.NODE_LOST
    assert events[0].evidence["incarnation"] == "first n2"
    assert events[1].incarnation == "second"
    # A late heartbeat of the old one changes nothing.
    assert cluster.beat("n2", 5.1).events == []
    assert cluster.monitor.view.nodes["n2"].incarnation == "second"


def test_a_deaf_monitor_blames_no_node() -> None:
    cluster = Cluster()
    for node in ("n0", "n1", "n2"):
        cluster.beat(node, 1.0)
    for tenth in range(10, 80):
        assert cluster.tick(tenth / 10, echo=False) == []
    # The bus is back: clients get time to reconnect.
    for tenth in range(80, 110):
        assert cluster.tick(tenth / 10) == []
    events = [event for tenth in range(110, 140) for event in cluster.tick(tenth / 10)]
    assert {e.node for e in events if isinstance(e, ErrorDetected)} == {"n0", "n1", "n2"}


def lose(cluster: Cluster, node: str) -> list[Any]:
    """Bring all nodes to second 10, and let one fall silent there."""
    cluster.listen_until(10.0)
    for name in cluster.names:
        cluster.beat(name, 10.0)
    for tenth in range(101, 117):
        for name in cluster.names:
            if name != node:
                cluster.beat(name, tenth / 10)
        if events := cluster.tick(tenth / 10):
            return events
    return []


# ---- processes and exceptions


def test_a_killed_rank_is_an_incident_with_the_evidence_a_reader_needs() -> None:
    cluster = Cluster()
    for node in cluster.names:
        cluster.beat(node, 1.0, step=16, micro_batch=3)
    signal = cluster.exited("n1/0", 1.1)
    error = only_error(cluster.signal(signal, 1.11))
    assert (error.kind, error.severity, error.method) == (
        ErrorKind.PROCESS_EXIT,
        Severity.SEV2,
        Method.PROCESS_SUPERVISION,
    )
    assert (error.task, error.worker, error.node, error.rank) == ("gpt", "n1/0", "n1", 1)
    assert (error.generation, error.step, error.incident) == (1, 16, error.event_id)
    assert (error.occurred_at, error.detected_at) == (at(1.1), at(1.11))
    assert error.evidence["exit"] == "SIGKILL"
    assert error.evidence["last_output"] == "the end"
    assert error.evidence["ranks"]["n0/0"]["micro_batch"] == 3
    # The same signal again has no effect.
    assert cluster.signal(signal, 1.2) == []


@pytest.mark.parametrize("order", list(itertools.permutations(["exception", "exit", "peer 0", "peer 2"])))
def test_one_failure_is_one_incident_in_whatever_order_its_signals_come(order: tuple[str, ...]) -> None:
    cluster = Cluster()
    signals: dict[str, Signal] = {
        "exception": cluster.raised("n1/0", 1.0, "exception"),
        "exit": cluster.exited("n1/0", 1.05, code=1),
        "peer 0": cluster.raised("n0/0", 1.01, "communication"),
        "peer 2": cluster.raised("n2/0", 1.02, "communication"),
    }
    events = [e for name in order for e in cluster.signal(signals[name], 1.1)]
    for node in cluster.names:
        cluster.beat(node, 2.0)
    events += cluster.tick(2.1)
    error = only_error(events)
    assert error.worker == "n1/0"
    first = min(["exception", "exit"], key=order.index)
    assert error.kind is (ErrorKind.EXCEPTION if first == "exception" else ErrorKind.PROCESS_EXIT)


def test_two_killed_ranks_are_two_incidents() -> None:
    cluster = Cluster()
    events = []
    for worker in ("n0/0", "n1/0"):
        events += cluster.signal(cluster.exited(worker, 1.0), 1.0)
    assert [e.worker for e in events] == ["n0/0", "n1/0"]
    assert events[0].incident != events[1].incident


def test_non_finite_numbers_are_told_once_for_each_process_they_end() -> None:
    cluster = Cluster()
    events = []
    for worker in cluster.workers[:2]:
        events += cluster.signal(cluster.raised(worker, 1.0, "non_finite"), 1.0)
        events += cluster.signal(cluster.exited(worker, 1.1, code=1), 1.1)
    assert [e.worker for e in events] == cluster.workers[:2]
    error = events[0]
    assert (error.kind, error.severity, error.method) == (ErrorKind.NON_FINITE, Severity.SEV2, Method.STATISTICS)


def test_broken_sockets_without_a_cause_are_a_connection_fault_once_all_nodes_have_reported() -> None:
    cluster = Cluster()
    cluster.monitor.signal(cluster.raised("n0/0", 1.0, "communication"), at(1.0))
    cluster.beat("n0", 1.3)
    cluster.beat("n1", 1.3)
    assert cluster.tick(1.35) == []
    cluster.beat("n2", 1.4)
    error = only_error(cluster.tick(1.45))
    assert (error.kind, error.severity, error.worker) == (ErrorKind.CONNECTION, Severity.SEV3, "n0/0")
    assert cluster.tick(1.5) == []


@pytest.mark.parametrize("away_s", [1.0, 4.0])
def test_a_bus_that_was_away_does_not_make_a_node_report(away_s: float) -> None:
    """Its silence is excused meanwhile; that is no word of its ranks, who may have gone with it."""
    cluster = Cluster()
    cluster.listen_until(1.0)
    for node in cluster.names:
        cluster.beat(node, 0.9)
    cluster.monitor.signal(cluster.raised("n0/0", 1.0, "communication"), at(1.0))
    back_s = 1.0 + away_s
    for node in ("n0", "n1"):
        cluster.beat(node, back_s)
    assert cluster.tick(back_s) == []
    assert cluster.tick(back_s + 0.1) == []
    assert cluster.monitor.view.nodes["n2"].lost is None


def test_a_dead_rank_in_a_heartbeat_leaves_the_suspicion_to_its_exit() -> None:
    cluster = Cluster()
    cluster.monitor.signal(cluster.raised("n0/0", 1.0, "communication"), at(1.0))
    for node in ("n0", "n2"):
        cluster.beat(node, 1.4)
    cluster.beat("n1", 1.4, task=None)
    assert cluster.tick(1.45) == []
    error = only_error(cluster.signal(cluster.exited("n1/0", 0.99), 1.5))
    assert error.evidence["broken_sockets_of"] == ["n0/0"]


def test_signals_of_older_generations_and_unknown_tasks_are_dropped() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    complete("p2", cluster, 3)
    old = cluster.exited("n0/0", 2.0, generation=1)
    assert cluster.signal(old, 2.0) == []
    unknown = cluster.exited("n0/0", 2.0, task="other")
    assert cluster.signal(unknown, 2.0) == []
    only_error(cluster.signal(cluster.exited("n0/0", 2.0), 2.0))


# ---- escalation


def test_a_survivor_that_dies_during_a_plan_is_an_incident_of_its_own() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    second = only_error(cluster.signal(cluster.exited("n2/0", 1.2), 1.2))
    assert second.severity is Severity.SEV2
    assert second.escalates is None
    # The first plan's failure follows from it.
    assert cluster.fold(moved("p2", 2, "failed", failed_workers=["n2/0"])).events == []


@pytest.mark.parametrize("signal_first", [True, False])
def test_a_failed_restart_becomes_sev1_once(signal_first: bool) -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    exited = cluster.exited("n1/0", 2.0, code=1, step=0, generation=2, rank=None)
    failed = moved("p2", 3, "failed", failed_workers=["n1/0"], detail="exited with 1")
    if signal_first:
        events = cluster.signal(exited, 2.0) + cluster.fold(failed).events
    else:
        events = cluster.fold(failed).events + cluster.signal(exited, 2.0)
    escalated = only_error(events)
    assert (escalated.severity, escalated.escalates, escalated.incident) == (
        Severity.SEV1,
        error.event_id,
        error.incident,
    )
    assert (escalated.node, escalated.worker) == ("n1", "n1/0")


def test_the_first_failure_on_a_node_that_a_lost_one_made_join_is_no_reason_to_give_it_up() -> None:
    cluster = Cluster(4)
    lost = only_error(lose(cluster, "n1"))
    workers = ["n0/0", "n2/0", "n3/0"]
    change = TaskChange(
        task="gpt", reason="replace", action="move", from_generation=1, survivors=workers[:2], hold=True,
        interrupted=stage(2, workers[:2], kind="interrupted"), prepare=["n3/0"], target=stage(3, workers),
    )  # fmt: skip
    cluster.fold(plan("p2", lost.event_id, change, response=Response.RECONFIGURE))
    first = only_error(cluster.signal(cluster.exited("n3/0", 12.0, code=1, generation=2, rank=None), 12.0))
    assert (first.severity, first.escalates, first.incident) == (Severity.SEV2, None, first.event_id)
    # Its restart may fail, too; then it is given up.
    change = change.model_copy(update={"failed": ["n3/0"], "from_generation": 3, "target": stage(5, workers)})
    change = change.model_copy(update={"interrupted": stage(4, workers[:2], kind="interrupted")})
    cluster.fold(plan("p3", first.event_id, change))
    second = only_error(cluster.signal(cluster.exited("n3/0", 13.0, code=2, generation=4, rank=None), 13.0))
    assert (second.severity, second.escalates, second.node) == (Severity.SEV1, first.event_id, "n3")


def test_a_failed_retry_becomes_sev2() -> None:
    cluster = Cluster()
    cluster.monitor.signal(cluster.raised("n0/0", 1.0, "communication"), at(1.0))
    for node in cluster.names:
        cluster.beat(node, 1.5)
    error = only_error(cluster.tick(1.5))
    retry = stage(2, cluster.workers, kind="interrupted")
    change = TaskChange(
        task="gpt", reason="retry", action="move", from_generation=1, survivors=cluster.workers, interrupted=retry
    )
    cluster.fold(plan("p2", error.event_id, change, response=Response.RETRY))
    escalated = only_error(cluster.fold(moved("p2", 2, "failed", detail="again")).events)
    assert (escalated.severity, escalated.incident) == (Severity.SEV2, error.incident)


def test_plans_that_crossed_blame_no_node() -> None:
    cluster = Cluster()
    lost = only_error(lose(cluster, "n1"))
    survivors = ["n0/0", "n2/0"]
    change = TaskChange(
        task="gpt", reason="shrink", action="none", from_generation=1, survivors=survivors, hold=True,
        interrupted=stage(2, survivors, kind="interrupted"),
    )  # fmt: skip
    cluster.fold(plan("p2", lost.event_id, change))
    detail = "released: hold: an earlier plan released n2/0"
    error = only_error(cluster.fold(moved("p2", 2, "failed", failed_workers=["n2/0"], detail=detail)).events)
    assert (error.kind, error.severity) == (ErrorKind.TRANSITION_FAILED, Severity.SEV2)
    assert (error.worker, error.incident, error.escalates) == ("n2/0", lost.incident, None)


def test_a_start_that_fails_is_an_incident() -> None:
    cluster = Cluster()
    change = TaskChange(
        task="gpt", reason="grow", action="move", from_generation=1, survivors=cluster.workers, prepare=["n3/0"]
    )
    cluster.fold(plan("p2", "n3 joined", change, response=Response.RECONFIGURE))
    error = only_error(cluster.fold(moved("p2", 2, "failed", failed_workers=["n3/0"])).events)
    assert (error.kind, error.severity, error.node) == (ErrorKind.TRANSITION_FAILED, Severity.SEV2, "n3")
    assert error.incident == error.event_id


def test_a_superseded_plan_cannot_fail_any_more() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    second = only_error(cluster.signal(cluster.exited("n2/0", 1.2), 1.2))
    restart_plan("p3", second, cluster, "n2/0", generation=3)
    assert cluster.fold(moved("p2", 2, "failed", failed_workers=["n2/0"])).events == []


# ---- the same failure again and again


def fail_again(cluster: Cluster, times: int, *, step: int = 16, gap_s: float = 10.0) -> list[Any]:
    """A rank raises at the same step, is restarted, and raises again."""
    events: list[Any] = []
    for index in range(times):
        now = at(1.0 + index * gap_s)
        signal = cluster.raised("n1/0", 1.0 + index * gap_s, "exception", step=step)
        events += cluster.monitor.signal(signal, now).events
        if isinstance(events[-1], ErrorDetected):
            restart_plan(f"p{index + 2}", events[-1], cluster, "n1/0", generation=cluster.generation)
            complete(f"p{index + 2}", cluster, cluster.generation + 2)
    return events


def test_the_same_failure_more_than_max_restarts_times_ends_the_task() -> None:
    cluster = Cluster()
    events = fail_again(cluster, 4)
    assert [type(e) for e in events] == [ErrorDetected] * 3 + [TaskFailed]
    assert {e.severity for e in events[:3]} == {Severity.SEV2}
    assert "ValueError" in events[3].reason
    assert "4 times" in events[3].reason
    assert events[3].traceback == "Traceback ..."
    assert events[3].incident == events[2].incident
    # What its ranks do from here on is nobody's concern.
    assert cluster.signal(cluster.exited("n0/0", 60.0), 60.0) == []


def test_no_restart_is_allowed_with_max_restarts_zero() -> None:
    assert [type(e) for e in fail_again(Cluster(max_restarts=0), 1)] == [TaskFailed]


def test_failures_outside_the_window_do_not_count() -> None:
    assert [type(e) for e in fail_again(Cluster(), 6, gap_s=300.0)] == [ErrorDetected] * 6


def test_ranks_that_fail_alike_in_one_generation_count_once() -> None:
    cluster = Cluster(max_restarts=1)
    events = []
    for worker in cluster.workers:
        events += cluster.signal(cluster.raised(worker, 1.0, "exception"), 1.0)
    assert [type(e) for e in events] == [ErrorDetected] * 3


def test_a_repeated_failure_blames_no_node() -> None:
    """The restarted rank raises again at the same step before the plan is done: a bug, not a bad node."""
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.raised("n1/0", 1.0, "exception"), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    again = cluster.raised("n1/0", 2.0, "exception", generation=3)
    second = only_error(cluster.signal(again, 2.0))
    assert second.severity is Severity.SEV2
    assert second.evidence["occurrences"] == 2


# ---- effects and progress


def test_effects_count_only_in_the_current_generation() -> None:
    cluster = Cluster()
    about: dict[str, Any] = {**cluster._about("n0/0", 1.0, 20), "path": "/c"}
    old = RankCheckpointed.model_validate({**about, "generation": 0})
    assert cluster.signal(old, 1.0) == []
    kept = cluster.signal(RankCheckpointed.model_validate(about), 1.0)
    assert [type(e) for e in kept] == [TaskCheckpointed]
    done = {**cluster._about("n0/0", 2.0, 100), "samples_sha256": "ab", "parameters_path": "/p", "loss": 1.0}
    finished = cluster.signal(RankFinished.model_validate(done), 2.0)
    assert [type(e) for e in finished] == [TaskFinished]
    assert cluster.signal(RankFinished.model_validate(done), 2.1) == []


def test_an_effect_is_told_once_whatever_time_its_repeat_bears() -> None:
    cluster = Cluster()
    ahead = {**cluster._about("n0/0", 9.0, 20), "path": "/c"}  # the node's clock is ahead of the monitor's
    saved = RankCheckpointed.model_validate(ahead)
    [event] = cluster.signal(saved, 1.0)
    assert event.occurred_at == at(1.0)
    assert cluster.signal(saved, 1.1) == []
    assert cluster.signal(saved.model_copy(update={"signal_id": "another", "occurred_at": at(1.2)}), 1.3) == []
    next_one = saved.model_copy(update={"step": 21, "path": "/d"})
    assert [e.step for e in cluster.signal(next_one, 1.4)] == [21]
    error = only_error(cluster.signal(cluster.exited("n1/0", 2.0), 2.0))
    restart_plan("p2", error, cluster, "n1/0")
    assert cluster.signal(saved, 2.1) == []
    cluster.fold(moved("p2", 2, "resumed"), moved("p2", 3, "restored"))
    for generation in (2, 3):
        later = saved.model_copy(update={"generation": generation})
        assert len(cluster.signal(later, 3.0)) == 1
        assert cluster.signal(later, 3.1) == []


def test_progress_is_summarised_when_a_rate_is_known_and_then_at_intervals() -> None:
    cluster = Cluster()
    events = []
    for step in range(1, 61):
        now = step * 0.25
        decision = cluster.beat("n0", now, step=step, step_s=0.2 if step % 3 else 0.4, steps_timed=step, loss=2.0)
        events += [(now, e) for e in decision.events]
    assert all(isinstance(e, TaskProgressed) for _, e in events)
    assert [now for now, _ in events] == [0.5, 5.5, 10.5]
    assert events[-1][1].step_s == 0.2
    assert (events[-1][1].workers, events[-1][1].loss) == (3, 2.0)


# ---- restarts of the monitor


def test_a_restarted_monitor_repeats_nothing() -> None:
    cluster = Cluster()
    signal = cluster.exited("n1/0", 1.0)
    error = only_error(cluster.signal(signal, 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    view = cluster.monitor.view
    successor = Cluster()
    successor.monitor.fold(error)
    restart_plan("p2", error, successor, "n1/0")
    assert successor.signal(signal, 5.0) == []
    assert successor.monitor.view.tasks["gpt"].covered == view.tasks["gpt"].covered


def test_an_unanswered_failure_is_escalated_after_a_restart_and_an_answered_one_is_not() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    failed = moved("p2", 3, "failed", failed_workers=["n1/0"])
    cluster.monitor.fold(failed)
    escalated = only_error(cluster.monitor.escalate(at(9.0)).events)
    assert cluster.monitor.escalate(at(9.1)).events == []
    answered = Cluster()
    answered.monitor.fold(error)
    restart_plan("p2", error, answered, "n1/0")
    answered.monitor.fold(failed)
    answered.monitor.fold(escalated)
    assert answered.monitor.escalate(at(9.0)).events == []


def test_events_of_unknown_tasks_and_nodes_fold_without_harm() -> None:
    view = View()
    cluster = Cluster(1)
    evolve(view, moved("p9", 4, "restored", complete=True))
    lost = lose(cluster, "n0")
    for event in lost:
        evolve(view, event)
    assert "gpt" in view.tasks


# ---- no false alarm

beats = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.floats(0.05, 0.9),  # what a node's next heartbeat takes: late on a busy machine, never lost
        st.sampled_from(["begun", "compute", "reduce", "update", "ended", "setup", "checkpoint", "waiting"]),
        st.floats(0.0, 2.9),
        st.floats(0.01, 5.0),
    ),
    max_size=120,
)


@given(beats)
def test_ordinary_heartbeats_in_any_interleaving_raise_no_error(
    beats: list[tuple[int, float, str, float, float]],
) -> None:
    cluster = Cluster()
    due = dict.fromkeys(cluster.names, 0.0)
    steps = dict.fromkeys(cluster.names, 0)
    now = 0.0
    for index, gap_s, phase, age_s, step_s in beats:
        target = now + gap_s / 3
        while now + 0.1 < target:
            now += 0.1
            assert not [e for e in cluster.tick(now) if isinstance(e, ErrorDetected)]
        now = target
        chosen = cluster.names[index]
        for node in cluster.names:
            if node == chosen or now - due[node] > 0.9:
                due[node] = now
                steps[node] += phase == "ended"
                status = {"phase": phase, "progress_age_s": age_s, "step": steps[node]}
                timed = {"step_s": step_s, "steps_timed": steps[node]}
                decision = cluster.beat(node, now, **status, **timed)
                assert not [e for e in decision.events if isinstance(e, ErrorDetected)]
        assert not [e for e in cluster.tick(now) if isinstance(e, ErrorDetected)]
    assert START <= at(now)
