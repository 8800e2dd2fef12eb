"""The global 1/M with Megatron's stock loss functions, which the schedules divide by the micro-batches of a call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.unicron.changed_examples import changed_example
from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent
from unicron.errors import WrongLoop
from unicron.megatron.schedule import LossScale
from unicron.protocol.messages import Finished, Raised

pytestmark = pytest.mark.timeout(180)

STEPS = 3
FIELDS = {"steps": STEPS, "batch": {"global": 16, "micro": 2}}
TO_STEPS = ("STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 60,", f"STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = {STEPS},")
# Unlike Adam with clipping, plain descent shows how large gradients are.
TO_SGD = ('optimizer="adam", lr=2e-3, weight_decay=0.01, clip_grad=1.0', 'optimizer="sgd", lr=0.1, clip_grad=0.0')

LOOP_SCALES = [
    ("persist_layer_norm=False,", "persist_layer_norm=False, calculate_per_token_loss=True,"),
    ("return total,", "return total / labels.numel() / MICRO_BATCHES,"),
]
"""As before there was a scale: the loop divides by M, and tells Megatron not to divide."""

TWO_OUTPUTS = [
    (
        "return total, torch.tensor(labels.numel(), dtype=torch.int), total.detach() / labels.numel()",
        "return total / labels.numel(), total.detach() / labels.numel()",
    )
]
"""The older form of a loss function."""

ALL_AT_ONCE = [
    ("iter([batch(ids)])", "iter([batch(sample_ids(step.number, k)) for k in ids])"),
    ("num_microbatches=1", "num_microbatches=len(ids)"),
    (
        """        for k in step.micro_batches():  # + in place of one call with all of the replica's micro-batches
            ids = sample_ids(step.number, k)
            losses = forward_backward(run.model, ids)
            step.commit(k, losses[0] if losses else None, ids)  # +
""",
        """        ks = step.all_micro_batches()
        losses = forward_backward(run.model, ks)
        step.commit_all(ks, [float(one) for one in losses], [sample_ids(step.number, k) for k in ks])
""",
    ),
]
"""One call of the schedule for all micro-batches of the rank."""

NO_AUXILIARY_LOSSES = ("persist_layer_norm=False,", "persist_layer_norm=False, mtp_num_layers=0,")
"""With which the schedule asks for the scale of auxiliary losses all the same, before each micro-batch's own."""

USUAL = {"calculate_per_token_loss": False, "deallocate_pipeline_outputs": False}
"""What the library reads of Megatron's configuration here."""

PER_TOKEN = ("persist_layer_norm=False,", "persist_layer_norm=False, calculate_per_token_loss=True,")

MASKED = (
    """    total = losses.float().sum()
    return total, torch.tensor(labels.numel(), dtype=torch.int), total.detach() / labels.numel()
""",
    """    mask = labels % 7 < labels[0, 0] % 5  # every micro-batch has another number of tokens, and one has none
    total, tokens = (losses.float() * mask).sum(), mask.sum()
    return total, tokens.to(torch.int), (total.detach().clone(), tokens)
""",
)
"""As Megatron-LM's own loss function: a sum over tokens, their number, and both to report."""

MEETS = ("        run.optimizer.step()\n", "        torch.distributed.barrier()\n        run.optimizer.step()\n")
"""A rank that is lost before its update keeps the others from theirs."""

DIVIDED = (
    "    return total, tokens.to(torch.int), (total.detach().clone(), tokens)\n",
    """    labels_of_step = (batch(sample_ids(step.number, k))[2] for k in range(MICRO_BATCHES))
    of_step = sum(int((of_one % 7 < of_one[0, 0] % 5).sum()) for of_one in labels_of_step)
    return total / of_step, tokens.to(torch.int), total.detach() * MICRO_BATCHES / of_step
""",
)
"""The same where the loop divides by the tokens of the step, which it has to know before it begins."""

COLLECTED = [(old, new.replace("step.all_micro_batches()", "list(step.micro_batches())")) for old, new in ALL_AT_ONCE]
"""The same with numbers that are to be computed one by one."""


def example(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the example of a Megatron loop with changes; return its path."""
    return changed_example("megatron_gpt.py", (TO_STEPS, TO_SGD, *changes), folder)


async def train(a: Agent, spec: Path, workers: list[str], pipeline: int = 1) -> Finished:
    a.messages.clear()
    await asyncio.gather(*(a.fork(worker, spec) for worker in workers))
    await a.configure(dict.fromkeys(workers, "initial"), pipeline=pipeline)
    return await a.finished(len(workers))


@pytest.mark.slow
async def test_a_stock_loss_counts_as_one_that_the_loop_scales(tmp_path: Path, spec_file: SpecFile) -> None:
    """However the loss is written, however many micro-batches a call computes, and however many replicas there are."""
    async with agent(tmp_path / "run") as a:
        spec = spec_file(script=str(example(tmp_path, *LOOP_SCALES)), **FIELDS)
        expected = await train(a, spec, ["w0"])
        for number, changes in enumerate(([], TWO_OUTPUTS)):
            example(tmp_path, *changes)
            finished = await train(a, spec, [f"stock-{number}-{rank}" for rank in range(3)])
            assert largest_difference(finished.parameters_path, expected.parameters_path) <= 1e-7, changes
        example(tmp_path, *ALL_AT_ONCE, NO_AUXILIARY_LOSSES)
        rounded = spec_file(script=str(tmp_path / "script.py"), exact=False, deterministic_sums=True, **FIELDS)
        finished = await train(a, rounded, ["all-0", "all-1", "all-2"])
        assert largest_difference(finished.parameters_path, expected.parameters_path) <= 1e-7


@pytest.mark.slow
async def test_gradients_of_sums_are_divided_by_the_tokens_of_the_global_batch(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    """With ``calculate_per_token_loss`` and a loss function like Megatron-LM's, in any layout, and through faults."""
    async with agent(tmp_path / "run") as a:
        spec = spec_file(script=str(example(tmp_path, PER_TOKEN, MASKED, DIVIDED)), **FIELDS)
        expected = await train(a, spec, ["w0"])
        for exact in (True, False):
            spec = spec_file(script=str(example(tmp_path, PER_TOKEN, MASKED, MEETS)), **FIELDS, exact=exact)
            a.messages.clear()
            workers = [f"{name}-{exact}" for name in ("one", "two", "three")]
            faults = {"UNICRON_FAIL_AT": "1:2:1:hang,2:3:update:hang"}
            await asyncio.gather(*(a.fork(worker, spec, faults) for worker in workers))
            await a.configure(dict.fromkeys(workers, "initial"))
            # The second one is lost while the others are between the division of the gradients and the update.
            for step, phase in ((2, ""), (3, "update")):
                await a.lose(workers[1], step, phase)
                workers.pop(1)
                await a.hold(workers)
                await a.resumed(await a.configure(dict.fromkeys(workers, "live"), stage="interrupted"))
            finished = await a.finished(1)
            assert finished.loss == pytest.approx(expected.loss, rel=1e-6)
            assert finished.samples_sha256 == expected.samples_sha256
            assert largest_difference(finished.parameters_path, expected.parameters_path) <= 1e-6
        # Only the last of two stages knows the tokens; and models of two stages begin with other numbers.
        # As in Megatron-LM, the first of its outputs is given back before the backward pass, and then is any number.
        given_back = (PER_TOKEN[0], f"{PER_TOKEN[1]} deallocate_pipeline_outputs=True,")
        example(tmp_path, given_back, MASKED, MEETS)
        split = await train(a, spec, ["a0", "a1"], pipeline=2)
        example(tmp_path, PER_TOKEN, MASKED, DIVIDED)
        divided = await train(a, spec, ["b0", "b1"], pipeline=2)
        assert largest_difference(split.parameters_path, divided.parameters_path) <= 1e-6


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ([PER_TOKEN], "512 times"),  # Megatron's own loss function, whose mean is committed: 8 times 64 tokens
        pytest.param(  # divided by M and the tokens twice
            [*LOOP_SCALES[1:]], "0.001953 times", marks=pytest.mark.slow
        ),
        pytest.param(
            [PER_TOKEN, MASKED, ("return total, tokens.to", "return total / tokens.clamp(min=1) / 8, tokens.to")],
            "times",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["per-token", "divided-twice", "divided-and-summed"],
)
async def test_gradients_that_are_wrong_by_a_factor_are_refused_in_the_first_step(
    changes: list[tuple[str, str]], factor: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec_file(script=str(example(tmp_path, *changes)), **FIELDS))
        await a.configure({"w0": "initial"})
        await a.until(lambda: "w0" in a.exits)
        (raised,) = a.of(Raised)
        assert (raised.error, raised.step) == ("WrongLoop", 1)
        assert raised.detail.startswith("gradients would be ")
        assert factor in raised.detail


async def test_micro_batches_that_are_collected_for_one_call_are_refused(tmp_path: Path, spec_file: SpecFile) -> None:
    """Each would count as the only one of a call: the gradients would be too small."""
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec_file(script=str(example(tmp_path, *COLLECTED)), **FIELDS))
        await a.configure({"w0": "initial"})
        await a.until(lambda: "w0" in a.exits)
        (raised,) = a.of(Raised)
        assert raised.error == "WrongLoop"
        assert raised.detail.startswith("micro-batch 0 of step 1 is not committed before the next one")


def test_the_models_own_function_is_called_once_also_where_two_models_share_a_configuration() -> None:
    config = SimpleNamespace(**USUAL, grad_scale_func=lambda loss: loss + 1.0)
    model = SimpleNamespace(config=config, module=SimpleNamespace(sharded_state_dict=dict))
    first, second = LossScale(model, 8), LossScale(model, 8)
    second.begin_call(2)
    assert config.grad_scale_func(torch.tensor(3.0)) == 1.0
    first.begin_call(4)  # the model built last could not be used, and the one before trains on
    assert config.grad_scale_func(torch.tensor(3.0)) == 2.0


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_is_asked_for_beside_the_losses_does_not_count_as_one(chunks: int) -> None:
    """Megatron's schedules ask for the scale of auxiliary losses with a number that nothing is computed from."""
    config = SimpleNamespace(**USUAL, grad_scale_func=None)
    model = [SimpleNamespace(config=config, module=SimpleNamespace(sharded_state_dict=dict)) for _ in range(chunks)]
    scale = LossScale(model if chunks > 1 else model[0], 8)
    filling = chunks - 1
    scale.begin_call(4, filling=filling)
    loss = torch.ones(1, requires_grad=True)
    factors = []
    for _ in range(4):
        assert scale(torch.ones(1)).item() == 0.5
        factors.append(scale(loss).item())
    assert factors == [0.5] * (4 - filling) + [0.0] * filling
    if filling:
        with pytest.raises(WrongLoop, match="more losses than the 4 micro-batches"):
            scale(loss)
