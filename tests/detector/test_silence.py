"""Silent nodes: lost, unreachable, or the control plane cut off; each rule, and properties of all of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.detector.nodes.probing import DETECTOR, ProbeQuestion
from services.detector.nodes.silence import MAX_OWN_PROBES, reachability
from services.detector.state.progress_gaps import FIRST_STEPS, WARM_UP
from shared.events.severities import ErrorKind
from shared.events.union import ErrorDetected, TaskFailed, TaskFinished
from shared.messages.probes import Outcome
from tests.detector.kit import LIMITS, START, Cluster, at, restart_plan
from tests.detector.world import SOON_S, TICK_S, TIMEOUT_S, World

# ---- dead nodes


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
@pytest.mark.parametrize("how", ["off", "stopped"])
def test_one_dead_node_is_found_as_soon_as_its_silence_allows(nodes: int, how: str) -> None:
    world = World(nodes)
    setattr(world, how, {"n1"})
    found = world.run_until_lost(10.0)
    assert found.keys() == {"n1"}
    assert TIMEOUT_S - 2 * TICK_S <= found["n1"] <= SOON_S
    outcome = {"off": "silent", "stopped": "mute"}[how]
    assert set(world.events[-1].evidence["witnesses"].values()) == {outcome}
    reason = {
        "off": "no heartbeat, and no witness reaches it",
        "stopped": "no heartbeat, and no answer from its agent within the limit, though its machine answers",
    }[how]
    assert world.events[-1].evidence["reason"] == reason


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_an_agent_that_has_ended_is_found_without_waiting_for_a_time_out(nodes: int) -> None:
    world = World(nodes)
    world.ended = {"n0"}
    found = world.run_until_lost(10.0)
    assert found.keys() == {"n0"}
    assert found["n0"] <= 0.6 + TICK_S / 2
    evidence = world.events[-1].evidence
    assert evidence["reason"] == "no heartbeat, and its machine answers without an agent"
    assert (evidence["limit_s"], evidence["limit_source"]) == (0.375, "ended")


def test_a_witness_alone_cannot_say_that_an_agent_has_ended_before_it_is_silent_for_long() -> None:
    """A firewall on its way may refuse the connection."""
    world = World(3)
    world.ended = {"n1"}
    world.cut = {frozenset({DETECTOR, "n1"})}
    found = world.run_until_lost(10.0)
    assert found.keys() == {"n1"}
    assert TIMEOUT_S - 2 * TICK_S <= found["n1"] <= SOON_S


@pytest.mark.parametrize(("nodes", "dead"), [(3, 2), (4, 2), (8, 4), (8, 7)])
def test_many_dead_nodes_are_found_if_one_is_left_to_witness(nodes: int, dead: int) -> None:
    world = World(nodes)
    world.off = set(world.names[:dead])
    found = world.run_until_lost(10.0)
    assert found.keys() == world.off
    assert max(found.values()) <= SOON_S
    assert world.unreachable() == {}


@pytest.mark.parametrize("how", ["off", "ended"])
def test_nodes_that_fall_silent_together_are_logged_together_though_their_last_heartbeats_were_not(how: str) -> None:
    world = World(8, phases=True)
    setattr(world, how, {"n1", "n4", "n5", "n6"})
    found = world.run_until_lost(10.0)
    assert found.keys() == getattr(world, how)
    assert len(set(found.values())) == 1
    lost = [event for event in world.events if isinstance(event, ErrorDetected)]
    last = lost[-1].event_id
    assert [event.answered_with for event in lost] == [last, last, last, None]
    # Nobody waits for a node that is silent for another reason, nor longer than one interval of heartbeats.
    assert max(found.values()) <= SOON_S + LIMITS.heartbeat_interval_s


def test_agents_that_end_together_are_logged_together_however_many_the_detector_has_to_probe() -> None:
    world = World(2 * MAX_OWN_PROBES + 4)
    world.here = set(world.names)  # nobody else tells that their agents have ended
    world.ended = set(world.names[2:])
    found = world.run_until_lost(10.0)
    assert found.keys() == world.ended
    assert len(set(found.values())) == 1
    assert max(found.values()) <= TIMEOUT_S


def test_a_plan_for_the_last_of_several_losses_answers_them_all() -> None:
    world = World(4)
    world.off = {"n1", "n2"}
    world.run_until_lost(10.0)
    task = world.monitor.state.tasks["gpt"]
    first, last = (event for event in world.events if isinstance(event, ErrorDetected))
    assert task.unanswered == {last.event_id}
    assert list(world.monitor.state.unanswered) == [first.event_id, last.event_id]
    restart_plan("p2", last, world.cluster, "n1/0")
    assert not world.monitor.state.unanswered
    assert not task.unanswered


def test_a_node_that_is_kept_though_it_is_silent_delays_no_loss() -> None:
    world = World(4)
    world.cut_control("n3")
    world.run(3 * TIMEOUT_S)
    assert set(world.unreachable()) == {"n3"}
    world.off = {"n1"}
    found = world.run_until_lost(10.0)
    assert found["n1"] <= SOON_S


@pytest.mark.parametrize("how", ["ended", "stopped"])
def test_the_only_node_is_lost_if_its_machine_answers_without_an_agent(how: str) -> None:
    world = World(1)
    setattr(world, how, {"n0"})
    found = world.run_until_lost(10.0)
    assert found["n0"] <= 2 * TIMEOUT_S
    assert not world.is_cut_off()


def test_the_only_node_whose_machine_is_silent_cannot_be_told_from_a_cut_link() -> None:
    world = World(1)
    world.off = {"n0"}
    assert world.run(2 * TIMEOUT_S) == []
    assert world.is_cut_off()
    assert world.unreachable() == {"n0": []}
    assert world.run(60.0) == []


# ---- the control plane cut off


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
@pytest.mark.parametrize("cut_s", [1.0, 4.0, 30.0])
def test_a_control_plane_that_is_cut_off_replaces_nobody(nodes: int, cut_s: float) -> None:
    world = World(nodes)
    world.cut_control()
    assert world.run(cut_s) == []
    long = cut_s > SOON_S
    assert world.is_cut_off() is long
    assert set(world.unreachable()) == (set(world.names) if long else set())
    world.heal()
    assert world.run(10.0) == []
    assert not world.is_cut_off()
    assert world.unreachable() == {}
    assert world.cleans == []
    assert len([note for note in world.notes if "adopted" in note]) == (nodes if long else 0)


def test_nodes_that_reconnect_one_after_the_other_are_all_adopted() -> None:
    """Each node that is heard finds the others silent, and witnesses that they are there."""
    world = World(4)
    world.cut_control()
    world.run(8.0)
    for name in world.names:
        world.unheard.discard(name)
        world.cut.discard(frozenset({DETECTOR, name}))
        assert world.run(6.0) == []
    assert world.unreachable() == {}


def test_a_node_that_died_while_the_control_plane_was_cut_off_is_found_afterwards() -> None:
    world = World(3)
    world.cut_control()
    world.run(8.0)
    world.off = {"n2"}
    world.heal()
    found = world.run_until_lost(10.0)
    assert found.keys() == {"n2"}
    assert found["n2"] <= 5.0


def test_a_detector_that_starts_while_it_is_cut_off_loses_nobody() -> None:
    world = World(3)
    world.cut_control()
    world.restart_detector()
    assert world.run(10.0) == []
    assert world.is_cut_off()
    world.heal()
    assert world.run(5.0) == []
    assert world.unreachable() == {}


def test_a_task_that_finished_while_the_control_plane_was_cut_off_has_not_vanished() -> None:
    """The node of rank 0, whose signal says that the task has finished, is the last one that is heard again."""
    world = World(3)
    world.cut_control()
    world.run(5.0)
    world.idle = set(world.names)
    for name in ("n1", "n2", "n0"):
        world.unheard.discard(name)
        world.cut.discard(frozenset({DETECTOR, name}))
        assert world.run(5.0 if name != "n0" else 1.5) == []
    finished = world.cluster.finished("n0/0", world.now_s)
    assert [type(e) for e in world.cluster.signal(finished, world.now_s)] == [TaskFinished]
    assert world.run(10.0) == []


def test_a_rank_that_vanished_while_the_control_plane_was_cut_off_is_found_afterwards() -> None:
    world = World(3)
    world.cut_control()
    world.run(5.0)
    world.idle = {"n1"}
    world.heal()
    [error] = world.run(10.0)
    assert (error.kind, error.worker) == (ErrorKind.PROCESS_EXIT, "n1/0")


# ---- one machine for all


@pytest.mark.parametrize("nodes", [2, 3])
def test_one_silent_node_on_the_detectors_machine_cuts_nobody_off(nodes: int) -> None:
    """Its agent has lost its connection to NATS; the others beside it are heard."""
    world = World(nodes)
    world.here = set(world.names)
    world.run(1.0)
    world.unheard = {"n1"}
    assert world.run(8.0) == []
    assert world.unreachable() == {"n1": [DETECTOR]}
    assert not world.is_cut_off()
    assert not [note for note in world.notes if "cut off" in note]
    world.unheard = set(world.names)
    assert world.run(2 * TIMEOUT_S) == []
    assert world.is_cut_off()
    world.heal()
    assert world.run(10.0) == []
    assert not world.is_cut_off()


# ---- a detector that was started again

HERE = {"n0", "n1", "n2"}


@pytest.mark.parametrize("here", [HERE, {"n0"}, set()], ids=["one machine", "one node here", "all on others"])
@pytest.mark.parametrize("how", ["ended", "stopped"])
@pytest.mark.parametrize("away_s", [0.0, 60.0])
def test_a_node_that_fell_silent_before_the_detector_was_started_again_is_lost(
    here: set[str], how: str, away_s: float
) -> None:
    """The log says where its agent answered, and on which machine: it is judged as if it had been heard."""
    world = World(3, here=here)
    setattr(world, how, {"n1"})
    world.run(0.1)
    world.ticks += round(away_s / TICK_S)
    world.restart_detector()
    started_s = world.now_s
    found = world.run_until_lost(10.0)
    assert found.keys() == {"n1"}
    assert found["n1"] <= {"ended": 0.6 + TICK_S / 2, "stopped": SOON_S}[how]
    assert world.unreachable() == {}
    lost = world.events[-1]
    assert lost.occurred_at == at(started_s)
    assert "silence_s" not in lost.evidence
    assert "last_heartbeat_at" not in lost.evidence
    assert TICK_S < lost.evidence["listened_s"] <= found["n1"] + TICK_S / 2


def test_a_machine_that_is_off_since_before_the_detector_was_started_again_is_lost_where_a_witness_is_heard() -> None:
    world = World(3, here={"n0"})
    world.off = {"n1"}
    world.restart_detector()
    assert world.run_until_lost(10.0)["n1"] <= SOON_S


def test_a_silent_machine_is_kept_where_only_nodes_on_the_detectors_own_machine_are_heard() -> None:
    """The link of the detector's machine may be cut, which the nodes on it do not show."""
    world = World(3, here={"n0", "n2"})
    world.off = {"n1"}
    world.restart_detector()
    assert world.run(30.0) == []
    assert world.unreachable() == {"n1": []}
    assert not world.is_cut_off()


@pytest.mark.parametrize("here", [HERE, {"n0"}, set()], ids=["one machine", "one node here", "all on others"])
def test_a_node_that_only_a_detector_that_was_started_again_does_not_hear_is_kept(here: set[str]) -> None:
    world = World(3, here=here)
    world.unheard = {"n1"}
    world.restart_detector()
    assert world.run(30.0) == []
    assert set(world.unreachable()) == {"n1"}
    world.heal()
    assert world.run(5.0) == []
    assert world.unreachable() == {}


def test_a_node_that_returns_to_a_detector_that_has_just_started_has_no_silence_of_zero_seconds() -> None:
    world = World(3, here=HERE)
    world.ended = {"n1"}
    world.restart_detector()
    world.run(TICK_S)
    lost, _ = world.cluster.beat("n1", world.now_s, incarnation="second", task=None).events
    assert (lost.kind, lost.node) == (ErrorKind.NODE_LOST, "n1")
    assert lost.evidence["reason"] == "a new incarnation of the agent"
    assert lost.occurred_at == at(world.now_s - TICK_S)
    assert "silence_s" not in lost.evidence


def test_a_node_that_returns_was_silent_since_its_last_heartbeat() -> None:
    world = World(3, here=HERE)
    world.ended = {"n1"}
    world.run(0.2)
    lost, _ = world.cluster.beat("n1", world.now_s, incarnation="second", task=None).events
    assert lost.evidence["silence_s"] == pytest.approx(0.2)
    assert lost.evidence["last_heartbeat_at"] == at(1.0).isoformat()


# ---- nodes that only the control plane does not hear


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_a_node_that_witnesses_reach_is_kept_until_they_no_longer_do(nodes: int) -> None:
    world = World(nodes)
    world.cut_control("n1")
    assert world.run(30.0) == []
    assert set(world.unreachable()) == {"n1"}
    assert DETECTOR not in world.unreachable()["n1"]
    assert not world.is_cut_off()
    world.off = {"n1"}
    found = world.run_until_lost(10.0)
    assert found.keys() == {"n1"}
    assert found["n1"] <= TIMEOUT_S + 1.0
    assert world.unreachable() == {}


def test_a_node_that_the_detector_itself_reaches_is_kept() -> None:
    world = World(1)
    world.unheard = {"n0"}
    assert world.run(30.0) == []
    assert world.unreachable() == {"n0": [DETECTOR]}


def test_one_witness_that_reaches_it_outweighs_others_that_do_not() -> None:
    world = World(4)
    world.cut_control("n1")
    world.cut |= {frozenset({"n1", "n0"}), frozenset({"n1", "n2"})}
    assert world.run(30.0) == []
    assert world.unreachable() == {"n1": ["n3"]}


def test_a_node_that_nobody_reaches_any_more_is_lost_whoever_is_cut() -> None:
    world = World(4)
    world.cut_control("n1")
    world.cut |= {frozenset({"n1", other}) for other in world.names if other != "n1"}
    assert world.run_until_lost(10.0).keys() == {"n1"}


def test_a_node_that_a_decision_needs_is_lost() -> None:
    """A rank of its task fails: the plan has to reach all members."""
    world = World(3)
    world.cut_control("n1")
    world.run(10.0)
    exited = world.cluster.exited("n2/0", world.now_s)
    [error] = world.cluster.signal(exited, world.now_s)
    restart_plan("p2", error, world.cluster, "n2/0")
    [lost] = world.run(0.5)
    assert (lost.kind, lost.node) == (ErrorKind.NODE_LOST, "n1")
    assert "task gpt cannot go on" in lost.evidence["reason"]


def test_a_node_whose_ranks_break_the_others_collectives_is_lost() -> None:
    world = World(3)
    world.cut_control("n1")
    world.run(10.0)
    raised = world.cluster.raised("n2/0", world.now_s, "communication")
    assert world.cluster.signal(raised, world.now_s) == []
    [lost] = world.run(0.5)
    assert (lost.kind, lost.node) == (ErrorKind.NODE_LOST, "n1")


def test_a_node_that_its_task_waits_for_is_lost() -> None:
    world = World(3)
    world.status = {"step": 5, "step_s": 0.5, "steps_timed": 5}
    world.run(1.0)
    world.cut_control("n1")
    assert world.run(10.0) == []
    world.status = {"step": 5, "phase": "reduce", "progress_age_s": 30.0}
    [lost] = world.run(0.5)
    assert (lost.kind, lost.node) == (ErrorKind.NODE_LOST, "n1")


def test_a_rank_that_hangs_alone_is_blamed_and_not_the_unreachable_node() -> None:
    world = World(3)
    world.status = {"step": 5, "step_s": 0.5, "steps_timed": 5}
    world.run(1.0)
    world.cut_control("n1")
    assert world.run(2.0) == []
    world.status = {"step": 5, "phase": "compute", "progress_age_s": 30.0}
    first = world.run(0.5)[0]
    assert (first.kind, first.worker) == (ErrorKind.HANG, "n0/0")


def faults(events: list[Any]) -> list[ErrorDetected]:
    return [event for event in events if isinstance(event, ErrorDetected)]


def test_a_rank_in_its_first_micro_batch_may_wait_for_parameters_of_the_unreachable_node() -> None:
    world = World(3)
    for step in range(1, FIRST_STEPS + WARM_UP + 1):
        world.status = {"step": step, "step_s": 0.5, "steps_timed": step}
        world.run(0.25)
    world.cut_control("n1")
    assert faults(world.run(2.0)) == []
    world.status |= {"phase": "update", "progress_age_s": 0.1}
    world.of_node = {"n0": {"phase": "begun", "progress_age_s": 30.0}}
    assert faults(world.run(0.5)) == []
    world.heal()
    [hang] = faults(world.run(0.5))
    assert (hang.kind, hang.worker) == (ErrorKind.HANG, "n0/0")


# ---- properties

HEARD = st.lists(st.frozensets(st.sampled_from(["n0", "n1", "n2"])), min_size=1, max_size=90)


class Random:
    """A monitor of three nodes without a task, whose probes are answered late and in any order, as hypothesis draws."""

    def __init__(self, data: st.DataObject) -> None:
        self.cluster = Cluster(3)
        self.monitor = self.cluster.monitor
        ended = TaskFailed(event_id="f", occurred_at=START, task="gpt", generation=1, step=1, reason="a bug")
        self.cluster.fold(ended)
        self._data = data
        self._waiting: list[ProbeQuestion] = []
        self.lost: set[str] = set()
        self.tick = 0
        self.step(frozenset(self.cluster.names), {})

    def step(self, heard: frozenset[str], outcomes: dict[str, list[Outcome | None]]) -> None:
        """One tick: heartbeats of some nodes, then answers. ``outcomes``: what a witness may find out, by node."""
        self.tick += 1
        now = at(self.tick * TICK_S)
        for name in sorted(heard):
            self.cluster.beat(name, self.tick * TICK_S, task=None, probe=f"{name}:1", network=name)
        self.monitor.echo(now)
        answered = self._data.draw(st.sets(st.integers(0, len(self._waiting) - 1)) if self._waiting else st.just(set()))
        for index in sorted(answered, reverse=True):
            question = self._waiting.pop(index)
            drawn = {peer: self._data.draw(st.sampled_from(outcomes[peer])) for peer in question.peers}
            self.monitor.probed(question, {p: o for p, o in drawn.items() if o is not None}, now)
        decision = self.monitor.tick(now)
        self._waiting += decision.probes
        self.lost |= {e.node for e in decision.events if isinstance(e, ErrorDetected) and e.node is not None}


ANY: list[Outcome | None] = [None, *Outcome]


@settings(deadline=None, derandomize=True)
@given(st.data(), HEARD)
def test_a_node_that_answers_probes_is_never_lost(data: st.DataObject, heard: list[frozenset[str]]) -> None:
    random = Random(data)
    for names in heard:
        random.step(names - {"n1"}, {"n0": ANY, "n1": [Outcome.REACHED, None], "n2": ANY})
    assert "n1" not in random.lost


@settings(deadline=None, derandomize=True)
@given(st.data(), HEARD)
def test_where_no_node_is_heard_and_no_machine_answers_nothing_is_lost(
    data: st.DataObject, heard: list[frozenset[str]]
) -> None:
    random = Random(data)
    nothing: list[Outcome | None] = [None, Outcome.SILENT]
    for _ in heard:
        random.step(frozenset(), dict.fromkeys(random.cluster.names, nothing))
    assert random.lost == set()
    silent = random.tick * TICK_S - TICK_S > TIMEOUT_S + TICK_S / 2
    assert (reachability(random.monitor.state).cut_off_since is not None) is silent
