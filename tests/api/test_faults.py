"""Requests for faults: who may, what is refused, and that the log has a fault before it happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from shared.bus.connection import Bus
from shared.events.union import FaultInjected, TaskFailed
from shared.log.journal import Journal
from shared.messages.injection import FAULTS, FaultRequest, FaultResult
from shared.service.tokens import Scope
from shared.settings.model import Settings
from tests.api.kit import Server, Story, bearer, serving


@pytest.fixture
async def lab(settings: Settings, bus: Bus, journal: Journal, story: Story) -> AsyncIterator[Server]:
    """The gateway, with fault injection enabled, and a task of four ranks on n0 and n1."""
    enabled = settings.model_copy(update={"fault_injection": True})
    recorded = await journal.append([record.event for record in story.running().records])
    async with serving(enabled, bus, journal) as server:
        await server.projected(recorded[-1].position)
        yield server


class StandIn:
    """An agent that answers requests for faults, and notes what the log has by then."""

    def __init__(self, api: Server, **result: Any) -> None:
        self.api, self.result = api, FaultResult(incarnation="first", **result)
        self.asked: list[FaultRequest] = []
        self.logged: list[int] = []

    async def serve(self, data: bytes) -> bytes:
        self.asked.append(FAULTS.request.decode(data))
        self.logged.append(len(injected(self.api)))
        return self.result.model_dump_json().encode()


def injected(api: Server) -> list[FaultInjected]:
    return [record.event for record in api.journal.log.read_all() if isinstance(record.event, FaultInjected)]


async def agent(api: Server, bus: Bus, node: str = "n0", **result: Any) -> StandIn:
    made = StandIn(api, **result)
    await bus.answer(FAULTS.at(node), lambda _, data: made.serve(data))
    return made


def refused(answer: httpx.Response, status: int, code: str, field: str = "") -> None:
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (status, code), problem
    if field:
        assert problem["errors"][0]["field"] == field


async def ask(
    api: Server, name: str = "tasks/gpt", headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    return await api.http.post(f"/v1/{name}/faults", json=body, headers=headers)


async def test_a_fault_is_in_the_log_before_the_agent_lets_it_happen(lab: Server, bus: Bus) -> None:
    node = await agent(lab, bus, "n1")
    answer = await ask(lab, fault="hang", rank=2, step=50)
    assert answer.status_code == 202, answer.text
    shown = answer.json()
    (event,) = injected(lab)
    assert (event.fault, event.task, event.rank, event.step, event.node) == ("hang=stop", "gpt", 2, 50, None)
    assert (shown["id"], shown["worker"], shown["node"], shown["fault"]) == (event.event_id, "n1/0", "n1", "hang=stop")
    assert event.actor == shown["actor"] != ""
    judged, happens = node.asked
    assert (judged.judge, happens.judge, node.logged) == (True, False, [0, 1])
    assert happens == judged.model_copy(update={"judge": False})
    assert (happens.fault_id, happens.worker, happens.rank, happens.step) == (event.event_id, "n1/0", 2, 50)


async def test_a_fault_of_a_node_goes_to_its_agent(lab: Server, bus: Bus) -> None:
    node = await agent(lab, bus)
    answer = await ask(lab, "nodes/n0", fault="disconnect=2")
    assert answer.status_code == 202, answer.text
    (event,) = injected(lab)
    assert (event.fault, event.node, event.task, event.stream) == ("disconnect=2", "n0", None, "node/n0")
    assert [request.judge for request in node.asked] == [True, False]
    # The node's other requests go on from the version that its stream has now.
    assert (await lab.http.post("/v1/nodes/n0/cordon")).status_code == 200


async def test_what_cannot_be_is_refused_and_not_logged(lab: Server, bus: Bus) -> None:
    await agent(lab, bus)
    refused(await ask(lab, fault="melt", rank=0), 422, "invalid-input", "fault")
    refused(await ask(lab, fault="xid=79", rank=0), 422, "invalid-input", "fault")
    refused(await ask(lab, fault="kill", rank=4), 422, "invalid-input", "rank")
    refused(await ask(lab, fault="kill", rank=0, step=101), 422, "invalid-input", "step")
    refused(await ask(lab, fault="kill"), 422, "invalid-input")
    refused(await ask(lab, "tasks/none", fault="kill", rank=0), 404, "not-found")
    refused(await ask(lab, "nodes/none", fault="disconnect"), 404, "not-found")
    refused(await ask(lab, "nodes/n0", fault="kill"), 422, "invalid-input", "fault")
    refused(await ask(lab, fault="kill", rank=3), 503, "unavailable")  # n1 has no agent here
    record = await lab.append(TaskFailed, task="gpt", generation=1, step=1, reason="r")
    await lab.projected(record.position)
    refused(await ask(lab, fault="kill", rank=0), 409, "conflict")
    assert injected(lab) == []


async def test_what_the_agent_refuses_is_not_logged(lab: Server, bus: Bus) -> None:
    await agent(lab, bus, problem="must be above 8", field="step")
    refused(await ask(lab, fault="kill", rank=0, step=8), 422, "invalid-input", "step")
    await agent(lab, bus, "n1", problem="off here", disabled=True)
    refused(await ask(lab, fault="kill", rank=2), 403, "faults-disabled")
    assert injected(lab) == []


async def test_a_request_that_is_repeated_makes_one_fault(lab: Server, bus: Bus) -> None:
    node = await agent(lab, bus)
    headers = {"Idempotency-Key": "k"}
    first, second = [await ask(lab, headers=headers, fault="kill", rank=0) for _ in range(2)]
    assert (first.status_code, first.json()) == (second.status_code, second.json())
    refused(await ask(lab, headers=headers, fault="exception", rank=0), 409, "conflict")
    assert (len(injected(lab)), len(node.asked)) == (1, 2)


async def test_only_operators_inject_faults(lab: Server, bus: Bus, settings: Settings) -> None:
    await agent(lab, bus)
    submitter = bearer(settings, Scope.SUBMIT)
    refused(await ask(lab, headers=submitter, fault="kill", rank=0), 403, "forbidden")
    refused(await ask(lab, "nodes/n0", headers=submitter, fault="disconnect"), 403, "forbidden")
    assert injected(lab) == []


async def test_faults_are_refused_unless_they_are_enabled(api: Server) -> None:
    await api.join("n0")
    refused(await ask(api, "nodes/n0", fault="disconnect"), 403, "faults-disabled")
    refused(await ask(api, fault="kill", rank=0), 403, "faults-disabled")
