"""Scripts without a line of the library: ended and started again, on all workers, from their own checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from cli.stack.stack import Stack
from tests.e2e.kit import Client, Record

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SCRIPT = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, steps = pathlib.Path(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
tracker, begin = folder / "latest_checkpointed_iteration.txt", 0

def save(step):
    if rank == 0:
        path = folder / f"iter_{step:07d}"
        path.mkdir(exist_ok=True)
        torch.save(model.module.state_dict(), path / "model.pt")
        (folder / "tracker").write_text(str(step))
        (folder / "tracker").rename(tracker)

if tracker.exists():
    begin = int(tracker.read_text())
    model.module.load_state_dict(torch.load(folder / f"iter_{begin:07d}" / "model.pt"))
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
print(f"begins at {begin} as {rank} of {dist.get_world_size()}", flush=True)
for step in range(begin + 1, steps + 1):
    torch.manual_seed(1000 * step + rank)
    loss = model(torch.randn(4, 8)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (folder / "raises").exists() and rank == 1:
        raise ValueError("a fault of the script")
    print(f" [now] iteration {step:8d}/{steps:8d} | elapsed time per iteration (ms): 20.0 | lm loss: {loss:.6E} |")
    if step % 10 == 0:
        save(step)
    told = torch.tensor(len(stop))
    dist.all_reduce(told)
    if told:
        save(step)
        sys.exit(0)
    while (folder / "waits").exists() and step == begin + 25:
        time.sleep(0.01)
save(steps)
time.sleep(0.3 * rank)  # the task has succeeded when the last one has ended
dist.destroy_process_group()
"""
"""Data parallel, with what Megatron-LM prints and writes of its steps; ends with a checkpoint on SIGTERM."""

STEPS, WORKERS = 60, 2
"""Two workers: a sum of two does not depend on their order, which is another in the first step of a start (DDP)."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A stack of its own: a node of it is lost."""
    async with Stack(tmp_path_factory.mktemp("whole") / "run", nodes=3, workers_per_node=2) as started:
        yield started


@pytest.fixture
def client(own_stack: Stack) -> Any:
    with Client(own_stack.url) as client:
        yield client


def folder_of(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


def task(tmp_path: Path, folder: Path, **fields: Any) -> Record:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return {
        "name": folder.name,
        "script": str(script),
        "arguments": ["--save", str(folder), str(STEPS)],
        "loop": "restart",
        "workers": {"min": WORKERS, "max": WORKERS},
        **fields,
    }


def scripts_of(folder: Path) -> list[int]:
    """Return the processes of a task's script."""
    found = [(one.info["pid"], one.info["cmdline"] or []) for one in psutil.process_iter(["pid", "cmdline"])]
    return sorted(pid for pid, command in found if "-u" in command and str(folder) in command)


def lines_of(client: Client, name: str, text: str) -> list[str]:
    out = client.http.get(f"/v1/tasks/{name}/logs").raise_for_status().text
    return [line for line in out.splitlines() if text in line]


def at_25(client: Client, name: str) -> None:
    client.until("it is at step 25", lambda: client.task(name)["step"] >= 25 and client.task(name)["saved_step"] == 20)


def same_without_faults(tmp_path: Path, folder: Path) -> bool:
    """Train with torchrun and without faults; return whether the result is the same to the bit."""
    plain = folder_of(tmp_path, "plain")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, str(tmp_path / "train.py"), "--save", str(plain), str(STEPS)],
        check=True, timeout=120, env=environment, capture_output=True,
    )  # fmt: skip
    name = f"iter_{STEPS:07d}"
    one, other = (torch.load(place / name / "model.pt") for place in (plain, folder))
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.short
def test_a_killed_process_restarts_the_script_from_its_own_checkpoint(client: Client, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "killed")
    (folder / "waits").touch()
    client.submit(task(tmp_path, folder))
    at_25(client, "killed")
    before = {rank["worker"]: rank["pid"] for rank in client.task("killed")["ranks"]}
    os.kill(scripts_of(folder)[0], signal.SIGKILL)
    client.until("it is healed", lambda: [one for one in client.incidents("killed") if one["restored_at"]])
    after = {rank["worker"]: rank["pid"] for rank in client.task("killed")["ranks"]}
    assert len(before.items() & after.items()) == WORKERS - 1, "the processes of the others are kept"
    (folder / "waits").unlink()
    ended = client.until_state("killed", "succeeded")
    (incident,) = client.incidents("killed")
    assert (incident["kind"], incident["severity"], incident["steps_recomputed"]) == ("process-exit", "SEV2", 5)
    assert (incident["response"], incident["state_source"]) == ("restart", "script")
    assert (ended["step"], ended["steps"], ended["saved_step"]) == (STEPS, None, STEPS)
    client.until("its processes have ended", lambda: not scripts_of(folder))


def test_a_bug_of_the_script_ends_the_task_with_its_error(client: Client, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "raises")
    (folder / "raises").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch "{folder}/interpreted"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    client.submit(task(tmp_path, folder, max_restarts=1, python=str(python)))
    failed = client.until_state("raises", "failed")
    assert (folder / "interpreted").exists()
    assert failed["reason"].endswith("happened 2 times; max_restarts is 1: ValueError: a fault of the script")
    assert "a fault of the script" in failed["traceback"]
    client.until("its processes have ended", lambda: not scripts_of(folder))
    assert {one["kind"] for one in client.incidents("raises")} == {"exception"}


def test_a_module_that_is_missing_refuses_the_task_at_once(client: Client, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "missing")
    spec = task(tmp_path, folder)
    Path(spec["script"]).write_text("import apex_of_a_mountain")
    client.submit(spec)
    failed = client.until_state("missing", "failed")
    assert "cannot run it: ModuleNotFoundError: No module named 'apex_of_a_mountain'" in failed["reason"]
    assert client.incidents("missing") == []


def test_an_interpreter_that_is_missing_refuses_the_task_at_once(client: Client, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "interpreter")
    client.submit(task(tmp_path, folder, python="/opt/none/bin/python"))
    failed = client.until_state("interpreter", "failed")
    assert "python: /opt/none/bin/python is no program on this node" in failed["reason"]


def test_a_stop_lets_the_script_save_and_resume_goes_on_from_there(client: Client, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "stopped")
    (folder / "waits").touch()
    client.submit(task(tmp_path, folder))
    at_25(client, "stopped")
    (folder / "waits").unlink()
    client.http.post("/v1/tasks/stopped/stop").raise_for_status()
    stopped = client.until_state("stopped", "stopped")
    assert stopped["saved_step"] >= 25
    client.until("its processes have ended", lambda: not scripts_of(folder))
    client.http.post("/v1/tasks/stopped/resume").raise_for_status()
    client.until_state("stopped", "succeeded")
    assert lines_of(client, "stopped", f"begins at {stopped['saved_step']} as 0 of {WORKERS}")
    assert same_without_faults(tmp_path, folder)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_lost_node_is_replaced(client: Client, own_stack: Stack, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "lost")
    (folder / "waits").touch()
    client.submit(task(tmp_path, folder))
    at_25(client, "lost")
    await own_stack.kill_node(client.task("lost")["ranks"][0]["node"])
    (folder / "waits").unlink()
    client.until_state("lost", "succeeded")
    assert same_without_faults(tmp_path, folder)
