"""Boundary sections (``run.boundary``): what a script does with its peers between two steps survives faults."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import agent
from tests.unicron.zygote import zygote
from unicron.protocol.messages import Progress

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import json, os, random, signal
import torch
import torch.distributed as dist
import unicron

WORKER = os.environ.get("UNICRON_WORKER", "alone")
FAULTS = {faults}  # worker -> (step, section) in which it is killed
noted = []


class Samples:
    seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def build(tensor, pipeline):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def section(name):
    with run.boundary():
        drawn = torch.rand(()).item(), random.random()
        if FAULTS.get(WORKER) == (step.number, name) and not os.path.exists({folder} + "/" + WORKER):
            open({folder} + "/" + WORKER, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        total = run.model(torch.ones(4)).detach().double().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        seen, rate = run.state["samples"].seen, run.optimizer.param_groups[0]["lr"]
        found = [step.number, name, total.item(), seen, rate, drawn]
        noted.append(found)
        if run.generation.rank == 0:
            with open({folder} + "/" + f"{step.number}-{name}", "a") as file:
                file.write(json.dumps(found[:-1]) + "\\n")


state = {
    "scheduler": lambda model, optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    "samples": Samples(),
}
run = unicron.attach(steps=6, micro_batches=12, build=build, state=state, exact=True)
torch.manual_seed(7), random.seed(7)
for step in run.steps():
    with step:
        for k in step.micro_batches():
            loss = run.model(torch.arange(4.0) + step.number + k / 12).square().sum()
            (loss / 12).backward()
            step.commit(k, float(loss), [k])
        step.reduce()
        run.optimizer.step()
        run.state["scheduler"].step()
    if step.completed:
        run.state["samples"].seen += 12
        if step.number % 2 == 0:
            section("evaluate")
            section("save")

with open({folder} + "/noted-" + WORKER + ".json", "w") as file:
    json.dump(noted, file)
"""


def script(folder: Path, faults: dict[str, tuple[int, str]]) -> str:
    """Write the loop; return its path."""
    folder.mkdir(exist_ok=True)
    path = folder / "script.py"
    path.write_text(SCRIPT.replace("{faults}", repr(faults)).replace("{folder}", repr(str(folder))))
    return str(path)


def entries(folder: Path) -> dict[str, list[Any]]:
    """Return the last line of what each section has written."""
    files = (path for path in folder.iterdir() if path.name[:1].isdigit())
    return {path.name: json.loads(path.read_text().splitlines()[-1]) for path in files}


@pytest.mark.parametrize(
    ("fault", "replaced"),
    [
        ((2, "evaluate"), False),
        ((4, "save"), True),
        pytest.param((6, "save"), False, marks=pytest.mark.slow),
        pytest.param((2, "evaluate"), True, marks=pytest.mark.slow),
        pytest.param((4, "save"), False, marks=pytest.mark.slow),
        pytest.param((6, "save"), True, marks=pytest.mark.slow),
    ],
)
async def test_a_section_comes_again_after_a_rank_is_lost_in_it(
    tmp_path: Path, spec_file: SpecFile, fault: tuple[int, str], replaced: bool
) -> None:
    quiet, folder = tmp_path / "quiet", tmp_path / "faulty"
    script(quiet, {})
    zygote().run([str(quiet / "script.py")], quiet)
    spec = spec_file(script=script(folder, {"w1": fault}))
    async with agent(tmp_path / "agent") as a:
        workers = ["w0", "w1", "w2"]
        for worker in workers:
            await a.fork(worker, spec)
        await a.configure(dict.fromkeys(workers, "initial"))
        await a.until(lambda: "w1" in a.exits)
        await a.hold(["w0", "w2"])
        members = {"w0": "live", "w2": "live"}
        if replaced:
            await a.fork("w3", spec)
            members["w3"] = "take"
        await a.configure(members, fault_step=fault[0] + 1)
        finished = await a.finished(len(members))
    assert entries(folder) == entries(quiet)
    assert {error.kind for error in a.errors()} <= {"communication"}
    assert (
        largest_difference(finished.parameters_path, quiet / "unicron-run" / "result" / "parameters.safetensors") == 0
    )
    drawn = [
        [found[-1] for found in json.loads((folder / f"noted-{worker}.json").read_text())] for worker in ("w0", "w2")
    ]
    # Sections that come again draw the numbers that they drew before; one that was run through may have come twice.
    expected = [found[-1] for found in json.loads((quiet / "noted-alone.json").read_text())]
    for own in drawn:
        assert [one for i, one in enumerate(own) if one not in own[:i]] == expected


ALONE = """
import os
import torch
import torch.distributed as dist
import unicron


def build(tensor, pipeline):
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


run = unicron.attach(steps=6, micro_batches=12, build=build)
for step in run.steps():
    with step:
        for k in step.micro_batches():
            loss = run.model(torch.ones(4)).square().sum()
            (loss / 12).backward()
            step.commit(k, loss, [k])
        step.reduce()
        run.optimizer.step()
    if step.number == 3 and os.environ["UNICRON_WORKER"] == "w0":
        with run.boundary():
            open("begun", "w").close()
            dist.all_reduce(torch.ones(1))
"""


async def test_a_rank_that_enters_a_section_alone_waits_and_says_where(tmp_path: Path, spec_file: SpecFile) -> None:
    """Its collectives would otherwise meet those of the others' next step, which ends the process (gloo)."""
    begun = tmp_path / "begun"
    (tmp_path / "train.py").write_text(ALONE.replace('"begun"', repr(str(begun))))
    spec = spec_file(script=str(tmp_path / "train.py"))
    async with agent(tmp_path / "agent") as a:
        for worker in ("w0", "w1"):
            await a.fork(worker, spec)
        await a.configure(dict.fromkeys(("w0", "w1"), "initial"))
        await a.until(lambda: [m for m in a.of(Progress, "w0") if m.sections])
        await a.in_step(["w1"], 4, "reduce")
        inside, gone_on = a.of(Progress, "w0")[-1], a.of(Progress, "w1")[-1]
        line = ALONE.splitlines().index("        with run.boundary():") + 1
        assert (inside.phase, inside.step, inside.sections, inside.section) == ("aside", 3, 1, f"train.py:{line}")
        assert (gone_on.sections, gone_on.section) == (0, None)
        assert not begun.exists()
        a.kill("w1")
        await a.hold(["w0"])


async def test_a_section_stands_behind_a_step(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    text = SCRIPT.replace("{faults}", "{}").replace("{folder}", repr(str(tmp_path)))
    path.write_text(text.replace("torch.manual_seed(7), random.seed(7)", "run.boundary().__enter__()"))
    with pytest.raises(subprocess.CalledProcessError):
        zygote().run([str(path)], tmp_path)
    assert "WrongLoop: run.boundary() stands behind a step's block" in (tmp_path / "output").read_text()
