"""A user's own loop on a backend that behaves as NCCL does (``tests.unicron.contract``)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.contract_course import CONTRACT
from tests.unicron.harness import agent
from tests.unicron.test_scripts import script, train
from unicron.protocol.messages import Raised

pytestmark = pytest.mark.timeout(150)

STEP = 3
LEAVES = f"""if step.number == {STEP} and first and run.generation.rank == 0:
            first = False
            torch.distributed.all_reduce(torch.ones(1), async_op=True)
            raise torch.distributed.DistBackendError("remote process exited")"""
"""The other rank does not enter this collective. What follows on the device waits for it until it is aborted."""


@pytest.mark.parametrize("mode", ["sockets", pytest.param("silent", marks=pytest.mark.slow)])
async def test_a_survivor_leaves_with_an_error_before_it_is_held(
    mode: str, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """Nobody has aborted what it has under way; nothing may wait for the device before that is done."""
    copies = {"checkpoint": {"every": 0, "memory_every": 1}}
    spec = spec_file(script=script(tmp_path, begin=LEAVES), **copies)
    async with agent(tmp_path / "run") as a:
        nodes = {
            worker: CONTRACT
            | {
                "UNICRON_TEST_CONTRACT": mode,
                "UNICRON_NODE": worker,
                "UNICRON_DOMAIN": worker,
                "UNICRON_MEMORY": str(shared_memory / worker),
            }
            for worker in ("w0", "w1")
        }
        fault = {"UNICRON_FAIL_AT": f"1:{STEP}:0:sleep"}
        await asyncio.gather(*(a.fork(worker, spec, own | fault) for worker, own in nodes.items()))
        await a.configure(dict.fromkeys(nodes, "initial"))
        await a.until(lambda: a.of(Raised, "w0"))
        a.kill("w1")
        await a.until(lambda: "w1" in a.exits)
        await a.hold(["w0"])
        (resumed,) = await a.resumed(await a.configure({"w0": "live"}, stage="interrupted"))
        assert (resumed.source, resumed.steps_recomputed) == ("own", 0)
        finished = await a.finished(1)
        usual = await train(a, spec_file(script=script(tmp_path)), ("w2",))
        assert largest_difference(finished.parameters_path, usual.parameters_path) <= 1e-6
