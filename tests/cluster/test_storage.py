"""Checkpoints of tasks on several machines: without a directory that all nodes see, and in an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.bed import Bed
from tests.cluster.training import BATCH_S, MODEL
from tests.e2e.kit import Client, Pace, Record, pids, small_task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

MANY_STEPS = 10_000
"""More than a task does while a test lasts."""


def endless(name: str, corpus: Path, **changes: object) -> Record:
    """Return a task that is still training when its test stops it."""
    return small_task(name, corpus, model=MODEL, steps=MANY_STEPS, exact=True, **changes)


def events(client: Client, task: str, kind: str) -> list[Record]:
    """Return a task's events of one type, oldest first."""
    return [r["event"] for r in client.items("/v1/events") if r["type"] == kind and r["event"].get("task") == task]


def test_what_cannot_be_saved_is_not_stopped(bed: Bed, corpus: Path, tmp_path: Path) -> None:
    """The nodes share no directory: the log says so once, nobody is blamed, the task trains on until told to stop."""
    client = bed.client
    incidents = client.items("/v1/incidents")
    client.submit(Pace(tmp_path, BATCH_S).of(endless("unshared", corpus, checkpoint={"every": 2})))
    try:
        before = client.until_step("unshared", 1)
        assert len(before["ranks"]) == len(bed.nodes)
        shown = client.until("the failure shows", lambda: (t := client.task("unshared"))["checkpoint_failure"] and t)
        client.until_step("unshared", shown["step"] + 4)
        (failed,) = events(client, "unshared", "task.checkpoint-failed")
        assert "do not share" in failed["reason"]
        assert shown["checkpoint_failure"]["reason"] == failed["reason"]
        assert (shown["saved_step"], shown["checkpoint"]) == (0, None)
        assert client.items("/v1/incidents") == incidents
        client.http.post("/v1/tasks/unshared/stop").raise_for_status()
        refused = client.until("the stop is refused", lambda: (t := client.task("unshared"))["stop_refused"] and t)
        assert refused["state"] == "running"
        assert "do not share" in refused["stop_refused"]["reason"]
        after = client.until_step("unshared", refused["step"] + 2)
        assert pids(after) == pids(before)  # the processes that were to stop
        assert client.items("/v1/incidents") == incidents
    finally:
        client.http.post("/v1/tasks/unshared/stop", json={"lose_steps": True})
        stopped = client.until_state("unshared", "stopped")
    assert "not saved: there is no checkpoint" in stopped["reason"]
    assert client.items("/v1/incidents") == incidents
