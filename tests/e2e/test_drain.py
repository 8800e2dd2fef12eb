"""A node is drained whose task cannot do without it: the task saves its state and waits for the node."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import NODES
from tests.e2e.kit import Client, Pace, check_result, rank, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def test_a_task_that_fits_nowhere_else_saves_and_goes_on_from_there(
    client: Client, corpus: Path, tmp_path: Path
) -> None:
    incidents = len(client.items("/v1/incidents"))
    pace = Pace(tmp_path, 0.05)
    spec = small_task("whole", corpus, workers={"min": NODES, "max": NODES}, checkpoint={"every": 40})
    client.submit(pace.of(spec))
    node = rank(client.until_step("whole", 3), 1)["node"]
    client.http.post(f"/v1/nodes/{node}/drain").raise_for_status()
    client.until("the node is drained", lambda: client.http.get(f"/v1/nodes/{node}").json()["state"] == "drained")
    waiting = client.until_state("whole", "queued")
    assert waiting["ranks"] == []
    assert waiting["checkpoint"].endswith(f"step-{waiting['step']}")
    assert waiting["step"] >= 3
    client.http.post(f"/v1/nodes/{node}/return").raise_for_status()
    pace.end()
    client.until_state("whole", "succeeded")
    moved = [
        e["event"] for e in client.items("/v1/events") if e["type"] == "state.moved" and e["event"]["task"] == "whole"
    ]
    assert {event["steps_recomputed"] for event in moved} == {0}
    check_result(client, "whole", spec, tmp_path / "reference")
    assert len(client.items("/v1/incidents")) == incidents
