"""A task that is calm: no rule would find anything, and ticks look at no rank of which nothing was heard since."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detector.incidents import absences, script_ends
from services.detector.progress import calm, hangs
from services.detector.progress.standstill import SUSPICION
from services.detector.state.task import MonitoredTask
from shared.events.plans import Layout
from tests.detector.hanging import drain_plan
from tests.detector.kit import LIMITS, Cluster, at, only_error, restart_plan, timed

NOW_S = 300.0
AGES = st.sampled_from([None, 0.0, 0.1, 0.2, 0.4, 2.0, 30.0, 200.0])


@st.composite
def statuses(draw: st.DrawFn) -> dict[str, Any]:
    """What a rank reports: mostly the ordinary, so that in many examples all ranks do."""
    if draw(st.integers(0, 2)):
        return {"progress_age_s": draw(st.sampled_from([0.0, 0.1])), "process_state": "S", "steps_done": 20}
    return {
        "task": draw(st.sampled_from(["gpt", "gpt", None])),
        "state": draw(st.sampled_from(["training", "training", "waiting", "ready"])),
        "generation": draw(st.sampled_from([1, 1, 0, 2])),
        "phase": draw(st.sampled_from(["compute", "reduce", "ended", "setup", "waiting", "tail", "script", None])),
        "progress_age_s": draw(AGES),
        "hold_age_s": draw(AGES),
        "starved_s": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "process_state": draw(st.sampled_from(["S", "S", "T"])),
        "step": draw(st.sampled_from([9, 10])),
        "steps_timed": draw(st.sampled_from([0, 10])),
        "steps_done": draw(st.sampled_from([0, 20])),
    }


def _task(cluster: Cluster) -> MonitoredTask:
    return cluster.monitor.state.tasks["gpt"]


def _rules_find_nothing(cluster: Cluster) -> bool:
    state, task, stalls, now = cluster.monitor.state, _task(cluster), LIMITS.stalls, at(NOW_S)
    absences.update(state, task, now)
    of_hang = hangs.of_training if task.change is None else hangs.of_moving
    return not (task.absent_since or script_ends.going_on(state, task) or of_hang(state, task, stalls, now))


@given(
    st.sampled_from([(1, 1), (3, 1), (1, 3)]),
    st.sampled_from(["trains", "drains", "recovers"]),
    st.lists(st.lists(statuses(), min_size=3, max_size=3), min_size=1, max_size=2),
    st.sampled_from([(), ("n1",)]),
)
def test_the_rules_find_nothing_in_a_task_that_is_calm(
    shape: tuple[int, int], does: str, heard: list[list[dict[str, Any]]], unreachable: tuple[str, ...]
) -> None:
    tensor, pipeline = shape
    layout = Layout(tensor=tensor, pipeline=pipeline, data=3 // (tensor * pipeline), micro_batch=1)
    cluster = Cluster(layout=layout)
    timed(cluster, 0.1, 0.1)
    if does == "drains":
        drain_plan(cluster)
    elif does == "recovers":
        restart_plan("p2", only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0)), cluster, "n1/0")
    for turn, each in enumerate(heard):
        for name, status in zip(cluster.names, each, strict=True):
            cluster.beat(name, NOW_S - 1.0 + turn / 4, **status)
        for name in unreachable:
            cluster.monitor.state.nodes[name].unreachable_since = at(NOW_S - 10.0)
        state, task, stalls = cluster.monitor.state, _task(cluster), LIMITS.stalls
        if calm.is_calm(state, task, stalls):
            assert _rules_find_nothing(cluster)
        if calm.is_calm(state, task, stalls, SUSPICION):
            assert hangs.suspected(state, task, stalls, SUSPICION, at(NOW_S)) is None


@pytest.mark.parametrize("does", ["trains", "drains"])
def test_a_task_whose_ranks_all_make_progress_is_calm_until_one_of_them_says_otherwise(does: str) -> None:
    cluster = Cluster()
    timed(cluster, 0.1, 0.1)
    if does == "drains":
        drain_plan(cluster)
    for name in cluster.names:
        cluster.beat(name, NOW_S, process_state="S", steps_done=20)
    state, task = cluster.monitor.state, _task(cluster)
    assert calm.is_calm(state, task, LIMITS.stalls, SUSPICION)
    known = [node.summaries["gpt"] for node in state.nodes.values()]
    assert calm.is_calm(state, task, LIMITS.stalls, SUSPICION)
    assert all(node.summaries["gpt"] is summary for node, summary in zip(state.nodes.values(), known, strict=True))
    cluster.beat("n2", NOW_S + 0.25, process_state="T", pid=101)
    assert not calm.is_calm(state, task, LIMITS.stalls)


@pytest.mark.parametrize(
    ("tensor", "drains", "unreachable", "ages_s", "is_calm"),
    [
        (3, False, (), (9.0, 9.0, 9.0), False),
        (3, False, (), (9.0, 0.1, 9.0), True),  # the others wait for a rank that makes progress
        (3, False, ("n1",), (9.0, 0.1, 9.0), False),  # what it does by now is not known
        (3, True, (), (9.0, 0.1, 0.1), False),
        (1, False, (), (9.0, 0.1, 0.1), False),  # it waits for nobody
        (1, False, (), (0.1, 0.1, 0.1), True),
    ],
)
def test_which_time_without_progress_leaves_a_task_calm(
    tensor: int, drains: bool, unreachable: tuple[str, ...], ages_s: tuple[float, ...], is_calm: bool
) -> None:
    cluster = Cluster(layout=Layout(tensor=tensor, pipeline=1, data=3 // tensor, micro_batch=1))
    timed(cluster, 0.1, 0.1)
    if drains:
        drain_plan(cluster)
    for name, age_s in zip(cluster.names, ages_s, strict=True):
        cluster.beat(name, NOW_S, progress_age_s=age_s, process_state="S", steps_done=20)
    for name in unreachable:
        cluster.monitor.state.nodes[name].unreachable_since = at(NOW_S - 10.0)
    assert calm.is_calm(cluster.monitor.state, _task(cluster), LIMITS.stalls) is is_calm
