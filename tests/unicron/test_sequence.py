"""Sequence parallelism, norms of queries and keys, and bfloat16, with float32 sums; tests/parity has the exact mode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unicron.conftest import MODEL, SpecFile, largest_difference, train_alone
from tests.unicron.harness import Agent, agent, reference_of
from tests.unicron.test_transfer import check_result
from unicron.protocol.messages import Finished, Raised
from unicron.trainer.dropout import Dropout

pytestmark = pytest.mark.timeout(180)

SMALL_BUCKETS = {"UNICRON_BUCKET_BYTES": str(16 << 10)}
"""Several buckets on each rank."""

SEQUENCE = {
    "model": MODEL | {"qk_layernorm": True},
    "batch": {"global": 6},
    "steps": 5,
    "optimizer": {"clip": 0.1},
}
"""The model has biases, and norms of queries and keys; the norm of its gradients is above the limit."""

BFLOAT16_STEP = 2.0**-7
"""Largest relative distance of two bfloat16 numbers between which there is none."""

SPLIT = {"sequence_parallel": True}


async def begin(a: Agent, spec: Path, workers: Sequence[str], *fail_at: str, tensor: int) -> None:
    env = SMALL_BUCKETS | {"UNICRON_FAIL_AT": ",".join(fail_at)}
    await asyncio.gather(*(a.fork(worker, spec, env) for worker in workers))
    await a.configure(dict.fromkeys(workers, "initial"), tensor=tensor)


async def test_a_replaced_rank_and_a_repeated_update_change_nothing(tmp_path: Path, spec_file: SpecFile) -> None:
    """One of four ranks is lost in the reduction; later all leave an update whose gradients they have exchanged."""
    spec = spec_file(**SEQUENCE, parallel=SPLIT, exact=False)
    repeated = "*:4:update:communication:always"
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, ["w0", "w1", "w2", "w3"], "3:2:reduce:1:kill", repeated, tensor=2)
        await a.until(lambda: "w3" in a.exits)
        await a.hold(["w0", "w1", "w2"])
        await a.fork("w4", spec, SMALL_BUCKETS | {"UNICRON_FAIL_AT": repeated})
        members = {"w0": "live", "w1": "live", "w2": "live", "w4": "take"}
        generation = await a.configure(members, tensor=2)
        assert {r.step for r in await a.resumed(generation)} == {2}
        await a.until(lambda: all(a.of(Raised, worker, generation) for worker in members))
        await a.hold(list(members))
        resumed = await a.resumed(await a.configure(dict.fromkeys(members, "live"), stage="interrupted", tensor=2))
        assert {(r.step, r.computed, r.buckets_kept == r.buckets) for r in resumed} == {(4, 0, True)}
        await check_result(a, spec, await a.finished(4))


@pytest.mark.slow
async def test_a_divided_optimizer_moves_to_whole_layers_and_back(tmp_path: Path, spec_file: SpecFile) -> None:
    """With exact sums, and the norm of ``unicron.megatron.clipping``."""
    spec = spec_file(**SEQUENCE, parallel=SPLIT | {"distributed_optimizer": True})
    workers = ["w0", "w1"]
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, workers, "0:2:0:hang", "0:4:0:hang", tensor=2)
        for tensor in (1, 2):
            await a.stopped("w0")
            await a.drain(workers)
            resumed = await a.resumed(await a.configure(dict.fromkeys(workers, "live"), tensor=tensor))
            assert {r.source for r in resumed} == {"live"}
        await check_result(a, spec, await a.finished(2))


async def check_rounding(a: Agent, spec: Path, finished: Finished) -> None:
    """Compare with a failure-free run in one process, to the rounding of parameters."""
    reference = await reference_of(a, spec)
    assert finished.loss == pytest.approx(reference.loss, rel=1e-3)
    trained, expected = load_file(finished.parameters_path), load_file(reference.parameters_path)
    for name, value in expected.items():
        assert value.dtype == torch.bfloat16
        assert torch.allclose(trained[name], value, rtol=BFLOAT16_STEP, atol=1e-5), name


@pytest.mark.slow
async def test_bfloat16_heals_to_the_rounding_of_its_parameters(tmp_path: Path, spec_file: SpecFile) -> None:
    spec = spec_file(bf16=True, exact=False, parallel={"recompute": "selective"}, dropout=0.1)
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, ["w0", "w1", "w2"], "2:2:reduce:1:kill", tensor=1)
        await a.until(lambda: "w2" in a.exits)
        await a.hold(["w0", "w1"])
        await a.resumed(await a.configure(dict.fromkeys(["w0", "w1"], "live"), stage="interrupted"))
        await check_rounding(a, spec, await a.finished(2))


@pytest.mark.slow
async def test_a_divided_bfloat16_optimizer_repeats_a_step(tmp_path: Path, spec_file: SpecFile) -> None:
    """The reduction goes beside the backward pass; all ranks leave the update of a step."""
    spec = spec_file(bf16=True, exact=False, parallel={"distributed_optimizer": True, "overlap": True}, steps=4)
    workers = ["w0", "w1"]
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, workers, "*:3:update:communication", tensor=1)
        await a.until(lambda: all(a.of(Raised, worker) for worker in workers))
        await a.hold(workers)
        resumed = await a.resumed(await a.configure(dict.fromkeys(workers, "live"), stage="interrupted"))
        assert {(r.step, r.source, r.steps_recomputed) for r in resumed} == {(3, "own", 0)}
        await check_rounding(a, spec, await a.finished(2))


@pytest.mark.slow
def test_activations_that_are_computed_again_change_nothing(tmp_path: Path, spec_file: SpecFile) -> None:
    """Dropout draws the same numbers again."""
    fields = {"batch": {"global": 4}, "steps": 3, "dropout": 0.2}
    found = []
    for recompute in ("none", "selective", "full"):
        spec = spec_file(parallel={"recompute": recompute}, **fields)
        found.append(train_alone(spec, tmp_path / recompute)["parameters"])
    for other in found[1:]:
        assert largest_difference(found[0], other) == 0.0


@pytest.mark.slow
@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("divides_sequence", [False, True])
def test_dropout_differs_between_ranks_that_divide_the_sequence(
    divides_sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is the same whenever a layer of a micro-batch is computed, whatever was computed before."""
    from megatron.core import parallel_state

    # As unicron.megatron.cpu does for good, in the processes that train.
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    monkeypatch.setattr(torch.cuda, "manual_seed", torch.manual_seed)
    layer: Any = torch.nn.Identity()
    layer.layer_number, layer.layers = 1, [layer]
    model: Any = SimpleNamespace(config=SimpleNamespace(sequence_parallel=divides_sequence), module=torch.nn.Identity())
    model.module.decoder = SimpleNamespace(layers=[layer])
    dropout = Dropout(SimpleNamespace(seed=1, dropout=0.1), model)  # type: ignore[arg-type]

    def drawn(rank: int, micro_batch: int) -> tuple[float, ...]:
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: rank)
        dropout.set_micro_batch(1, micro_batch)
        layer(torch.zeros(1))
        return tuple(torch.rand(4).tolist())

    first = drawn(0, 0)
    assert drawn(0, 1) != first
    assert drawn(0, 0) == first
    assert (drawn(1, 0) != first) == divides_sequence
