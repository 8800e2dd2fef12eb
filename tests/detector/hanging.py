"""Ranks that stand still in one way or another, and what the monitor finds."""

from __future__ import annotations

from typing import Any

from shared.events.plans import Response, TaskChange
from tests.agent.kit import stage
from tests.detector.kit import Cluster, plan


def stopped_from(cluster: Cluster, node: str, start_s: float, until_s: float, **status: Any) -> list[Any]:
    """All nodes send heartbeats four times a second; one shows its process stopped all the time."""
    events: list[Any] = []
    for quarter in range(round((until_s - start_s) * 4) + 1):
        now_s = start_s + quarter / 4
        for name in cluster.names:
            own = {"process_state": "T", "pid": 101, **status} if name == node else {"process_state": "S"}
            # The others wait, so that nothing but the stopped process can be seen.
            state = {"state": "waiting", "phase": "waiting"} if name != node else {}
            events += cluster.beat(name, now_s, **{**state, **own}).events
        events += cluster.tick(now_s)
    return events


def held_from(cluster: Cluster, start_s: float, until_s: float, **status: Any) -> list[Any]:
    """The peers of a dead rank were asked at ``start_s`` to leave their step; n2's has not done so."""
    events: list[Any] = []
    for quarter in range(round((until_s - start_s) * 4) + 1):
        age_s = quarter / 4
        cluster.beat("n0", start_s + age_s, state="waiting", phase="waiting", progress_age_s=age_s)
        cluster.beat("n1", start_s + age_s, state="ready", phase=None, progress_age_s=None, generation=2)
        fields = {"progress_age_s": age_s + 9.0, "hold_age_s": age_s, **status}
        cluster.beat("n2", start_s + age_s, step=15, **fields)
        events += cluster.tick(start_s + age_s)
    return events


def joining(cluster: Cluster, age_s: float, parts: dict[str, int | None]) -> list[Any]:
    """The ranks of the stage in generation 3 have done some parts of joining it; None: they wait in the first step."""
    for name in cluster.names:
        done = parts[name]
        fields = {"phase": "reduce"} if done is None else {"phase": "setup", "setup_parts": done}
        cluster.beat(name, 2.0 + age_s, generation=3, progress_age_s=age_s, **fields)
    return cluster.tick(2.0 + age_s)


def drain_plan(cluster: Cluster) -> None:
    """A healthy task is to go on with one worker less."""
    change = TaskChange(
        task="gpt",
        reason="shrink",
        action="move",
        from_generation=1,
        survivors=cluster.workers,
        release=cluster.workers[2:],
        target=stage(2, cluster.workers[:2]),
    )
    cluster.fold(plan("p2", "another task", change, response=Response.RECONFIGURE))


def stalled(cluster: Cluster, age_s: float, *late: str, **status: Any) -> list[Any]:
    """All ranks made progress ``age_s`` before second 500: those on ``late`` nodes compute, the others wait."""
    for name in cluster.names:
        phase = "compute" if name in late else "reduce"
        cluster.beat(name, 500.0, **{"phase": phase, "progress_age_s": age_s, **status})
    return cluster.tick(500.0)
