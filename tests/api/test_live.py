"""Requests are answered while heartbeats arrive and the log is folded."""

from __future__ import annotations

import asyncio
import inspect
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from services.api.gateway import Gateway
from services.api.live import Live
from services.api.main import ROUTERS
from shared.bus.cancellation import cancelled
from shared.bus.connection import Bus
from shared.bus.dropped import DroppedMessages
from shared.messages.signals import HEARTBEATS, DeviceReading, Heartbeat, WorkerStatus
from tests.api.kit import Story, client_of, offline_gateway
from tests.condition import until
from tests.nats_server import OpenServer


def heartbeat(sequence: int) -> Heartbeat:
    status = WorkerStatus(
        worker="n0/0",
        state="training",
        task="gpt",
        generation=3,
        rank=0,
        pid=999,
        step=95 + sequence,
        step_s=0.5,
        steps_timed=sequence,
        loss=1.25,
    )
    return Heartbeat(
        node="n0",
        incarnation="one",
        agent_pid=4,
        sequence=sequence,
        sent_at=datetime(2025, 3, 1, 13, tzinfo=UTC),
        interval_s=0.25,
        workers=[status],
    )


@pytest.fixture
def gateway(story: Story, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway over the story of a process that was lost and restarted, after one heartbeat."""
    story.running().process_exit().process_restored()
    with offline_gateway(tmp_path, story.records) as gateway:
        gateway.live.add(heartbeat(1))
        yield gateway


async def test_a_heartbeat_counts_for_the_node_that_has_sent_it_and_for_no_other(gateway: Gateway) -> None:
    """NATS vouches for the subject: a stolen credential of n9 publishes to it whatever it likes."""
    forged = heartbeat(2).model_copy(update={"sequence": 1 << 40})
    dropped = DroppedMessages({})
    hear = HEARTBEATS.receiver(gateway.live.hear, lambda _: None, dropped)
    await hear(HEARTBEATS.at("n9"), HEARTBEATS.request.encode(forged))
    assert gateway.live.state().heartbeats["n0"].sequence == 1
    assert dropped.counters == {"wrong_sender": 1}
    await hear(HEARTBEATS.at("n0"), HEARTBEATS.request.encode(heartbeat(2)))
    assert gateway.live.state().heartbeats["n0"].sequence == 2


async def test_of_many_heartbeats_the_newest_is_read_and_none_with_readings_of_devices_is_left_out(
    nats: OpenServer,
) -> None:
    live, decoded = Live(), Counter[str]()
    bus = await Bus.connect(nats.url, credential=nats.credential, name="api")
    add = live.add

    def count(heartbeat: Heartbeat) -> None:
        decoded[heartbeat.node] += 1
        add(heartbeat)

    async def listens() -> int:
        await bus.publish(HEARTBEATS, heartbeat(1).model_copy(update={"node": "n1", "workers": []}), "n1")
        return decoded["n1"]

    live.add = count  # type: ignore[method-assign]
    hearing = asyncio.create_task(live.keep_hearing(bus))
    try:
        await until(listens)
        for sequence in range(1, 101):
            readings = [DeviceReading(device=3)] if sequence == 50 else []
            sent = heartbeat(sequence).model_copy(update={"device_readings": readings})
            await bus.publish(HEARTBEATS, sent, "n0")
        await until(lambda: decoded["n0"] and live._heartbeats["n0"].sequence == 100)
        assert decoded["n0"] < 100
        (reading,) = live.state().device_readings["n0"]
        assert reading.device == 3
    finally:
        await cancelled(hearing)
        await bus.close()


@pytest.mark.parametrize("path", ["/v1/tasks/gpt", "/v1/tasks"])
async def test_a_heartbeat_in_the_midst_of_an_answer_does_no_harm(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    median = statistics.median

    def interrupted(durations: Iterable[float]) -> float:
        read = iter(durations)
        first = next(read)
        gateway.live.add(heartbeat(2))
        return median([first, *read])

    monkeypatch.setattr(statistics, "median", interrupted)
    async with client_of(gateway) as http:
        answer = await http.get(path)
    assert answer.status_code == 200
    body = answer.json()
    (task,) = body.get("items", [body])
    assert (task["step"], task["step_s"]) == (96, 0.5)


def dependencies(dependant: Dependant) -> Iterator[Any]:
    """Yield what FastAPI calls for a route."""
    yield dependant.call
    for further in dependant.dependencies:
        yield from dependencies(further)


def test_endpoints_and_their_dependencies_run_on_the_event_loop() -> None:
    """FastAPI runs plain functions in threads, beside the event loop that changes what they read."""
    routes = [route for router in ROUTERS for route in router.routes]
    called = {call for route in routes if isinstance(route, APIRoute) for call in dependencies(route.dependant)}
    assert len(called) > len(routes)
    assert [call for call in called if not inspect.iscoroutinefunction(call)] == []


@pytest.mark.parametrize("watched", [True, False])
async def test_heartbeats_are_read_as_they_come_while_somebody_looks_and_not_for_a_probe(
    watched: bool, nats: OpenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.api.live.UNWATCHED_PER_S", 1e-3)
    live = Live()
    bus = await Bus.connect(nats.url, credential=nats.credential, name="api")

    async def beat(node: str, *readings: DeviceReading) -> None:
        sent = heartbeat(1).model_copy(update={"node": node, "workers": [], "device_readings": [*readings]})
        await bus.publish(HEARTBEATS, sent, node)

    async def listens() -> bool:
        live.state(watched=watched)
        await beat("n0")
        return "n0" in live.state(watched=watched).heartbeats

    hearing = asyncio.create_task(live.keep_hearing(bus))
    try:
        await until(listens)
        await beat("n1")
        await beat("n2", DeviceReading(device=3))  # it is behind the other one, and read at once
        await until(lambda: "n2" in live.state(watched=watched).device_readings)
        if watched:
            await until(lambda: "n1" in live.state().heartbeats)
        assert ("n1" in live.state(watched=watched).heartbeats) == watched
    finally:
        await cancelled(hearing)
        await bus.close()
