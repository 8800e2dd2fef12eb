"""Faults of a script that calls ``pretrain``, over a small stand-in for Megatron-LM's training module.

The stand-in (``stand_in/``, this project's own) is what trains where there is no checkout of Megatron-LM. It is
compared with the record of the seams, as checkouts are, so that it cannot match its author alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron_lm.record import parameters, source_of
from tests.megatron_lm.test_seams import recorded
from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent
from unicron.megatron_lm.seams import SEAMS, Seam
from unicron.protocol.messages import Finished, Stop, Stopped

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).with_name("stand_in")
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
VERSION = "0.16.1"
"""The release whose seams it has."""
STEPS = 6
TRACKER = "latest_checkpointed_iteration.txt"
FAULT_STEP = 3

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_the_stand_in_has_the_seams_of_the_record(seam: Seam) -> None:
    """What it takes from the megatron-core that is installed is compared there."""
    installed = Path(torch.__file__).parents[1]
    where = STAND_IN if (STAND_IN / source_of(seam, STAND_IN)).is_file() else installed
    assert parameters(seam, where) == recorded(VERSION)[seam.name]


def given(folder: Path, extra: str = "") -> list[str]:
    """Return the script's arguments."""
    text = f"--train-iters {STEPS} --global-batch-size 12 --eval-interval 2 --save-interval 3 --save {folder} {extra}"
    return text.split()


def task(spec_file: SpecFile, folder: Path, extra: str = "", **fields: Any) -> Path:
    """Return the specification of a task of the script, which is run as it is."""
    options = {"loop": "megatron-lm", "arguments": given(folder, extra), "steps": STEPS, "deterministic_sums": True}
    return spec_file(exact=False, script=str(STAND_IN / "pretrain_gpt.py"), **options | fields)


async def begin(a: Agent, spec: Path, workers: list[str], faults: str = "") -> int:
    """Start workers, with injected faults; return the generation."""
    env = {"UNICRON_FAIL_AT": faults} if faults else {}
    await asyncio.gather(*(a.fork(worker, spec, env) for worker in workers))
    return await a.configure(dict.fromkeys(workers, "initial"))


async def without_faults(a: Agent, spec: Path) -> Finished:
    """Train on two workers to the end."""
    await begin(a, spec, ["q0", "q1"])
    finished = await a.finished(2)
    a.messages.clear()
    return finished


async def through_a_fault(a: Agent, spec: Path, at: str) -> Finished:
    """Train on two workers, of which one is killed and replaced."""
    # The survivor comes two steps further, and waits there for the process that replaces the other.
    await begin(a, spec, ["w0", "w1"], f"1:{FAULT_STEP}:{at}:kill,0:{FAULT_STEP + 2}:0:hang")
    await a.until(lambda: "w1" in a.exits)
    await a.hold(["w0"])
    generation = await a.configure({"w0": "live"}, stage="interrupted", fault_step=FAULT_STEP - 1)
    await a.stopped("w0")
    (resumed,) = await a.resumed(generation)
    assert resumed.steps_recomputed == 0
    await a.drain(["w0"])
    await a.fork("w2", spec)
    await a.resumed(await a.configure({"w0": "live", "w2": "take"}))
    return await a.finished(2)


@pytest.mark.parametrize(
    ("at", "extra"),
    [
        ("4.backward", ""),
        *(pytest.param(at, "", marks=pytest.mark.slow) for at in ("4.forward", "reduce", "update", "section")),
        pytest.param("reduce", "--overlap-grad-reduce", marks=pytest.mark.slow),
    ],
)
async def test_a_process_that_is_lost_changes_nothing(at: str, extra: str, tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        expected = await without_faults(a, task(spec_file, tmp_path / "quiet", extra))
        finished = await through_a_fault(a, task(spec_file, tmp_path / "faulty", extra), at)
    assert finished.samples_sha256 == expected.samples_sha256
    assert largest_difference(finished.parameters_path, expected.parameters_path) == 0.0
    saved = [torch.load(tmp_path / name / f"iter_{STEPS:07d}" / "model.pt") for name in ("quiet", "faulty")]
    assert saved[0]["consumed"] == saved[1]["consumed"] == (12 * STEPS, 12 * STEPS // 2)
    assert (tmp_path / "faulty" / TRACKER).read_text() == str(STEPS)


PROGRAM = """
import importlib, os, runpy, sys
from unicron.megatron import cpu
cpu.enable()
adapter, *sys.argv = sys.argv[1:]
if adapter == "stock":
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    importlib.import_module(adapter).run_script(sys.argv[0], sys.argv[1:])
"""


def alone(adapter: str, folder: Path, script: Path, arguments: list[str]) -> dict[str, Any]:
    """Run a script under torchrun on two ranks; return what it has saved at its end, in a folder ``saved`` there.

    Args:
        adapter: the package that runs it; ``stock``: it is run as it is.
        folder: is made.
        script: its file.
        arguments: its own.
    """
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    command = [str(program), adapter, str(script), *arguments]
    with (folder / "output").open("w") as output:
        subprocess.run(
            [sys.executable, *torchrun, *command],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=output,
            stderr=output,
            timeout=150,
            check=True,
        )
    found: dict[str, Any] = torch.load(folder / "saved" / f"iter_{STEPS:07d}" / "model.pt")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", OVERLAPS])
def test_without_the_adapter_it_trains_to_the_same_parameters(extra: str, tmp_path: Path) -> None:
    stock, ours = (
        alone(mode, tmp_path / mode, STAND_IN / "pretrain_gpt.py", given(tmp_path / mode / "saved", extra))
        for mode in ("stock", "unicron.megatron_lm")
    )
    assert stock["consumed"] == ours["consumed"]
    assert differing_chunks(stock, ours) == []


def differing_chunks(stock: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return the names of the parameters of two checkpoints that are not the same to the last bit."""
    chunks = zip(stock["model"], ours["model"], strict=True)
    return [
        name
        for one, other in chunks
        for name in one
        if isinstance(one[name], torch.Tensor) and not one[name].equal(other[name])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("asks", ["signal", "stop"])
async def test_a_signal_or_a_stop_leaves_a_checkpoint_of_the_scripts_own(
    asks: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    saved = tmp_path / "saved"
    spec = task(spec_file, saved, "--exit-signal-handler --save-interval 100")
    step = await step_of_an_asked_end(tmp_path / "run", spec, asks)
    assert (saved / TRACKER).read_text() == str(step)
    assert torch.load(saved / f"iter_{step:07d}" / "model.pt")["iteration"] < STEPS


async def step_of_an_asked_end(folder: Path, spec: Path, asks: str) -> int:
    """Train on two workers, of which the first gets a signal, or both are to stop; return the last step.

    The rank waits in the third step, and comes to know of it in that step or in the next one.
    """
    async with agent(folder) as a:
        await begin(a, spec, ["w0", "w1"], "0:3:0:hang")
        await a.stopped("w0")
        if asks == "stop":
            a.send_all(["w0", "w1"], Stop(generation=1))
        else:
            a.kill("w0", signal.SIGTERM)
        a.kill("w0", signal.SIGCONT)
        await a.until(lambda: {"w0", "w1"} <= set(a.exits))
        assert [a.exits[worker][1] for worker in ("w0", "w1")] == [0, 0]
        (step,) = {int(one.step) for one in a.of(Stopped if asks == "stop" else Finished)}
    assert step in {3, 4}
    return step
