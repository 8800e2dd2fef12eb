"""Every layout trains on the CPU, and to the same losses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unicron.conftest import TWO_LAYERS, SpecFile, largest_difference, train_alone
from tests.unicron.harness import Agent, agent
from unicron.protocol.messages import Checkpointed, Finished, Progress

LAYOUTS = [(2, 1, 2), (3, 1, 1), (4, 2, 1)]
"""(processes, tensor, pipeline)"""


async def losses(
    a: Agent, spec: Path, layout: Sequence[int], checkpoint: str = ""
) -> tuple[dict[int, float], Finished]:
    """Train the task to its end; return the loss of each step, and the end."""
    size, tensor, pipeline = layout
    workers = [f"w{i}" for i in range(size)]
    await asyncio.gather(*(a.fork(worker, spec) for worker in workers))
    members = dict.fromkeys(workers, "checkpoint" if checkpoint else "initial")
    generation = await a.configure(members, tensor=tensor, pipeline=pipeline, checkpoint=checkpoint)
    finished = await a.finished(size)
    ended = [m for m in a.of(Progress, "w0", generation) if m.phase == "ended"]
    a.messages.clear()
    return {m.step: m.loss for m in ended}, finished


@pytest.fixture(scope="module")
def layout_spec() -> dict[str, object]:
    return {"model": TWO_LAYERS, "steps": 5, "batch": {"global": 8, "micro": 2}}


@pytest.mark.slow
async def test_layouts_agree(tmp_path: Path, spec_file: SpecFile, layout_spec: dict[str, object]) -> None:
    spec = spec_file(**layout_spec)
    async with agent(tmp_path / "run") as a:
        expected, reference = await losses(a, spec, (1, 1, 1))
        assert sorted(expected) == [1, 2, 3, 4, 5]
        assert expected[5] < expected[1]
        for layout in LAYOUTS:
            found, finished = await losses(a, spec, layout)
            assert found == pytest.approx(expected, abs=1e-5), layout
            assert finished.samples_sha256 == reference.samples_sha256
            if layout[1:] == (1, 1):
                assert largest_difference(finished.parameters_path, reference.parameters_path) <= 1e-5


@pytest.mark.slow
async def test_a_checkpoint_is_read_in_another_layout(
    tmp_path: Path, spec_file: SpecFile, layout_spec: dict[str, object]
) -> None:
    spec = spec_file(**layout_spec, checkpoint={"every": 3})
    async with agent(tmp_path / "run") as a:
        workers = ["w0", "w1"]
        await asyncio.gather(*(a.fork(worker, spec) for worker in workers))
        await a.configure(dict.fromkeys(workers, "initial"), tensor=2)
        await a.finished(2)
        (saved,) = a.of(Checkpointed)
        expected = {m.step: m.loss for m in a.of(Progress, "w0") if m.phase == "ended"}
        a.messages.clear()
        found, _ = await losses(a, spec, (2, 1, 2), checkpoint=saved.path)
        assert found == pytest.approx({step: expected[step] for step in (4, 5)}, abs=1e-5)


@pytest.mark.slow
def test_the_size_of_a_micro_batch_does_not_change_the_update(tmp_path: Path, spec_file: SpecFile) -> None:
    one = train_alone(spec_file(batch={"global": 8, "micro": 1}), tmp_path / "one")
    eight = train_alone(spec_file(batch={"global": 8, "micro": 8}), tmp_path / "eight")
    assert one["samples_sha256"] == eight["samples_sha256"]
    # Not to rounding: Adam turns the rounding of near-zero gradients into steps.
    assert one["loss"] == pytest.approx(eight["loss"], abs=1e-4)
