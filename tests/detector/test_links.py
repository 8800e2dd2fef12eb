"""Faults that a link may have caused: who is asked first, who is left out, and who waits on."""

from __future__ import annotations

from typing import Any

import pytest

from services.detector.nodes import links
from shared.events.codes import FailureCode
from shared.events.evidence import Evidence
from shared.events.plans import Layout, Response, TaskChange
from shared.events.severities import ErrorKind, Severity
from shared.events.union import ErrorDetected, TaskFailed, TaskSubmitted
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC, stage
from tests.detector.kit import Cluster, at, moved, only_error, plan
from tests.detector.network import STALLED_S, STEP_S, Links, timed


def test_a_broken_pair_leaves_out_one_side_and_blames_nobody_else() -> None:
    found = timed(Links())
    found.stall()
    found.cut_pair("n1", "n2")
    error = found.until_event()
    assert (error.kind, error.severity, error.node) == (ErrorKind.BROKEN_LINK, Severity.SEV1, "n2")
    assert (error.task, error.worker, error.escalates, error.incident) == (None, None, None, error.event_id)
    evidence = Evidence.read(error.evidence)
    assert evidence.pairs == [("n1", "n2")]
    assert evidence.tasks["gpt"].workers == ["n2/0"]
    # Two inquiries of a second each.
    assert found.now_s < 1.0 + 2 * links.ANSWER_S + 2 * STEP_S
    # The error awaits its plan, and nothing else is found meanwhile.
    assert found.run(10.0) == []


def test_all_nodes_of_the_task_are_asked_and_a_few_others_as_witnesses() -> None:
    found = timed(Links(2, idle=links.OTHER_WITNESSES + 2))
    found.stall()
    found.run(STEP_S)
    witnesses = sorted(found.idle)[: links.OTHER_WITNESSES]
    assert {q.witness: sorted(q.peers) for q in found.asked} == {
        "n0": sorted(["n1", *witnesses]),
        "n1": sorted(["n0", *witnesses]),
        **{witness: ["n0", "n1"] for witness in witnesses},
    }


def test_the_nodes_that_most_cannot_reach_are_left_out() -> None:
    found = timed(Links(2, idle=2))
    found.stall()
    for other in ("n1", "n2", "n3"):
        found.cut_pair("n0", other)
    assert found.until_event().node == "n0"


def test_the_side_that_the_plans_need_less_is_left_out() -> None:
    """Node n2 has a worker of a second task: nobody would choose n1 by its name."""
    found = timed(Links())
    spec = parse_spec({**SPEC, "name": "heavy", "weight": 2.0})
    found.cluster.fold(TaskSubmitted(event_id="heavy", occurred_at=at(0), task="heavy", spec=spec))
    first = stage(1, ["n2/1"], source="initial")
    change = TaskChange(task="heavy", reason="new", action="move", from_generation=0, target=first, prepare=["n2/1"])
    found.cluster.fold(plan("p2", "heavy", change, response=Response.RECONFIGURE))
    found.cluster.fold(moved("p2", 1, "restored", complete=True, task="heavy"))
    # While a plan is carried out for it, nobody misses its rank, which sends no status here.
    change = change.model_copy(update={"from_generation": 1, "target": stage(2, ["n2/1"])})
    found.cluster.fold(plan("p3", "grown", change, response=Response.RECONFIGURE))
    found.stall()
    found.cut_pair("n1", "n2")
    assert found.until_event().node == "n1"


def test_a_collective_that_is_stuck_while_all_reach_all_is_retried() -> None:
    found = timed(Links())
    found.stall()
    error = found.until_event()
    assert (error.kind, error.severity, error.node) == (ErrorKind.COLLECTIVE_TIMEOUT, Severity.SEV3, None)
    assert found.now_s <= 1.0 + 3 * STEP_S  # no longer than the answers took


def test_nobody_is_asked_about_a_rank_that_computes() -> None:
    found = timed(Links())
    found.stall()
    found.statuses["n1"] |= {"phase": "compute"}
    error = found.until_event()
    assert (error.kind, error.worker, found.asked) == (ErrorKind.HANG, "n1/0", [])


def test_a_rank_that_computes_may_wait_for_others_where_the_model_is_divided() -> None:
    found = timed(Links(4, layout=Layout(tensor=2, pipeline=1, data=2, micro_batch=1)))
    found.stall()
    found.cut_pair("n2", "n3")
    found.statuses["n2"] |= {"phase": "compute"}
    assert found.until_event().node == "n3"


def test_a_node_that_cannot_be_asked_is_judged_as_before() -> None:
    """Agents of an older version neither probe nor answer."""
    cluster = Cluster()
    for name in cluster.names:
        cluster.beat(name, 1.0, step=16, phase="reduce", progress_age_s=130.0)
    error = only_error(cluster.tick(1.1))
    assert (error.kind, error.severity) == (ErrorKind.COLLECTIVE_TIMEOUT, Severity.SEV3)


def test_agents_that_do_not_answer_delay_the_judgment_by_no_more_than_their_time() -> None:
    found = timed(Links())
    found.stall()
    found.deaf = set(found.cluster.names)
    found.cut_pair("n1", "n2")
    error = found.until_event()
    assert error.kind is ErrorKind.COLLECTIVE_TIMEOUT
    assert found.now_s <= 1.0 + links.ANSWER_S + 3 * STEP_S


def test_one_nodes_word_isolates_nobody() -> None:
    found = timed(Links())
    found.stall()
    found.deaf = {"n2"}
    found.cut_pair("n1", "n2")
    found.cut_pair("n0", "n2")
    assert found.until_event().kind is ErrorKind.COLLECTIVE_TIMEOUT


def test_broken_sockets_are_examined_as_well() -> None:
    found = timed(Links())
    found.run(STEP_S)
    found.cut_pair("n0", "n1")
    found.cluster.monitor.feed(found.cluster.raised("n0/0", found.now_s, "communication"), at(found.now_s))
    error = found.until_event()
    assert (error.kind, error.node) == (ErrorKind.BROKEN_LINK, "n1")


def test_a_plan_that_failed_because_a_peer_did_not_come_is_examined_as_well() -> None:
    found = timed(Links())
    found.run(STEP_S)
    found.stall()
    retried = found.until_event()
    change = TaskChange(
        task="gpt",
        reason="retry",
        action="none",
        from_generation=1,
        survivors=found.cluster.workers,
        hold=True,
        interrupted=stage(2, found.cluster.workers, kind="interrupted"),
    )
    found.cluster.fold(plan("p2", retried.event_id, change, response=Response.RETRY))
    found.train()
    found.cut_pair("n0", "n2")
    failed = moved("p2", 2, "failed", code=FailureCode.RANK_RAISED, detail="n0: lost a peer")
    assert found.take(found.cluster.monitor.record(failed, at(found.now_s))) == []
    error = found.until_event()
    assert (error.kind, error.node) == (ErrorKind.BROKEN_LINK, "n2")
    assert found.run(5.0) == []


def test_ranks_in_a_slow_network_wait_on_as_long_as_all_reach_all() -> None:
    found = timed(Links(round_trip_s=0.4))
    found.stall()
    assert found.run(20.0) == []
    # All the time the nodes are asked again, so a link that breaks is found.
    found.cut_pair("n1", "n2")
    error = found.until_event(10.0)
    assert (error.kind, error.node) == (ErrorKind.BROKEN_LINK, "n2")


def test_ranks_in_a_slow_network_wait_on_though_answers_are_late() -> None:
    found = timed(Links(round_trip_s=0.4))
    found.stall()
    assert found.run(5.0) == []
    found.deaf = set(found.cluster.names)
    assert found.run(10.0) == []


def test_ranks_in_a_slow_network_do_not_wait_for_ever() -> None:
    found = timed(Links(round_trip_s=0.4))
    found.stall(links.patience_s(0.4, in_setup=False))
    assert found.until_event().kind is ErrorKind.COLLECTIVE_TIMEOUT


def test_ranks_that_join_for_long_are_examined_and_blamed_for_nothing_else() -> None:
    """The first generation of a task forms across a broken link. How long joining may take is not known yet."""
    found = Links(trained=False)
    found.statuses = {
        name: {"phase": "setup", "setup_parts": 0, "progress_age_s": STALLED_S} for name in found.statuses
    }
    assert found.run(2 * links.SUSPICION_S + 1.0) == []
    # The nodes are not asked all the time.
    assert len({question.asked_at for question in found.asked}) == 3
    found.cut_pair("n1", "n2")
    error = found.until_event(links.SUSPICION_S + 2 * links.ANSWER_S)
    assert (error.kind, error.node) == (ErrorKind.BROKEN_LINK, "n2")


# ---- failures that no link explains


@pytest.mark.parametrize("same_step", [True, False])
def test_collectives_that_break_again_and_again_escalate_whatever_the_step_is(same_step: bool) -> None:
    found = timed(Links(max_restarts=3))
    kinds: list[Any] = []
    for index in range(5):
        generation = index + 1
        found.cluster.generation = generation
        found.stall()
        step = 16 if same_step else 16 + index
        found.statuses = {name: {**status, "step": step} for name, status in found.statuses.items()}
        event = found.until_event()
        kinds.append(event.severity if isinstance(event, ErrorDetected) else type(event))
        if isinstance(event, TaskFailed):
            break
        assert event.worker is None
        change = TaskChange(
            task="gpt",
            reason="retry",
            action="none",
            from_generation=generation,
            survivors=found.cluster.workers,
            hold=True,
            interrupted=stage(generation + 1, found.cluster.workers, kind="interrupted"),
        )
        name = f"plan {generation + 1}"
        found.cluster.fold(plan(name, event.event_id, change, response=Response.RETRY))
        found.cluster.fold(moved(name, generation + 1, "resumed", step=step, complete=True))
    if same_step:
        assert kinds == [Severity.SEV3] * 3 + [TaskFailed]
    else:
        assert kinds == [Severity.SEV3] * 3 + [Severity.SEV2] * 2
