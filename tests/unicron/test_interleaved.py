"""Interleaved pipelines: several model chunks on each rank, with sums and accounts for each.

What is lost, moved and re-laid out with them is in the courses of ``tests/parity``.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import agent
from tests.unicron.test_loss_scale import ALL_AT_ONCE, example
from tests.unicron.test_supported import in_megatrons_wrapper
from unicron.accounting import bits_of
from unicron.errors import UnsupportedModel, WrongLoop
from unicron.gradients.precision import Precision
from unicron.join.agreement import Report
from unicron.join.dealing import deal
from unicron.megatron import supported
from unicron.megatron.schedule import LossScale, each_backward, fitting
from unicron.state.rank_state import RankState

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("megatron")]


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 60), st.integers(2, 8), st.integers(0, 5))
def test_a_schedule_is_filled_by_as_few_micro_batches_as_it_takes(count: int, pipeline: int, more: int) -> None:
    """As ``forward_backward_pipelining_with_interleaving`` checks them."""
    group = pipeline + more

    def fits(number: int) -> bool:
        return number >= group and not 0 < number % group < pipeline

    found = fitting(count, pipeline, group)
    assert (found == 0) == (count == 0)
    assert found == 0 or fits(found)
    assert not any(fits(number) for number in range(max(count, 1), found))


def test_micro_batches_that_fill_a_schedule_have_no_gradients() -> None:
    config = SimpleNamespace(calculate_per_token_loss=True, deallocate_pipeline_outputs=False, grad_scale_func=None)
    chunk = SimpleNamespace(config=config, module=SimpleNamespace(sharded_state_dict=dict))
    scale = LossScale([chunk, chunk], micro_batches=8)
    scale.begin_call(4, filling=1)
    loss = torch.tensor(2.0, requires_grad=True)
    assert [config.grad_scale_func(loss) for _ in range(4)] == [2.0, 2.0, 2.0, 0.0]
    config.calculate_per_token_loss = False
    scale = LossScale([chunk, chunk], micro_batches=8)
    scale.begin_call(4, filling=2)
    # Megatron has divided by the 4 of the call.
    assert [config.grad_scale_func(loss) for _ in range(4)] == [1.0, 1.0, 0.0, 0.0]
    scale.begin_call(4)  # the call before was broken off, or not: its losses do not count here
    assert config.grad_scale_func(loss) == 1.0


@pytest.mark.parametrize("precision", [Precision.FLOAT64, Precision.EXACT])
def test_a_chunk_adds_what_it_lacks_and_nothing_twice(precision: Precision) -> None:
    """A schedule is broken off in a backward pass; its second chunk is ahead, as it is in Megatron's schedule."""
    torch.manual_seed(0)
    chunks = [torch.nn.Linear(3, 2), torch.nn.Linear(2, 5)]
    optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
    state = RankState(chunks, optimizer, micro_batches=3, precision=precision, model_parallel=True)
    gradients = {
        (number, k): [torch.rand_like(p) for p in chunk.parameters()]
        for number, chunk in enumerate(chunks)
        for k in range(3)
    }

    def backward(number: int, k: int, share: float = 1.0) -> None:
        for parameter, gradient in zip(chunks[number].parameters(), gradients[number, k], strict=True):
            assert parameter.grad is not None
            parameter.grad.add_(gradient, alpha=share)

    def compute(number: int, k: int) -> None:
        backward(number, k)
        state.commit({k: 0.5} if number == 1 else {}, {k: [k]}, number)

    state.set_version(0, bytes(32))
    state.begin(1, [0, 1, 2], generation=1, micro_batches=3)
    compute(1, 0)
    compute(1, 1)
    compute(0, 0)
    backward(0, 1, share=0.5)
    state.recover(computing=True)
    assert state.partial is not None
    report = Report(
        coordinate=(0, 0), partial=1, generation=1, buckets=state.accumulator.buckets,
        assigned_bits=bits_of(state.partial.assigned), done_bits=tuple(map(bits_of, state.partial.done)),
    )  # fmt: skip
    dealt = deal([report], 1, 3, in_place=False)
    state.resume(1, dealt.kept[0, 0], 0, dealt.assigned[0], micro_batches=3)
    assert state.partial.remaining() == [1, 2]
    for number, k in ((1, 1), (1, 2), (1, 2), (0, 1), (0, 2), (0, 2)):
        if (number, k) not in {(number, k) for k in state.partial.computed[number]}:
            compute(number, k)
        else:
            state.commit({}, {k: [k]}, number)  # it fills the schedule
    assert (state.partial.remaining(), state.partial.finished()) == ([], {0, 1, 2})
    state.accumulator.finish()
    for number, chunk in enumerate(chunks):
        for i, parameter in enumerate(chunk.parameters()):
            expected = sum(gradients[number, k][i] for k in range(3))
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=1e-7)


def test_each_backward_tells_whose_backward_pass_has_ended() -> None:
    """In whatever order they come: Megatron's timers, which the schedules call, do not tell."""
    chunks: list[Any] = [torch.nn.Linear(2, 2) for _ in range(2)]
    for chunk in chunks:
        chunk.config = chunks[0].config if chunk is not chunks[0] else SimpleNamespace(timers=None)
    ended: list[int] = []
    with each_backward(chunks, ended.append):
        outputs = [chunk(torch.ones(1, 2)) for chunk in (*chunks, *chunks)]
        for number in (1, 3, 0, 2):
            timer = chunks[0].config.timers("backward-compute", log_level=2)
            timer.start()
            outputs[number].sum().backward()
            timer.stop()
    assert ended == [1, 1, 0, 0]
    assert chunks[0].config.timers is None
    chunks[1].forward = lambda inputs: (inputs, inputs)
    with each_backward(chunks, ended.append), pytest.raises(WrongLoop, match="returns one tensor, not tuple"):
        chunks[1](torch.ones(1, 2))


def test_each_backward_knows_a_chunk_without_layers() -> None:
    """Its output is its input, which nothing has computed on this rank."""
    chunks: list[Any] = [torch.nn.Linear(2, 2), torch.nn.Identity()]
    for chunk in chunks:
        chunk.config = SimpleNamespace(timers=None)
    ended: list[int] = []
    with each_backward(chunks, ended.append):
        outputs = [chunk(torch.ones(1, 2, requires_grad=True)) for chunk in chunks]
        for output in reversed(outputs):
            output.sum().backward()
            chunks[0].config.timers("backward-compute").stop()
    assert ended == [1, 0]


VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
ON_GLOO = VIRTUAL | {"overlap_p2p_comm": True, "batch_p2p_comm": False}


@pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
@pytest.mark.parametrize(
    ("chunks", "config", "problem"),
    [
        (1, ON_GLOO, "build returned 1 model chunks, and parallel.interleave asks for 2"),
        (3, ON_GLOO, "build returned 3 model chunks"),
        (2, {}, "virtual_pipeline_model_parallel_size: must be 2"),
        (2, VIRTUAL, r"overlap_p2p_comm: must be True \(and batch_p2p_comm False\)"),
        (2, ON_GLOO | {"overlap_p2p_comm_warmup_flush": True}, "overlap_p2p_comm_warmup_flush: must be False"),
        (2, ON_GLOO | {"fp8": "hybrid"}, "fp8: must be None"),
    ],
)
def test_chunks_that_would_train_wrongly(chunks: int, config: dict[str, Any], problem: str) -> None:
    model = [in_megatrons_wrapper(config, {}) for _ in range(chunks)]
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(UnsupportedModel, match=problem):
        supported.check(model, optimizer, 1, 2, chunks=2)
    supported.check([in_megatrons_wrapper(ON_GLOO, {}) for _ in range(2)], optimizer, 1, 2, chunks=2)


def test_models_that_are_no_chunks() -> None:
    plain = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with pytest.raises(UnsupportedModel, match="a module or a list of modules, not dict"):
        supported.check({}, optimizer, 1, 1)
    with pytest.raises(UnsupportedModel, match="each chunk must be wrapped"):
        supported.check([plain, plain], optimizer, 1, 2, chunks=2)


INITIALISE = """
def initialise(model):
    import zlib
    from unicron.megatron.model import located_shards

    for shard in located_shards(model):
        generator = torch.Generator().manual_seed(zlib.crc32(shard.name.encode()))
        shard.tensor.data.copy_(0.05 * torch.randn(shard.tensor.shape, generator=generator))
        if "layernorm.weight" in shard.name:
            shard.tensor.data.add_(1.0)
"""
"""The same parameters in every layout; the layers' names are."""

CHUNKS = [
    ("SEQUENCE_LENGTH, VOCABULARY = 2,", "SEQUENCE_LENGTH, VOCABULARY = 4,"),
    ("MICRO_BATCHES, MICRO_BATCH_SIZE = 3, 8, 2", "MICRO_BATCHES, MICRO_BATCH_SIZE = 3, 7, 2"),
    (
        "        pipeline_dtype=torch.float32,\n",
        "        pipeline_dtype=torch.float32,\n"
        "        virtual_pipeline_model_parallel_size=2 if pipeline > 1 else None,\n"
        "        overlap_p2p_comm=pipeline > 1, batch_p2p_comm=pipeline == 1,\n",
    ),
    ("    module = GPTModel(\n", "    module = lambda stage: GPTModel(\n"),
    (
        "parallel_state.is_pipeline_first_stage()",
        "parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)",
    ),
    (
        "parallel_state.is_pipeline_last_stage(),\n    )",
        "parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),\n        vp_stage=stage,\n    )",
    ),
    (
        "    model = DistributedDataParallel(config, ddp, module)\n",
        "    stages = range(2) if pipeline > 1 else [None]\n"
        "    model = [DistributedDataParallel(config, ddp, module(stage)) for stage in stages]\n",
    ),
    ("        [model],\n", "        model,\n"),
    ("        model=[model],\n", "        model=model,\n"),
    (
        "iter([batch(ids)]),",
        "[iter([batch(sample_ids(step.number, k)) for k in ids]) for _ in model],",
    ),
    ("build=build, checkpoint_every", "build=build, initialise=initialise, interleave=2, checkpoint_every"),
    ("def sample_ids(", INITIALISE + "\n\ndef sample_ids("),
    *ALL_AT_ONCE[1:],
]
"""The example of a Megatron loop with model chunks. A replica's 7 micro-batches are not what the schedule takes."""


@pytest.mark.slow
async def test_a_script_interleaves(tmp_path: Path, spec_file: SpecFile) -> None:
    """Megatron's stock loss and default settings; equal to the same script in one process, which has one chunk."""
    path = example(tmp_path, *CHUNKS)
    spec = spec_file(exact=False, script=str(path), steps=3, batch={"global": 14, "micro": 2})
    async with agent(tmp_path / "run") as a:
        finished = {}
        for workers in (["w0", "w1"], ["alone"]):
            a.messages.clear()
            await asyncio.gather(*(a.fork(worker, spec) for worker in workers))
            await a.configure(dict.fromkeys(workers, "initial"), pipeline=len(workers))
            finished[len(workers)] = await a.finished(len(workers))
    assert largest_difference(finished[2].parameters_path, finished[1].parameters_path) <= 1e-6
    assert finished[2].samples_sha256 == finished[1].samples_sha256
    assert math.isclose(finished[2].loss or 0.0, finished[1].loss or 1.0, rel_tol=1e-5)
