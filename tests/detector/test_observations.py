"""One fault seen by many ranks and methods is one incident with several observations, and its root cause is named."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detector.incidents import observations
from services.detector.incidents.observations import DETAIL_CHARACTERS, MOST, OBSERVE_S, root_cause
from services.detector.state.unlogged import Isolation
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import IncidentObserved, Observation, TaskProgressed
from shared.messages.signals import Signal
from tests.detector.kit import Cluster, at, lose, moved, only_error, restart_plan


def observed(cluster: Cluster, seconds: float) -> list[Any]:
    """What a tick adds to the log of incidents that were watched."""
    for name in cluster.names:
        cluster.beat(name, seconds)
    return [event for event in cluster.tick(seconds) if not isinstance(event, TaskProgressed)]


def seen(kind: ErrorKind, seconds: float = 0.0, worker: str | None = "n1/0", error: str = "e") -> Observation:
    return Observation(method=Method.EXCEPTION, kind=kind, worker=worker, error=error, at=at(seconds))


@pytest.mark.parametrize("order", list(itertools.permutations(["exit", "peer 0", "peer 2"])))
def test_what_peers_see_of_a_killed_rank_is_in_one_event(order: tuple[str, ...]) -> None:
    cluster = Cluster()
    signals: dict[str, Signal] = {
        "exit": cluster.exited("n1/0", 1.0),
        "peer 0": cluster.raised("n0/0", 1.01, "communication"),
        "peer 2": cluster.raised("n2/0", 1.02, "communication"),
    }
    error = only_error([e for name in order for e in cluster.signal(signals[name], 1.1)])
    for name in order:
        assert cluster.signal(signals[name], 1.2) == []  # an agent repeats a signal
    restart_plan("p2", error, cluster, "n1/0")
    cluster.fold(moved("p2", 2, "held", incident=error.incident))
    assert observed(cluster, 0.1) == []
    (event,) = observed(cluster, 1.0)
    assert isinstance(event, IncidentObserved)
    assert (event.incident, event.task, event.omitted) == (error.incident, "gpt", 0)
    assert {(one.kind, one.worker) for one in event.observations} == {
        (ErrorKind.PROCESS_EXIT, "n1/0"),
        (ErrorKind.CONNECTION, "n0/0"),
        (ErrorKind.CONNECTION, "n2/0"),
    }
    cause = event.root_cause
    assert (cause.kind, cause.worker, cause.rank, cause.error) == (ErrorKind.PROCESS_EXIT, "n1/0", 1, "SIGKILL")
    assert observed(cluster, 20.0) == []


def test_an_incident_that_nobody_else_saw_has_no_further_event() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    assert observed(cluster, 1.0 + OBSERVE_S) == []
    assert cluster.monitor.state.watches == {}


def test_without_an_answer_the_collection_ends_after_a_while() -> None:
    cluster = Cluster()
    only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    cluster.signal(cluster.raised("n0/0", 1.1, "communication"), 1.1)
    assert observed(cluster, 0.9 + OBSERVE_S) == []
    (event,) = observed(cluster, 1.0 + OBSERVE_S)
    assert isinstance(event, IncidentObserved)


def test_the_exception_is_the_root_cause_of_its_process_end_and_an_escalation_is_an_observation() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.raised("n1/0", 1.0, "exception"), 1.0))
    cluster.signal(cluster.exited("n1/0", 1.1, code=1), 1.1)
    restart_plan("p2", error, cluster, "n1/0")
    again = cluster.exited("n1/0", 2.0, code=3, step=0, generation=2, rank=None)
    assert only_error(cluster.signal(again, 2.0)).severity is Severity.SEV2
    (event,) = observed(cluster, 1.0 + OBSERVE_S)
    assert [(one.kind, one.error) for one in event.observations] == [
        (ErrorKind.EXCEPTION, "ValueError"),
        (ErrorKind.PROCESS_EXIT, "exit 1"),
        (ErrorKind.PROCESS_EXIT, "exit 3"),
    ]
    assert (event.root_cause.kind, event.root_cause.detail) == (ErrorKind.EXCEPTION, "it broke")


def test_a_detail_that_was_longer_ends_in_an_ellipsis() -> None:
    cluster = Cluster()
    details = {"n1/0": "x" * DETAIL_CHARACTERS, "n0/0": "y" * (DETAIL_CHARACTERS + 1)}
    for worker, cause in (("n1/0", "exception"), ("n0/0", "communication")):
        signal = cluster.raised(worker, 1.0, cause).model_copy(update={"detail": details[worker]})
        cluster.signal(signal, 1.1)
    (event,) = [e for e in observed(cluster, 1.1 + OBSERVE_S) if isinstance(e, IncidentObserved)]
    found = {one.worker: one.detail for one in event.observations}
    assert found == {"n1/0": details["n1/0"], "n0/0": "y" * (DETAIL_CHARACTERS - 1) + "…"}


def test_a_lost_node_explains_what_the_peers_see() -> None:
    cluster = Cluster()
    lost = only_error(lose(cluster, "n1"))
    cluster.signal(cluster.raised("n0/0", 11.7, "communication"), 11.7)
    found = [e for e in observed(cluster, 12.0 + OBSERVE_S) if isinstance(e, IncidentObserved)]
    assert [(e.incident, e.root_cause.kind, e.root_cause.node) for e in found] == [
        (lost.incident, ErrorKind.NODE_LOST, "n1")
    ]


def test_a_task_of_a_thousand_ranks_costs_one_short_event() -> None:
    cluster = Cluster(300)
    only_error(cluster.signal(cluster.exited("n7/0", 1.0), 1.0))
    for name in cluster.names:
        if name != "n7":
            cluster.signal(cluster.raised(f"{name}/0", 1.1, "communication"), 1.1)
    found = [e for e in cluster.tick(1.0 + OBSERVE_S) if isinstance(e, IncidentObserved)]
    (event,) = found
    assert (len(event.observations), event.omitted) == (MOST, 300 - MOST)
    assert len(event.canonical()) < 8000
    assert event.root_cause.worker == "n7/0"


def test_the_stated_order_has_every_kind() -> None:
    assert sorted(observations.ORDER) == sorted(ErrorKind)


kinds = st.sampled_from(ErrorKind)
anything = st.builds(
    seen, kinds, st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from([None, "n0/0", "n1/0"]), st.sampled_from("ab")
)


@given(st.lists(anything, min_size=1, max_size=8), st.randoms())
def test_the_root_cause_does_not_depend_on_the_order_of_arrival(found: list[Observation], draw: Any) -> None:
    cause = root_cause(found)
    shuffled = [*found]
    draw.shuffle(shuffled)
    assert root_cause(shuffled) == cause
    assert all(observations.ORDER.index(cause.kind) <= observations.ORDER.index(one.kind) for one in found)


def test_a_device_is_the_root_cause_of_the_exception_and_the_end_that_follow() -> None:
    found = [
        seen(ErrorKind.CONNECTION, 0.0, "n0/0"),
        seen(ErrorKind.PROCESS_EXIT, 2.0, error="exit 1"),
        seen(ErrorKind.EXCEPTION, 1.0),
        seen(ErrorKind.DEVICE, 3.0, "n1/0"),
    ]
    assert root_cause(found).kind is ErrorKind.DEVICE
    assert root_cause(found[:3]).kind is ErrorKind.EXCEPTION
    assert root_cause(found[:2]).kind is ErrorKind.PROCESS_EXIT


def test_a_node_that_is_lost_soon_after_its_link_broke_is_one_incident() -> None:
    cluster = Cluster()
    link = cluster.monitor.state.isolated["n1"] = Isolation("the broken link", at(8.0), 5.0)
    assert only_error(lose(cluster, "n1")).incident == "the broken link"
    other = Cluster()
    link.since = at(-100.0)
    other.monitor.state.isolated["n1"] = link
    lost = only_error(lose(other, "n1"))
    assert lost.incident == lost.event_id
