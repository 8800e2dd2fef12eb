"""Monitors from outside report troubles: one has a node drained, another one has a node isolated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from cli.stack.stack import Stack
from shared.service import tokens
from shared.service.tokens import Scope
from shared.settings.model import Settings
from tests.e2e.conftest import NODES
from tests.e2e.kit import Client, Pace, Record, rank, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture
def monitor(stack: Stack, client: Client) -> Iterator[Callable[[str], httpx.Client]]:
    """Makes a monitor that may report of all nodes; afterwards an operator uses all nodes again."""
    made: list[httpx.Client] = []

    def make(name: str) -> httpx.Client:
        path = Settings(run_dir=stack.run_dir).token_file
        token = tokens.add(path, name, Scope.REPORT, datetime.now(UTC), ["n*"])
        made.append(httpx.Client(base_url=stack.url, headers={"Authorization": f"Bearer {token}"}, timeout=30.0))
        return made[-1]

    yield make
    for one in made:
        one.close()
    for number in range(NODES):
        client.http.post(f"/v1/nodes/n{number}/return", timeout=60.0).raise_for_status()


def tell(monitor: httpx.Client, node: str, severity: str) -> Record:
    body = {"key": "trouble", "severity": severity, "reason": "as a test", "evidence": {"line": "mlx5_0 is down"}}
    answer = monitor.post(f"/v1/nodes/{node}/reports", json=body)
    assert answer.status_code == 202, answer.text
    found: Record = answer.json()
    return found


def test_a_report_drains_a_node_and_another_one_isolates_one(
    client: Client, monitor: Callable[[str], httpx.Client], corpus: Path, tmp_path: Path
) -> None:
    def node(name: str) -> Record:
        return client.http.get(f"/v1/nodes/{name}").json()  # type: ignore[no-any-return]

    def until(name: str, state: str) -> Record:
        client.until(f"{name} is {state}", lambda: node(name)["state"] == state)
        return node(name)

    pace = Pace(tmp_path, 0.05)
    client.submit(pace.of(small_task("reported", corpus, workers={"min": 1, "max": 2})))
    slurm, health = monitor("slurm"), monitor("health")

    drained = rank(client.until_step("reported", 3), 1)["node"]
    tell(slurm, drained, "warning")
    assert until(drained, "drained")["reason"] == "token/slurm reports trouble: as a test"
    assert client.incidents("reported") == []
    step = client.task("reported")["step"]
    task = client.until_step("reported", step + 2)
    assert drained not in {one["node"] for one in task["ranks"]}

    # The same source has taken its one of four nodes for this hour; another source may take one.
    isolated = rank(task, 0)["node"]
    tell(slurm, isolated, "error")
    client.until("it is held back", lambda: node(isolated)["reports"][0]["held"])
    assert "has taken 1 of 4 nodes out of use within an hour" in node(isolated)["reports"][0]["held"]
    assert node(isolated)["state"] == "ready"
    tell(health, isolated, "error")
    assert "token/health reports trouble: as a test" in until(isolated, "isolated")["reason"]
    incident = client.until_restored("reported", node=isolated)
    assert (incident["severity"], incident["method"], incident["tasks"]) == ("SEV1", "report", ["reported"])
    assert incident["evidence"]["reported"] == {"line": "mlx5_0 is down"}
    step = client.task("reported")["step"]
    ranks = client.until_step("reported", step + 2)["ranks"]
    assert {drained, isolated}.isdisjoint({one["node"] for one in ranks})

    # Nothing that a monitor says brings the node back.
    assert health.post(f"/v1/nodes/{isolated}/return").status_code == 403
    tell(health, isolated, "warning")
    assert node(isolated)["state"] == "isolated"
    pace.end()
    client.until_state("reported", "succeeded")
    assert node(isolated)["state"] == "isolated"
