"""Ranks that are not what the other members are: incidents of their task, whatever node they ran on."""

from __future__ import annotations

from typing import Any

import pytest

from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, TaskFailed, TaskIdentified, TaskSubmitted
from shared.messages.signals import RankIdentified, RankRaised
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC
from tests.detector.kit import START, Cluster, complete, only_error, restart_plan

DETAIL = "code: train.py is b here and a on rank 0"


def differs(cluster: Cluster, worker: str, seconds: float, *, code: str = "b", **rest: Any) -> RankRaised:
    signal = cluster.raised(worker, seconds, "differs", **rest)
    return signal.model_copy(update={"error": "MemberDiffers", "detail": DETAIL, "difference": f"code/train.py={code}"})


def refused_newcomer(cluster: Cluster, worker: str, number: int, seconds: float, **rest: Any) -> ErrorDetected:
    """A rank is lost, another process takes its place, and is not what the survivors are."""
    error = only_error(cluster.signal(cluster.exited(worker, seconds), seconds))
    restart_plan(f"p{number}", error, cluster, worker, generation=cluster.generation)
    generation = cluster.generation + 2
    signal = differs(cluster, worker, seconds + 1.0, generation=generation, **rest)
    return only_error(cluster.signal(signal, seconds + 1.0))


def test_a_difference_is_an_incident_of_its_own_with_both_values() -> None:
    found = refused_newcomer(Cluster(), "n1/0", 2, 1.0)
    assert (found.kind, found.severity, found.method) == (ErrorKind.DIFFERENCE, Severity.SEV2, Method.EXCEPTION)
    assert (found.escalates, found.incident) == (None, found.event_id)
    assert found.evidence["detail"] == DETAIL
    assert Evidence.read(found.evidence).rule == ""


@pytest.mark.parametrize("worker", ["n1/0", "n2/0"])
def test_a_second_newcomer_with_the_same_difference_accuses_the_task(worker: str) -> None:
    """At whatever step, and on whatever node; no node is isolated, however often it comes."""
    cluster = Cluster()
    first = refused_newcomer(cluster, "n1/0", 2, 1.0)
    restart_plan("p3", first, cluster, worker, generation=3)
    again = only_error(cluster.signal(differs(cluster, worker, 5.0, generation=5, step=20), 5.0))
    assert (again.kind, again.severity) == (ErrorKind.DIFFERENCE, Severity.SEV2)
    assert (again.incident, again.escalates) == (first.event_id, first.event_id)
    assert Evidence.read(again.evidence).rule == "task"


def test_another_difference_is_another_incident() -> None:
    cluster = Cluster()
    first = refused_newcomer(cluster, "n1/0", 2, 1.0)
    restart_plan("p3", first, cluster, "n1/0", generation=3)
    other = only_error(cluster.signal(differs(cluster, "n1/0", 5.0, generation=5, code="c"), 5.0))
    assert (other.escalates, Evidence.read(other.evidence).rule) == (None, "")


def test_differences_make_no_lemon() -> None:
    """A node with as many faults of its own would be left out."""
    cluster = Cluster()
    for number in range(6):
        at_s = 10.0 * number + 1.0
        signal = differs(cluster, "n1/0", at_s, code=str(number), generation=cluster.generation)
        found = only_error(cluster.signal(signal, at_s))
        assert (found.severity, found.escalates) == (Severity.SEV2, None)
        restart_plan(f"p{number + 2}", found, cluster, "n1/0", generation=cluster.generation)
        complete(f"p{number + 2}", cluster, cluster.generation + 2)


def test_members_that_differ_before_a_task_has_trained_end_it() -> None:
    """Which of them is meant is not known; to start them again would not help."""
    cluster = Cluster(trained=False)
    (failed,) = cluster.signal(differs(cluster, "n1/0", 1.0), 1.0)
    assert isinstance(failed, TaskFailed)
    assert failed.reason == f"worker n1/0 of node n1 cannot run it: MemberDiffers: {DETAIL}"


# ---- what is recorded


def identified(cluster: Cluster, number: int, **identity: str) -> RankIdentified:
    about = cluster.finished("n0/0", 1.0).model_dump(
        exclude={"kind", "samples_sha256", "parameters_path", "loss", "signal_id"}
    )
    return RankIdentified(**about, signal_id=f"identified {number}", identity=identity)


def test_what_a_task_is_is_recorded_once_and_a_resumption_says_what_has_changed() -> None:
    cluster = Cluster()
    (first,) = cluster.signal(identified(cluster, 1, code="a", seed="1"), 1.0)
    assert isinstance(first, TaskIdentified)
    assert (first.identity, first.changed) == ({"code": "a", "seed": "1"}, [])
    assert cluster.signal(identified(cluster, 2, code="c"), 1.0) == []
    cluster.fold(TaskFailed(event_id="ended", occurred_at=START, task="gpt", generation=1, step=16, reason="no more"))
    assert "gpt" not in cluster.monitor.state.tasks
    spec = parse_spec({**SPEC, "name": "gpt"})
    cluster.fold(TaskSubmitted(event_id="again", occurred_at=START, task="gpt", spec=spec))
    cluster.monitor.state.tasks["gpt"].generation = 2  # generations go on over submissions
    later = identified(cluster, 3, code="b", seed="1", data="d").model_copy(update={"generation": 2})
    (second,) = cluster.signal(later, 2.0)
    assert second.changed == ["code: a -> b"]
    assert second.event_id != first.event_id
