"""Requests for faults at an agent: what it does with them, and what it refuses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from services.agent.faults import Faults, Xid, memory_limit
from services.agent.node.slots import Node
from shared.bus.connection import Bus
from shared.errors import InvalidInput
from shared.messages.injection import FAULTS, FaultRequest, FaultResult
from tests.agent.kit import WAIT_S
from tests.condition import until
from unicron.protocol import messages

STEP = 7
"""Updates that the rank of these tests has applied."""


class Bench:
    """A node with a rank that trains, and what is sent to it."""

    def __init__(self, bus: Bus, xid: Xid = print) -> None:
        self.bus = bus
        self.node = Node.create("n0", "i", 2)
        process = self.node.start("gpt", "n0/0", 1)
        process.attached = process.configured = True
        process.rank, process.step = 1, STEP
        self.sent: list[messages.Message] = []
        self.faults = Faults(self.node, lambda _, message: self.sent.append(message), bus, enabled=True, xid=xid)

    async def ask(self, fault: str, *, fault_id: str = "f", **changes: Any) -> FaultResult:
        about: dict[str, Any] = {"task": "gpt", "worker": "n0/0", "rank": 1}
        request = FaultRequest(fault_id=fault_id, fault=fault, **about | changes)
        return await self.bus.call(FAULTS, request, "n0", timeout_s=WAIT_S)


async def bench(bus: Bus, xid: Xid = print) -> Bench:
    made = Bench(bus, xid)
    await made.faults.serve()
    return made


async def test_a_fault_of_a_rank_is_sent_to_it_once(bus: Bus) -> None:
    agent = await bench(bus)
    assert await agent.ask("slow=2", judge=True) == FaultResult(incarnation="i")
    assert agent.sent == []
    for _ in range(2):
        assert (await agent.ask("slow=2", step=STEP + 2)).problem == ""
    assert agent.sent == [messages.Inject(id="f", kind="slow", argument="2", step=STEP + 2)]
    assert (await agent.ask("hang", fault_id="g")).problem == ""
    assert agent.sent[1:] == [messages.Inject(id="g", kind="hang", argument="stop")]


@pytest.mark.parametrize(
    ("fault", "changes", "field", "problem"),
    [
        ("kill", {"rank": 0}, "rank", "no process of 'gpt'"),
        ("kill", {"worker": "n0/1"}, "rank", "no process of 'gpt'"),
        ("kill", {"task": "other"}, "rank", "no process of 'other'"),
        ("kill", {"step": STEP + 1}, "step", f"must be above {STEP + 1}"),
        ("melt", {}, "fault", "unknown kind"),
    ],
)
async def test_what_cannot_happen_is_refused(
    bus: Bus, fault: str, changes: dict[str, Any], field: str, problem: str
) -> None:
    agent = await bench(bus)
    result = await agent.ask(fault, **changes)
    assert result.field == field
    assert problem in result.problem
    assert agent.sent == []


async def test_an_agent_that_may_not_refuses_all(bus: Bus) -> None:
    agent = await bench(bus)
    agent.faults._enabled = False
    result = await agent.ask("kill")
    assert (result.disabled, agent.sent) == (True, [])


async def test_an_unreadable_request_is_answered_and_counted(bus: Bus) -> None:
    await bench(bus)
    result = FAULTS.reply.decode(await bus.request(FAULTS.at("n0"), b"{}", timeout_s=WAIT_S))
    assert "cannot be read" in result.problem
    assert bus.dropped.counters == {"undecodable": 1}


async def test_an_xid_goes_to_whoever_reads_devices(bus: Bus) -> None:
    seen: list[tuple[int, int]] = []

    def inject(code: int, device: int) -> None:
        if device:
            raise InvalidInput("the node has 1 device")
        seen.append((code, device))

    agent = await bench(bus, xid=inject)
    assert (await agent.ask("xid=79")).problem == ""
    assert (await agent.ask("xid=79:4", fault_id="g")).problem == "the node has 1 device"
    assert seen == [(79, 0)]


async def test_a_node_that_disconnects_answers_first_and_comes_back(bus: Bus) -> None:
    agent = await bench(bus)
    began_s = time.monotonic()
    assert (await agent.ask("disconnect=0.5")).problem == ""
    await until(lambda: not bus.connected)
    await until(lambda: bus.connected)
    assert time.monotonic() - began_s >= 0.5


GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.events": "oom_kill 0", "memory.max": f"{GIB}\n", "memory.oom.group": "0\n"}, GIB),
        ({"memory.events": "oom_kill 0", "memory.max": "max\n"}, "no limit"),
        ({"memory.events": "oom_kill 0", "memory.max": f"{64 * GIB}\n"}, "no limit"),
        ({"memory.events": "oom_kill 0", "memory.max": f"{GIB}\n", "memory.oom.group": "1\n"}, "together"),
        ({"memory.oom_control": "oom_kill_disable 0\n", "memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ({"memory.oom_control": "oom_kill_disable 1\n", "memory.limit_in_bytes": f"{GIB}\n"}, "none"),
        ({"memory.oom_control": "oom_kill_disable 0\n", "memory.limit_in_bytes": "9223372036854771712\n"}, "no limit"),
        ({"memory.events": "oom_kill 0"}, "cannot be read"),
    ],
)
def test_memory_is_used_up_where_there_is_a_limit(tmp_path: Path, files: dict[str, str], expected: int | str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    machine = tmp_path / "meminfo"
    machine.write_text(f"MemTotal: {32 * GIB // 1024} kB\n")
    found = memory_limit(tmp_path / next(iter(files)), machine)
    assert found == expected if isinstance(expected, int) else expected in str(found)
    assert "shows none" in str(memory_limit(None, machine))
