"""Which agents may join: every answer to a hello, and heartbeats of agents that have lost their name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from services.detector.decisions.admission import Ask, Liveness
from services.detector.decisions.decision import Revoke
from shared.events.union import ErrorDetected, NodeJoined, TaskCheckpointed
from shared.messages.admission import Answer, Departure, Hello
from shared.messages.probes import Outcome
from shared.messages.signals import Heartbeat, WorkerStatus
from tests.detector.kit import Cluster, Monitor, at

HERE, THERE = "boot/1", "boot/2"
"""Network stacks of two machines."""

FAR = {"address": "198.51.100.2", "store_host": "198.51.100.2"}
LOOPBACK = {"address": "127.0.0.1", "store_host": "127.0.0.1"}
FIRST, SECOND, THIRD = (digit * 32 for digit in "123")


def hello(name: str, incarnation: str, addresses: Mapping[str, str] = FAR, network: str = HERE) -> Hello:
    return Hello(node=name, incarnation=incarnation, addresses=dict(addresses), network=network)


class Detector:
    """A monitor that began to listen at second 0, and hears its own messages."""

    def __init__(self) -> None:
        self.monitor = Monitor(at(0))
        self.monitor.echo(at(0))

    def hello(self, said: Hello, seconds: float, **answers: Liveness) -> Answer | Ask:
        known = {"first": FIRST, "second": SECOND, "third": THIRD}
        return self.monitor.hello(said, {known[name]: answer for name, answer in answers.items()}, at(seconds))

    def verdict(self, said: Hello, seconds: float, **answers: Liveness) -> str:
        answer = self.hello(said, seconds, **answers)
        assert isinstance(answer, Answer), answer
        return answer.verdict

    def beat(
        self,
        name: str,
        incarnation: str,
        seconds: float,
        *,
        addresses: Mapping[str, str] = FAR,
        network: str = HERE,
        sent_at: float | None = None,
        probe: str = "",
    ) -> tuple[list[Any], list[Revoke]]:
        heartbeat = Heartbeat(
            node=name,
            incarnation=incarnation,
            agent_pid=1,
            sequence=1,
            sent_at=at(seconds if sent_at is None else sent_at),
            interval_s=0.25,
            addresses=dict(addresses),
            network=network,
            probe=probe,
            workers=[WorkerStatus(worker=f"{name}/0")],
        )
        decision = self.monitor.feed(heartbeat, at(seconds))
        return list(decision.events), decision.revokes

    def silence(self, seconds: float) -> None:
        """Let time pass without heartbeats."""
        for tenth in range(round(seconds * 10) + 1):
            self.monitor.echo(at(tenth / 10))
            self.monitor.tick(at(tenth / 10))


def test_the_name_of_a_node_that_left_is_free_once_its_agent_has_ended() -> None:
    detector = Detector()
    detector.beat("n0", FIRST, 1.0)
    departure = Departure(node="n0", incarnation=FIRST, reason="asked to end")
    detector.monitor.feed(departure, at(1.0))
    assert detector.verdict(hello("n0", SECOND, network=THERE), 1.1, first=Liveness.ANSWERED) == "wait"
    assert detector.verdict(hello("n0", SECOND, network=THERE), 1.2, first=Liveness.GONE) == "admitted"


def refused(answer: Answer | Ask) -> Answer:
    assert isinstance(answer, Answer)
    assert answer.verdict == "refused"
    return answer


# ---- names


def test_an_agent_with_a_free_name_is_admitted() -> None:
    detector = Detector()
    assert detector.verdict(hello("n0", FIRST), 1.0) == "admitted"
    assert detector.verdict(hello("n0", FIRST), 1.1) == "admitted"  # the answer was lost: the agent asks again
    assert [type(event) for event in detector.beat("n0", FIRST, 1.2)[0]] == [NodeJoined]


def test_the_agent_that_has_the_name_is_asked_first_and_keeps_it_while_it_answers() -> None:
    detector = Detector()
    detector.beat("n0", FIRST, 1.0)
    assert detector.hello(hello("n0", SECOND), 1.1) == Ask("n0", FIRST)
    answer = refused(detector.hello(hello("n0", SECOND), 1.1, first=Liveness.ANSWERED))
    assert answer.code == "name-in-use"
    assert "n0" in answer.detail
    assert detector.beat("n0", FIRST, 1.2) == ([], [])


def test_the_successor_of_an_ended_agent_is_admitted_at_once_on_the_same_machine() -> None:
    detector = Detector()
    detector.beat("n0", FIRST, 1.0)
    assert detector.verdict(hello("n0", SECOND), 1.1, first=Liveness.GONE) == "admitted"
    events, revokes = detector.beat("n0", SECOND, 1.2)
    assert [type(event) for event in events] == [ErrorDetected, NodeJoined]
    assert revokes == []


@pytest.mark.parametrize(
    ("answer", "network"), [(Liveness.GONE, THERE), (Liveness.SILENT, HERE), (Liveness.SILENT, THERE)]
)
def test_an_agent_that_may_be_cut_off_keeps_its_name_until_its_node_is_lost(answer: Liveness, network: str) -> None:
    detector = Detector()
    detector.beat("n0", FIRST, 0.0)
    assert detector.verdict(hello("n0", SECOND, network=network), 1.4, first=answer) == "wait"
    detector.silence(1.6)
    assert detector.monitor.state.nodes["n0"].lost is not None
    assert detector.verdict(hello("n0", SECOND, network=network), 1.7, first=answer) == "admitted"


@pytest.mark.parametrize("reached", [False, True])
def test_a_machine_that_replaces_the_only_node_gets_its_name_if_nobody_reaches_that(reached: bool) -> None:
    """Nothing can show that the only node is lost; its successor must not wait for ever."""
    detector = Detector()
    detector.beat("n0", FIRST, 0.0, probe="n0:1")
    for tenth in range(60):
        detector.monitor.echo(at(tenth / 10))
        for question in detector.monitor.tick(at(tenth / 10)).probes:
            outcome = Outcome.REACHED if reached else Outcome.SILENT
            detector.monitor.probed(question, {"n0": outcome}, at(tenth / 10))
    assert detector.monitor.state.nodes["n0"].lost is None
    verdict = detector.verdict(hello("n0", SECOND, network=THERE), 6.0, first=Liveness.GONE)
    assert verdict == ("wait" if reached else "admitted")
    if not reached:
        events, _ = detector.beat("n0", SECOND, 6.1, network=THERE)
        assert [type(event) for event in events] == [ErrorDetected, NodeJoined]


def test_a_lost_agent_that_answers_keeps_its_name() -> None:
    """Its node was cut off from NATS and is being cleaned, for example."""
    detector = Detector()
    detector.beat("n0", FIRST, 0.0)
    detector.silence(1.6)
    refused(detector.hello(hello("n0", SECOND), 1.7, first=Liveness.ANSWERED))


def test_of_two_agents_that_start_at_once_one_is_admitted() -> None:
    detector = Detector()
    assert detector.verdict(hello("n0", FIRST), 1.0) == "admitted"
    assert detector.hello(hello("n0", SECOND), 1.0) == Ask("n0", FIRST)
    assert refused(detector.hello(hello("n0", SECOND), 1.0, first=Liveness.ANSWERED)).code == "name-in-use"


def test_an_agent_that_ended_before_its_first_heartbeat_gives_its_name_back() -> None:
    detector = Detector()
    detector.verdict(hello("n0", FIRST), 1.0)
    assert detector.verdict(hello("n0", SECOND, network=THERE), 1.1, first=Liveness.GONE) == "admitted"
    # Of the two, the one that was admitted last may join.
    assert detector.beat("n0", FIRST, 1.2) == ([], [Revoke("n0", FIRST)])
    assert [type(event) for event in detector.beat("n0", SECOND, 1.3)[0]] == [NodeJoined]


def test_an_admitted_agent_that_is_silent_keeps_its_name_for_the_time_out_of_a_node() -> None:
    detector = Detector()
    detector.verdict(hello("n0", FIRST), 1.0)
    assert detector.verdict(hello("n0", SECOND), 2.5, first=Liveness.SILENT) == "wait"
    assert detector.verdict(hello("n0", SECOND), 2.6, first=Liveness.SILENT) == "admitted"


def test_both_the_present_and_the_admitted_agent_of_a_name_are_asked() -> None:
    detector = Detector()
    detector.beat("n0", FIRST, 1.0)
    detector.verdict(hello("n0", SECOND), 1.1, first=Liveness.GONE)
    assert detector.hello(hello("n0", THIRD), 1.2) == Ask("n0", SECOND)
    assert detector.hello(hello("n0", THIRD), 1.2, second=Liveness.GONE) == Ask("n0", FIRST)
    assert detector.verdict(hello("n0", THIRD), 1.2, second=Liveness.GONE, first=Liveness.GONE) == "admitted"


def test_a_restarted_detector_waits_for_the_first_heartbeats() -> None:
    detector = Detector()
    [joined] = detector.beat("n0", FIRST, 0.0)[0]
    successor = Detector()
    successor.monitor.fold(joined)
    assert successor.verdict(hello("n0", SECOND), 0.5, first=Liveness.GONE) == "wait"
    assert successor.verdict(hello("n0", SECOND), 0.51, first=Liveness.GONE) == "admitted"
    elsewhere = hello("n0", THIRD, network="elsewhere")
    assert successor.verdict(elsewhere, 0.51, second=Liveness.GONE, first=Liveness.GONE) == "wait"
    unplaced = Detector()
    unplaced.monitor.fold(joined.model_copy(update={"network": ""}))  # of a log that does not say where it is
    assert unplaced.verdict(elsewhere, 0.5, first=Liveness.GONE) == "wait"
    assert unplaced.verdict(elsewhere, 0.51, first=Liveness.GONE) == "admitted"


def test_an_agent_whose_name_was_given_away_is_told_and_changes_nothing() -> None:
    """It was cut off, counted as lost, and comes back beside its successor."""
    detector = Detector()
    detector.beat("n0", FIRST, 0.0)
    detector.silence(1.6)
    detector.verdict(hello("n0", SECOND), 2.0, first=Liveness.SILENT)
    detector.beat("n0", SECOND, 2.1)
    assert detector.beat("n0", FIRST, 2.2) == ([], [Revoke("n0", FIRST)])
    assert detector.monitor.state.nodes["n0"].incarnation == SECOND
    assert refused(detector.hello(hello("n0", FIRST), 2.3)).code == "name-in-use"


def test_two_agents_without_a_hello_end_nothing() -> None:
    """The second join of an agent would have the id of its first one, with another time: the log refuses that."""
    detector = Detector()
    events = [e for turn in range(4) for e in detector.beat("n0", (FIRST, SECOND)[turn % 2], 1.0 + turn / 10)[0]]
    assert [type(event) for event in events] == [NodeJoined, ErrorDetected, NodeJoined]
    assert len({event.event_id for event in events}) == 3


def test_past_agents_are_known_after_a_restart_of_the_detector() -> None:
    detector, successor = Detector(), Detector()
    for incarnation in (FIRST, SECOND):
        for event in detector.beat("n0", incarnation, 1.0)[0]:
            successor.monitor.fold(event)
    assert successor.beat("n0", FIRST, 2.0) == ([], [Revoke("n0", FIRST)])
    assert successor.beat("n0", SECOND, 2.0) == ([], [])


def test_a_successor_whose_clock_is_behind_joins() -> None:
    detector = Detector()
    detector.beat("n0", FIRST, 10.0)
    events, _ = detector.beat("n0", SECOND, 10.1, sent_at=4.0)
    assert [type(event) for event in events] == [ErrorDetected, NodeJoined]


def test_signals_of_an_agent_whose_name_was_given_away_are_dropped() -> None:
    cluster = Cluster()
    cluster.beat("n2", 5.3, task=None, incarnation="second")
    late = cluster.checkpointed("n2/0", 5.4, incarnation="first n2")
    assert cluster.signal(late, 5.4) == []
    of_the_successor = cluster.checkpointed("n2/0", 5.4, incarnation="second")
    assert [type(event) for event in cluster.signal(of_the_successor, 5.4)] == [TaskCheckpointed]


# ---- addresses


def test_a_loopback_address_beside_a_node_on_another_machine_is_refused() -> None:
    detector = Detector()
    detector.beat("n0", FIRST, 1.0, network=THERE)
    assert detector.hello(hello("n1", SECOND, LOOPBACK), 1.1) == Ask("n0", FIRST)
    answer = refused(detector.hello(hello("n1", SECOND, LOOPBACK), 1.1, first=Liveness.ANSWERED))
    assert answer.code == "unreachable-address"
    assert "node n1 would advertise the loopback address 127.0.0.1" in answer.detail
    assert "node n0 (198.51.100.2)" in answer.detail
    assert "set UNICRON_ADDRESS" in answer.detail


def test_the_refusal_names_the_setting_that_is_wrong() -> None:
    detector = Detector()
    detector.beat("n0", FIRST, 1.0, network=THERE)
    answer = refused(
        detector.hello(hello("n1", SECOND, {**FAR, "store_host": "127.0.1.1"}), 1.1, first=Liveness.ANSWERED)
    )
    assert "127.0.1.1" in answer.detail
    assert "set UNICRON_STORE_HOST" in answer.detail


def test_an_agent_beside_a_node_with_a_loopback_address_on_another_machine_is_refused() -> None:
    detector = Detector()
    detector.beat("n0", FIRST, 1.0, addresses=LOOPBACK, network=THERE)
    answer = refused(detector.hello(hello("n1", SECOND), 1.1, first=Liveness.ANSWERED))
    assert "node n0 on another machine advertises the loopback address 127.0.0.1" in answer.detail


@pytest.mark.parametrize("mine", [FAR, LOOPBACK])
@pytest.mark.parametrize("theirs", [FAR, LOOPBACK])
def test_nodes_of_one_machine_have_any_address(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    detector = Detector()
    detector.beat("n0", FIRST, 1.0, addresses=theirs)
    assert detector.verdict(hello("n1", SECOND, mine), 1.1) == "admitted"


def test_lost_nodes_and_nodes_that_report_no_address_refuse_nobody() -> None:
    detector = Detector()
    detector.beat("n0", FIRST, 0.0, network=THERE)
    detector.silence(1.6)
    detector.beat("n1", SECOND, 1.7, addresses={}, network="")
    assert detector.verdict(hello("n2", THIRD, LOOPBACK), 1.8) == "admitted"


def test_an_agent_that_was_admitted_counts_before_its_first_heartbeat() -> None:
    detector = Detector()
    assert detector.verdict(hello("n0", FIRST, network=THERE), 1.0) == "admitted"
    assert detector.verdict(hello("n1", SECOND, LOOPBACK), 1.0, first=Liveness.ANSWERED) == "refused"


@pytest.mark.parametrize("joined", [False, True])
def test_a_peer_that_has_ended_refuses_nobody(joined: bool) -> None:
    detector = Detector()
    assert detector.verdict(hello("n0", FIRST, LOOPBACK, THERE), 1.0) == "admitted"
    if joined:
        detector.beat("n0", FIRST, 1.1, addresses=LOOPBACK, network=THERE)
    assert detector.verdict(hello("n1", SECOND), 1.2, first=Liveness.SILENT) == "wait"
    assert detector.verdict(hello("n1", SECOND), 1.2, first=Liveness.GONE) == "admitted"


def test_nodes_that_were_not_heard_yet_are_waited_for() -> None:
    detector, successor = Detector(), Detector()
    for event in detector.beat("n0", FIRST, 0.0, network=THERE)[0]:
        successor.monitor.fold(event)
    assert successor.verdict(hello("n1", SECOND, LOOPBACK), 0.4) == "wait"
    successor.beat("n0", FIRST, 0.45, network=THERE)
    assert successor.verdict(hello("n1", SECOND, LOOPBACK), 0.46, first=Liveness.ANSWERED) == "refused"
