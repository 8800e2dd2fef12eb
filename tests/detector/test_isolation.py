"""Isolated nodes: what brings them back, and what keeps them away."""

from __future__ import annotations

import pytest

from services.detector.nodes import isolation, links
from services.detector.state.unlogged import Condemnation
from shared.events.evidence import Evidence
from shared.events.plans import Response, TaskChange
from shared.events.severities import ErrorKind, Severity
from shared.events.union import ErrorDetected, IncidentObserved, NodeJoined, NodeReturned
from tests.agent.kit import stage
from tests.detector.kit import START, at, moved, plan
from tests.detector.network import STEP_S, Links, timed


def left_out(found: Links) -> ErrorDetected:
    """Cut a pair; a plan goes on without the node that is left out."""
    found.stall()
    found.cut_pair("n1", "n2")
    error = found.until_event()
    assert error.node == "n2"
    generation = found.cluster.generation
    rest = ["n0/0", "n1/0"]
    change = TaskChange(
        task="gpt",
        reason="without n2",
        action="move",
        from_generation=generation,
        survivors=rest,
        failed=["n2/0"],
        hold=True,
        interrupted=stage(generation + 1, rest, kind="interrupted"),
    )
    name = f"plan {generation + 1}"
    found.cluster.fold(plan(name, error.event_id, change, response=Response.RECONFIGURE))
    found.cluster.fold(moved(name, generation + 1, "resumed", step=17, complete=True))
    found.cluster.generation = generation + 1
    found.train()
    found.statuses["n2"] = {"task": None}
    return error  # type: ignore[no-any-return]


def returned(found: Links) -> NodeJoined:
    event = found.until_event(2 * isolation.RETURN_MAX_S)
    assert isinstance(event, NodeJoined)
    assert event.node == "n2"
    return event


def grow(found: Links, cause: str) -> None:
    """The plan that takes the node back."""
    generation = found.cluster.generation + 1
    change = TaskChange(
        task="gpt",
        reason="grow",
        action="move",
        from_generation=generation - 1,
        survivors=["n0/0", "n1/0"],
        prepare=["n2/0"],
        target=stage(generation, found.cluster.workers),
    )
    found.cluster.fold(plan(f"plan {generation}", cause, change, response=Response.RECONFIGURE))
    found.cluster.fold(moved(f"plan {generation}", generation, "restored", step=18, complete=True))
    found.cluster.generation = generation
    found.train()


def test_an_isolated_node_returns_once_its_links_have_worked_for_a_while() -> None:
    found = timed(Links())
    error = left_out(found)
    assert found.run(30.0) == []
    found.cut.clear()
    healed_s = found.now_s
    joined = returned(found)
    assert joined.incarnation == "first n2"
    assert healed_s + isolation.RETURN_S <= found.now_s <= healed_s + isolation.RETURN_S + 3.0
    assert error.evidence["return_after_s"] == isolation.RETURN_S


def test_a_failure_begins_the_while_anew() -> None:
    found = timed(Links())
    left_out(found)
    found.cut.clear()
    assert found.run(isolation.RETURN_S - 1.0) == []
    found.cut_pair("n0", "n2")  # another pair of the node
    assert found.run(3.0) == []
    found.cut.clear()
    assert found.run(isolation.RETURN_S - 1.0) == []
    returned(found)


def test_each_further_break_within_an_hour_doubles_the_while_and_needs_no_second_inquiry() -> None:
    found = timed(Links())
    times_s = []
    for _ in range(3):
        before_s = found.now_s
        error = left_out(found)
        found_s = found.now_s - before_s
        found.cut.clear()
        times_s.append((found_s, error.evidence["return_after_s"]))
        joined = returned(found)
        grow(found, joined.event_id)
    assert [after_s for _, after_s in times_s] == [isolation.RETURN_S * times for times in (1, 2, 4)]
    assert times_s[1][0] < times_s[0][0] < 2 * links.ANSWER_S + 3 * STEP_S


def test_a_pair_that_worked_again_at_the_second_look_is_remembered() -> None:
    found = timed(Links())
    found.stall()
    found.cut_pair("n1", "n2")
    found.run(2 * STEP_S)  # asked once
    assert len({question.asked_at for question in found.asked}) == 1
    found.run(1.0)
    found.cut.clear()
    retried = found.until_event()
    assert (retried.kind, retried.severity) == (ErrorKind.COLLECTIVE_TIMEOUT, Severity.SEV3)
    assert Evidence.read(retried.evidence).pairs == [("n1", "n2")]
    assert isolation.breaks(found.cluster.monitor.state, ("n1", "n2"), at(found.now_s)) == 1
    assert isolation.breaks(found.cluster.monitor.state, ("n1", "n2"), at(found.now_s + isolation.MEMORY_S + 1)) == 0


def test_a_new_agent_of_an_isolated_node_does_not_bring_it_back() -> None:
    found = timed(Links())
    left_out(found)
    found.statuses["n2"] = {**found.statuses["n2"], "incarnation": "second n2"}
    lost = found.until_event()
    assert (lost.kind, lost.node) == (ErrorKind.NODE_LOST, "n2")
    (seen,) = found.run(20.0)
    assert isinstance(seen, IncidentObserved)
    assert [one.kind for one in seen.observations] == [ErrorKind.BROKEN_LINK, ErrorKind.NODE_LOST]
    found.cut.clear()
    assert returned(found).incarnation == "second n2"


def test_an_isolated_node_that_was_lost_meanwhile_still_has_to_prove_its_links() -> None:
    found = timed(Links())
    left_out(found)
    found.cluster.monitor.state.nodes["n2"].lost = "an error"
    assert found.run(10.0) == []
    found.cut.clear()
    returned(found)


def test_an_isolated_node_need_not_reach_nodes_of_another_kind() -> None:
    found = timed(Links(idle=1))
    left_out(found)
    found.hardware["n3"] = "h100"
    found.cut = {("n2", "n3")}
    returned(found)


def test_the_last_node_returns_to_a_cluster_without_others() -> None:
    found = timed(Links())
    left_out(found)
    for name in ("n0", "n1"):
        found.cluster.monitor.state.nodes[name].lost = f"error of {name}"
        found.cluster.names.remove(name)
    returned(found)


def test_an_isolated_node_is_tested_before_it_returns() -> None:
    found = timed(Links())
    left_out(found)
    assert found.tested == []
    found.problem = "memory: 3 wrong words, allowed 0"
    found.cut.clear()
    assert found.run(50.0) == []
    assert [(q.node, sorted(q.peers)) for q in found.tested] == [("n2", ["n0", "n1"])]
    assert found.notes == [
        "node n2 stays isolated: self-test failed: memory: 3 wrong words, allowed 0; again after 60 s"
    ]
    found.problem = ""
    joined = returned(found)
    assert len(found.tested) == 2
    assert [check.name for check in joined.self_test] == ["compute"]


def test_a_node_that_was_never_isolated_joins_without_a_test() -> None:
    found = Links()
    found.cluster.monitor.state.nodes["n1"].lost = "an error"
    found.statuses["n1"] = {"task": None}
    assert isinstance(found.until_event(), NodeJoined)
    assert found.tested == []


def test_a_new_agent_of_a_condemned_node_is_tested_first() -> None:
    found = Links(4)
    state = found.cluster.monitor.state
    state.condemned["n2"] = Condemnation("an error", by_device=False)
    state.nodes["n2"].lost = "another"
    found.statuses["n2"] = {"task": None, "incarnation": "second n2"}
    found.problem = "compute: 1 wrong products, allowed 0"
    assert found.run(5.0) == []
    assert [question.incarnation for question in found.tested] == ["second n2"]
    found.problem = ""
    assert returned(found).incarnation == "second n2"
    assert state.condemned == {}


@pytest.mark.slow
def test_a_link_that_breaks_too_often_keeps_its_node_out_until_an_operator_returns_it() -> None:
    found = timed(Links())
    state = found.cluster.monitor.state
    state.breaks["n1", "n2"] = [at(float(second)) for second in range(7)]
    error = left_out(found)
    assert (error.evidence["rule"], error.evidence["breaks"]) == ("pair", 8)
    found.cut.clear()
    assert found.run(isolation.RETURN_MAX_S + 60.0) == []
    found.cluster.fold(NodeReturned(event_id="r", occurred_at=START, node="n2", incarnation="first n2"))
    assert state.isolated == {}
