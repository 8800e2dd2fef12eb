"""The map of all nodes says what the list says, and is made anew once a second at most."""

from __future__ import annotations

from typing import Any

from shared.bus.connection import Bus
from shared.events.union import NodeCordoned, NodeLeft, WorkerSlowed
from shared.log.journal import Journal
from shared.messages.signals import HEARTBEATS, WorkerStatus
from shared.settings.model import Settings
from tests.api.kit import Story, serving
from tests.condition import until
from tests.versions.kit import heartbeat


def listed(node: dict[str, Any]) -> dict[str, Any]:
    """Return of an item of the list what the map says."""
    workers = [(worker["task"], worker["state"]) for worker in node["workers"]]
    return {"state": node["state"], "domain": node["domain"], "reason": node["reason"], "workers": workers}


def read(found: dict[str, Any]) -> dict[str, Any]:
    """Return the nodes of a map by their names."""
    nodes = {}
    for name, state, domain, runs in zip(
        found["names"], found["states"], found["domains"], found["workers"], strict=True
    ):
        each = [runs[start : start + 3] for start in range(0, len(runs), 3)]
        workers = [
            (None if task < 0 else found["task_names"][task], found["use_names"][use])
            for task, use, number in each
            for _ in range(number)
        ]
        about = {"state": found["state_names"][state], "domain": found["domain_names"][domain]}
        nodes[name] = {**about, "reason": found["reasons"].get(name, ""), "workers": workers}
    return nodes


async def test_the_map_says_what_the_list_says(settings: Settings, bus: Bus, journal: Journal) -> None:
    story = Story(settings.run_dir / "log.db")
    story.running()
    for name in ("n2", "n3"):
        story.node(name, 3)
    story.add(NodeCordoned, node="n2", actor="uid/0", reason="a fan")
    left = story.node("n4")
    story.add(NodeLeft, node="n4", incarnation=left.event.incarnation, reason="asked to")  # type: ignore[union-attr]
    story.add(WorkerSlowed, task="gpt", generation=1, step=9, node="n0", worker="n0/1", rank=1, slowdown=2.5)
    story.log.close()
    async with serving(settings, bus, journal) as server:
        status = WorkerStatus(worker="n1/0", state="training", task="gpt", rank=2, generation=1, step=12)
        await bus.publish(HEARTBEATS, heartbeat(node="n1", workers=[status]), "n1")

        async def heard() -> bool:
            return bool((await server.http.get("/v1/nodes/n1")).json()["last_heartbeat_at"])

        await until(heard)
        nodes = {node["name"]: listed(node) for node in (await server.http.get("/v1/nodes")).json()["items"]}
        assert nodes.pop("n4")["state"] == "left"
        found = (await server.http.get("/v1/node-map")).json()
        assert read(found) == nodes
        assert ("gpt", "training") in nodes["n1"]["workers"]
        assert found["slow"] == {"n0/1": 2.5}
        assert found["workers"][2] == [-1, found["use_names"].index("unknown"), 3]  # one run of three workers
