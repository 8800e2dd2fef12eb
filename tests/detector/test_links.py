"""Faults that a link may have caused: who is asked first, who is left out, and who waits on."""

from __future__ import annotations

from typing import Any

import pytest

from services.detector import isolation, links
from services.detector.decision import Decision
from services.detector.pairs import pair
from services.detector.probing import ProbeQuestion
from shared.codes import FailureCode
from shared.events import ErrorDetected, NodeJoined, TaskFailed, TaskProgressed, TaskSubmitted
from shared.evidence import Evidence
from shared.plans import Layout, Response, TaskChange
from shared.probes import Outcome
from shared.severities import ErrorKind, Severity
from shared.tasks import parse_spec
from tests.agent.kit import SPEC, stage
from tests.detector.kit import Cluster, at, moved, only_error, plan

STEP_S = 0.25
"""Time between two rounds of heartbeats, answers and a tick."""

STALLED_S = 20.0
"""More than the limit of a first step (15 s)."""

IN_COLLECTIVE = {"phase": "reduce", "step": 16}


class Links:
    """A cluster whose agents probe one another, with links that can be cut; ``gpt`` trains on all or some nodes."""

    def __init__(self, nodes: int = 3, *, idle: int = 0, round_trip_s: float = 0.001, **rest: Any) -> None:
        self.cluster = Cluster(nodes, **rest)
        self.cut: set[tuple[str, str]] = set()
        self.round_trip_s = round_trip_s
        self.idle = [f"n{nodes + i}" for i in range(idle)]
        self.deaf: set[str] = set()
        self.hardware: dict[str, str] = {}
        self.asked: list[ProbeQuestion] = []
        self.now_s = 1.0
        self._open: list[tuple[float, ProbeQuestion]] = []
        self.statuses: dict[str, dict[str, Any]] = {name: {} for name in self.cluster.names}
        self.cluster.names += self.idle
        for name in self.idle:
            self.cluster.beat(name, 0.0, task=None)

    def cut_pair(self, one: str, other: str) -> None:
        self.cut.add(pair(one, other))

    def run(self, seconds: float) -> list[Any]:
        """Let time pass; return the events."""
        events: list[Any] = []
        until = self.now_s + seconds
        while self.now_s < until - 1e-9:
            self.now_s += STEP_S
            events += self._round()
        return events

    def until_event(self, limit_s: float = 60.0) -> Any:
        until = self.now_s + limit_s
        while self.now_s < until:
            if events := self.run(STEP_S):
                (event,) = events
                return event
        raise AssertionError("nothing happened")

    def _round(self) -> list[Any]:
        cluster, events = self.cluster, []
        for name in cluster.names:
            status = {"task": None} if name in self.idle else self.statuses[name]
            node = {"probe": f"{name}:1", "hardware": self.hardware.get(name, "cpu")}
            events += cluster.beat(name, self.now_s, **node, **status).events
        for due_s, question in [*self._open]:
            if due_s <= self.now_s:
                self._open.remove((due_s, question))
                outcomes = (
                    {} if question.witness in self.deaf else {p: self._outcome(question, p) for p in question.peers}
                )
                trips = {p: self.round_trip_s for p, o in outcomes.items() if o is Outcome.REACHED}
                events += cluster.monitor.probed(question, outcomes, at(self.now_s), trips).events
        cluster.monitor.echo(at(self.now_s))
        events += self.take(cluster.monitor.tick(at(self.now_s)))
        return [event for event in events if not isinstance(event, TaskProgressed)]

    def take(self, decision: Decision) -> list[Any]:
        """Have the questions of a decision answered; return its events."""
        for question in decision.probes:
            slow = any(self._outcome(question, peer) is Outcome.SILENT for peer in question.peers)
            self._open.append((self.now_s + (question.timeout_s if slow else 0.0), question))
            self.asked.append(question)
        return list(decision.events)

    def _outcome(self, question: ProbeQuestion, peer: str) -> Outcome:
        return Outcome.SILENT if pair(question.witness, peer) in self.cut else Outcome.REACHED

    def stall(self, age_s: float = 0.0) -> None:
        """All ranks wait in a collective from now on."""
        self.statuses = {name: {**IN_COLLECTIVE, "progress_age_s": STALLED_S + age_s} for name in self.statuses}

    def train(self) -> None:
        self.statuses = {name: {} for name in self.statuses}


def timed(found: Links) -> Links:
    """Steps of 0.1 s: a collective times out after 5 s."""
    for step in range(1, 5):
        found.cluster.beat("n0", 1.0, step=step, step_s=0.1, steps_timed=step, probe="n0:1")
    return found


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
    found.cluster.monitor.signal(found.cluster.raised("n0/0", found.now_s, "communication"), at(found.now_s))
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


# ---- how a node comes back


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
    assert found.run(20.0) == []
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
