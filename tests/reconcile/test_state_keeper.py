"""Services that start from state snapshots, and write them: now and then by another process, and at a planned stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.detector import main as detector
from services.detector.state_snapshot import KEPT as DETECTOR
from services.planner import main as planner
from services.planner.replay.replay import verify
from services.planner.state_snapshot import KEPT as PLANNER
from services.transition import main as transition
from services.transition.state_snapshot import KEPT as TRANSITION
from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.service.frame import Main
from shared.service.state_keeper import folder_of
from shared.service.state_snapshots import KeptState, StateSnapshots
from shared.settings.model import Settings
from tests.condition import until
from tests.detector.conftest import Awaited
from tests.logs.kit import golden_log, read_rows, restore
from tests.planner.test_shell import node, plans, submission
from tests.transition.test_main import NODES, Agents, Watch, agents, restart_plan, submitted, watch

__all__ = ["agents", "watch"]

ROOT = Path(__file__).parents[2]

SERVICES: dict[str, tuple[Main, KeptState[Any]]] = {
    "detector": (detector.serve, DETECTOR),
    "planner": (planner.serve, PLANNER),
    "transition": (transition.main, TRANSITION),
}


@contextlib.asynccontextmanager
async def running(
    main: Main, settings: Settings, bus: Bus, journal: Journal, *, planned: bool = True
) -> AsyncIterator[None]:
    """Run a service, ready, for the length of the block, and then stop it: as it is asked to, or by cancelling it."""
    context = Awaited(settings, bus, journal, asyncio.Event(), "service")
    task = asyncio.ensure_future(main(context))
    waiting = asyncio.ensure_future(context.began.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield
    finally:
        waiting.cancel()
        if planned:
            context.stop.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def recorded(settings: Settings, **others: object) -> Settings:
    """Write a recorded log; return settings with which time makes no events."""
    restore(read_rows(golden_log("demo")), settings.run_dir / "log.db")
    # Nobody sends heartbeats here, and the times in the log are long ago.
    return settings.model_copy(update={"node_timeout_s": 50.0, "starvation_s": 0.0, **others})


@pytest.mark.parametrize("name", SERVICES)
async def test_a_service_stops_with_a_snapshot_and_starts_from_it(
    name: str, settings: Settings, bus: Bus, journal: Journal, log: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    main, kept = SERVICES[name]
    # The log has fewer events, so none is written while the service runs, and more than the tenth of it (``AT_STOP``).
    settings = recorded(settings, state_snapshot_events=1000)
    without = settings.model_copy(update={"state_snapshot_events": 0})
    async with running(main, without, bus, journal):
        pass
    last = log.last_position()  # a planner has logged its settings
    async with running(main, settings, bus, journal, planned=False):
        pass
    assert not folder_of(settings).exists()
    async with running(main, settings, bus, journal):
        pass
    found = StateSnapshots(folder_of(settings), kept).newest(log)
    assert found is not None
    assert found.position == last
    with caplog.at_level(logging.INFO):
        async with running(main, settings, bus, journal):
            pass
        assert f"starts from the state snapshot at position {last}" in caplog.messages
        caplog.clear()
        async with running(main, without, bus, journal):
            pass
        assert not any("state snapshot" in message for message in caplog.messages)
    assert log.last_position() == last


async def test_a_transition_service_goes_on_from_a_snapshot_at_the_end_of_the_log(
    settings: Settings, bus: Bus, journal: Journal, agents: Agents, watch: Watch
) -> None:
    settings = settings.model_copy(update={"state_snapshot_events": 2})
    await journal.append([submitted(), restart_plan()])
    async with running(transition.main, settings, bus, journal):
        pass  # no agent listens
    assert [path.name for path in folder_of(settings).iterdir()] == ["transition-000000000002.json"]
    await agents.start(*NODES)
    async with running(transition.main, settings, bus, journal):
        await watch.until("restored")


@contextlib.asynccontextmanager
async def process(settings: Settings, log: EventLog) -> AsyncIterator[tuple[Process, Callable[[str], Awaitable[None]]]]:
    """A planner's process that is ready, and what waits for a text in its log lines."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "UNICRON_RUN_DIR": str(settings.run_dir),
        "UNICRON_LOG_URL": log.url,
        "UNICRON_NATS_URL": settings.nats_url,
        "UNICRON_NATS_CREDENTIAL": str(settings.nats_credential),
        "UNICRON_STATE_SNAPSHOT_EVENTS": "5",
    }
    started = await asyncio.create_subprocess_exec(
        *[sys.executable, "-P", "-m", "services.planner.main"],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | environment,
    )
    assert started.stdout is not None
    assert started.stderr is not None
    lines = started.stderr

    async def has_said(text: str) -> None:
        while text not in (line := (await lines.readline()).decode()):
            assert line, f"it has ended without {text!r}"

    try:
        assert await started.stdout.readline() == b"ready\n"
        yield started, has_said
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.communicate()


@pytest.mark.slow
async def test_a_planner_that_is_killed_decides_on_from_its_snapshot(
    settings: Settings, journal: Journal, log: EventLog
) -> None:
    async with process(settings, log) as (killed, has_said):
        await journal.append([node("n0"), submission("a")])
        await has_said("state snapshot at position 5")  # parameters, node, task, and the two plans
        await until(lambda: len(plans(log)) == 2)
        killed.send_signal(signal.SIGKILL)
    await journal.append([node("n1"), submission("b")])
    async with process(settings, log) as (planned, has_said):
        await has_said("starts from the state snapshot at position 5")
        await journal.append([submission("c")])
        await until(lambda: len(plans(log)) == 5)
        planned.send_signal(signal.SIGTERM)
        assert await planned.wait() == 0
    report = verify(log)
    assert (report.ok, report.verified) == (True, 5)
    assert [plan.plan for plan in plans(log)] == ["p1", "p2", "p3", "p4", "p5"]
    found = StateSnapshots(folder_of(settings), PLANNER).newest(log)
    assert found is not None
    assert found.position > 5


async def test_a_snapshot_of_another_log_is_ignored_and_replaced(
    settings: Settings, bus: Bus, log: EventLog, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = recorded(settings, state_snapshot_events=10)
    position = StateSnapshots(folder_of(settings), PLANNER).write(log, 20)
    other = EventLog(f"sqlite:///{tmp_path / 'other.db'}")
    try:
        async with Journal(other, bus) as another, running(planner.serve, settings, bus, another):
            await another.append([node("n7"), submission("d")])
            await until(lambda: len(plans(other)) == 2)
        ignored = [message for message in caplog.messages if "snapshot" in message]
        why = f"the log does not have its event at position {position}"
        assert ignored == [f"state snapshot planner-{position:012d}.json is ignored: {why}"]
        assert verify(other).ok
        assert StateSnapshots(folder_of(settings), PLANNER).newest(log) is None
    finally:
        other.close()
