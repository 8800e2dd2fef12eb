"""A task that resumes on nodes that do not see one place for checkpoints is refused at its start, with the reason."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile
from tests.unicron.harness import agent
from unicron.protocol.messages import Configure

NODES = ["n0", "n1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "fault_step", "unread"), [(2, 0, False), (2, 3, True), (0, 0, True)], ids=["resumed", "fault", "unsaved"]
)
async def test_the_reason_is_the_place_and_not_the_checkpoint_that_is_missing_there(
    tmp_path: Path, spec_file: SpecFile, every: int, fault_step: int, unread: bool
) -> None:
    """``unread``: where checkpoints are not needed, or a fault comes before, the task is refused once it needs one."""
    spec = spec_file(checkpoint={"every": every})
    async with agent(tmp_path / "run") as a:
        await asyncio.gather(*(a.fork(node, spec) for node in NODES))
        port = await a.store()
        for rank, node in enumerate(NODES):
            a.send(
                node,
                Configure(
                    generation=1, stage="boundary", rank=rank, world_size=2, tensor=1, pipeline=1,
                    store_host="127.0.0.1", store_port=port,
                    members=[[at, f"{name}/0", "checkpoint"] for at, name in enumerate(NODES)],
                    checkpoint=str(tmp_path / "earlier" / "step-3"), complete=True, fault_step=fault_step,
                    directory=str(tmp_path / node / "generation-1"),
                ),
            )  # fmt: skip
        await a.until(lambda: set(NODES) <= set(a.exits))
        assert {message.error for message in a.errors()} == {"InvalidSpec"}
        assert len(a.errors()) == len(NODES)
        for message in a.errors():
            assert message.kind == "refused"
            assert "node n1 does not see the checkpoints that node n0 writes to " in message.detail
            assert ("cannot be read" in message.detail) is unread
