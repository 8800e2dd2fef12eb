"""A script of megatron-bridge's, not a byte changed (``make test-bridge``).

Without faults the parameters are stock's, bit for bit. After the loss of a process they are those of a failure-free
run, and the newest checkpoint is complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from cli.launch.checking import checked
from shared.launch.check import Check
from tests.megatron_lm import program
from tests.megatron_lm.courses import ROOT, differing, parameters, through_a_fault, torchrun
from tests.unicron.conftest import SpecFile
from tests.unicron.harness import Agent, agent
from unicron.protocol.messages import Resumed

FOLDER = os.environ.get("UNICRON_BRIDGE", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not FOLDER, reason="UNICRON_BRIDGE names no folder with megatron-bridge"),
]

STEPS = 4

DIVIDED = "ddp.use_distributed_optimizer=true"

OVERLAPS = f"{DIVIDED} ddp.overlap_grad_reduce=true ddp.overlap_param_gather=true optimizer.overlap_param_gather=true"

LAYOUTS = {
    "DP1": (1, ""),
    "DP2": (2, ""),
    "DP2, cyclic": (2, 'dataset.dataloader_type="cyclic"'),
    "DP2, bf16": (2, 'mixed_precision="bf16_mixed"'),
    "DP2, distributed optimizer": (2, DIVIDED),
    "DP2, distributed optimizer with both overlaps": (2, OVERLAPS),
    "TP2 and SP": (2, "model.tensor_model_parallel_size=2 model.sequence_parallel=true"),
    "PP2": (2, "model.pipeline_model_parallel_size=2"),
    "DP2, a batch that grows": (2, "train.rampup_batch_size=[4,4,20] train.train_iters=7"),
}

PLACES = {"forward:9": 1, "reduce:1": 0, "update:2": 1, "evaluate:3": 2, "save:1": 2}
"""Where a process is killed, for the how manieth time that it comes there; and the updates applied before."""


def run(
    mode: str, folder: Path, ranks: int, settings: str, environment: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Run the script under torchrun; return the parameters at its end."""
    asked = [str(ROOT / "tests/bridge/program.py"), mode, str(folder), *settings.split()]
    return torchrun(folder, ranks, asked, FOLDER, environment)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parameters_are_those_of_stock(layout: str, tmp_path: Path) -> None:
    stock, ours = (run(mode, tmp_path / mode, *LAYOUTS[layout]) for mode in ("stock", "unicron"))
    assert differing(stock, ours) == []
    losses = [re.findall(r"lm loss[^|]*", (tmp_path / mode / "output").read_text()) for mode in ("stock", "unicron")]
    assert losses[0]
    assert losses[0] == losses[1]


def write_script(folder: Path, settings: str) -> Path:
    """Write what a worker runs, which saves every second step and keeps the newest checkpoint; return its path."""
    folder.mkdir()
    script = folder / "script.py"
    saves = [f'checkpoint.save="{folder}/checkpoints"', "checkpoint.save_interval=2", "checkpoint.most_recent_k=1"]
    given = [*saves, *settings.split()]
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        f"sys.path[:] = [{str(ROOT)!r}, *sys.path]\n"
        f"from tests.bridge.program import main\nmain('unicron', Path({str(folder)!r}), {given!r})\n"
    )
    return script


async def train(
    a: Agent, spec_file: SpecFile, folder: Path, lost: str = "", settings: str = "", *, replaced: bool = False
) -> int:
    """Train on two workers, of which the second is lost at a place; return the generation that does the rest."""
    spec = spec_file(exact=False, deterministic_sums=True, steps=STEPS, script=str(write_script(folder, settings)))
    where = {"PYTHONPATH": os.pathsep.join(filter(None, (FOLDER, os.environ.get("PYTHONPATH"))))}
    return await through_a_fault(a, spec, lost, PLACES.get(lost, 0), where, replaced=replaced)


@pytest.mark.parametrize("place", PLACES)
async def test_a_process_that_is_lost_costs_no_step(place: str, tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "quiet-agent") as a:
        await train(a, spec_file, tmp_path / "quiet")
    async with agent(tmp_path / "agent") as a:
        generation = await train(a, spec_file, tmp_path / "faulty", place)
        (resumed,) = a.of(Resumed, generation=generation)
    assert resumed.steps_recomputed == 0
    assert differing(parameters(tmp_path / "quiet"), parameters(tmp_path / "faulty")) == []
    saved = tmp_path / "faulty" / "checkpoints"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert [path.name for path in saved.glob("iter_*")] == ["iter_0000004"]
    assert (saved / "iter_0000004" / ".metadata").stat().st_size > 0
    assert len([*saved.glob("unfinished-iter_0000002-*")]) == (place == "save:1")


@pytest.mark.parametrize("modes", [("stock", "unicron"), ("unicron", "stock")], ids="-then-".join)
def test_each_goes_on_from_a_checkpoint_of_the_other(modes: tuple[str, str], tmp_path: Path) -> None:
    saves = f'checkpoint.save="{tmp_path}/saved" checkpoint.save_interval=2 train.exit_interval=2'
    run(modes[0], tmp_path / "first", 1, saves)
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2"
    went_on = run(modes[1], tmp_path / "second", 1, f'checkpoint.load="{tmp_path}/saved"')
    assert differing(run("stock", tmp_path / "whole", 1, ""), went_on) == []


def test_a_signal_leaves_a_checkpoint_from_which_stock_goes_on(tmp_path: Path) -> None:
    """Behind the second step, in which the second rank gets it. Stock 0.3.1 never puts its own handler in place."""
    saves = f'checkpoint.save="{tmp_path}/saved" train.exit_signal_handler=true'
    run("unicron", tmp_path / "first", 2, saves, {program.FAULT: "1:forward:9", program.SIGNAL: "SIGTERM"})
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2"
    went_on = run("stock", tmp_path / "second", 2, f'checkpoint.load="{tmp_path}/saved"')
    assert differing(run("stock", tmp_path / "whole", 2, ""), went_on) == []


def test_a_run_reads_the_settings_from_the_script_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which ends at ``pretrain()``; ``sitecustomize`` makes that one run without CUDA."""
    asked = "import sys\nif '--settings' in sys.orig_argv:\n    from tests.bridge.program import apply\n    apply()\n"
    (tmp_path / "sitecustomize.py").write_text(asked)
    monkeypatch.chdir(tmp_path)
    path = (str(tmp_path), str(ROOT), FOLDER, os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))

    def check(*given: str) -> Check:
        command = ["torchrun", "--nproc-per-node", "4", str(ROOT / "tests/bridge/script.py"), *given]
        return checked(command).check

    saves = ("model.tensor_model_parallel_size=2", "checkpoint.save_interval=2", 'checkpoint.save="a"')
    found = check(*saves)
    assert (found.verdict, found.findings, found.task["read_by"]) == ("unchanged", [], "script")
    assert found.task["model"] == {"layers": 2, "hidden": 32, "heads": 2, "sequence_length": 32, "vocabulary": 64}
    assert (found.task["batch"], found.task["steps"]) == ({"global": 12, "micro": 1}, STEPS)
    assert (found.task["parallel"]["tensor"], found.task["least_workers"], found.task["saves_every"]) == (2, 2, 2)
    assert not (tmp_path / "a").exists()
    refused = check(*saves, "train.iterations_to_skip=[2]", "checkpoint.async_save=true")
    assert refused.verdict == "restart"
    assert {one.argument: one.what for one in refused.findings} == {
        "train.iterations_to_skip": "restart",
        "checkpoint.async_save": "speed-off",
    }
    (one,) = check("train.no.such=1").findings
    assert "and it ends with AttributeError: 'TrainingConfig' object has no attribute 'no' before pretrain()" in one.why
