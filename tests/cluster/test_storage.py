"""Checkpoints of tasks on several machines: without a directory that all nodes see, and in an object store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.bed import CONTROL, Bed
from tests.cluster.object_store import BUCKET, ObjectStore
from tests.cluster.recorded import Recorded
from tests.cluster.training import BATCH_S, MODEL, STEPS, on_all_nodes
from tests.e2e.kit import Pace, Record, pids, reference, small_task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

MANY_STEPS = 10_000
"""More than a task does while a test lasts."""


def endless(name: str, corpus: Path, **changes: object) -> Record:
    """Return a task that is still training when its test stops it."""
    return small_task(name, corpus, model=MODEL, steps=MANY_STEPS, exact=True, **changes)


UNSEEN = "nodes n1, n2 do not see the checkpoints that node n0 writes to /run/unicron/tasks/"


def test_a_task_with_checkpoints_that_not_all_nodes_see_is_refused_at_its_start(
    bed: Bed, recorded: Recorded, corpus: Path
) -> None:
    """No node is blamed, and a task on one node runs."""
    client = bed.client
    client.submit(endless("unseen", corpus, checkpoint={"every": 5}, workers={"min": 3}))
    failed = client.until_state("unseen", "failed")
    assert UNSEEN in failed["reason"]
    assert "checkpoint.directory that all of them share, or an object store (checkpoint.url)" in failed["reason"]
    client.submit(small_task("alone", corpus, model=MODEL, checkpoint={"every": 10}, workers={"max": 1}))
    assert client.until_state("alone", "succeeded")["saved_step"] > 0
    assert recorded.incidents() == []


def test_what_cannot_be_saved_is_not_stopped(bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path) -> None:
    """The nodes share no directory: the log says so once, nobody is blamed, the task trains on until told to stop."""
    client = bed.client
    client.submit(Pace(tmp_path, BATCH_S).of(endless("unshared", corpus, checkpoint={"every": 0})))
    try:
        client.until_step("unshared", 1)
        before = client.until("all nodes train", lambda: on_all_nodes(bed, "unshared"))
        client.http.post("/v1/tasks/unshared/stop").raise_for_status()
        refused = client.until("the stop is refused", lambda: (t := client.task("unshared"))["stop_refused"] and t)
        assert refused["state"] == "running"
        assert refused["stop_refused"]["reason"].startswith(UNSEEN)
        shown = client.until("the failure shows", lambda: (t := client.task("unshared"))["checkpoint_failure"] and t)
        (failed,) = recorded.events("task.checkpoint-failed", task="unshared")
        assert shown["checkpoint_failure"]["reason"] == failed["reason"] == refused["stop_refused"]["reason"]
        assert (shown["saved_step"], shown["checkpoint"]) == (0, None)
        after = client.until_step("unshared", refused["step"] + 2)
        assert pids(after) == pids(before)  # the processes that were to stop
        assert recorded.incidents() == []
    finally:
        client.http.post("/v1/tasks/unshared/stop", json={"lose_steps": True})
        stopped = client.until_state("unshared", "stopped")
    assert "not saved: there is no checkpoint" in stopped["reason"]
    assert recorded.incidents() == []


def test_checkpoints_in_an_object_store(bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path) -> None:
    """Without a shared directory, a task that has lost all its processes goes on, and so does one that was stopped."""
    client, url = bed.client, f"s3://{BUCKET}/stored"
    place = {"every": 4, "url": url, "memory_every": 0}
    spec = small_task("stored", corpus, model=MODEL, steps=STEPS, exact=True, checkpoint=place)
    store = ObjectStore(bed.machines[CONTROL])
    spec["env"] |= store.variables
    spec["secrets"] = store.secrets(tmp_path)
    pace = Pace(tmp_path, BATCH_S)
    with ThreadPoolExecutor() as pool:
        expected = pool.submit(reference, {**spec, "checkpoint": {"every": 0}}, tmp_path / "reference")
        client.submit(pace.of(spec))
        try:
            before = client.until("a checkpoint is saved", lambda: (t := client.task("stored"))["saved_step"] and t)
            assert {rank["node"] for rank in before["ranks"]} == set(bed.nodes)
            for rank in before["ranks"]:
                bed.nodes[rank["node"]].kill(rank["pid"])

            def restored() -> bool:
                moved = recorded.events("state.moved", task="stored")
                return any("checkpoint" in event["sources"].values() for event in moved)

            client.until("the state is read from the store", restored)
            task = client.task("stored")
            client.until_step("stored", task["step"] + 2)
            client.http.post("/v1/tasks/stored/stop").raise_for_status()
        except BaseException:
            client.http.post("/v1/tasks/stored/stop", json={"lose_steps": True})
            raise
        stopped = client.until_state("stored", "stopped")
        assert stopped["checkpoint"].startswith(f"{url}/generation-")
        assert (stopped["saved_step"], stopped["reason"]) == (
            stopped["step"],
            f"stopped as asked, saved at step {stopped['step']}",
        )
        pace.end()
        client.submit(pace.of(spec))
        result = client.until_state("stored", "succeeded")["result"]
        parameters, samples = expected.result()
    assert (result["steps"], result["samples_sha256"]) == (STEPS, samples)
    assert bed.file(result["parameters_path"]) == parameters.read_bytes()
    assert recorded.events("task.checkpoint-failed", task="stored") == []
