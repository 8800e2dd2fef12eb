"""The export of a task's result (``unicron.checkpoint.export``)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unicron.conftest import SpecFile
from tests.unicron.harness import agent
from tests.unicron.test_loss_scale import example

pytestmark = pytest.mark.timeout(180)

GATED = (
    "persist_layer_norm=False,",
    "persist_layer_norm=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,",
)

HIDDEN, WIDTH = 64, 256
"""Of the example."""


async def test_a_gated_model_is_exported_whole(tmp_path: Path, spec_file: SpecFile) -> None:
    """The first weight of a gated MLP is two shards of one global tensor on each rank."""
    exported = []
    spec = spec_file(script=str(example(tmp_path, GATED)), steps=3, batch={"global": 16, "micro": 2})
    async with agent(tmp_path / "run") as a:
        for workers in (["one"], ["two", "three"]):
            a.messages.clear()
            await asyncio.gather(*(a.fork(worker, spec) for worker in workers))
            await a.configure(dict.fromkeys(workers, "initial"), tensor=len(workers))
            exported.append(load_file((await a.finished(len(workers))).parameters_path))
    whole, split = exported
    assert whole["decoder.layers.0.mlp.linear_fc1.weight"].shape == (2 * WIDTH, HIDDEN)
    assert whole.keys() == split.keys()
    for name, value in whole.items():
        assert torch.allclose(value, split[name], atol=1e-5), name


async def test_a_result_can_be_read_like_any_file_of_the_process(tmp_path: Path, spec_file: SpecFile) -> None:
    """Where tasks have users of their own, the agent that serves it is another user."""
    spec = spec_file(steps=1)
    async with agent(tmp_path / "run") as a:
        await a.fork("one", spec)
        await a.configure({"one": "initial"})
        result = Path((await a.finished(1)).parameters_path)
    (other := tmp_path / "other").touch()
    assert mode_of(result) == mode_of(other)


def mode_of(path: Path) -> int:
    return path.stat().st_mode
