"""The stack keeps its services running."""

from __future__ import annotations

import asyncio

import pytest

from cli.stack.stack import Stack
from tests.e2e.kit import Client, Record

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]


async def test_a_service_that_is_killed_as_it_starts_is_started_again(stack: Stack, client: Client) -> None:
    """Two deaths in a row, the second before the service said that it is ready."""

    def course() -> None:
        killed: list[int] = []

        def kill_a_new_one() -> bool:
            pid = stack.kill_service("planner")
            if pid is None or pid in killed:
                return False
            killed.append(pid)
            return True

        for _ in range(2):
            # This looks twenty times a second; a service needs longer to import what it uses.
            client.until("a new planner is killed", kill_a_new_one)
        client.until("all services are ready", lambda: client.http.get("/readyz").status_code == 200)

    await asyncio.to_thread(course)
    assert not stack.failed.done()


@pytest.mark.slow
async def test_a_node_that_ends_while_the_detector_starts_again_is_lost(stack: Stack, client: Client) -> None:
    """All nodes are on the detector's machine; where the ended one was, the new detector has from the log alone."""

    def incidents() -> list[Record]:
        return [one for one in client.items("/v1/incidents") if (one["kind"], one["node"]) == ("node-lost", "n3")]

    before = len(incidents())
    assert stack.kill_service("detector") is not None
    await stack.kill_node("n3")
    await asyncio.to_thread(client.until, "n3 is lost", lambda: len(incidents()) > before)
    lost = max(incidents(), key=lambda one: str(one["detected_at"]))
    assert lost["evidence"]["limit_source"] == "ended"
    assert lost["evidence"]["listened_s"] > 0.0
    assert "silence_s" not in lost["evidence"]
    await stack.start_node("n3")
    await asyncio.to_thread(
        client.until, "n3 is ready", lambda: client.http.get("/v1/nodes/n3").json()["state"] == "ready"
    )
