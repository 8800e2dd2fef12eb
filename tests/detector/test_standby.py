"""Detectors that stand by while the active one has too many signals: it keeps its lease, and no signal is lost."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.agent.cluster.signals import SignalQueue
from shared.bus.cancellation import cancelled
from shared.bus.connection import Bus
from shared.events.plans import TaskChange
from shared.events.union import TaskCheckpointed, TaskSubmitted
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.messages.signals import SIGNALS, RankCheckpointed
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC, stage
from tests.detector.kit import plan
from tests.instances import LIMIT_S, LOAD_S, Instances, busy_machine
from tests.nats_server import OpenServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MEASURED_S = 5.0
"""For how long it is measured what a detector can do."""


class Agents:
    """Agents that always have a signal to send. ``answered``: the checkpoints of which the signals were answered."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.answered: list[str] = []

    async def send(self, number: int, duration_s: float) -> int:
        """Have so many agents send for a while; return how many signals were answered in that time."""
        before, ends_at_s = len(self.answered), time.monotonic() + duration_s
        sending = [asyncio.create_task(self._send(ends_at_s)) for _ in range(number)]
        await asyncio.sleep(duration_s)  # this is the load
        in_time = len(self.answered) - before
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*sending)
        return in_time

    async def _send(self, ends_at_s: float) -> None:
        node, queue = f"n{uuid.uuid4().hex}", SignalQueue(self._bus)
        running = asyncio.create_task(queue.run())
        for step in itertools.count():
            if time.monotonic() > ends_at_s:
                break
            signal = checkpointed(node, step)
            queue.put([signal])
            await queue.answered()
            self.answered.append(signal.path)
        await cancelled(running)


def checkpointed(node: str, step: int) -> RankCheckpointed:
    """Return a signal of which each makes an event."""
    return RankCheckpointed(
        signal_id=uuid.uuid4().hex, node=node, incarnation="i", occurred_at=datetime.now(UTC), task="gpt",
        worker=f"{node}/0", generation=1, rank=0, step=step, path=f"/{node}/{step}",
    )  # fmt: skip


async def test_an_active_one_with_ten_times_the_signals_that_it_can_answer_keeps_its_lease(
    tmp_path: Path, bus_server: OpenServer, bus: Bus, log: EventLog
) -> None:
    url, credential = bus_server.url, bus_server.credential_file
    async with Journal(log, bus) as journal, Instances("detector", tmp_path, url, credential, log.url) as detectors:
        for _ in range(2):
            await detectors.start()
        submitted = TaskSubmitted(
            event_id="submitted", occurred_at=datetime.now(UTC), task="gpt", spec=parse_spec(SPEC)
        )
        target = stage(1, ["n0/0"], source="initial")
        change = TaskChange(task="gpt", reason="new", action="move", from_generation=0, prepare=["n0/0"], target=target)
        await journal.append([submitted, plan("p1", "submitted", change)])
        token, agents = log.leases()["detector"].token, Agents(bus)
        async with busy_machine():
            per_s = await agents.send(20, MEASURED_S) / MEASURED_S
            # An agent asks again when an answer has not come in time: so many ask for ten times what can be answered.
            number = round(10 * per_s * SIGNALS.timeout_s)
            in_time = await agents.send(number, LOAD_S)
        print(f"{per_s:.0f} signals a second; {number} agents: {in_time / LOAD_S:.0f} a second")
        assert log.leases()["detector"].token == token
        assert [process.returncode for process in detectors.processes] == [None, None]
    events = [record.event for record in log.read_all()]
    recorded = Counter(event.path for event in events if isinstance(event, TaskCheckpointed))
    assert recorded == Counter(agents.answered)
