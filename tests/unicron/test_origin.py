"""A state that a task is given from outside (``attach(origin=...)``): where it counts, and where its own does."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent
from tests.unicron.zygote import WRITES_AT_ONCE, zygote
from unicron.protocol.messages import Checkpointed, Raised

pytestmark = pytest.mark.timeout(120)

STEPS = 8

SCRIPT = """
import os
from pathlib import Path
import torch
import unicron

FOLDER = Path({folder})


class Given:
    def __str__(self):
        return "given.pt"

    def step(self):
        if os.environ.get("UNICRON_WORKER") == os.environ.get("BLIND"):
            return -1
        return torch.load(FOLDER / "given.pt")["step"] if (FOLDER / "given.pt").exists() else -1

    def load(self, model, optimizer, objects):
        torch.distributed.barrier()
        found = torch.load(FOLDER / "given.pt")
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        objects["scheduler"].load_state_dict(found["scheduler"])
        return found["step"]


def build(tensor, pipeline):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


# Each rate follows from the one before.
state = {"scheduler": lambda model, optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}
run = unicron.attach(steps=8, micro_batches=12, build=build, state=state, exact=True, origin=Given())
for step in run.steps():
    with step:
        for k in step.micro_batches():
            loss = run.model(torch.arange(4.0) + step.number + k / 12).square().sum()
            (loss / 12).backward()
            step.commit(k, float(loss), [k])
        step.reduce()
        run.optimizer.step()
        run.state["scheduler"].step()
    if "UNICRON_WORKER" not in os.environ:
        now = {"step": step.number, "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        torch.save(now | {"scheduler": run.state["scheduler"].state_dict()}, FOLDER / f"{step.number}.pt")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script; the states behind each of its steps are in ``4.pt``, ..., of a run alone and without a failure."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("{folder}", repr(str(tmp_path))))
    zygote().run([str(path)], tmp_path)
    return path


def give(folder: Path, step: int) -> None:
    """Give the task the state behind a step."""
    shutil.copy(folder / f"{step}.pt", folder / "given.pt")


async def check(a: Agent, folder: Path, count: int) -> None:
    """Compare the result with that of the run alone."""
    finished = await a.finished(count)
    alone = folder / "unicron-run" / "result" / "parameters.safetensors"
    assert largest_difference(finished.parameters_path, alone) == 0.0


async def lose_all(a: Agent, workers: list[str], step: int) -> None:
    """Kill all workers, of which the last one's fault stops it in a step."""
    await a.lose(workers[-1], step)
    for worker in workers[:-1]:
        a.kill(worker)
    await a.until(lambda: all(worker in a.exits for worker in workers))


@pytest.mark.slow
async def test_a_task_begins_from_what_it_is_given_and_goes_on_from_the_newest(
    script: Path, tmp_path: Path, spec_file: SpecFile
) -> None:
    spec, workers = spec_file(script=str(script), steps=STEPS, checkpoint={"every": 3}), ["w0", "w1"]
    give(tmp_path, 4)
    async with agent(tmp_path / "run") as a:
        for fault, given, source, expected in (
            ("1:6:1:hang", 4, "initial", ("loaded", 5, 0)),
            ("1:8:1:hang:always", 4, "initial", ("loaded", 5, 1)),  # no checkpoint: from the beginning again
            ("1:8:1:hang:always", 4, "checkpoint", ("checkpoint", 7, 1)),  # the task's own is newer
            ("", 7, "checkpoint", ("loaded", 8, 0)),  # what the task is given is newer
        ):
            give(tmp_path, given)
            await asyncio.gather(*(a.fork(w, spec, {"UNICRON_FAIL_AT": fault, **WRITES_AT_ONCE}) for w in workers))
            saved = a.of(Checkpointed)[-1].path if source == "checkpoint" else ""
            fault_step = 0 if a.generation == 0 else 5 if not saved else 7
            generation = await a.configure(dict.fromkeys(workers, source), checkpoint=saved, fault_step=fault_step)
            resumed = await a.resumed(generation)
            assert {(r.source, r.step, r.steps_recomputed) for r in resumed} == {expected}
            read = "given.pt" if expected[0] == "loaded" else f"the task's own checkpoint, {saved}"
            said = [line for line in a.output("w0").splitlines() if line.startswith("unicron: the state is")]
            assert said[-1] == f"unicron: the state is that of {read}"
            if fault:
                await lose_all(a, workers, int(fault.split(":")[1]))
        await check(a, tmp_path, 2)


@pytest.mark.slow
async def test_a_new_process_takes_what_a_survivor_has_trained_from_there(
    script: Path, tmp_path: Path, spec_file: SpecFile
) -> None:
    spec = spec_file(script=str(script), steps=STEPS)
    give(tmp_path, 4)
    async with agent(tmp_path / "run") as a:
        await asyncio.gather(*(a.fork(worker, spec, {"UNICRON_FAIL_AT": "1:6:1:hang"}) for worker in ("w0", "w1")))
        await a.configure({"w0": "initial", "w1": "initial"})
        await a.lose("w1", 6)
        await a.hold(["w0"])
        await a.fork("w2", spec)
        resumed = await a.resumed(await a.configure({"w0": "live", "w2": "take"}))
        assert {(r.source, r.step) for r in resumed} == {("own", 6), ("live", 6)}
        await check(a, tmp_path, 2)


@pytest.mark.slow
async def test_ranks_that_do_not_see_the_same_are_refused(script: Path, tmp_path: Path, spec_file: SpecFile) -> None:
    spec, workers = spec_file(script=str(script), steps=STEPS), ["w0", "w1"]
    give(tmp_path, 4)
    async with agent(tmp_path / "run") as a:
        await asyncio.gather(*(a.fork(worker, spec, {"BLIND": "w1"}) for worker in workers))
        await a.configure(dict.fromkeys(workers, "initial"))
        await a.until(lambda: set(workers) <= set(a.exits))
        assert {m.error for m in a.of(Raised)} == {"InvalidSpec"}
        assert "given.pt: ranks see steps [-1, 4]" in a.of(Raised)[0].detail
