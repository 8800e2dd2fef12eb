"""A task that failed before its first checkpoint: ``resume`` goes on from the copies that its nodes keep in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.kit import Client, Record, check_result, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

FAILS = """
import os, pathlib
from unicron import train
from unicron.trainer.data import Samples

read, broken = Samples.batch, pathlib.Path(os.environ["BROKEN"])
count = 0

def batch(samples, ids):
    global count
    count += 1
    if broken.exists() and count > 30:
        raise ValueError("a fault of the script")
    return read(samples, ids)

Samples.batch = batch
train.train(pathlib.Path(os.environ["UNICRON_SPEC"]))
"""
"""The built-in trainer, whose data loader raises after some steps as long as a file exists."""


def failed(client: Client, name: str, corpus: Path, folder: Path) -> Record:
    """Run a task until it has failed with copies in memory and without a checkpoint; return its specification."""
    script, broken = folder / "fails.py", folder / "broken"
    script.write_text(FAILS)
    broken.touch()
    place = {"every": 1000, "memory_every": 1}
    spec = small_task(name, corpus, steps=30, workers={"min": 2, "max": 2}, checkpoint=place, max_restarts=0)
    spec["env"] |= {"BROKEN": str(broken)}
    client.submit(spec | {"script": str(script)})
    client.until_state(name, "failed")
    client.until("its copies are kept", lambda: client.task(name)["copies_kept"])
    broken.unlink()
    return spec


def first_restored(client: Client, name: str, generation: int) -> Record:
    """Return what the first generation behind another one has begun with, once the task has succeeded."""
    client.until_state(name, "succeeded")
    moved: list[Record] = [e["event"] for e in client.items("/v1/events") if e["type"] == "state.moved"]
    return next(e for e in moved if e["task"] == name and e["phase"] == "restored" and e["generation"] > generation)


def test_resume_goes_on_from_copies_in_memory(client: Client, corpus: Path, tmp_path: Path) -> None:
    name = "fails-early"
    spec = failed(client, name, corpus, tmp_path)
    before = client.task(name)["generation"]
    client.http.post(f"/v1/tasks/{name}/resume").raise_for_status()
    restored = first_restored(client, name, before)
    assert set(restored["sources"].values()) <= {"memory", "peer-memory"}
    assert restored["step"] > 3
    check_result(client, name, spec, tmp_path)


def test_a_new_submission_of_the_name_begins_anew(client: Client, corpus: Path, tmp_path: Path) -> None:
    name = "fails-anew"
    spec = failed(client, name, corpus, tmp_path)
    task = client.task(name)
    client.submit(task["spec"])
    restored = first_restored(client, name, task["generation"])
    assert set(restored["sources"].values()) == {"initial"}
    check_result(client, name, spec, tmp_path)
