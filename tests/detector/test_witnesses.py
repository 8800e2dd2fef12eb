"""Who is asked whether a silent node is there: which witnesses count, which are waited for, and how many are asked."""

from __future__ import annotations

from typing import Any

import pytest

from services.detector.nodes.probing import DETECTOR
from services.detector.nodes.silence import UNANSWERED_S
from services.detector.state.slow_links import PERIOD_S
from shared.events.union import TaskFailed
from tests.detector.kit import START, Cluster, at
from tests.detector.world import SOON_S, TICK_S, TIMEOUT_S, World


def test_a_node_on_the_detectors_machine_is_no_witness_against_others() -> None:
    """Its link is the one that may be cut."""
    world = World(3, here={"n0"})
    world.cut_control("n1", "n2")
    world.cut |= {frozenset({"n0", "n1"}), frozenset({"n0", "n2"})}
    world.cluster.fold(TaskFailed(event_id="f", occurred_at=START, task="gpt", generation=1, step=1, reason="bug"))
    assert world.run(30.0) == []
    assert world.unreachable() == {"n1": [], "n2": []}
    assert not world.is_cut_off(), "n0 is heard"
    assert [note for note in world.notes if "no node on another machine is heard" in note]


def test_nodes_elsewhere_have_time_to_reconnect_after_the_link_of_the_detectors_machine_was_cut() -> None:
    """A node beside the detector is heard all the time, which says nothing of that link."""
    world = World(3, here={"n0"})
    links = {frozenset({a, b}) for a in ("n0", DETECTOR) for b in ("n1", "n2")}
    world.unheard, world.cut = {"n1", "n2"}, links
    assert world.run(5.0) == []
    world.unheard = {"n2"}
    world.cut = {link for link in links if "n2" in link} | {frozenset({"n1", "n2"})}
    assert world.run(1.9) == []
    world.heal()
    assert world.run(10.0) == []


def test_a_node_that_ranks_on_the_detectors_machine_need_is_lost() -> None:
    world = World(2, here={"n0"})
    world.off = {"n1"}
    raised = world.cluster.raised("n0/0", world.now_s, "communication")
    assert world.cluster.signal(raised, world.now_s) == []
    found = world.run_until_lost(10.0)
    assert found["n1"] <= 5.0


@pytest.mark.parametrize("older", [{"n1"}, {"n0", "n2"}, {"n0", "n1", "n2"}])
def test_nodes_of_an_older_version_are_lost_by_silence_alone_while_others_speak(older: set[str]) -> None:
    world = World(3, older=older)
    world.off = {"n1"}
    found = world.run_until_lost(10.0)
    assert found.keys() == {"n1"}
    assert found["n1"] <= SOON_S


def test_a_cluster_of_an_older_version_is_lost_by_silence_alone() -> None:
    world = World(2, older={"n0", "n1"})
    world.cut_control()
    assert world.run_until_lost(10.0).keys() == {"n0", "n1"}


def test_nodes_of_an_older_version_are_kept_where_others_may_be_cut_off() -> None:
    world = World(3, older={"n1"})
    world.cut_control()
    assert world.run(30.0) == []


def test_a_witness_that_has_not_answered_yet_is_waited_for() -> None:
    world = World(3, late_s={"n1": 1.0})
    world.off = {"n2"}
    found = world.run_until_lost(10.0)
    assert found.keys() == {"n2"}
    assert TIMEOUT_S + 0.8 <= found["n2"] <= TIMEOUT_S + 1.4


def test_witnesses_that_never_answer_do_not_keep_a_node_for_ever() -> None:
    cluster = Cluster(2)
    cluster.listen_until(1.0)
    events: list[Any] = []
    for tick in range(10, round(20 / TICK_S)):
        seconds = tick * TICK_S
        if tick % 2 == 0:
            cluster.beat("n0", seconds, probe="n0:1")
        if tick == 10:
            cluster.beat("n1", seconds, probe="n1:1")
        cluster.monitor.echo(at(seconds))
        decision = cluster.monitor.tick(at(seconds))
        events += decision.events
        for question in decision.probes:
            cluster.monitor.probed(question, {}, at(seconds))
    [lost] = events
    assert lost.node == "n1"
    assert UNANSWERED_S < (lost.detected_at - at(1.0)).total_seconds() < UNANSWERED_S + 2.0


def test_witnesses_are_few_and_of_many_domains() -> None:
    world = World(20)
    world.off = {"n19"}
    world.run(0.8)
    first = world.asked[0].asked_at
    asked = [q.witness for q in world.asked if q.asked_at == first]
    assert len(asked) == 6
    assert DETECTOR in asked


def test_nobody_is_asked_while_all_are_heard() -> None:
    world = World(3)
    world.run(0.9 * PERIOD_S / 3)
    assert world.asked == []
    world.run(PERIOD_S)
    # The rare probes between the nodes of near ranks (``slow_links.py``): each pair once.
    asked = [(question.witness, *question.peers) for question in world.asked]
    assert asked == [("n0", "n1"), ("n1", "n2"), ("n0", "n2")]
