"""Every call of the table of docs/integrating.md, on a plain module, one with tied weights, and a Megatron one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import agent
from tests.unicron.test_scripts import train
from tests.unicron.zygote import ROOT, zygote

pytestmark = pytest.mark.timeout(120)

STEPS, MICRO_BATCHES = 4, 12

LIMIT = 0.01
"""Below every norm of these models' first gradients."""

PLAIN = """
import torch

import unicron


class Tied(torch.nn.Module):
    '''Its output layer has the weight of its input layer.'''

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs)))


def build(tensor, pipeline):
    torch.manual_seed(0)
    model = {model}
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def sample_ids(step, k):
    return [(step - 1) * 12 + k]


def forward_backward(model, ids):
    loss = model(torch.arange(4.0) + ids[0] / 48).square().sum()
    (loss / MICRO_BATCHES).backward()
    return [loss]


STEPS, MICRO_BATCHES = 4, 12
"""

LOOP = """
import json
import pathlib


class Counter:
    '''A state of the script's own.'''

    updates = 0

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]


def gradients():
    return [getattr(p, "main_grad", p.grad) for p in run.model.parameters()]


def norm():
    return sum(float(g.double().square().sum()) for g in gradients()) ** 0.5


run = unicron.attach(steps=STEPS + 1, micro_batches=MICRO_BATCHES, build=build, state={"counter": Counter()})
seen = []
for step in run.steps():
    with step:
        for k in step.micro_batches():
            ids = sample_ids(step.number, k)
            losses = forward_backward(run.model, ids)
            step.commit(k, losses[0], ids)
        if step.number == STEPS and run.generation.rank == 0:
            step.end_training()
        step.reduce()
        before = norm()
        clipped = step.clip_gradients(LIMIT)
        after = norm()
        run.optimizer.step()
        run.log({"norm": clipped})
        run.state["counter"].updates += 1
    if step.completed:
        with run.boundary() as section:
            size = run.generation.world_size
            if step.number == run.last_step:
                section.end_training()
        seen.append({"norms": [before, clipped, after], "loss": step.loss, "size": size})
    run.heartbeat()
run.log({"behind": STEPS})
found = {"steps": seen, "updates": run.state["counter"].updates}
pathlib.Path(__file__).with_name(f"seen-{run.generation.rank}.json").write_text(json.dumps(found))
"""

MODELS = {
    "plain": PLAIN.replace("{model}", "torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))"),
    "tied": PLAIN.replace("{model}", "Tied()"),
    "megatron": (ROOT / "examples" / "megatron_gpt.py").read_text().partition("\nrun = unicron.attach(")[0]
    + f"\n\nSTEPS, MICRO_BATCHES = {STEPS}, {MICRO_BATCHES}\n",
}


def write_script(folder: Path, model: str, *, without: str = "") -> Path:
    """Write the loop with a model; ``without``: a call that is left out."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    loop = LOOP.replace(f"step.{without}(LIMIT)", "0.0") if without else LOOP
    script.write_text(f"{MODELS[model]}\nLIMIT = {LIMIT}\n{loop}")
    return script


def test_the_loop_has_every_call_of_the_table() -> None:
    text = (ROOT / "docs" / "integrating.md").read_text()
    rows = text.partition("| call | what it does |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    calls = [call for row in rows for call in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(calls) >= 14
    assert [call for call in calls if call.partition("(")[0].rstrip(":") not in LOOP] == []


@pytest.mark.parametrize("model", MODELS)
def test_every_call_does_what_the_table_says(model: str, tmp_path: Path) -> None:
    zygote().run([str(write_script(tmp_path, model))], tmp_path)
    seen = json.loads((tmp_path / "seen-0.json").read_text())
    assert (len(seen["steps"]), seen["updates"]) == (STEPS, STEPS)
    for step in seen["steps"]:
        before, clipped, after = step["norms"]
        assert clipped == pytest.approx(before, rel=1e-6)
        assert before > LIMIT
        assert after == pytest.approx(LIMIT, rel=1e-3)
        assert (math.isfinite(step["loss"]), step["size"]) == (True, 1)
    logged = map(json.loads, (tmp_path / "unicron-run" / "metrics" / "0.jsonl").read_text().splitlines())
    norms = [(number, {"norm": step["norms"][1]}) for number, step in enumerate(seen["steps"], 1)]
    assert [(line["step"], line["values"]) for line in logged] == [*norms, (STEPS, {"behind": STEPS})]


def test_the_result_of_tied_weights_has_each_of_their_names(tmp_path: Path) -> None:
    zygote().run([str(write_script(tmp_path, "tied"))], tmp_path)
    found = load_file(tmp_path / "unicron-run" / "result" / "parameters.safetensors")
    assert sorted(found) == ["first.bias", "first.weight", "last.bias", "last.weight"]
    assert torch.equal(found["first.weight"], found["last.weight"])


@pytest.mark.parametrize("model", ["tied", pytest.param("plain", marks=pytest.mark.slow)])
async def test_clipping_is_the_same_to_the_last_bit_on_any_number_of_processes(
    model: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    clipping, not_clipping = (
        {
            "script": str(write_script(tmp_path / name, model, without=call)),
            "exact": True,
            "steps": STEPS + 1,
            "checkpoint": {"every": 2},
        }
        for name, call in (("clipping", ""), ("not", "clip_gradients"))
    )
    async with agent(tmp_path / "run") as a:
        alone = await train(a, spec_file(**clipping), ("w0",))
        together = await train(a, spec_file(**clipping), ("w1", "w2"))
        assert largest_difference(together.parameters_path, alone.parameters_path) == 0.0
        unclipped = await train(a, spec_file(**not_clipping), ("w3",))
        assert largest_difference(unclipped.parameters_path, alone.parameters_path) > 0.0
