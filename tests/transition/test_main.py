"""The shell with a NATS server, an SQLite log, and agents that reply to commands over NATS."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from services.planner.decide import DECIDER
from services.transition.main import Transition
from services.transition.state import Send
from shared.bus.connection import Bus
from shared.events.codes import FailureCode
from shared.events.plans import Response, TaskChange, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, Event, PlanDecided, Recorded, StateMoved, TaskSubmitted
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.messages.commands import COMMANDS, Command, Reply
from shared.model import utc_now
from shared.service.frame import Context
from shared.service.log_lines import JsonLines
from shared.settings.model import Settings
from tests.condition import until
from tests.nats_server import OpenServer
from tests.transition.drive import answer, change, spec, stage

THREE = ["n0/0", "n1/0", "n2/0"]
NODES = ("n0", "n1", "n2")
STALL_S = 4.0
"""The least limit of a command here: longer than a busy machine stalls a process."""


class Agents:
    """Agents of some nodes. A repeated command joins the first one; ``hold_back`` delays the replies to a kind of
    command."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._answers: dict[str, asyncio.Future[Reply]] = {}
        self.commands: list[tuple[str, Command]] = []
        self.gates: dict[str, asyncio.Event] = {}

    async def start(self, *nodes: str) -> None:
        for node in nodes:
            await self._bus.serve(COMMANDS, functools.partial(self._serve, node), node)

    def hold_back(self, kind: str) -> asyncio.Event:
        self.gates[kind] = asyncio.Event()
        return self.gates[kind]

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait for a condition on the commands that have come."""
        await until(predicate, seen=lambda: self.commands)

    def count(self, kind: str) -> int:
        """Return how many different commands of the kind have come."""
        return len({c.command_id for _, c in self.commands if c.kind == kind})

    async def _serve(self, node: str, command: Command) -> Reply:
        self.commands.append((node, command))
        if command.command_id not in self._answers:
            self._answers[command.command_id] = asyncio.ensure_future(self._do(node, command))
        return await asyncio.shield(self._answers[command.command_id])

    async def _do(self, node: str, command: Command) -> Reply:
        if command.kind in self.gates:
            await self.gates[command.kind].wait()
        return answer(Send(node, command, 0, ()))


class Watch:
    """Follows the log and waits for state-moved events."""

    def __init__(self) -> None:
        self.moved: list[StateMoved] = []

    async def take(self, record: Recorded) -> None:
        if isinstance(record.event, StateMoved):
            self.moved.append(record.event)

    async def until(self, *phases: str) -> list[StateMoved]:
        await until(lambda: {*phases} <= {m.phase for m in self.moved}, f"all of {phases}", seen=lambda: self.moved)
        return self.moved

    async def until_any(self, *phases: str) -> list[StateMoved]:
        moved = self.moved
        await until(lambda: {*phases} & {m.phase for m in moved}, f"one of {phases}", seen=lambda: moved)
        return self.moved


@pytest.fixture
async def agents(bus: Bus) -> Agents:
    return Agents(bus)


@pytest.fixture
async def watch(journal: Journal) -> AsyncIterator[Watch]:
    watch = Watch()
    task = asyncio.create_task(journal.follow(watch.take, consumer="watch", after=0))
    yield watch
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@contextlib.asynccontextmanager
async def running(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Context]:
    """Run the service for the length of the block, and then cancel it; give its context."""
    context = Context(settings, bus, journal, asyncio.Event(), "transition")
    task = asyncio.create_task(Transition(context).run())
    try:
        yield context
    finally:
        if task.done():
            task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def plan(name: str, *changes: TaskChange) -> PlanDecided:
    return PlanDecided(
        event_id=f"event-{name}",
        occurred_at=utc_now(),
        decider=DECIDER,
        plan=name,
        trigger=Trigger.ERROR,
        cause="cause",
        response=Response.RESTART,
        changes=list(changes),
    )


def restart_plan() -> PlanDecided:
    survivors = THREE[:2]
    return plan(
        "p",
        change(
            survivors=survivors,
            failed=["n2/0"],
            hold=True,
            interrupted=stage(2, survivors, interrupted=True),
            prepare=["n2/0"],
            target=stage(3, THREE, take=["n2/0"]),
        ),
    )


def submitted() -> Event:
    return TaskSubmitted(event_id="submit", occurred_at=utc_now(), task="a", spec=spec("a"))


async def test_plan_is_executed_over_the_bus(
    settings: Settings, bus: Bus, journal: Journal, agents: Agents, watch: Watch
) -> None:
    await agents.start(*NODES)
    hold = agents.hold_back("hold")
    prepare = agents.hold_back("prepare")
    async with running(settings, bus, journal):
        await journal.append([submitted(), restart_plan()])
        await agents.until(lambda: agents.count("hold") == 2 and agents.count("prepare") == 1)
        hold.set()
        await watch.until("resumed")
        assert agents.count("drain") == 0
        prepare.set()
        moved = await watch.until("restored")
    assert [m.phase for m in moved] == ["held", "resumed", "prepared", "drained", "restored"]
    assert [m.complete for m in moved] == [False, False, False, False, True]
    assert all(m.started_at <= m.occurred_at for m in moved)
    assert moved[-1].durations_s["prepare"] >= moved[1].durations_s["configure"]
    spec_sent = next(c for _, c in agents.commands if c.kind == "prepare").spec
    assert spec_sent == spec("a")


async def test_commands_show_in_the_metrics(
    settings: Settings, bus: Bus, journal: Journal, agents: Agents, watch: Watch
) -> None:
    await agents.start(*NODES)
    hold = agents.hold_back("hold")
    async with running(settings, bus, journal) as context:

        def value(name: str, **labels: str) -> float | None:
            return context.registry.get_sample_value(name, labels)

        await journal.append([submitted(), restart_plan()])
        await agents.until(lambda: agents.count("hold") == 2)
        assert value("unicron_commands_in_flight", kind="hold") == 2
        assert value("unicron_transition_tasks_changing") == 1
        hold.set()
        await watch.until("restored")
        assert value("unicron_commands_in_flight", kind="hold") == 0
        assert value("unicron_command_seconds_count", kind="hold") == 2
        assert value("unicron_commands_failed_total", kind="hold", code="fenced") is None


async def test_lines_about_commands_have_the_incident(
    settings: Settings,
    bus: Bus,
    journal: Journal,
    agents: Agents,
    watch: Watch,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(caplog.handler, "formatter", JsonLines("transition", {}))  # pytest keeps the handler
    await agents.start(*NODES)
    async with running(settings, bus, journal):
        await journal.append([submitted(), restart_plan().model_copy(update={"incident": "i1"})])
        await watch.until("restored")
    lines = [json.loads(text) for text in caplog.text.splitlines()]
    sent = [one for one in lines if one["message"].startswith("hold of a to")]
    assert [(one["task"], one["plan"], one["incident"]) for one in sent] == [("a", "p", "i1")] * 2
    assert {one["node"] for one in sent} == {"n0", "n1"}


async def test_command_is_sent_again_to_an_agent_that_comes_late(
    settings: Settings, bus: Bus, journal: Journal, agents: Agents, watch: Watch
) -> None:
    await agents.start("n0")
    async with running(settings, bus, journal):
        await journal.append([submitted(), restart_plan()])
        await agents.until(lambda: agents.count("hold") == 1)
        await agents.start("n1", "n2")
        await watch.until("restored")


async def test_restarted_service_goes_on_and_repeats_nothing_that_is_done(
    settings: Settings, bus: Bus, journal: Journal, agents: Agents, watch: Watch
) -> None:
    await agents.start(*NODES)
    configure = agents.hold_back("configure")
    async with running(settings, bus, journal):
        await journal.append([submitted(), restart_plan()])
        await agents.until(lambda: agents.count("configure") == 2)
        await watch.until("held", "prepared")
    holds = len([c for _, c in agents.commands if c.kind == "hold"])
    async with running(settings, bus, journal):
        configure.set()
        await watch.until("restored")
    assert len({m.phase for m in watch.moved}) == len(watch.moved) == 5
    assert agents.count("configure") == 2 + 3, "the same commands again, with the same ids"
    assert len([c for _, c in agents.commands if c.kind == "hold"]) == holds
    done = len(agents.commands)
    async with running(settings, bus, journal):
        ending = plan("q", change(action="end", release=THREE))
        await journal.append([ending])
        await watch.until("ended")
    assert {c.kind for _, c in agents.commands[done:]} == {"release"}


@pytest.mark.slow
async def test_silence_is_reported_with_the_workers(
    settings: Settings, bus: Bus, journal: Journal, agents: Agents, watch: Watch
) -> None:
    await agents.start(*NODES)
    agents.hold_back("hold")
    impatient = settings.model_copy(update={"command_timeout_s": STALL_S, "resume_timeout_s": STALL_S})
    async with running(impatient, bus, journal):
        await journal.append([submitted(), restart_plan()])
        failed = (await watch.until("failed"))[-1]
    assert failed.failed_workers == ["n0/0", "n1/0"]
    assert failed.code is FailureCode.TIMEOUT


@pytest.mark.slow
async def test_time_without_the_bus_does_not_count_as_silence(
    settings: Settings, bus: Bus, nats: OpenServer, journal: Journal, agents: Agents, watch: Watch
) -> None:
    await agents.start(*NODES)
    hold = agents.hold_back("hold")
    impatient = settings.model_copy(update={"command_timeout_s": STALL_S, "resume_timeout_s": STALL_S})
    async with running(impatient, bus, journal):
        await journal.append([submitted(), restart_plan()])
        await agents.until(lambda: agents.count("hold") == 2)
        await nats.stop()
        await asyncio.sleep(impatient.resume_timeout_s + 0.5)  # the time itself is what is tested
        hold.set()
        await nats.start()
        moved = await watch.until_any("restored", "failed")
    assert [m.phase for m in moved if m.phase == "failed"] == []


@pytest.mark.slow
async def test_silence_after_the_bus_was_away_is_reported(
    settings: Settings, bus: Bus, nats: OpenServer, journal: Journal, agents: Agents, watch: Watch
) -> None:
    await agents.start(*NODES)
    agents.hold_back("hold")
    impatient = settings.model_copy(update={"command_timeout_s": STALL_S, "resume_timeout_s": STALL_S})
    async with running(impatient, bus, journal):
        await journal.append([submitted(), restart_plan()])
        await agents.until(lambda: agents.count("hold") == 2)
        await nats.stop()
        await nats.start()
        failed = (await watch.until("failed"))[-1]
    assert failed.failed_workers == ["n0/0", "n1/0"]


async def test_no_command_is_repeated_to_a_lost_node(
    settings: Settings, bus: Bus, journal: Journal, agents: Agents, watch: Watch
) -> None:
    await agents.start("n0", "n2")  # nobody on n1
    async with running(settings, bus, journal):
        await journal.append([submitted(), restart_plan()])
        await agents.until(lambda: agents.count("hold") == 1)
        lost = ErrorDetected(
            event_id="lost",
            occurred_at=utc_now(),
            detected_at=utc_now(),
            incident="lost",
            kind=ErrorKind.NODE_LOST,
            severity=Severity.SEV1,
            method=Method.NODE_HEALTH,
            node="n1",
        )
        alone = change(
            action="none",
            survivors=["n0/0"],
            failed=["n1/0", "n2/0"],
            hold=True,
            interrupted=stage(4, ["n0/0"], interrupted=True),
        )
        await journal.append([lost, plan("q", alone)])
        moved = await watch.until("resumed")
    assert moved[-1].complete
    assert moved[-1].plan == "q"


async def test_process_starts_and_stops(tmp_path: object, nats: OpenServer, log: EventLog, settings: Settings) -> None:
    environment = {
        **os.environ,
        "UNICRON_RUN_DIR": str(settings.run_dir),
        "UNICRON_NATS_URL": nats.url,
        "UNICRON_NATS_CREDENTIAL": str(nats.credential_file),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "services.transition.main",
        env={**environment, "PYTHONPATH": os.getcwd()},
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()).strip() == b"ready"
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
