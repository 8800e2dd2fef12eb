"""A task that names its Python, in whose environment nothing of the project but the library is installed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import yaml

from cli.stack.stack import Stack
from tests import training_environment
from tests.e2e.by_hand import UNICRON
from tests.e2e.kit import PACED, Client, Pace, Record, check_result, make_corpus, pids, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ALONE = """
import importlib.util
project = [name for name in ("cli", "services", "shared", "simulator") if importlib.util.find_spec(name)]
assert not project, project
"""
"""Begins a script: of the project only the library can be imported."""


SCRIPT = """
import sys
import torch
import unicron

def build(tensor, pipeline):
    model = torch.nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)

print("in", sys.prefix, flush=True)
run = unicron.attach(steps=3, micro_batches=1, build=build, checkpoint_every=1000)
for step in run.steps():
    with step:
        for k in step.micro_batches():
            loss = run.model(torch.ones(2, 8)).square().mean()
            loss.backward()
            step.commit(k, loss, [k])
        step.reduce()
        run.optimizer.step()
"""
"""Says where it runs."""

REST = {
    "model": {"layers": 1, "hidden": 8, "heads": 1, "sequence_length": 1},
    "batch": {"global": 2, "micro": 2},
    "steps": 3,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A stack of its own: an agent and fork servers of it are killed."""
    async with Stack(tmp_path_factory.mktemp("interpreter") / "run", nodes=2, workers_per_node=2) as started:
        yield started


@pytest.fixture
def client(own_stack: Stack) -> Any:
    with Client(own_stack.url) as client:
        yield client


def fork_server(task: Record, worker: str) -> psutil.Process:
    """Return the fork server of a worker's process."""
    found = psutil.Process(pids(task)[worker]).parent()
    assert found is not None
    return found


def test_it_is_healed_inside_the_step_beside_a_task_of_the_nodes_own_python(client: Client, tmp_path: Path) -> None:
    python = training_environment.make(tmp_path / "train")
    corpus = make_corpus(tmp_path)
    pace = Pace(tmp_path, 0.15, ALONE + PACED)
    spec = pace.of(small_task("there", corpus, python=python, workers={"min": 2, "max": 2}))
    (tmp_path / "here").mkdir()
    here = Pace(tmp_path / "here", 0.15).of(small_task("here", corpus, workers={"min": 2, "max": 2}))
    for task in (spec, here):
        client.submit(task)
    before = client.until_step("there", 3)
    client.until_step("here", 1)
    assert {fork_server(before, worker).cmdline()[0] for worker in pids(before)} == {python}
    assert python not in {fork_server(client.task("here"), worker).cmdline()[0] for worker in pids(client.task("here"))}

    killed, kept = sorted(pids(before))
    os.kill(pids(before)[killed], signal.SIGKILL)
    healed = client.until_restored("process-exit", task="there")
    assert healed["steps_recomputed"] == 0
    assert pids(client.task("there"))[kept] == pids(before)[kept]

    now = client.task("there")
    fork_server(now, killed).kill()
    client.until("the end of its fork server is healed", lambda: _restored_twice(client))
    again = client.task("there")
    assert fork_server(again, killed).cmdline()[0] == python

    pace.end()
    Path(here["env"]["PACE"]).unlink()
    for name in ("there", "here"):
        client.until_state(name, "succeeded")
    check_result(client, "there", spec | {"script": None}, tmp_path)
    assert client.incidents("here") == []


def _restored_twice(client: Client) -> bool:
    found = client.incidents("there")
    return len(found) >= 2 and all(one["restored_at"] for one in found)


def test_a_run_of_ones_own_forks_in_the_python_of_its_command_alone(tmp_path: Path) -> None:
    """So the environment of the command `unicron` needs no torch."""
    python = training_environment.make(tmp_path / "train")
    (tmp_path / "healed.py").write_text(ALONE + SCRIPT)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**REST, "data": "healed.py"}))
    command = [*UNICRON, "run", "--device", "cpu", "--workers", "1", "--spec", "spec.yaml", "--run-dir", "run"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    ended = subprocess.run(
        [*command, "--", python, "healed.py"],
        cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"in {tmp_path}/train" in ended.stdout
    logs = [path.name for path in tmp_path.glob("run/nodes/*/forkserver*.log")]
    assert logs == ["forkserver.log"]


def test_a_python_without_the_library_is_refused_at_submission(client: Client, tmp_path: Path) -> None:
    spec = small_task("refused", make_corpus(tmp_path), python="/usr/bin/env")
    answer = client.http.post("/v1/tasks", json=spec)
    assert answer.status_code == 422, answer.text
    assert "python: cannot import the library" in answer.text
