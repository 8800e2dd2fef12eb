"""What tests of the agent share with those of the detector: a specification, and the other ends of an agent's bus."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.agent.machine.address import NodeAddress
from services.agent.machine.hardware import NodeHardware
from services.agent.succession.inheritance import Inheritance
from services.agent.supervisor import Supervisor
from shared.bus.connection import Bus
from shared.events.plans import Layout, Member, Stage
from shared.messages.commands import COMMANDS, Reply
from shared.messages.signals import SIGNALS, Heartbeat
from shared.settings.model import Settings
from tests.condition import until

STAND_IN = (sys.executable, "-m", "tests.agent.stand_in")
"""The command line of a fork server whose ranks train nothing."""


@contextlib.asynccontextmanager
async def supervision(settings: Settings, command: Sequence[str] = STAND_IN) -> AsyncIterator[Inheritance]:
    """A supervisor that runs fork servers, and leaves agents to the test."""
    supervisor = Supervisor(settings, fork_server=command)
    supervisor._worked = True
    asyncio.get_running_loop().add_reader(supervisor._reports, supervisor._take_report)
    keeping = asyncio.create_task(supervisor._keep_fork_server())
    try:
        yield supervisor._inherited
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await supervisor._end_children()
        asyncio.get_running_loop().remove_reader(supervisor._reports)
        supervisor._close()


HERE = NodeAddress("127.0.0.1", "lo", "127.0.0.1", "127.0.0.1", "a network stack")
"""The address of an agent in the test's own process."""

WORKERS = NodeHardware("cpu", ("n0/0", "n0/1"))
"""What the workers of an agent in the test's own process are."""

WAIT_S = 40.0
"""How long tests wait for what must come: far longer than it takes, also on a busy machine."""

SPEC = {
    "name": "gpt",
    "model": {"layers": 2, "hidden": 64, "heads": 4, "sequence_length": 32},
    "batch": {"global": 12},
    "steps": 100,
    "data": "corpus.txt",
}


def stage(generation: int, workers: list[str], kind: Any = "boundary", source: Any = "live") -> Stage:
    members = [Member(rank=r, worker=w, node=w.rpartition("/")[0], source=source) for r, w in enumerate(workers)]
    layout = Layout(tensor=1, pipeline=1, data=len(workers), micro_batch=1)
    return Stage(kind=kind, generation=generation, layout=layout, members=members)


@dataclass
class Ear:
    """Receives what agents send; answers signals as a detector would."""

    bus: Bus
    signals: list[Any] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    answering: bool = True

    async def signal(self, data: bytes) -> bytes:
        self.signals.append(SIGNALS.request.decode(data))
        if not self.answering:
            await asyncio.Event().wait()
        return b"+"

    async def heartbeat(self, _: str, data: bytes) -> None:
        self.heartbeats.append(Heartbeat.model_validate_json(data))

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait for a condition on what has been received, a heartbeat at least: an agent that runs sends them."""
        await until(lambda: bool(self.heartbeats) and predicate(), seen=lambda: (self.signals, self.heartbeats[-1:]))

    def kinds(self) -> list[str]:
        return [signal.kind for signal in self.signals]

    def workers(self) -> dict[str, str]:
        return {w.worker: w.state for w in self.heartbeats[-1].workers} if self.heartbeats else {}


class Driver:
    """Sends an agent commands, as the transition service does."""

    def __init__(self, bus: Bus, node: str = "n0") -> None:
        self.bus, self.node = bus, node
        self.workers = [f"{node}/0", f"{node}/1"]
        self._ids = itertools.count(1)

    async def ask(self, kind: str, generation: int, **rest: Any) -> Reply:
        command = {"kind": kind, "command_id": f"c{next(self._ids)}", "plan": f"p{generation}", "task": "gpt"}
        return await self.send({**command, "generation": generation, **rest})

    async def send(self, command: dict[str, Any]) -> Reply:
        data = json.dumps(command).encode()
        return Reply.model_validate_json(await self.bus.request(COMMANDS.at(self.node), data, timeout_s=WAIT_S))

    async def prepare(self, generation: int = 1, workers: Any = None, *, behaviour: str = "train") -> Reply:
        spec = {**SPEC, "env": {"BEHAVIOUR": behaviour}}
        return await self.ask("prepare", generation, workers=workers or self.workers, spec=spec)

    async def configure(self, generation: int = 1, workers: list[str] | None = None) -> Reply:
        joined: Stage = stage(generation, workers or self.workers)
        store = {"store_host": "127.0.0.1", "store_port": 1}
        return await self.ask("configure", generation, stage=joined.model_dump(mode="json"), **store)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def train(driver: Driver, behaviour: str = "train") -> dict[str, int]:
    """Bring both workers into generation 1; return their pids."""
    prepared = await driver.prepare(behaviour=behaviour)
    assert prepared.ok, prepared
    configured = await driver.configure()
    assert configured.ok, configured
    return {worker: result.pid or 0 for worker, result in configured.workers.items()}
