"""Transition services that stand by while the active one has too much work: it keeps its lease, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shared.bus.connection import Bus
from shared.events.union import Event, PlanDecided, StateMoved
from shared.log.journal import Journal
from shared.log.log import EventLog
from tests.instances import Instances, keeps_its_lease
from tests.nats_server import OpenServer
from tests.transition.drive import change, stage
from tests.transition.test_main import plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def plans(name: str) -> list[Event]:
    """Return plans for a task that nobody has submitted: each fails, and its failure is recorded."""
    target = stage(1, ["n0/0"], "initial")
    return [plan(f"{name}-{number}", change(prepare=["n0/0"], target=target)) for number in range(100)]


async def test_an_active_one_with_ten_times_the_work_that_it_can_do_keeps_its_lease(
    tmp_path: Path, bus_server: OpenServer, bus: Bus, log: EventLog
) -> None:
    url, credential = bus_server.url, bus_server.credential_file
    async with Journal(log, bus), Instances("transition", tmp_path, url, credential, log.url) as services:
        for _ in range(2):
            await services.start()
        await keeps_its_lease(services, log, plans)
        handled = log.leases()["transition"].handled
    records = list(log.read_all())
    moved = Counter(record.event.plan for record in records if isinstance(record.event, StateMoved))
    wanted = [
        record.event.plan for record in records if isinstance(record.event, PlanDecided) and record.position <= handled
    ]
    assert [name for name in wanted if moved[name] != 1] == []
