"""Nodes that the detector does not hear, in ``/v1/nodes`` and ``/readyz``."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from services.api import present
from services.api.live import Live
from shared.bus.connection import Bus
from shared.bus.dropped import DroppedMessages
from shared.events.union import NodeDraining, NodeJoined
from shared.log.journal import Journal
from shared.messages.reachability import REACHABILITY, STALE_S, Reachability, Unreachable
from shared.settings.model import Settings
from shared.views.documents import NodeState, NodeView
from tests.api.kit import Server, serving
from tests.condition import until
from tests.versions.kit import heartbeat

SINCE = datetime(2025, 3, 1, 13, 5, tzinfo=UTC)


async def published(server: Server, bus: Bus, seen: Reachability) -> dict[str, Any]:
    """Have a detector publish what it sees; return the nodes by name once the gateway shows it."""
    await bus.publish(REACHABILITY, seen)
    names = set(seen.unreachable)

    async def nodes() -> dict[str, Any]:
        return {node["name"]: node for node in (await server.http.get("/v1/nodes")).json()["items"]}

    async def shown() -> bool:
        return {name for name, node in (await nodes()).items() if node["state"] == "unreachable"} == names

    await until(shown)
    return await nodes()


async def check(server: Server) -> dict[str, Any]:
    checks = (await server.http.get("/readyz")).json()["checks"]
    return next(one for one in checks if one["name"] == "nodes")


async def test_unreachable_nodes_are_shown_until_they_are_heard_again(
    settings: Settings, bus: Bus, journal: Journal
) -> None:
    async with serving(settings, bus, journal) as server:
        for name in ("n0", "n1"):
            joined = await server.append(
                NodeJoined, node=name, incarnation=name, agent_pid=1, domain="default", workers=[f"{name}/0"]
            )
        await server.projected(joined.position)
        cut = Unreachable(since=SINCE, reached_by=["@detector", "n0"])
        nodes = await published(server, bus, Reachability(unreachable={"n1": cut}))
        assert nodes["n0"]["state"] == "ready"
        assert nodes["n1"]["reason"] == (
            "no heartbeat arrives since 2025-03-01 13:05:00 UTC; its ranks are kept: "
            "its agent is reached by the detector, n0"
        )
        assert (await check(server))["ok"]
        assert (await check(server))["detail"] == "1 ready, 1 unreachable (n1)"
        for state, names in {"ready": ["n0"], "unreachable": ["n1"], "lost": []}.items():
            items = (await server.http.get("/v1/nodes", params={"state": state})).json()["items"]
            assert [node["name"] for node in items] == names
        both = {name: Unreachable(since=SINCE) for name in ("n0", "n1")}
        nodes = await published(server, bus, Reachability(unreachable=both, cut_off_since=SINCE))
        assert all(n["reason"].endswith("the control plane is cut off from all nodes") for n in nodes.values())
        found = await check(server)
        assert not found["ok"]
        assert found["detail"].startswith("0 ready, 2 unreachable (n0, n1); the control plane is cut off")
        assert {node["state"] for node in (await published(server, bus, Reachability())).values()} == {"ready"}
        assert (await check(server))["ok"]


@pytest.mark.parametrize(
    ("state", "shown", "reason"),
    [
        ("ready", "unreachable", "no heartbeat arrives since 2025-03-01 13:05:00 UTC; its ranks are kept: "),
        ("cordoned", "unreachable", "cordoned (new kernel); no heartbeat arrives since "),
        ("draining", "unreachable", "draining (new kernel); no heartbeat arrives since "),
        ("drained", "unreachable", "drained (new kernel); no heartbeat arrives since "),
        ("isolated", "isolated", "new kernel; no heartbeat arrives since 2025-03-01 13:05:00 UTC"),
        ("lost", "lost", "new kernel"),
        ("left", "left", "new kernel"),
    ],
)
async def test_a_silent_node_is_shown_as_silent_whatever_users_want_of_it(state: str, shown: str, reason: str) -> None:
    live = Live()
    seen = Reachability(unreachable={"n1": Unreachable(since=SINCE)})
    await live.hear_detector(seen)
    view = NodeView(
        name="n1",
        position=1,
        version=1,
        state=NodeState(state),
        reason="" if state == "ready" else "new kernel",
        incarnation="n1",
        agent_pid=1,
        domain="default",
        workers=["n1/0"],
        joined_at=SINCE,
    )
    node = present.node(view, live.state(), {}, SINCE)
    assert (node.state, node.recorded_state) == (shown, state)
    assert node.reason.startswith(reason)


async def test_a_silent_node_that_is_drained_is_found_and_counted_as_unreachable(
    settings: Settings, bus: Bus, journal: Journal
) -> None:
    async with serving(settings, bus, journal) as server:
        for name in ("n0", "n1"):
            await server.append(
                NodeJoined, node=name, incarnation=name, agent_pid=1, domain="default", workers=[f"{name}/0"]
            )
        drained = await server.append(NodeDraining, node="n1", by="user", timeout_s=60.0, reason="new kernel")
        await server.projected(drained.position)
        assert (await check(server))["detail"] == "1 ready, 1 closed to new work"
        nodes = await published(server, bus, Reachability(unreachable={"n1": Unreachable(since=SINCE)}))
        assert (nodes["n1"]["state"], nodes["n1"]["recorded_state"]) == ("unreachable", "draining")
        assert (await check(server))["detail"] == "1 ready, 1 unreachable (n1)"
        for state, names in {"draining": [], "unreachable": ["n1"], "ready": ["n0"]}.items():
            items = (await server.http.get("/v1/nodes", params={"state": state})).json()["items"]
            assert [node["name"] for node in items] == names


async def test_what_a_detector_said_before_it_ended_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Live()
    seen = Reachability(unreachable={"n1": Unreachable(since=SINCE)})
    await live.hear_detector(seen)
    assert live.state().reachability == seen
    late = time.monotonic() + STALE_S + 1.0
    monkeypatch.setattr(time, "monotonic", lambda: late)
    assert live.state().reachability == Reachability()


async def test_a_message_that_cannot_be_read_is_counted() -> None:
    dropped = DroppedMessages({})
    hear = REACHABILITY.receiver(Live().hear_detector, lambda _: None, dropped)
    await hear(REACHABILITY.subject, b'{"unreachable": 3}')
    assert dropped.counters == {"undecodable": 1}


def node_view(**fields: object) -> NodeView:
    ordinary = {"name": "n1", "position": 1, "version": 1, "incarnation": "n1", "agent_pid": 1, "domain": "d"}
    rest = {"workers": ["n1/0", "n1/1"], "joined_at": SINCE, "hardware": "h100"}
    return NodeView.model_validate({**ordinary, **rest, **fields})


READ: dict[str, object] = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory_bytes": 85_520_809_984,
    "driver": "570.1",
    "temperature_c": 50,
    "utilisation_percent": 97,
    "memory_used_bytes": 61_203_283_968,
}


async def test_a_node_shows_its_devices_as_long_as_it_has_an_agent() -> None:
    """The sick one and the healthy one; what heartbeats say of the first stands beside what was read of both."""
    live = Live()
    readings = [{**READ, "device": device, "uuid": f"GPU-{device}", "workers": [f"n1/{device}"]} for device in (0, 1)]
    sick = {"device": 1, "uuid": "GPU-1", "notes": ["92 C, slows down at 90 C"], "faults": {"xid-31": 2}}
    live.add(heartbeat(node="n1", workers=[], devices=[], device_readings=readings))
    live.add(heartbeat(node="n1", sequence=9, workers=[], devices=[sick], device_readings=[]))
    shown = present.node(node_view(), live.state(), {}, SINCE)
    assert shown.hardware == "h100"
    assert [device.model_dump() for device in shown.devices] == [
        {**readings[0], "notes": [], "faults": {}},
        {**readings[1], "notes": sick["notes"], "faults": sick["faults"]},
    ]
    assert {worker.worker: worker.device for worker in shown.workers} == {"n1/0": 0, "n1/1": 1}
    assert present.node(node_view(state=NodeState.LOST), live.state(), {}, SINCE).devices == []


async def test_what_an_agent_has_read_of_devices_goes_with_it() -> None:
    live = Live()
    reading = {**READ, "device": 0, "uuid": "GPU-0", "workers": ["n1/0"]}
    live.add(heartbeat(node="n1", workers=[], devices=[], device_readings=[reading]))
    live.add(heartbeat(node="n1", incarnation="another", workers=[], devices=[], device_readings=[]))
    shown = present.node(node_view(hardware="cpu"), live.state(), {}, SINCE)
    assert shown.devices == []
    assert {worker.device for worker in shown.workers} == {None}


async def test_an_older_agent_says_of_its_devices_what_it_has_to_say() -> None:
    live = Live()
    said = {"device": 3, "uuid": "GPU-3", "faults": {"xid-31": 2}}
    live.add(heartbeat(node="n1", workers=[], devices=[said], device_readings=[]))
    [device] = present.node(node_view(), live.state(), {}, SINCE).devices
    assert (device.device, device.uuid, device.faults, device.name) == (3, "GPU-3", {"xid-31": 2}, "")
