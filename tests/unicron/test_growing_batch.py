"""A batch that grows (``attach(micro_batches_of=...)``): each step has its own micro-batches, also behind a fault."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import agent
from tests.unicron.zygote import zygote
from unicron.protocol.messages import Raised, Resumed

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import torch
import unicron


class Seen:
    samples = 0

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state):
        self.samples = state["samples"]


def build(tensor, pipeline):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def count(number):
    return min(LARGEST, 2 + run.state["seen"].samples)


run = unicron.attach(
    steps=6, micro_batches=12, build=build, state={"seen": Seen()}, exact=True, micro_batches_of=count
)
for step in run.steps():
    with step:
        seen = run.state["seen"].samples
        for k in step.micro_batches():
            loss = run.model(torch.arange(4.0) + (seen + k) / 12).square().sum()
            (loss / count(step.number)).backward()
            step.commit(k, float(loss), [seen + k])
        step.reduce()
        run.optimizer.step()
        run.state["seen"].samples += count(step.number)
"""
"""Steps of 2, 4, 8 and 12 micro-batches."""


def script(folder: Path, largest: int = 12) -> str:
    """Write the loop; return its path."""
    path = folder / "script.py"
    path.write_text(f"LARGEST = {largest}\n{SCRIPT}")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["reduce", "3"])
async def test_a_step_is_completed_with_its_own_micro_batches(place: str, tmp_path: Path, spec_file: SpecFile) -> None:
    """The rank of a step of 8 that is lost leaves its part to one that knows nothing of the step."""
    spec = spec_file(script=script(tmp_path), steps=6)
    zygote().run([str(tmp_path / "script.py")], tmp_path)
    async with agent(tmp_path / "run") as a:
        await asyncio.gather(*(a.fork(w, spec, {"UNICRON_FAIL_AT": f"1:3:{place}:hang"}) for w in ("w0", "w1")))
        await a.configure({"w0": "initial", "w1": "initial"})
        await a.lose("w1", 3, "compute")
        await a.hold(["w0"])
        await a.fork("w2", spec)
        generation = await a.configure({"w0": "live", "w2": "take"})
        finished = await a.finished(2)
        deal = next(r.deal for r in a.of(Resumed, generation=generation) if r.deal)
    assert sorted(k for ks in deal.values() for k in ks) == list(range(8))
    alone = tmp_path / "unicron-run" / "result" / "parameters.safetensors"
    assert largest_difference(finished.parameters_path, alone) == 0.0


@pytest.mark.slow
async def test_a_step_of_more_than_the_largest_is_an_error(tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec_file(script=script(tmp_path, largest=100), steps=6))
        await a.configure({"w0": "initial"})
        await a.until(lambda: "w0" in a.exits)
        (raised,) = a.of(Raised)
    assert raised.error == "WrongLoop"
    assert "step 4 has 16, and attach says up to 12" in raised.detail
