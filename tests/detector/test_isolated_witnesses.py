"""An isolated node cannot reach some others because of its own links: it is no witness against anybody."""

from __future__ import annotations

import pytest

from services.detector.incidents.faults import Fault
from services.detector.nodes import isolation, links
from services.detector.nodes.probing import ProbeQuestion
from services.detector.state.unlogged import Inquiry
from shared.events.severities import ErrorKind
from shared.events.union import NodeReturned, TaskFailed
from shared.messages.probes import Outcome, ProbeTarget
from tests.detector.kit import LIMITS, START, Cluster, at
from tests.detector.world import World

SOON_S = LIMITS.node_timeout_s + 0.3


def isolate(cluster: Cluster, node: str, other: str, seconds: float) -> None:
    """Record that the link between two nodes is broken, and that the first one is left out for it."""
    pair = (node, other) if node < other else (other, node)
    found = Fault(
        cause="stuck", kind=ErrorKind.COLLECTIVE_TIMEOUT, error="", occurred_at=at(seconds), generation=1, step=1
    )
    cluster.fold(isolation.isolate(cluster.monitor.state, node, {pair}, found, at(seconds)))


def beside_isolated(nodes: int, isolated: str) -> World:
    """Nodes of which one does not reach n0 and is isolated; no task waits for anything."""
    world = World(nodes)
    world.cluster.fold(TaskFailed(event_id="f", occurred_at=START, task="gpt", generation=1, step=1, reason="bug"))
    world.cut.add(frozenset({isolated, "n0"}))
    isolate(world.cluster, isolated, "n0", world.now_s)
    world.run(3.0)
    return world


@pytest.mark.parametrize("how", ["unheard", "off"])
def test_a_node_that_only_an_isolated_one_misses_is_kept(how: str) -> None:
    """Whether its machine is off, or its link to NATS is cut, nobody can say."""
    world = beside_isolated(2, "n1")
    if how == "off":
        world.off.add("n0")
    else:
        world.cut_control("n0")
    assert world.run(60.0) == []
    assert world.unreachable() == {"n0": []}
    assert not world.is_cut_off()


def test_an_isolated_node_that_a_user_returns_is_a_witness_again() -> None:
    world = beside_isolated(2, "n1")
    world.off.add("n0")
    assert world.run(10.0) == []
    world.cluster.fold(NodeReturned(event_id="back", occurred_at=at(world.now_s), node="n1", incarnation="first n1"))
    assert world.run_until_lost(10.0).keys() == {"n0"}


def test_an_agent_that_an_isolated_node_does_not_find_is_not_lost_for_that() -> None:
    """The address may lead the isolated node to another machine, which is part of what is wrong with its network."""
    world = beside_isolated(2, "n1")
    world.cut.clear()
    world.cut_control("n0")
    world.ended.add("n0")
    world.run(10.0)
    assert world.unreachable() == {"n0": []}


def test_what_an_isolated_node_reaches_is_reached() -> None:
    world = beside_isolated(3, "n1")
    world.off.add("n0")
    world.run(3.0)
    world.cut_control("n2")
    assert world.run(20.0) == []
    assert world.unreachable() == {"n2": ["n1"]}


def test_other_witnesses_delay_no_loss_because_of_an_isolated_one() -> None:
    world = beside_isolated(3, "n2")
    world.off.add("n0")
    found = world.run_until_lost(10.0)
    assert found["n0"] <= SOON_S


def test_the_broken_pairs_of_a_node_that_was_isolated_meanwhile_decide_nothing() -> None:
    """Two tasks ask at the same time. For the first one, n3 is isolated: it misses n1, which misses n2 as well."""
    cluster = Cluster(4)
    for name in cluster.names:
        cluster.beat(name, 1.0, probe=f"{name}:1")
    state = cluster.monitor.state
    task = state.tasks["gpt"]
    cut = {("n1", "n3"), ("n1", "n2")}
    asked = frozenset((a, b) for a in cluster.names for b in cluster.names if a != b)
    task.members = {worker: member for worker, member in task.members.items() if member.node != "n3"}
    task.inquiry = Inquiry(at(2.0), at(2.0), asked, suspects=frozenset({("n1", "n2")}))
    for witness, peer in asked:
        target = ProbeTarget(address=f"{peer}:1", incarnation=f"first {peer}")
        question = ProbeQuestion(witness, {peer: target}, at(2.0), 1.0)
        outcome = Outcome.SILENT if {(witness, peer), (peer, witness)} & cut else Outcome.REACHED
        cluster.monitor.probed(question, {peer: outcome}, at(2.1))
    isolate(cluster, "n3", "n1", 2.2)
    task.inquiry = Inquiry(at(2.0), at(2.0), asked, suspects=frozenset({("n1", "n2")}))
    task.unanswered.clear()
    stuck = Fault(
        cause="stuck too",
        kind=ErrorKind.COLLECTIVE_TIMEOUT,
        error="",
        occurred_at=at(2.0),
        generation=1,
        step=1,
        by_peers=True,
    )
    [error] = links.examine(state, task, stuck, at(2.3)).errors
    assert error.node == "n2"  # of a pair without a majority, the one whose name sorts last
