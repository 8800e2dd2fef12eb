"""``unicron.huggingface.Trainer``: the result is that of transformers' own Trainer, also through faults."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import agent
from tests.unicron.zygote import zygote

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'unicron[transformers]')")
pytestmark = pytest.mark.timeout(170)

SCRIPT = """
import os, sys
from pathlib import Path
import torch
import transformers
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from unicron.huggingface import Trainer

STOCK = "stock" in Path.cwd().name
torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
rows = torch.randint(0, 64, (64, 16))
labels = rows.clone()
for number, row in enumerate(labels):
    row[: number % 13] = -100  # micro-batches have different numbers of tokens
dataset = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels)]
arguments = TrainingArguments(
    output_dir=str(Path(__file__).parent / f"out-{os.getpid()}"), per_device_train_batch_size=2,
    gradient_accumulation_steps=6, max_steps=4, learning_rate=1e-2, warmup_steps=1, logging_steps=1,
    eval_strategy="steps", eval_steps=2, save_strategy="no" if STOCK else "steps", save_steps=2,
    report_to="none", optim="adamw_torch", use_cpu=True, disable_tqdm=True,
)


class Stock(transformers.Trainer):
    def _get_train_sampler(self, dataset=None):
        return [i for step in range(1, 5) for k in range(6) for i in ours._sample_ids(step, k)]


ours = Trainer(model=model, args=arguments, train_dataset=dataset, eval_dataset=dataset[:5])
if STOCK:
    Stock(model=model, args=arguments, train_dataset=dataset, eval_dataset=dataset[:5]).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(state, "stock.safetensors")
else:
    ours.train()
"""


def check_saved(folder: Path, result: Path) -> None:
    """Compare the model that transformers has saved behind the last step with the result."""
    (saved,) = folder.glob("out-*/checkpoint-4/model.safetensors")
    weights = load_file(result)
    assert all(value.equal(weights[name]) for name, value in load_file(saved).items())


async def test_a_faulty_run_has_the_result_of_stock(tmp_path: Path, spec_file: SpecFile) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for name in ("stock", "alone"):
        (tmp_path / name).mkdir()
        await asyncio.to_thread(zygote().run, [str(script)], tmp_path / name)
    stock = tmp_path / "stock" / "stock.safetensors"
    alone = tmp_path / "alone" / "unicron-run" / "result" / "parameters.safetensors"
    assert largest_difference(alone, stock) <= 1e-5
    check_saved(tmp_path, alone)
    spec = spec_file(
        script=str(script), steps=4, batch={"global": 12, "micro": 2}, exact=False, deterministic_sums=True
    )
    async with agent(tmp_path / "run") as a:
        workers = ["w0", "w1", "w2"]
        faults = {"UNICRON_FAIL_AT": "1:2:1:hang,2:4:section:kill"}
        await asyncio.gather(*(a.fork(worker, spec, faults) for worker in workers))
        await a.configure(dict.fromkeys(workers, "initial"))
        await a.lose("w1", 2)
        await a.hold(["w0", "w2"])
        await a.resumed(await a.configure({"w0": "live", "w2": "live"}, stage="interrupted"))
        await a.until(lambda: "w2" in a.exits)
        await a.hold(["w0"])
        await a.configure({"w0": "live"}, fault_step=5)
        finished = await a.finished(1)
        assert "eval_loss" in (a.folder / "w0.log").read_text()
        (newest,) = a.folder.glob("generation-3/metrics/w0.jsonl")
        assert '"step": 4, "rank": 0, "values": {"eval_loss": ' in newest.read_text()
    assert largest_difference(finished.parameters_path, stock) <= 1e-5


@pytest.mark.parametrize(("event", "asked"), [("on_evaluate", 2), ("on_step_end", 1)])
async def test_a_callback_of_one_process_ends_the_training_of_all(
    event: str, asked: int, tmp_path: Path, spec_file: SpecFile
) -> None:
    """Behind the evaluation at once, and else behind the step that follows."""
    ends = f"""
class Ends(transformers.TrainerCallback):
    def {event}(self, args, state, control, **_):
        control.should_training_stop |= state.global_step == {asked} and state.is_world_process_zero

ours.add_callback(Ends)
"""
    (script := tmp_path / "script.py").write_text(SCRIPT.replace("\nif STOCK:", f"{ends}\nif STOCK:"))
    spec = spec_file(script=str(script), steps=4, batch={"global": 12, "micro": 2}, exact=False)
    async with agent(tmp_path / "run") as a:
        await asyncio.gather(*(a.fork(worker, spec) for worker in ("w0", "w1")))
        await a.configure({"w0": "initial", "w1": "initial"})
        assert (await a.finished(2)).step == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size: must be off"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type: must follow"),
        ({"per_device_train_batch_size": 11}, "must have the samples of one update"),
    ],
)
def test_what_would_train_otherwise_after_a_fault_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    text = SCRIPT.replace("disable_tqdm=True,\n)", "disable_tqdm=True, **CHANGES,\n)").replace(
        "STOCK = ", f"CHANGES = {changes!r}\nSTOCK = "
    )
    for name in changes:
        text = text.replace(f"{name}=2,", "")
    (script := tmp_path / "script.py").write_text(text)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        zygote().run([str(script)], tmp_path)
    assert "UnsupportedModel" in caught.value.output
    assert message in caught.value.output
