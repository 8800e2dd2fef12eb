"""Storage that is away for a while: the task waits longer each time, is not given up, and its result is the same."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.kit import Client, Pace, Record, check_result, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

OUTAGE_S = 20.0

READS = """
import os, pathlib, time
from unicron import train
from unicron.trainer.data import Samples

read, pace, down = Samples.batch, pathlib.Path(os.environ["PACE"]), pathlib.Path(os.environ["DOWN"])

def batch(samples, ids):
    if down.exists():
        raise OSError(5, "Input/output error", "/mnt/data/shard-0001.bin")
    if pace.exists():
        time.sleep(float(os.environ["PACE_S"]))
    return read(samples, ids)

Samples.batch = batch
train.train(pathlib.Path(os.environ["UNICRON_SPEC"]))
"""
"""The built-in trainer, whose data cannot be read as long as a file exists."""


def events(client: Client, kind: str) -> list[Record]:
    return [e["event"] for e in client.items("/v1/events") if e["type"] == kind]


def of(client: Client, kind: str, task: str) -> list[Record]:
    return [event for event in events(client, kind) if event.get("task") == task]


BREAKS = READS.replace(
    'OSError(5, "Input/output error", "/mnt/data/shard-0001.bin")',
    '__import__("unicron.errors").errors.CommunicationFailed("injected")',
)
"""The same, whose collectives break as long as the file exists."""


def in_time(client: Client, name: str) -> list[bool]:
    """Return of each plan for a task that was to wait whether no process was up before its time."""
    plans = {plan["plan"]: plan for plan in events(client, "plan.decided")}
    prepared = [moved for moved in of(client, "state.moved", name) if moved["phase"] == "prepared"]
    return [
        datetime.fromisoformat(change["not_before"]) <= datetime.fromisoformat(moved["occurred_at"])
        for moved in prepared
        for change in plans[moved["plan"]]["changes"]
        if change["task"] == name and "not_before" in change
    ]


def submitted(
    client: Client, corpus: Path, folder: Path, name: str, *, script: str = READS, **fields: Any
) -> tuple[Record, Pace, Path]:
    """Submit a task that trains slowly; return its specification, its pace, and the file that ends its storage."""
    pace, down = Pace(folder, 0.05, script), folder / "down"
    spec = small_task(name, corpus, workers={"min": 1, "max": 2}, **fields)
    paced = pace.of(spec)
    paced["env"] |= {"DOWN": str(down)}
    client.submit(paced)
    client.until_step(name, 4)
    return spec, pace, down


def test_an_outage_of_storage_does_not_fail_the_task(client: Client, corpus: Path, tmp_path: Path) -> None:
    name = "storage-away"
    spec, pace, down = submitted(client, corpus, tmp_path, name)
    down.touch()
    began_s = time.monotonic()

    def held_back() -> Any:
        return (shown := client.task(name))["wait"] and shown

    shown = client.until("it says that it waits", held_back)
    assert shown["state"] in ("transitioning", "degraded")
    assert "since the same failure came " in shown["wait"]["reason"]
    assert "without a new step" in shown["wait"]["reason"]
    client.until("the storage is back", lambda: time.monotonic() - began_s > OUTAGE_S)
    assert client.task(name)["state"] not in ("failed", "stopped")
    down.unlink()
    pace.end()
    done = client.until_state(name, "succeeded")
    assert done["wait"] is None
    check_result(client, name, spec, tmp_path / "reference")

    errors = of(client, "error.detected", name)
    waits = [error["evidence"].get("wait_s", 0.0) for error in errors]
    assert waits[0] == 0.0
    assert max(waits) >= 8.0, "a storage that is away for 20 s has the task wait longer and longer"
    assert len({error["generation"] for error in errors}) <= 8
    assert {error["evidence"]["class"] for error in errors} == {"storage"}
    assert of(client, "task.failed", name) == []
    assert in_time(client, name)
    assert all(in_time(client, name))


def test_collectives_that_break_again_are_not_tried_without_end(client: Client, corpus: Path, tmp_path: Path) -> None:
    """They are retried in place, then one process and then all are started anew: these wait longer each time."""
    name = "breaks-again"
    spec, pace, down = submitted(client, corpus, tmp_path, name, script=BREAKS, max_restarts=20)
    down.touch()

    def waits() -> list[float]:
        return [error["evidence"].get("wait_s", 0.0) for error in of(client, "error.detected", name)]

    def held_back() -> Any:
        return (shown := client.task(name))["wait"] and shown

    shown = client.until("it says that it waits", held_back)
    assert "since the same failure came 2 times without a new step" in shown["wait"]["reason"]
    client.until("it is to wait for four seconds", lambda: max(waits(), default=0.0) >= 4.0)
    down.unlink()
    pace.end()
    client.until_state(name, "succeeded")
    check_result(client, name, spec, tmp_path / "reference")
    assert [error["severity"] for error in of(client, "error.detected", name)][:4] == ["SEV3", "SEV2", "SEV1", "SEV1"]
    assert waits() == [0.0, 0.0, 1.0, 2.0, 4.0]
    assert len(in_time(client, name)) == 3
    assert all(in_time(client, name))
    assert {node["state"] for node in client.items("/v1/nodes")} == {"ready"}


def test_a_task_without_progress_waits_for_its_operator(client: Client, corpus: Path, tmp_path: Path) -> None:
    name = "given-up"
    limits: dict[str, Any] = {"max_restarts": 0, "progress_timeout_s": 3}
    spec, pace, down = submitted(client, corpus, tmp_path, name, **limits)
    down.touch()
    shown = client.until_state(name, "queued")
    assert shown["wait"]["until"] is None
    assert "progress_timeout_s is 3" in shown["reason"]
    assert f"`unicron resume {name}`" in shown["reason"]
    step = shown["step"]
    down.unlink()
    client.http.post(f"/v1/tasks/{name}/resume").raise_for_status()
    client.until_step(name, step + 1)
    pace.end()
    client.until_state(name, "succeeded")
    check_result(client, name, spec, tmp_path / "reference")
    assert of(client, "task.failed", name) == []
    restored = [moved for moved in of(client, "state.moved", name) if moved["phase"] == "restored"]
    assert set(restored[-1]["sources"].values()) <= {"memory", "peer-memory", "take"}, "its copies in memory stay"
