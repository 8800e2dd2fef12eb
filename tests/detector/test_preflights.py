"""Preflights: nodes that are slow do not join, and an operator may use them all the same."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from services.agent.agent import Agent
from services.agent.cluster.preflight import Preflight
from services.agent.machine import preflight
from services.agent.machine.hardware import Devices
from services.agent.succession.inheritance import Inheritance
from services.detector import neighbours
from services.detector.state.cluster import DetectorState
from services.detector.state_snapshot import KEPT
from shared.bus.connection import Bus
from shared.events.measurements import NEIGHBOUR, Measurement, Rate
from shared.events.union import NodeJoined, NodeLeft, NodeMeasured, NodeReturned
from shared.messages.preflight import PREFLIGHT, NeighbourRequest, PreflightAnswer, PreflightReport
from shared.messages.self_test import SELF_TEST, SelfTest
from shared.service.state_codec import StateCodec
from shared.settings.model import Settings
from tests.agent.kit import HERE, WORKERS
from tests.condition import until
from tests.detector.conftest import LogWatch
from tests.detector.kit import START, Cluster, Found, at
from tests.detector.test_monitor import of

LIKE = ("n10", "n11", "n12")
"""Nodes that were measured before."""


class Measured(Cluster):
    """A cluster of which some nodes were measured; ``n3`` starts. Its newest report is kept, to be sent again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reports = 0
        for name in LIKE:
            assert self.report(name, 10e9, seconds=0.0).verdict == "reported"

    def report(self, node: str, value: float, *, seconds: float = 1.0, again: bool = False, **fields: Any) -> Any:
        """Send what a node has measured; return the answer."""
        self.reports += not again
        rates = [Rate(quantity="host memory", value=value)] if value else []
        count = fields.pop("count", 2)
        measured = Measurement(device="a processor", count=count, rates=rates, problems=fields.pop("problems", []))
        known: dict[str, Any] = {"incarnation": f"first {node}", "supervisor": "", "workers": [f"{node}/0"], **fields}
        report = PreflightReport(node=node, agent_pid=7, report=f"r{self.reports}", measurement=measured, **known)
        self.found = self.monitor.feed(report, at(seconds))
        answer = self.found.effects[-1]
        assert isinstance(answer, PreflightAnswer)
        return answer

    def joins(self, node: str = "n3", seconds: float = 2.0, **fields: Any) -> bool:
        """Return whether a node joins with its next heartbeat."""
        self.names = [*dict.fromkeys([*self.names, node])]
        found = self.beat(node, seconds, task=None, **fields)
        return any(isinstance(event, NodeJoined) for event in found.events)

    def returns(self, node: str = "n3", incarnation: str = "first n3") -> Found:
        event = NodeReturned(
            event_id=f"returned {incarnation}", occurred_at=START, node=node, incarnation=incarnation, actor="uid/0"
        )
        return self.fold(event)


def test_a_slow_node_does_not_join_and_the_log_has_its_figures() -> None:
    cluster = Measured()
    answer = cluster.report("n3", 4e9)
    assert answer.verdict == "refused"
    [event] = cluster.found.events
    assert isinstance(event, NodeMeasured)
    assert (event.node, event.verdict, event.workers, event.agent_pid) == ("n3", "refused", ["n3/0"], 7)
    assert (event.measurement.rates[0].value, event.measurement.rates[0].bound) == (4e9, 5e9)
    assert event.reason == answer.reason
    assert "host memory: 4 GB/s, at least 5 GB/s expected (0.5 of 10 GB/s, the median of 3 nodes" in event.reason
    assert not cluster.joins()
    assert not cluster.joins(seconds=3.0)


def test_a_fast_node_joins_and_so_does_one_that_could_not_be_measured() -> None:
    cluster = Measured()
    assert cluster.report("n3", 9e9) == PreflightAnswer(verdict="accepted")
    assert cluster.joins()
    assert cluster.report("n4", 0.0, problems=["not done within 30 s"]).reason == "not done within 30 s"
    assert cluster.joins("n4")
    assert cluster.joins("n5")  # nothing was measured, as without the setting


def test_a_report_that_is_sent_again_is_one_event() -> None:
    cluster = Measured()
    first = cluster.report("n3", 4e9)
    assert cluster.report("n3", 4e9, seconds=4.0, again=True) == first
    assert cluster.found.events == []


def test_another_measurement_or_another_agent_lets_the_node_join() -> None:
    cluster = Measured()
    cluster.report("n3", 4e9)
    assert cluster.report("n3", 9e9, incarnation="second n3").verdict == "accepted"
    assert cluster.joins(incarnation="second n3")

    cluster = Measured()
    cluster.report("n3", 4e9)
    assert cluster.joins(incarnation="third n3")  # its operator has started it without the setting


def test_an_agent_that_its_supervisor_has_started_again_is_refused_as_the_one_before() -> None:
    cluster = Measured()
    cluster.report("n3", 4e9, supervisor="s")
    [event] = cluster.beat("n3", 2.0, task=None, incarnation="second n3", supervisor="s").events
    assert isinstance(event, NodeMeasured)
    assert (event.incarnation, event.verdict) == ("second n3", "refused")
    assert cluster.beat("n3", 3.0, task=None, incarnation="second n3", supervisor="s").events == []
    cluster.returns(incarnation="second n3")
    assert cluster.joins(seconds=4.0, incarnation="second n3", supervisor="s")


def test_an_operator_overrules_a_refusal_for_as_long_as_the_agent_lives() -> None:
    cluster = Measured()
    cluster.report("n3", 4e9)
    assert not cluster.joins()
    cluster.returns(incarnation="another")
    assert not cluster.joins(seconds=3.0)
    cluster.returns()
    assert cluster.joins(seconds=4.0)
    answer = cluster.report("n3", 4e9, seconds=5.0)
    assert answer.verdict == "reported"
    assert answer.reason.startswith("an operator uses the node all the same: host memory: 4 GB/s")
    assert cluster.report("n3", 4e9, seconds=6.0, incarnation="second n3").verdict == "refused"


def test_a_node_in_use_is_not_taken_out_of_use() -> None:
    cluster = Measured()
    assert cluster.report("n1", 4e9).verdict == "refused"
    assert cluster.beat("n1", 2.0).events == []
    node = cluster.monitor.state.nodes["n1"]
    assert node.present
    assert cluster.monitor.state.is_open(node)


def test_the_agent_before_is_known_to_be_gone_when_the_next_one_is_measured() -> None:
    cluster = Measured()
    cluster.report("n1", 4e9, incarnation="second n1")
    lost, measured = cluster.found.events
    assert (lost.kind, lost.node, lost.evidence["reason"]) == ("node-lost", "n1", "a new incarnation of the agent")
    assert (measured.verdict, measured.incarnation) == ("refused", "second n1")
    assert not cluster.joins("n1", incarnation="second n1")
    cluster.returns("n1", "second n1")
    assert cluster.joins("n1", seconds=3.0, incarnation="second n1")


def test_a_refused_node_that_leaves_is_said_to_have_left() -> None:
    cluster = Measured()
    cluster.report("n3", 4e9)
    assert cluster.depart("n3", 2.0, incarnation="another") == []
    [event] = cluster.depart("n3", 3.0)
    assert isinstance(event, NodeLeft)
    assert (event.node, event.incarnation, event.reason) == ("n3", "first n3", "asked to end")


def test_what_was_measured_outlives_the_detector() -> None:
    cluster = Measured()
    cluster.report("n3", 4e9)
    cluster.report("n4", 4e9, incarnation="first n4")
    cluster.returns("n4", "first n4")
    codec: StateCodec[DetectorState] = StateCodec(KEPT.kind)
    again = codec.load(codec.dump(cluster.monitor.state))
    assert again.preflights == cluster.monitor.state.preflights
    assert [known.refuses for known in again.preflights.values()] == [False, False, False, True, False]


def test_a_node_that_joined_before_its_like_were_known_is_said_to_be_slow_once_they_are() -> None:
    cluster = Measured()
    for seconds, name in enumerate(("n3", "n4", "n5")):
        cluster.report(name, 4e9 if name == "n3" else 9e9, seconds=seconds, count=4)
        assert [event.verdict for event in cluster.found.events] == ["reported"]
    assert cluster.joins("n3", seconds=4.0)
    assert cluster.report("n6", 9e9, seconds=5.0, count=4).verdict == "accepted"
    measured, slow = cluster.found.events
    assert (measured.node, slow.node, slow.verdict, slow.incarnation) == ("n6", "n3", "slow", "first n3")
    assert slow.reason.startswith("host memory: 4 GB/s, at least 4.5 GB/s expected")
    assert slow.measurement.rates[0].is_slow
    assert cluster.monitor.state.is_open(cluster.monitor.state.nodes["n3"])
    cluster.report("n7", 9e9, seconds=6.0, count=4)
    assert [event.node for event in cluster.found.events] == ["n7"], "it is said once"


def test_a_member_that_no_task_uses_is_a_neighbour_of_its_like() -> None:
    cluster = Measured()
    for name in ("n1", "n3", "n4"):
        cluster.report(name, 9e9)
    assert cluster.joins("n3")  # n1 is used by a task, n4 and others have not joined

    def found(**changes: Any) -> list[str]:
        known = {"node": "n9", "device": "a processor", "count": 2, "store": "127.0.0.1:1", **changes}
        return neighbours.idle(cluster.monitor.state, NeighbourRequest(**known))

    assert found() == ["n3"]
    assert found(known=["n3"]) == found(node="n3") == found(count=4) == found(device="another") == []


# ---- a real agent, a real detector


def prints(folder: Path, **rates: float) -> str:
    """Return a stand-in for the Python of the ranks: where it is to measure, it says these rates at once."""
    path = folder / "python"
    lines = [json.dumps({"quantity": name.replace("_", " "), "device": None, "value": rates[name]}) for name in rates]
    found = folder / "rates"
    found.write_text("\n".join(lines))
    near = json.dumps({"quantity": NEIGHBOUR, "value": 1e9})
    path.write_text(
        f"""#!/bin/sh\ncase "$*" in *{preflight.PROGRAM}*neighbour*) echo '{near}'; exit;;\n"""
        f"""*{preflight.PROGRAM}*) exec cat {found};; esac\nexec {sys.executable} "$@"\n"""
    )
    path.chmod(0o755)
    return str(path)


async def test_a_slow_node_is_refused_and_an_operator_uses_it_and_a_self_test_measures_it_again(
    settings: Settings,
    bus: Bus,
    inherited: Inheritance,
    monitor: LogWatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "in_use", lambda: "")  # whatever other tests do on this machine
    monkeypatch.setattr(neighbours, "WAIT_S", 0.1)  # nobody else asks
    python = prints(tmp_path, host_memory=4e9)
    wanted = settings.model_copy(update={"preflight": True, "interpreters": python})
    alike = (await preflight.measure(python, tmp_path, Devices())).model_copy(
        update={"rates": [Rate(quantity="host memory", value=10e9)]}
    )
    for name in LIKE:
        known: dict[str, Any] = {
            "incarnation": f"first {name}",
            "report": f"of {name}",
            "agent_pid": 1,
            "workers": [f"{name}/0"],
        }
        answer = await bus.call(PREFLIGHT, PreflightReport(node=name, measurement=alike, **known), name)
        assert answer.verdict == "reported"

    agent = Agent(wanted, bus, HERE, WORKERS, "0" * 32, inherited)
    try:
        await agent.measure()
        await agent.start()
        events = await monitor.until(lambda found: len(of(found, NodeMeasured)) == len(LIKE) + 1)
        refused = of(events, NodeMeasured)[-1]
        assert (refused.node, refused.verdict, refused.workers) == ("n0", "refused", ["n0/0", "n0/1"])
        assert "host memory: 4 GB/s, at least 5 GB/s expected" in refused.reason
        beats = agent._heartbeats.sequence
        await until(lambda: agent._heartbeats.sequence > beats + 2)
        assert of([r.event for r in monitor.journal.log.read()], NodeJoined) == []

        asked = SelfTest(checks=["preflight"])  # of an operator who returns a node that was refused
        assert (await bus.call(SELF_TEST, asked, "n0")).checks == []
        now = datetime.now(UTC)
        returned = NodeReturned(event_id="r", occurred_at=now, node="n0", incarnation="0" * 32, actor="uid/0")
        await monitor.journal.append([returned])
        events = await monitor.until(lambda found: bool(of(found, NodeJoined)))
        assert of(events, NodeJoined)[0].incarnation == "0" * 32

        prints(tmp_path, host_memory=9e9)
        again = SelfTest(checks=["preflight"], preflight=True)
        assert [check.detail for check in (await bus.call(SELF_TEST, again, "n0")).checks] == ["accepted"]
        prints(tmp_path, host_memory=1e9)
        tested = await bus.call(SELF_TEST, again, "n0")
        assert tested.problem.startswith("preflight: host memory: 1 GB/s, at least 5 GB/s expected")
    finally:
        await agent.stop()


async def test_nodes_that_start_measure_with_one_another_and_a_later_one_with_a_member(
    settings: Settings,
    bus: Bus,
    inherited: Inheritance,
    monitor: LogWatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "in_use", lambda: "")
    monkeypatch.setattr(neighbours, "WAIT_S", 2.0)
    changes = {"preflight": True, "interpreters": prints(tmp_path, host_memory=4e9)}
    wanted = settings.model_copy(update=changes)

    def other(name: str) -> Preflight:
        own = wanted.model_copy(update={"node": name})
        return Preflight(own, bus, f"first {name}", "", WORKERS, wanted.rank_interpreters[0], HERE)

    agent = Agent(wanted, bus, HERE, WORKERS, "0" * 32, inherited)
    try:
        await asyncio.gather(agent.measure(), other("n1").before_joining())
        await agent.start()
        await monitor.until(lambda found: bool(of(found, NodeJoined)))
        await other("n2").before_joining()
        measured = of(await monitor.until(lambda found: len(of(found, NodeMeasured)) == 3), NodeMeasured)
        peers = {one.node: [rate.peer for rate in one.measurement.rates] for one in measured}
        assert peers == {"n0": [None, "n1"], "n1": [None, "n0"], "n2": [None, "n0"]}
    finally:
        await agent.stop()
