"""``unicron inject`` from end to end: each fault of a rank happens where it was asked for, and heals."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from cli.stack.stack import Stack
from tests.e2e.kit import Client, Record, at, small_task

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
]

FAULTS = {"kill": "process-exit", "exception": "exception", "nan": "non-finite", "hang": "hang"}
"""Fault -> the kind of incident that it is."""


def announced(run_dir: Path, task: str, fault_id: str) -> tuple[int, float] | None:
    """Return the step and the time at which a rank says that it lets a fault happen."""
    for path in (run_dir / "tasks" / task / "output").glob("*.log"):
        line = re.search(rf"injected fault {fault_id}: .* at step (\d+); unix time ([\d.]+)", path.read_text())
        if line:
            return int(line[1]), float(line[2])
    return None


def inject(client: Client, task: str, **body: Any) -> Record:
    answer = client.http.post(f"/v1/tasks/{task}/faults", json=body)
    assert answer.status_code == 202, answer.text
    record: Record = answer.json()
    return record


async def test_every_fault_happens_and_heals(stack: Stack, client: Client, corpus: Path) -> None:
    name = "injected"

    def happened(fault: Record) -> tuple[int, float]:
        found: tuple[int, float] = client.until(
            f"{fault['fault']} happens", lambda: announced(stack.run_dir, name, fault["id"])
        )
        return found

    def course() -> None:
        client.submit(small_task(name, corpus, steps=1_000_000, workers={"min": 2, "max": 2}, max_restarts=20))
        client.until_step(name, 5)
        for text, kind in FAULTS.items():
            fault = inject(client, name, fault=text, rank=1)
            step, at_s = happened(fault)
            incident = client.until_restored(kind, task=name)
            assert (incident["rank"], incident["node"]) == (1, fault["node"])
            assert incident["step"] == step - 1, "before the step's update"
            assert at(incident, "detected_at") >= at_s
            client.until_step(name, step + 3)
        step = client.task(name)["step"]
        assert happened(inject(client, name, fault="slow=3", rank=0))[0] > step
        refused = client.http.post(f"/v1/tasks/{name}/faults", json={"fault": "kill", "rank": 0, "step": step})
        assert refused.json()["errors"][0]["field"] == "step"
        order = [
            event["type"]
            for event in client.items("/v1/events")
            if event["type"] in ("fault.injected", "error.detected") and event["event"].get("task") == name
        ]
        assert order == ["fault.injected", "error.detected"] * len(FAULTS) + ["fault.injected"]
        assert client.http.post(f"/v1/tasks/{name}/stop", json={"lose_steps": True}).status_code == 202
        client.until_state(name, "stopped")

    await asyncio.to_thread(course)
