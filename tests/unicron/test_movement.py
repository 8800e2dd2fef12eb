"""State moves from any layout to any other through memory; nothing is read from a file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent
from unicron.protocol import Checkpointed, Finished

TOLERANCE = 1e-5
pytestmark = pytest.mark.timeout(180)

Layout = tuple[int, int, int]
"""(processes, tensor, pipeline)"""


def workers(layout: Layout) -> list[str]:
    return [f"w{i}" for i in range(layout[0])]


async def begin(a: Agent, spec: Path, layout: Layout, fail_at: str = "") -> None:
    """Fork the workers of a layout and train a first step."""
    env = {"UNICRON_FAIL_AT": fail_at} if fail_at else {}
    await asyncio.gather(*(a.fork(worker, spec, env) for worker in workers(layout)))
    await a.configure(dict.fromkeys(workers(layout), "initial"), tensor=layout[1], pipeline=layout[2])


async def relayout(a: Agent, spec: Path, old: Sequence[str], layout: Layout) -> None:
    """Drain the old members at a boundary and bring a new layout up, with new processes where it is larger."""
    await a.drain(list(old))
    added = [worker for worker in workers(layout) if worker not in old]
    await asyncio.gather(*(a.fork(worker, spec) for worker in added))
    members = {worker: "live" if worker in old else "take" for worker in workers(layout)}
    for worker in set(old) - members.keys():
        members[worker] = "live"
    await a.resumed(await a.configure(members, tensor=layout[1], pipeline=layout[2]))


async def check_result(a: Agent, spec: Path, finished: Finished) -> None:
    """Compare with a failure-free run of the same specification in one process."""
    assert not a.of(Checkpointed)
    assert not list(a.folder.rglob("checkpoints"))
    a.messages.clear()
    await a.fork("reference", spec)
    await a.configure({"reference": "initial"})
    reference = await a.finished(1)
    assert finished.samples_sha256 == reference.samples_sha256
    assert largest_difference(finished.parameters_path, reference.parameters_path) <= TOLERANCE


@pytest.mark.parametrize(
    ("before", "after", "sharded"),
    [
        ((2, 1, 1), (2, 2, 1), False),
        ((2, 2, 1), (2, 1, 1), True),
        ((2, 1, 2), (4, 1, 2), True),
        ((4, 2, 1), (3, 1, 1), False),
    ],
)
async def test_a_healthy_task_changes_its_layout(
    before: Layout, after: Layout, sharded: bool, tmp_path: Path, spec_file: SpecFile
) -> None:
    spec = spec_file(steps=10, parallel={"distributed_optimizer": sharded})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, before)
        await a.resumed(1)
        await relayout(a, spec, workers(before)[: after[0]], after)
        finished = await a.finished(after[0])
        await check_result(a, spec, finished)
