"""Megatron-LM's own ``pretrain_gpt.py``, not a byte changed, from a checkout (``make test-megatron-lm``).

Without faults the parameters are stock's, bit for bit. After the loss of a process they are those of a failure-free
run, and the newest checkpoint is complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.megatron_lm.courses import ROOT, differing, farthest, parameters, through_a_fault, torchrun
from tests.unicron.conftest import SpecFile
from tests.unicron.harness import Agent, agent
from unicron.protocol.messages import Resumed

CHECKOUT = os.environ.get("UNICRON_MEGATRON_LM", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not CHECKOUT, reason="UNICRON_MEGATRON_LM names no checkout of Megatron-LM"),
]

STEPS, BATCH = 4, 12

MODES = ("stock", "unicron")

ARGUMENTS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    f"--micro-batch-size 1 --global-batch-size {BATCH} --train-iters {STEPS} --lr 1e-2 --lr-decay-style linear "
    "--weight-decay 0.1 --clip-grad 1.0 --mock-data --tokenizer-type NullTokenizer --vocab-size 63 "
    "--attention-dropout 0 --hidden-dropout 0 --transformer-impl local --distributed-backend gloo "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --log-interval 1 --eval-iters 1 "
    "--eval-interval 2 --num-workers 0 --use-cpu-initialization --attention-backend unfused"
).split()

CYCLIC = "--dataloader-type cyclic"

BF16_GRADIENTS = "--bf16 --grad-reduce-in-bf16"

FP16_STEPS = 8

FP16 = f"--fp16 --initial-loss-scale 1048576 --hysteresis 1 --loss-scale-window 2 --train-iters {FP16_STEPS}"
"""The first update is skipped, and not all of the others."""

DIVIDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

PRECISION_AWARE = (
    "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16"
)
GROWS = "--train-samples 60 --rampup-batch-size 4 4 20"
"""Steps of 4, 4, 4, 8, and three of 12 samples."""

LAYOUTS = {
    "DP1": (1, ""),
    "DP2": (2, ""),
    "DP2, distributed optimizer with both overlaps": (2, DIVIDED),
    "DP2, cyclic": (2, CYCLIC),
    "DP2, bf16": (2, "--bf16"),
    "DP2, gradients in bf16": (2, BF16_GRADIENTS),
    "DP2, gradients in bf16, distributed optimizer with both overlaps": (2, f"{BF16_GRADIENTS} {DIVIDED}"),
    "TP2 and SP, gradients in bf16": (2, f"{BF16_GRADIENTS} --tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2, gradients in bf16, per-token loss": (
        2,
        f"{BF16_GRADIENTS} --pipeline-model-parallel-size 2 --calculate-per-token-loss",
    ),
    "DP2, precision-aware optimizer": (2, PRECISION_AWARE),
    "DP2, fp16": (2, FP16),
    "DP2, fp16 with gradients in fp32": (2, f"{FP16} --accumulate-allreduce-grads-in-fp32"),
    # Stock's gather beside the passes does not survive an evaluation behind a first update that was skipped.
    "DP2, fp16, distributed optimizer with both overlaps": (2, f"{FP16} {DIVIDED} --eval-interval 100"),
    "TP2 and SP, fp16": (2, f"{FP16} --tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2, fp16": (2, f"{FP16} --pipeline-model-parallel-size 2"),
    "DP2, per-token loss": (2, "--calculate-per-token-loss"),
    "PP2, per-token loss": (2, "--calculate-per-token-loss --pipeline-model-parallel-size 2"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP2 x VP2": (
        2,
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
    "PP2, a batch that grows": (2, f"--pipeline-model-parallel-size 2 {GROWS}"),
    "DP2, a batch that grows": (2, GROWS),
    "TP2 and SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "TP2, nothing to test with": (2, "--tensor-model-parallel-size 2 --split 90,10,0"),
}


def arguments(extra: str) -> list[str]:
    """Return the arguments of a run; one that ends behind so many samples has no number of iterations."""
    given = [*ARGUMENTS, *extra.split()]
    if "--train-samples" in given:
        place = given.index("--train-iters")
        del given[place : place + 2]
    return given


def run(
    mode: str, folder: Path, ranks: int, extra: str, environment: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Run the script under torchrun; return the parameters at its end."""
    program = [str(ROOT / "tests/megatron_lm/program.py"), mode, f"{CHECKOUT}/pretrain_gpt.py", str(folder)]
    return torchrun(folder, ranks, [*program, *arguments(extra)], environment=environment)


def _ramps_up() -> bool:
    """Return whether the checkout ramps a batch up: until core 0.17."""
    calculators = Path(CHECKOUT, "megatron/core/num_microbatches_calculator.py")
    return calculators.exists() and "class RampupBatchsizeNumMicroBatchesCalculator" in calculators.read_text()


@pytest.mark.parametrize("layout", [name for name, (_, given) in LAYOUTS.items() if _ramps_up() or GROWS not in given])
def test_the_parameters_are_those_of_stock(layout: str, tmp_path: Path) -> None:
    stock, ours = (run(mode, tmp_path / mode, *LAYOUTS[layout]) for mode in MODES)
    assert differing(stock, ours) == []
    if "fp16" in layout:
        skipped = [re.findall(r"skipped iterations: +(\d)", (tmp_path / m / "output").read_text()) for m in MODES]
        assert {"0", "1"} <= set(skipped[0])
        assert skipped[0] == skipped[1]


def test_three_replicas_are_as_far_from_stock_as_layouts_of_stock_are_from_each_other(tmp_path: Path) -> None:
    """Stock divides gradients by 4 and then by 3 there, and by 12 with one replica, as the library always does."""
    runs = (("stock", 1), ("stock", 3), ("unicron", 3))
    one, three, ours = (run(mode, tmp_path / f"{mode}-{ranks}", ranks, "") for mode, ranks in runs)
    assert 0.0 < farthest(three, ours) <= 2.0 * farthest(three, one)


def write_script(folder: Path, extra: str = "", script: str = "pretrain_gpt.py", given: Sequence[str] = ()) -> Path:
    """Write what a worker runs, which saves every second step; return its path.

    Args:
        folder: is made.
        extra: further arguments than those of a GPT.
        script: of the checkout.
        given: its arguments, in place of those of a GPT.
    """
    folder.mkdir()
    path = folder / "script.py"
    saves = ["--save", str(folder / "checkpoints"), "--save-interval", "2", "--ckpt-format", "torch_dist"]
    words = [*saves, *(given or arguments(extra))]
    path.write_text(
        "import sys\nfrom pathlib import Path\n"
        # A checkout has a package `tests` of its own, which would be found in place of this one.
        f"sys.path[:] = [{str(ROOT)!r}, *(place for place in sys.path if place != {CHECKOUT!r})]\n"
        f"from tests.megatron_lm.program import main\n"
        f"main('unicron', {f'{CHECKOUT}/{script}'!r}, Path({str(folder)!r}), {words!r})\n"
    )
    return path


async def train(
    a: Agent,
    spec_file: SpecFile,
    folder: Path,
    lost: str = "",
    extra: str = "",
    *,
    steps: int = STEPS,
    applied: int | None = None,
    replaced: bool = False,
    deterministic: bool = True,
) -> int:
    """Train on two workers, of which the second is lost at a place, and replaced by a new process or not.

    ``applied``: the updates applied before, if not as ``PLACES`` has them.

    Returns:
        The generation that does the rest.
    """
    iterations = "" if "--train-samples" in extra else f"--train-iters {steps}"
    script = write_script(folder, f"{extra} {iterations}")
    spec = spec_file(exact=False, deterministic_sums=deterministic, steps=steps, script=str(script))
    where = {"PYTHONPATH": os.pathsep.join(filter(None, (CHECKOUT, os.environ.get("PYTHONPATH"))))}
    step = (PLACES | OF_PRECISIONS)[lost] if lost and applied is None else applied or 0
    return await through_a_fault(a, spec, lost, step, where, replaced=replaced)


PLACES = {"forward:9": 1, "reduce:1": 0, "update:2": 1, "evaluate:3": 2, "save:1": 2}
"""Where the process is killed, for the how manieth time that it comes there; and the updates applied before."""

OF_PRECISIONS = {"forward:3": 0, "unscale:1": 0, "unscale:5": 4}
"""Further ones, of the same kind."""


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
    assert (saved / "iter_0000004" / ".metadata").stat().st_size > 0


@pytest.mark.parametrize(
    ("precision", "place"),
    [
        *((BF16_GRADIENTS, place) for place in ("forward:9", "reduce:1", "update:2")),
        # In the first step, whose update is skipped, and in a later one.
        *((FP16, place) for place in ("forward:3", "reduce:1", "unscale:1", "unscale:5")),
    ],
)
async def test_with_other_precisions_a_lost_process_costs_no_step(
    precision: str, place: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    """With ``deterministic_sums`` the parameters are those of a failure-free run."""
    steps = FP16_STEPS if precision == FP16 else STEPS
    async with agent(tmp_path / "quiet-agent") as a:
        await train(a, spec_file, tmp_path / "quiet", extra=precision, steps=steps)
    async with agent(tmp_path / "agent") as a:
        generation = await train(a, spec_file, tmp_path / "faulty", place, precision, steps=steps)
        (resumed,) = a.of(Resumed, generation=generation)
        if precision == FP16:
            skipped = re.findall(r"skipped iterations: +(\d)", a.output("w0"))
            assert skipped[0] == "1"
            assert "0" in skipped
    assert resumed.steps_recomputed == 0
    assert differing(parameters(tmp_path / "quiet"), parameters(tmp_path / "faulty")) == []


async def test_with_gradients_in_bf16_a_fault_changes_no_more_than_another_layout_of_stock(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    """Sums are rounded to bfloat16 in the order of their addends, which is another one on fewer replicas."""
    one, two = (run("stock", tmp_path / f"stock-{ranks}", ranks, BF16_GRADIENTS) for ranks in (1, 2))
    async with agent(tmp_path / "agent") as a:
        await train(a, spec_file, tmp_path / "faulty", "forward:9", BF16_GRADIENTS, deterministic=False)
    layouts, fault = farthest(one, two), farthest(two, parameters(tmp_path / "faulty"))
    print(f"two layouts of stock: {layouts:.3e}; through a fault: {fault:.3e}")
    assert 0.0 < fault <= 2.0 * layouts


@pytest.mark.parametrize("precision", ["", FP16])
async def test_a_new_process_takes_the_place_of_a_lost_one(precision: str, tmp_path: Path, spec_file: SpecFile) -> None:
    """It enters ``train()`` while the survivor is in the midst of it."""
    async with agent(tmp_path / "quiet-agent") as a:
        await train(a, spec_file, tmp_path / "quiet", extra=precision, steps=100)
    async with agent(tmp_path / "agent") as a:
        await train(a, spec_file, tmp_path / "faulty", "forward:9", precision, steps=100, replaced=True)
        assert [a.exits[worker][1] for worker in ("w0", "w2")] == [0, 0]
    assert differing(parameters(tmp_path / "quiet"), parameters(tmp_path / "faulty")) == []


@pytest.mark.skipif(not _ramps_up(), reason="the checkout ramps no batch up")
async def test_a_batch_that_grows_is_the_same_behind_a_fault(tmp_path: Path, spec_file: SpecFile) -> None:
    """The process is lost in the fourth step, the first of 8 samples; behind 6 passes of an evaluation."""
    async with agent(tmp_path / "quiet-agent") as a:
        await train(a, spec_file, tmp_path / "quiet", extra=GROWS, steps=7)
    async with agent(tmp_path / "agent") as a:
        generation = await train(a, spec_file, tmp_path / "faulty", "forward:14", GROWS, steps=7, applied=3)
        (resumed,) = a.of(Resumed, generation=generation)
    assert (resumed.steps_recomputed, resumed.step) == (0, 4)
    assert differing(parameters(tmp_path / "quiet"), parameters(tmp_path / "faulty")) == []


async def test_the_order_of_cyclic_stays_that_of_the_replicas_it_began_with(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    async with agent(tmp_path / "quiet-agent") as a:
        await train(a, spec_file, tmp_path / "quiet", extra=CYCLIC)
    async with agent(tmp_path / "agent") as a:
        await train(a, spec_file, tmp_path / "faulty", "forward:9", extra=CYCLIC)
    assert differing(parameters(tmp_path / "quiet"), parameters(tmp_path / "faulty")) == []
