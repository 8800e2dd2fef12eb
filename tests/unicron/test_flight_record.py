"""What a rank says of its collectives, from real processes of which one hangs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.detector.progress.standstill import missing
from shared.messages.stacks import GroupRecord, Operation
from tests.unicron.conftest import SpecFile
from tests.unicron.harness import Agent, agent
from unicron.protocol.messages import AskGroups, Groups

pytestmark = pytest.mark.timeout(180)

SLEEP = """
import os, pathlib, time
import unicron.train
from unicron.training.step import Step

reduce = Step.reduce

def late(step):
    if step.number == 2 and os.environ["UNICRON_WORKER"] == "w1":
        while True:
            time.sleep(1.0)
    reduce(step)

Step.reduce = late
unicron.train.train(pathlib.Path(os.environ["UNICRON_SPEC"]))
"""


async def reports(a: Agent, number: int) -> dict[int, list[GroupRecord]]:
    """Ask all ranks; return rank -> what it says."""
    a.send_all(a.members, AskGroups(request=number))

    def answers() -> list[Groups]:
        return [m for m in a.of(Groups) if m.request == number]

    await a.until(lambda: len(answers()) == len(a.members))
    found = {}
    for rank, worker in enumerate(a.members):
        (answer,) = (m for m in a.of(Groups, worker) if m.request == number)
        found[rank] = [
            GroupRecord(
                group=name, ranks=ranks, entered=entered, waits=[Operation(sequence=s, name=n) for s, n in waits]
            )
            for name, ranks, entered, waits in answer.groups
        ]
    return found


async def test_the_rank_that_others_wait_for_is_missing_from_their_collective(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    script = tmp_path / "sleep.py"
    script.write_text(SLEEP)
    spec = spec_file(script=str(script), exact=False)
    async with agent(tmp_path / "run") as a:
        workers = ("w0", "w1", "w2")
        await asyncio.gather(*(a.fork(worker, spec) for worker in workers))
        await a.configure(dict.fromkeys(workers, "initial"))
        await a.in_step(["w0", "w2"], 2, "reduce")
        async with asyncio.timeout(60):
            for number in range(1, 600):
                found = missing(await reports(a, number))
                first = {worker: a.of(Groups, worker)[-1].stacks.split("\n\n")[0] for worker in workers}
                if found and found[0]["entered"] == [0, 2] and "sleep.py" in first["w1"].splitlines()[1]:
                    break
        assert found[0]["missing"] == [1]
        assert found[0]["unknown"] == []
        assert found[0]["collective"].startswith("gloo:")
        assert all(stack.startswith("Current thread") for stack in first.values())
        assert all("in late\n" in stack for stack in first.values())
