"""New processes that need long to warm up: a rank is killed again and again, and no healthy node is blamed for it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from cli.stack.stack import Stack
from tests.e2e.kit import Client, Pace, Record, check_result, pids, reference, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

FAULTS = int(os.environ.get("UNICRON_WARM_UP_FAULTS", "200"))
"""Of the long course (``make test-warm-up``)."""

WARM_UP_S = float(os.environ.get("UNICRON_WARM_UP_S", "15"))
"""How long each of its processes warms up, seconds."""

STEPS_BETWEEN = 3
"""Steps after a recovery before the next rank is killed: those of a fresh process are over by then."""

WARM = """
import json, os, pathlib, time
import torch
from unicron import train
from unicron.trainer.data import Samples

read, pace, folder = Samples.batch, pathlib.Path(os.environ["PACE"]), pathlib.Path(os.environ["WARM_UP"])
cold = [True]

def number():
    # How many processes of the task have warmed up before this one.
    found = 0
    while True:
        try:
            (folder / f"start-{found}").touch(exist_ok=False)
            return found
        except FileExistsError:
            found += 1

def warm_up():
    until_s = time.monotonic() + float(os.environ["WARM_UP_S"])
    sleeps = number() % 2 == 0
    matrix = torch.randn(200, 200)
    while time.monotonic() < until_s:
        if sleeps:
            time.sleep(0.1)
        else:
            matrix = torch.tanh(matrix @ matrix)

def batch(samples, ids):
    if cold[0]:
        cold[0] = False
        warm_up()
    if pace.exists():
        time.sleep(float(os.environ["PACE_S"]))
    return read(samples, ids)

Samples.batch = batch
train.train(pathlib.Path(os.environ["UNICRON_SPEC"]))
"""
"""The built-in trainer. Each process warms up before its first micro-batch: by turns it sleeps, or it computes."""


def course(client: Client, corpus: Path, folder: Path, *, faults: int, warm_up_s: float) -> Record:
    """Kill ranks of two by turns, each while all is well, and look at what became of it; return the specification.

    The task goes on, as fast as it can.
    """
    pace = Pace(folder, 0.03, WARM)
    name = f"warm-{faults}"
    spec = small_task(name, corpus, steps=100 + 20 * faults, workers={"min": 1, "max": 2})
    spec = pace.of(spec)
    spec["env"] |= {"WARM_UP": str(folder), "WARM_UP_S": str(warm_up_s)}
    client.submit(spec)
    client.until_step(name, STEPS_BETWEEN, limit_s=60.0 + warm_up_s)
    killed = []
    for number in range(faults):
        task = client.task(name)
        workers = sorted(pids(task))
        assert len(workers) == 2, "every fault strikes a task that is whole again"
        killed.append(workers[number % 2])
        os.kill(pids(task)[killed[-1]], signal.SIGKILL)

        def healed(known: int = number + 1) -> bool:
            incidents = client.incidents(name)
            return len(incidents) >= known and all(incident["restored_at"] for incident in incidents)

        client.until(f"fault {number} is healed", healed, limit_s=60.0 + warm_up_s)
        client.until_step(name, client.task(name)["step"] + STEPS_BETWEEN)
    incidents = client.incidents(name)
    assert [(i["kind"], i["severity"], i["worker"]) for i in incidents] == [
        ("process-exit", "SEV2", worker) for worker in killed
    ]
    assert {i["steps_recomputed"] for i in incidents} == {0}
    assert {node["state"] for node in client.items("/v1/nodes")} == {"ready"}
    assert len(list(folder.glob("start-*"))) == 2 + faults, "each process has warmed up, half of them by computing"
    pace.end()
    return spec


@pytest.mark.timeout(180)
async def test_replacements_that_warm_up_for_longer_than_a_warm_rank_may_hang(
    stack: Stack, client: Client, corpus: Path, tmp_path: Path
) -> None:
    """Five of the faults below; the limit of a warm first step of these tasks is 2.5 s."""

    def some() -> None:
        spec = course(client, corpus, tmp_path, faults=5, warm_up_s=3.0)
        client.http.post(f"/v1/tasks/{spec['name']}/stop").raise_for_status()
        client.until_state(str(spec["name"]), "stopped")

    await asyncio.to_thread(some)


@pytest.mark.soak
@pytest.mark.timeout(3600 + int(FAULTS * (WARM_UP_S + 45.0)))
async def test_many_faults_with_processes_that_warm_up_for_long(
    stack: Stack, client: Client, corpus: Path, tmp_path: Path
) -> None:
    def many() -> None:
        spec = course(client, corpus, tmp_path, faults=FAULTS, warm_up_s=WARM_UP_S)
        name = str(spec["name"])
        client.until_state(name, "succeeded", limit_s=1800.0)
        reference(spec, tmp_path / "reference", timeout_s=1800.0)
        check_result(client, name, spec, tmp_path)

    await asyncio.to_thread(many)
