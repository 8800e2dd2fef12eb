"""Megatron's precision-aware optimizer and fp16: what they keep moves, is copied and is checkpointed as any state.

Transformer Engine's Adam, which it needs, runs on devices alone; a stand-in that keeps the same takes its place
(``tests.unicron.fused_adam``).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.unicron.changed_examples import changed_example
from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent, reference_of
from tests.unicron.test_loss_scale import FIELDS
from tests.unicron.test_recovery import begin
from tests.unicron.test_snapshots import Nodes
from tests.unicron.zygote import WRITES_AT_ONCE
from unicron.checkpoint import archive
from unicron.protocol.messages import Checkpointed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = str(Path(__file__).resolve().parents[2])
STEP, STEPS = 3, 6
OF_EVERY = [
    ("STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 60,", f"STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = {STEPS},"),
    ("checkpoint_every=20", f"checkpoint_every={STEP}"),
    (
        "    model = DistributedDataParallel(",
        "    from megatron.core.transformer.module import Float16Module\n\n"
        "    module = Float16Module(config, module)\n"
        "    model = DistributedDataParallel(",
    ),
    ("grad_reduce_in_fp32=True,", "grad_reduce_in_fp32=False, use_distributed_optimizer=True,"),
]
PRECISION_AWARE = [
    ("pipeline_dtype=torch.float32", "pipeline_dtype=torch.bfloat16, bf16=True, params_dtype=torch.bfloat16"),
    (
        "weight_decay=0.01, clip_grad=1.0",
        "weight_decay=0.01, clip_grad=0.0, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True,"
        " use_precision_aware_optimizer=True, main_grads_dtype=torch.bfloat16, exp_avg_dtype=torch.bfloat16,"
        " exp_avg_sq_dtype=torch.bfloat16",
    ),
    (
        "    torch.manual_seed(0)\n",
        f"    import sys\n\n    sys.path.insert(0, {ROOT!r})\n"
        "    from tests.unicron import fused_adam\n\n    fused_adam.enable()\n"
        "    torch.manual_seed(0)\n",
    ),
]
FP16 = [
    ("pipeline_dtype=torch.float32", "pipeline_dtype=torch.float16, fp16=True, params_dtype=torch.float16"),
    (
        "weight_decay=0.01, clip_grad=1.0",
        "weight_decay=0.01, clip_grad=0.0, fp16=True, params_dtype=torch.float16, use_distributed_optimizer=True,"
        " initial_loss_scale=2.0**20, hysteresis=1, loss_scale_window=1",
    ),
    (
        "        run.optimizer.step()\n",
        "        updated, *_ = run.optimizer.step()\n"
        "    print('update', step.number, updated, run.optimizer.get_loss_scale().item(), flush=True)\n",
    ),
]
"""The scale grows with each update, and is too large for the next one."""

FUSED_ADAM = PRECISION_AWARE[-1]

APPLIED = (2, 5)
"""The steps whose updates are not skipped in fp16."""

CASES = {"precision-aware": PRECISION_AWARE, "fp16": FP16, "fp16, updates counted by group": [*FP16, FUSED_ADAM]}
KINDS = {
    "precision-aware": {("exp_avg", "bfloat16"), ("exp_avg_sq", "bfloat16"), ("master_param", "int16")},
    "fp16": {("exp_avg", "float32"), ("exp_avg_sq", "float32"), ("main_param", "float32"), ("step", "float32")},
    "fp16, updates counted by group": {(kind, "float32") for kind in ("exp_avg", "exp_avg_sq", "main_param")},
}
"""Of the optimizer's state, and their types of numbers. Of a parameter in bfloat16 ``master_param`` is the rest."""


def script(folder: Path, case: str, *, divided: bool = True) -> str:
    """Write the script. ``divided``: whether the replicas divide the optimizer."""
    path = changed_example("megatron_gpt.py", [*OF_EVERY, *CASES[case]], folder)
    if not divided:
        path.write_text(path.read_text().replace("use_distributed_optimizer=True,", ""))
    return str(path)


async def end(a: Agent, spec: Path, workers: int) -> None:
    """Check that the result is that of a failure-free run, to the last bit."""
    finished = await a.finished(workers)
    reference = await reference_of(a, spec)
    assert finished.samples_sha256 == reference.samples_sha256
    assert largest_difference(finished.parameters_path, reference.parameters_path) == 0.0


@pytest.mark.parametrize("case", CASES)
async def test_a_lost_part_comes_from_a_copy_and_a_newcomer_takes_its_share(
    case: str, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """One of two replicas is lost with its node in a step; a new process takes its place."""
    fields = FIELDS | {"steps": STEPS, "exact": False, "deterministic_sums": True, "script": script(tmp_path, case)}
    spec = spec_file(**fields, checkpoint={"memory_every": STEP - 1})
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"})
        await nodes.train_to("w1", STEP, "1", then=f"0:{STEP + 2}:0:hang")
        a.kill("w1")
        shutil.rmtree(nodes.folder("n1"))
        await a.hold(["w0"])
        generation = await a.configure({"w0": "live"}, stage="interrupted", complete=False, fault_step=STEP - 1)
        (resumed,) = await a.resumed(generation)
        assert (resumed.step, resumed.steps_recomputed) == (STEP, 0)
        await a.stopped("w0")
        await a.drain(["w0"])
        await nodes.fork_one("w2", "n2")
        await a.resumed(await a.configure({"w0": "live", "w2": "take"}))
        await end(a, spec, 2)
        if case.startswith("fp16"):
            updated = re.findall(r"update \d+ (True|False)", a.output("w0"))
            assert set(updated) == {"True", "False"}


@pytest.mark.parametrize("step", [STEP, APPLIED[-1]])
@pytest.mark.parametrize("at", ["1.forward", "reduce:0", "update"])
async def test_a_process_is_lost_in_a_step_whose_update_is_skipped_or_not(
    at: str, step: int, tmp_path: Path, spec_file: SpecFile
) -> None:
    fields = FIELDS | {"steps": STEPS, "script": script(tmp_path, "fp16", divided=False)}
    spec = spec_file(**fields, exact=False, deterministic_sums=True)
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, ["w0", "w1"], f"1:{step}:{at}:kill")
        await a.until(lambda: "w1" in a.exits)
        await a.hold(["w0"])
        (resumed,) = await a.resumed(await a.configure({"w0": "live"}, stage="interrupted", fault_step=step - 1))
        assert resumed.steps_recomputed == 0
        await end(a, spec, 1)
        updated = dict(re.findall(r"update (\d+) (True|False)", a.output("w0")))
        assert updated == {str(number): str(number in APPLIED) for number in range(1, STEPS + 1)}


@pytest.mark.parametrize("case", CASES)
async def test_a_checkpoint_has_what_the_optimizer_keeps(case: str, tmp_path: Path, spec_file: SpecFile) -> None:
    fields = FIELDS | {"steps": STEPS, "exact": False, "deterministic_sums": True, "script": script(tmp_path, case)}
    spec = spec_file(**fields)
    async with agent(tmp_path / "run") as a:
        for worker in ("w0", "w1"):
            await a.fork(worker, spec, WRITES_AT_ONCE)
        await a.configure({"w0": "initial", "w1": "initial"})
        await a.finished(2)
        saved = next(one.path for one in a.of(Checkpointed) if one.step == STEP)
        kinds = {
            (chunk.kind, chunk.dtype)
            for file in archive.read(saved).files.values()
            for chunk in file.chunks.values()
            if chunk.is_optimizer_state
        }
        assert kinds == KINDS[case]
        a.messages.clear()
        await a.fork("v0", spec)
        await a.configure({"v0": "checkpoint"}, checkpoint=saved, fault_step=STEP)
        await end(a, spec, 1)
