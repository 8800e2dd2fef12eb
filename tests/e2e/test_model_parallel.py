"""Tasks whose model is split over ranks: a lost rank's slice, and its part of a divided optimizer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from cli.stack.stack import Stack
from tests.e2e.kit import Client, Pace, check_result, pids, rank, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]


async def test_killed_rank_of_a_tensor_parallel_task(
    stack: Stack, client: Client, corpus: Path, tmp_path: Path
) -> None:
    """The whole replica finishes the step, the other half of the broken one waits for the newcomer; no file is read."""

    def course() -> None:
        unsaved = {"every": 0, "memory_every": 0}
        spec = small_task("halves", corpus, checkpoint=unsaved, workers={"min": 2, "max": 4})
        pace = Pace(tmp_path, 0.05)
        client.submit(pace.of(spec | {"parallel": {"tensor": 2, "pipeline": 1}}))
        before = client.until_step("halves", 8)
        assert before["workers"] == 4
        victim = rank(before, 3)
        os.kill(victim["pid"], signal.SIGKILL)
        incident = client.until_restored("process-exit", task="halves")
        left = pids(before).items() - {(victim["worker"], victim["pid"])}
        assert left <= pids(client.task("halves")).items()
        pace.end()
        assert (incident["worker"], incident["steps_recomputed"]) == (victim["worker"], 0)
        assert incident["state_source"] == "live"
        client.until_state("halves", "succeeded")
        assert len(client.incidents("halves")) == 1
        check_result(client, "halves", spec, tmp_path)

    await asyncio.to_thread(course)


@pytest.mark.parametrize(
    ("name", "parallel", "workers"),
    [("parts", {"distributed_optimizer": True}, 4), ("stages", {"tensor": 1, "pipeline": 2}, 2)],
)
async def test_killed_rank_that_held_a_part_alone(
    name: str, parallel: dict[str, object], workers: int, stack: Stack, client: Client, corpus: Path, tmp_path: Path
) -> None:
    """Its part of the state comes from memory, whose copies are by default not of every step; the others stay."""

    def course() -> None:
        spec = small_task(name, corpus, checkpoint={"every": 0}, workers={"min": workers, "max": workers})
        pace = Pace(tmp_path, 0.03)
        client.submit(pace.of(spec | {"parallel": parallel}))
        client.until_step(name, 12)
        before = client.until(
            "the interval between copies is known", lambda: (t := client.task(name))["memory_every"] and t
        )
        assert (before["memory_every"] >= 2, before["replicated"]) == (True, False)
        victim = rank(before, 1)
        os.kill(victim["pid"], signal.SIGKILL)
        incident = client.until_restored("process-exit", task=name)
        left = pids(before).items() - {(victim["worker"], victim["pid"])}
        assert left <= pids(client.task(name)).items()
        pace.end()
        assert incident["worker"] == victim["worker"]
        sources = set(incident["state_source"].split("+"))
        assert sources & {"memory", "peer-memory"}
        assert sources <= {"memory", "peer-memory", "live"}
        assert incident["steps_recomputed"] < before["step"]
        client.until_state(name, "succeeded")
        assert len(client.incidents(name)) == 1
        check_result(client, name, spec, tmp_path)

    await asyncio.to_thread(course)
