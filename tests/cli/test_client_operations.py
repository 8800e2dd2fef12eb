"""What those who operate a cluster do with the Python client, against a real gateway."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import pytest

from shared.bus.connection import Bus
from shared.errors import Conflict, InvalidInput, NotFound
from shared.events.union import TaskStopped, TaskStopRequested
from shared.interface.models import Incident, Node, PlanDetail, PlanSummary, Task
from shared.messages.self_test import SELF_TEST, SelfTestResult
from tests.api.kit import START, Server
from tests.cli.test_client import ask
from unicron_client import Client
from unicron_client.connection import Connection
from unicron_client.output import OutputLine


async def test_a_task_is_changed_killed_deleted_and_resumed(api: Server) -> None:
    await ask(api, lambda client: client.submit(api.spec(workers={"min": 1, "max": 4})))
    changed = await ask(api, lambda client: client.change("gpt", weight=2.5, max_workers="any"))
    assert (type(changed), changed.weight, changed.spec.workers.min, changed.spec.workers.max) == (Task, 2.5, 1, None)
    changed = await ask(api, lambda client: client.change("gpt", min_workers=2, max_workers=3))
    assert (changed.weight, changed.spec.workers.min, changed.spec.workers.max) == (2.5, 2, 3)
    with pytest.raises(InvalidInput, match="weight"):
        await ask(api, lambda client: client.change("gpt", weight=-1.0))
    with pytest.raises(Conflict, match="stop it first"):
        await ask(api, lambda client: client.delete_task("gpt"))
    await ask(api, lambda client: client.kill("gpt"))
    asked = api.journal.log.read()[-1].event
    assert isinstance(asked, TaskStopRequested)
    assert asked.at_once
    recorded = await api.append(TaskStopped, task="gpt", generation=1, step=40, path="/c40")
    await api.projected(recorded.position)
    for _ in range(2):
        assert (await ask(api, lambda client: client.delete_task("gpt"))).deleted_at is not None
    assert (await ask(api, lambda client: client.resume("gpt"))).attempt == 2
    attempts = await ask(api, lambda client: [*client.attempts("gpt")])
    assert [(one.number, one.last_step, one.state.value) for one in attempts] == [
        (1, 40, "stopped"),
        (2, 40, "pending"),
    ]


async def test_incidents_are_picked_acknowledged_and_noted(healed: Server) -> None:
    assert isinstance(await ask(healed, lambda client: client.acknowledge("i1")), Incident)
    noted = await ask(healed, lambda client: client.note("i1", "the switch of rack 4"))
    assert [note.text for note in noted.notes] == ["the switch of rack 4"]
    assert noted.acknowledged is not None
    for wanted, ids in (
        ({"state": "closed"}, ["i1"]),
        ({"state": "open"}, []),
        ({"since": START}, ["i1"]),
        ({"since": START.replace(tzinfo=None) + timedelta(hours=1)}, []),
        ({"until": START}, []),
    ):
        found = await ask(healed, lambda client, wanted=wanted: [*client.incidents(**wanted)])  # type: ignore[misc]
        assert [one.id for one in found] == ids
    assert (await ask(healed, lambda client: client.postmortem("i1"))).startswith("# ")
    assert "<html" in await ask(healed, lambda client: client.postmortem("i1", "html"))
    assert json.loads(await ask(healed, lambda client: client.postmortem("i1", "json")))["headline"]
    with pytest.raises(NotFound):
        await ask(healed, lambda client: client.note("i9", "x"))


async def test_plans(healed: Server) -> None:
    plans = await ask(healed, lambda client: [*client.plans(newest_first=True)])
    assert [(type(plan), plan.id) for plan in plans] == [(PlanSummary, "p1"), (PlanSummary, "start")]
    assert await ask(healed, lambda client: [*client.plans(task="other")]) == []
    plan = await ask(healed, lambda client: client.plan("p1"))
    assert (type(plan), plan.incident) == (PlanDetail, "i1")


async def test_a_node_is_cordoned_drained_and_returned(healed: Server, bus: Bus) -> None:
    nodes = await ask(healed, lambda client: [*client.nodes()])
    assert [(type(node), node.name) for node in nodes] == [(Node, "n0"), (Node, "n1")]
    assert (await ask(healed, lambda client: client.cordon("n1", reason="memory"))).reason == "memory"
    assert [node.name for node in await ask(healed, lambda client: [*client.nodes(["cordoned"])])] == ["n1"]
    assert (await ask(healed, lambda client: client.drain("n1", timeout_s=5))).recorded_state == "draining"

    async def test(_: bytes) -> bytes:
        return SelfTestResult(incarnation=nodes[1].incarnation).model_dump_json().encode()

    await bus.answer(SELF_TEST.at("n1"), lambda _, data: test(data))
    assert (await ask(healed, lambda client: client.return_node("n1"))).state == "ready"
    assert (await ask(healed, lambda client: client.node("n1"))).state == "ready"
    with pytest.raises(NotFound):
        await ask(healed, lambda client: client.node("n9"))


async def test_a_part_of_the_events_and_of_the_output(healed: Server) -> None:
    everything = await ask(healed, lambda client: [*client.events()])
    moved = [record for record in everything if record.type == "state.moved"]
    assert await ask(healed, lambda client: [*client.events(last=3)]) == everything[-3:]
    assert await ask(healed, lambda client: [*client.events(types=["state.moved"])]) == moved
    assert await ask(healed, lambda client: [*client.events(types=["state.moved"], last=2)]) == moved[-2:]
    assert await ask(healed, lambda client: [*client.events(since=START + timedelta(hours=1))]) == []
    output = healed.data.parent / "tasks" / "gpt" / "output"
    output.mkdir(parents=True)
    (output / "1-n0-0.log").write_text("loss 3\nloss 2\ndone\n")

    def lines(client: Client, **wanted: object) -> list[str]:
        found = client.logs("gpt", rank=0, **wanted)  # type: ignore[arg-type]
        return [line.line for line in found if isinstance(line, OutputLine)]

    for wanted, shown in (
        ({"tail": 1}, ["done"]),
        ({"grep": "^loss"}, ["loss 3", "loss 2"]),
        ({"grep": "^loss", "tail": 1}, ["loss 2"]),
        ({"since": START.replace(year=2100)}, []),
    ):
        assert await ask(healed, lambda client, wanted=wanted: lines(client, **wanted)) == shown  # type: ignore[misc]

    def followed(client: Client) -> str:
        found = client.logs("gpt", rank=0, follow=True, tail=1)
        line = next(found)
        found.close()  # type: ignore[attr-defined]
        assert isinstance(line, OutputLine)
        return line.line

    assert await asyncio.wait_for(ask(healed, followed), 30) == "done"


def test_no_method_is_a_bare_verb_that_changes_what_is_there() -> None:
    """``client.delete("gpt")`` would send a request to a path that is none."""
    assert not {"delete", "patch", "put"} & {*dir(Client), *dir(Connection)}
