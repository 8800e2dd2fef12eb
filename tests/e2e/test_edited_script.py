"""A script is edited while its task trains, and a rank is lost: no process of the new version takes part."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.kit import Client, Pace, check_result, rank, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NAME = "edited"


def events(client: Client, kind: str) -> list[dict[str, Any]]:
    return [e["event"] for e in client.items("/v1/events") if e["type"] == kind and e["event"].get("task") == NAME]


def test_survivors_go_on_and_a_resumption_takes_the_new_version(client: Client, corpus: Path, tmp_path: Path) -> None:
    pace = Pace(tmp_path, 0.05)
    spec = small_task(NAME, corpus, workers={"min": 1, "max": 2}, checkpoint={"every": 0})
    paced = pace.of(spec)
    client.submit(paced)
    (recorded,) = client.until("it is recorded what it trains with", lambda: events(client, "task.identified"))
    assert recorded["identity"]["code/paced.py"].startswith("sha256 ")
    before = client.until_step(NAME, 4)
    script = Path(paced["script"])
    script.write_text(script.read_text() + "# another version\n")
    os.kill(rank(before, 1)["pid"], signal.SIGKILL)

    def attempts() -> list[dict[str, Any]]:
        return [e for e in events(client, "error.detected") if e["kind"] == "difference"]

    first, second = client.until("two newcomers have left", lambda: len(found := attempts()) > 1 and found)
    assert first["incident"] == second["incident"]
    assert "code: paced.py is sha256 " in first["evidence"]["detail"]
    assert recorded["identity"]["code/paced.py"] in first["evidence"]["detail"]
    assert second["evidence"]["rule"] == "task"
    alone = client.until_step(NAME, client.task(NAME)["step"] + 3)
    assert [r["rank"] for r in alone["ranks"]] == [0]
    assert rank(alone, 0)["pid"] == rank(before, 0)["pid"]
    assert {node["state"] for node in client.items("/v1/nodes")} == {"ready"}
    assert len(attempts()) == 2
    moved = events(client, "state.moved")
    assert {event["steps_recomputed"] for event in moved} == {0}

    client.http.post(f"/v1/tasks/{NAME}/stop").raise_for_status()
    client.until_state(NAME, "stopped")
    client.http.post(f"/v1/tasks/{NAME}/resume").raise_for_status()
    _, resumed = client.until("the new version trains", lambda: len(f := events(client, "task.identified")) > 1 and f)
    assert [change.partition(":")[0] for change in resumed["changed"]] == ["code/paced.py"]
    assert len(client.until_step(NAME, resumed["step"] + 1)["ranks"]) == 2
    pace.end()
    client.until_state(NAME, "succeeded")
    check_result(client, NAME, spec, tmp_path / "reference")
    assert len(attempts()) == 2
