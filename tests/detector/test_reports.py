"""What follows from the reports of monitors from outside, and what never does."""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.detector.evolve import evolve
from services.detector.nodes import reports
from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode
from services.detector.state.reports import WINDOW_S, most, source_of
from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind, Severity
from shared.events.union import (
    ErrorDetected,
    Event,
    NodeCordoned,
    NodeDraining,
    NodeReported,
    NodeReportHeld,
    NodeReturned,
    TaskChanged,
)
from tests.detector.kit import Cluster, Monitor, at

SOURCES = ("token/slurm", "token/cloud")
DRAIN_S = 60.0

_numbers = count()


def report(node: str = "n2", seconds: float = 1.0, **fields: Any) -> NodeReported:
    known: dict[str, Any] = {"actor": SOURCES[0], "key": "drain", "severity": "warning", "reason": "a fan"}
    expires_at = at(seconds) + timedelta(seconds=fields.pop("expires_s", 3600.0))
    event = {"event_id": f"report {next(_numbers)}", "occurred_at": at(seconds), "node": node, "expires_at": expires_at}
    return NodeReported.model_validate({**event, **known, **fields})


def returned(node: str, seconds: float, actor: str = "uid/0") -> NodeReturned:
    event_id = f"returned {next(_numbers)}"
    return NodeReturned(event_id=event_id, occurred_at=at(seconds), node=node, incarnation=f"first {node}", actor=actor)


def needing(workers: int) -> Cluster:
    """Three nodes of one worker each, all of which ``gpt`` uses; it needs so many."""
    cluster = Cluster()
    cluster.fold(TaskChanged(event_id="c", occurred_at=at(0), task="gpt", weight=1.0, min_workers=workers))
    return cluster


ANSWERS = (NodeDraining, NodeReportHeld, ErrorDetected)


def beaten(cluster: Cluster, seconds: float) -> list[Any]:
    """All nodes are heard; return what follows from reports."""
    for node in cluster.names:
        cluster.beat(node, seconds)
    return [event for event in cluster.tick(seconds) if isinstance(event, ANSWERS)]


def test_a_warning_drains_its_node_once() -> None:
    cluster = Cluster()
    reported = report(evidence={"reason": "a fan"})
    cluster.fold(reported)
    (event,) = cluster.tick(1.1)
    assert isinstance(event, NodeDraining)
    assert (event.node, event.by, event.actor, event.report) == ("n2", "user", SOURCES[0], reported.report)
    assert (event.timeout_s, event.save) == (60.0, False)
    assert event.reason == "token/slurm reports drain: a fan"
    cluster.fold(report(seconds=1.2))
    assert cluster.tick(1.3) == []


def test_an_error_isolates_its_node_until_an_operator_returns_it() -> None:
    cluster = Cluster()
    reported = report(severity="error", key="down", evidence={"state": "DOWN"})
    cluster.fold(reported)
    *_, event = cluster.tick(1.1)
    assert isinstance(event, ErrorDetected)
    assert (event.kind, event.severity, event.node, event.task) == (ErrorKind.REPORTED, Severity.SEV1, "n2", None)
    evidence = Evidence.read(event.evidence)
    assert (evidence.report, list(evidence.tasks), evidence.incarnation) == (reported.report, ["gpt"], "first n2")
    assert {name: event.evidence[name] for name in ("source", "key", "reason", "reported")} == {
        "source": "token/slurm",
        "key": "down",
        "reason": "a fan",
        "reported": {"state": "DOWN"},
    }
    # Neither the node's own heartbeats nor another agent bring it back, whatever its links are like.
    for tenth in range(12, 300):
        assert cluster.beat("n2", tenth / 10, task=None).events == []
    found = cluster.beat("n2", 40.0, task=None, incarnation="second n2").events
    assert [event.kind for event in found] == [ErrorKind.NODE_LOST]  # the agent before, and not a join
    assert cluster.monitor.state.isolated["n2"].until_returned
    cluster.fold(returned("n2", 41.0))
    assert "n2" not in cluster.monitor.state.isolated
    assert beaten(cluster, 42.0) == []  # the report that still lives is overruled
    cluster.fold(report(seconds=43.0, severity="error", key="down"))
    assert beaten(cluster, 43.1) == []


def test_a_drained_node_whose_warning_becomes_an_error_is_isolated() -> None:
    cluster = Cluster(40)
    cluster.fold(report())
    assert [type(event) for event in cluster.tick(1.1)] == [NodeDraining]
    cluster.fold(report(seconds=1.2, severity="error"))
    assert cluster.tick(1.3)[-1].kind is ErrorKind.REPORTED
    assert list(cluster.monitor.state.reports.taken[SOURCES[0]]) == ["n2"]


def test_an_operator_who_returns_a_node_overrules_all_that_is_reported_of_it() -> None:
    cluster = Cluster()
    cluster.fold(report(key="fan"), report(key="memory"))
    assert [type(event) for event in beaten(cluster, 1.1)] == [NodeDraining]
    cluster.fold(returned("n2", 2.0))
    assert beaten(cluster, 3.0) == []
    cluster.fold(report(seconds=4.0, key="memory"))
    assert beaten(cluster, 5.0) == []
    cluster.fold(report(seconds=6.0, key="memory", severity="error"))
    assert [event.kind for event in beaten(cluster, 6.1)] == [ErrorKind.REPORTED]


def test_what_is_reported_of_a_node_that_is_out_of_use_waits_for_it() -> None:
    cluster = Cluster()
    cluster.depart("n2", 1.0)
    cluster.fold(report())
    assert cluster.tick(1.1) == []
    cluster = Cluster()
    draining = {"event_id": "d", "occurred_at": at(1.0), "node": "n2", "by": "user", "timeout_s": 5.0}
    cluster.fold(NodeDraining.model_validate(draining), report())
    assert cluster.tick(1.1) == []


def test_no_task_falls_below_its_least_workers_before_the_deadline() -> None:
    cluster = needing(3)
    cluster.fold(report(deadline_at=at(100.0)))
    (held,) = beaten(cluster, 1.1)
    assert isinstance(held, NodeReportHeld)
    assert (held.why, held.reason) == ("minimum", "without it 2 workers would be left, and gpt needs at least 3")
    assert beaten(cluster, 1.2) == []  # said once
    assert beaten(cluster, 39.0) == []
    (event,) = beaten(cluster, 40.1)  # as long before as saving may take
    assert isinstance(event, NodeDraining)
    assert event.timeout_s == 29.95  # half of the time to move, half to save


def test_without_a_deadline_the_task_keeps_its_node() -> None:
    cluster = needing(3)
    cluster.fold(report(severity="error"))
    assert [type(event) for event in beaten(cluster, 1.1)] == [NodeReportHeld]
    for seconds in range(2, 3600, 100):
        assert beaten(cluster, seconds) == []


def test_nodes_that_take_no_work_do_not_count_for_the_least_workers() -> None:
    cluster = needing(2)
    cluster.fold(NodeCordoned(event_id="c1", occurred_at=at(0.5), node="n1"), report())
    assert [event.why for event in beaten(cluster, 1.1)] == ["minimum"]
    cluster.fold(returned("n1", 2.0))
    assert [type(event) for event in beaten(cluster, 2.1)] == [NodeDraining]


def test_a_report_that_is_held_back_acts_once_the_source_may_again() -> None:
    cluster = Cluster()
    cluster.fold(report("n0"), report("n1", expires_s=2 * WINDOW_S))
    first, held = cluster.tick(1.1)
    assert (first.node, held.node, held.why) == ("n0", "n1", "budget")
    assert held.reason == "token/slurm has taken 1 of 3 nodes out of use within an hour, the most that it may"
    assert beaten(cluster, WINDOW_S) == []
    assert [(event.type, event.node) for event in beaten(cluster, WINDOW_S + 1.2)] == [("node.draining", "n1")]


def test_a_report_that_has_expired_does_nothing() -> None:
    cluster = Cluster()
    cluster.fold(report("n0"), report("n1", expires_s=600.0))
    cluster.tick(1.1)
    assert beaten(cluster, WINDOW_S + 1.2) == []


def test_what_follows_is_the_same_after_a_restart() -> None:
    cluster = Cluster()
    cluster.fold(report("n0"), report("n1"))
    first = cluster.tick(1.1)
    again = Monitor(at(1.1))
    for event in cluster.monitor.log[: -len(first)]:
        again.fold(event)
    again.echo(at(1.1))
    assert again.tick(at(1.1)).events == first
    again.state.reports.judged_at = None
    assert again.tick(at(1.2)).events == []


class Model:
    """Nodes of which monitors report anything, and operators return some; each answer is checked as it comes."""

    def __init__(self, nodes: int) -> None:
        self.state = DetectorState()
        self.names = [f"n{number}" for number in range(nodes)]
        for name in self.names:
            node = MonitoredNode(name=name, incarnation=f"first {name}", joined=f"joined {name}", workers=8)
            self.state.nodes[name] = node
        self.taken: list[tuple[str, str, float]] = []
        """Source, node, and when: all that was ever taken."""
        self.seen: set[str] = set()

    def fold(self, event: Event) -> None:
        evolve(self.state, event, event.occurred_at)

    def answers(self, seconds: float) -> list[Event]:
        found = []
        self.state.reports.judged_at = None
        for event in reports.answers(self.state, DRAIN_S, at(seconds)):
            self.fold(event)
            assert event.event_id not in self.seen
            self.seen.add(event.event_id)
            found.append(event)
            if isinstance(event, NodeDraining | ErrorDetected):
                self._check(event, seconds)
        return found

    def _check(self, event: NodeDraining | ErrorDetected, seconds: float) -> None:
        assert event.node is not None
        name = event.report if isinstance(event, NodeDraining) else Evidence.read(event.evidence).report
        self.taken.append((source_of(name), event.node, seconds))
        within = {node for source, node, when in self.taken if source == source_of(name) and seconds - when < WINDOW_S}
        assert len(within) <= most(len(self.names))
        assert self.state.reports.known[event.node][name].event.expires_at > at(seconds)


_steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("report"),
            st.sampled_from(SOURCES),
            st.integers(0, 59),
            st.sampled_from(["warning", "error"]),
            st.sampled_from(["a", "b"]),
            st.sampled_from([60.0, 3600.0, 86_400.0]),
        ),
        st.tuples(st.just("return"), st.integers(0, 59)),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 100.0, 1800.0, 3599.0, 3601.0])),
    ),
    max_size=60,
)


@given(st.sampled_from([1, 3, 19, 20, 40, 60]), _steps)
def test_no_sequence_of_reports_takes_more_nodes_than_a_source_may(nodes: int, steps: list[Any]) -> None:
    model, seconds = Model(nodes), 0.0
    for kind, *rest in steps:
        seconds += 0.5
        if kind == "wait":
            seconds += rest[0]
        elif kind == "return":
            model.fold(returned(model.names[rest[0] % nodes], seconds))
        else:
            actor, number, severity, key, expires_s = rest
            name = model.names[number % nodes]
            model.fold(report(name, seconds, actor=actor, severity=severity, key=key, expires_s=expires_s))
        model.answers(seconds)
        assert model.answers(seconds) == []


@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from(["warning", "error"]))
def test_a_report_that_is_told_again_and_again_is_one(nodes: int, times: int, severity: str) -> None:
    model = Model(nodes)
    found: list[Event] = []
    for second in range(times):
        model.fold(report("n0", second, severity=severity))
        found += model.answers(second)
    assert len(found) == 1


def test_the_part_of_the_nodes() -> None:
    assert [most(nodes) for nodes in (1, 19, 20, 39, 40, 2000)] == [1, 1, 1, 1, 2, 100]
