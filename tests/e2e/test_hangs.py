"""Hangs of every kind are found, laid to the right rank and healed, with the failure-free result."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cli.demo.report import TOLERANCE, compare_parameters
from cli.stack.stack import Stack
from tests.e2e.kit import Client, Record, reference, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]


def first_ranks(client: Client, name: str) -> dict[str, int]:
    """Return the rank of each worker in the task's first generation, which its injected faults go by.

    Which node has which rank depends on what the stack has run before.
    """
    plans = [record["event"] for record in client.items("/v1/events") if record["type"] == "plan.decided"]
    first = next(change for plan in plans for change in plan["changes"] if change["task"] == name)
    return {member["worker"]: member["rank"] for member in first["target"]["members"]}


def trained(client: Client, corpus: Path, name: str, faults: list[str], folder: Path) -> list[Record]:
    """Train through faults to the expected result; return the incidents by step and first rank, as ``first_rank``."""
    spec = small_task(name, corpus, env={"UNICRON_FAIL_AT": ",".join(faults)})
    client.submit(spec)
    task = client.until_state(name, "succeeded")
    parameters, samples = reference(spec, folder / "reference")
    assert task["result"]["samples_sha256"] == samples
    assert compare_parameters(Path(task["result"]["parameters_path"]), parameters) <= TOLERANCE
    ranks = first_ranks(client, name)
    found = [incident | {"first_rank": ranks[incident["worker"]]} for incident in client.incidents(name)]
    incidents = sorted(found, key=lambda i: (i["step"], i["first_rank"]))
    assert [i["steps_recomputed"] for i in incidents] == [0] * len(incidents)
    return incidents


async def test_ranks_that_hang_in_a_step(stack: Stack, client: Client, corpus: Path, tmp_path: Path) -> None:
    """A sleep, a deadlock, one rank missing in a collective, native code that spins: restarted, nothing recomputed."""
    faults = ["1:6:1:sleep", "2:14:1:deadlock", "3:22:reduce:sleep", "0:30:1:spin"]
    incidents = await asyncio.to_thread(trained, client, corpus, "hung", faults, tmp_path)
    found = [(i["kind"], i["severity"], i["step"] + 1, i["first_rank"]) for i in incidents]
    assert found == [
        ("hang", "SEV2", 6, 1),
        ("hang", "SEV2", 14, 2),
        ("hang", "SEV2", 22, 3),
        ("hang", "SEV2", 30, 0),
    ]


async def test_a_survivor_that_hangs_when_it_is_held(
    stack: Stack, client: Client, corpus: Path, tmp_path: Path
) -> None:
    """It never leaves the step that another rank's death broke, and is named long before its command's time is up."""
    faults = ["1:8:1:kill", "2:8:1:sleep"]
    incidents = await asyncio.to_thread(trained, client, corpus, "held", faults, tmp_path)
    assert [(i["kind"], i["severity"], i["first_rank"]) for i in incidents] == [
        ("process-exit", "SEV2", 1),
        ("hang", "SEV2", 2),
    ]
