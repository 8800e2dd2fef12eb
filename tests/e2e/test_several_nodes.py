"""``srun unicron run`` on several nodes, which are processes here with the environment that srun gives them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.condition import until_blocking
from tests.e2e.by_hand import UNICRON
from tests.e2e.kit import Client, processes_of
from tests.e2e.several_nodes import REST, SCRIPT, STEPS, step_lines, weights_after

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NODES = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working directory, which all nodes share; the script is slow."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "rest.yaml").write_text(yaml.safe_dump(REST))
    (tmp_path / "slow").touch()
    return tmp_path


def start(folder: Path, number: int, files: ExitStack) -> subprocess.Popen[bytes]:
    """Start the process of a node."""
    step = {
        "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": str(NODES),
        "SLURM_STEP_NUM_TASKS": str(NODES), "SLURM_PROCID": str(number), "SLURMD_NODENAME": f"node_{number}",
        "UNICRON_ADDRESS": "127.0.0.1",
    }  # fmt: skip
    out, err = (files.enter_context((folder / f"{kind}.{number}").open("wb")) for kind in ("out", "err"))
    command = [*UNICRON, "run", "--workers", str(NODES), "--spec", "rest.yaml", "--", "train.py"]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | step, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
        start_new_session=True,
    )  # fmt: skip


def lose(pid: int) -> None:
    """End a process and all below it as a power cut would: none hears that its parent has ended, and leaves."""
    top = psutil.Process(pid)
    processes = [top, *top.children(recursive=True)]
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                act(process)


def test_the_nodes_of_one_srun_train_together_and_heal_a_lost_one(folder: Path) -> None:
    def text(name: str) -> str:
        return (folder / name).read_text()

    with ExitStack() as files:
        processes = [start(folder, number, files) for number in range(NODES)]
        try:
            until_blocking(lambda: "| step 5 " in text("out.0"), limit_s=120.0, seen=lambda: text("err.0"))
            found = re.search(r"live page: (\S+)/", text("err.0"))
            assert found is not None
            with Client(found[1]) as client:
                ranks = client.task("train")["ranks"]
                assert {rank["node"] for rank in ranks} == {"node-0", "node-1", "node-2"}
                lose(processes[2].pid)
                healed = client.until_restored("node-lost")
                assert (healed["node"], healed["steps_recomputed"]) == ("node-2", 0)
                # srun sends it to all; the first process alone would stop the task.
                processes[1].send_signal(signal.SIGTERM)
            (folder / "slow").unlink()
            assert [process.wait(60) for process in processes] == [0, 0, -signal.SIGKILL], text("err.0")
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert processes_of(folder / ".unicron") == []
    assert step_lines(text("out.0")) == [*range(1, STEPS + 1)]
    assert weights_after(text("out.0")) == pytest.approx(weights_after(), rel=1e-5)
    assert text("out.1") == ""
    left = sorted(path.name for path in (folder / ".unicron/allocations/17.0-0").iterdir())
    assert left == ["beat", "end", "here-node-1", "here-node-2", "leave", "offer.json"], "no key is left"
