"""The detector on a real bus and a real log, with real agents."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.agent.agent import Agent
from services.agent.ranks import fork_server
from shared.bus.connection import Bus
from shared.events.codes import FailureCode
from shared.events.plans import TaskChange
from shared.events.severities import ErrorKind, Severity
from shared.events.union import (
    ErrorDetected,
    Event,
    NodeJoined,
    TaskCheckpointed,
    TaskFailed,
    TaskFinished,
    TaskSubmitted,
)
from shared.log.journal import Journal
from shared.messages.admission import DEPARTURES, HELLO, Departure, Hello
from shared.messages.commands import COMMANDS, LEFTOVERS, Reply
from shared.messages.signals import HEARTBEATS, SIGNALS, Heartbeat, ProcessExited, RankCheckpointed, WorkerStatus
from shared.service.joining import credential_of
from shared.settings.model import Settings
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC, WAIT_S, Driver, stage
from tests.agent.program import running
from tests.detector.conftest import STALL_S, LogWatch, patient, watching
from tests.detector.kit import moved, plan
from tests.nats_server import OpenServer


def of(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


async def begin(journal: Journal, driver: Driver) -> None:
    """Append the plan by which ``gpt`` is to train in generation 1 on both workers."""
    spec = parse_spec(SPEC)
    target = stage(1, driver.workers, source="initial")
    change = TaskChange(
        task="gpt", reason="new", action="move", from_generation=0, prepare=driver.workers, target=target
    )
    now = datetime.now(UTC)
    submitted = TaskSubmitted(event_id="submitted", occurred_at=now, task="gpt", spec=spec)
    await journal.append([submitted, plan("p1", "submitted", change)])


async def train(journal: Journal, driver: Driver, behaviour: str = "train") -> dict[str, int]:
    """Have ``gpt`` train in generation 1 on both workers, with the events of that in the log."""
    await begin(journal, driver)
    assert (await driver.prepare(behaviour=behaviour)).ok
    configured = await driver.configure()
    assert configured.ok
    await journal.append([moved("p1", 1, "restored", complete=True)])
    return {worker: result.pid or 0 for worker, result in configured.workers.items()}


def exited(signal_id: str, task: str) -> ProcessExited:
    """Return the signal of a rank of a task that was killed."""
    return ProcessExited(
        signal_id=signal_id,
        node="n0",
        incarnation="i",
        occurred_at=datetime.now(UTC),
        task=task,
        worker="n0/1",
        generation=1,
        rank=1,
        step=0,
        pid=1,
        exit_code=-9,
    )


async def test_a_killed_rank_is_in_the_log_at_once(monitor: LogWatch, agent: Agent, driver: Driver) -> None:
    events = await monitor.until(lambda found: bool(of(found, NodeJoined)))
    assert of(events, NodeJoined)[0].workers == driver.workers
    pids = await train(monitor.journal, driver)
    killed_at, killed_s = datetime.now(UTC), time.monotonic()
    os.kill(pids["n0/1"], signal.SIGKILL)
    events = await monitor.until(lambda found: bool(of(found, ErrorDetected)))
    took_s = time.monotonic() - killed_s
    [error] = of(events, ErrorDetected)
    assert (error.kind, error.severity, error.worker) == (ErrorKind.PROCESS_EXIT, Severity.SEV2, "n0/1")
    assert error.evidence["exit"] == "SIGKILL"
    assert -0.05 < (error.occurred_at - killed_at).total_seconds() < 20.0
    assert took_s < 20.0  # about 30 ms on an idle machine; the limit is for a busy one


async def test_a_signal_that_overtakes_the_log_is_not_lost(monitor: LogWatch, bus: Bus) -> None:
    now = datetime.now(UTC)
    workers = ["n0/0", "n0/1"]
    for generation in range(1, 11):
        submitted = TaskSubmitted(
            event_id=f"submitted-{generation}", occurred_at=now, task=f"gpt{generation}", spec=parse_spec(SPEC)
        )
        change = TaskChange(
            task=submitted.task,
            reason="new",
            action="move",
            from_generation=0,
            prepare=workers,
            target=stage(1, workers, source="initial"),
        )
        await monitor.journal.append([submitted, plan(f"p{generation}", submitted.event_id, change)])
        died = exited(f"s{generation}", submitted.task)
        assert await bus.request(SIGNALS.at(died.node), died.model_dump_json().encode(), timeout_s=40) == b"+"
        # Once a signal is answered, the events that follow from it are in the log.
        errors = of([r.event for r in monitor.journal.log.read()], ErrorDetected)
        assert [e.task for e in errors] == [f"gpt{i}" for i in range(1, generation + 1)]


async def test_messages_that_name_another_node_than_their_sender_have_no_effect(
    settings: Settings, bus: Bus, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    """NATS vouches for the subject: n9 has sent all of these."""
    counters: dict[str, int] = {}
    beat = Heartbeat(
        node="n0", incarnation="i", agent_pid=1, sequence=1, sent_at=datetime.now(UTC), interval_s=0.25, workers=[]
    )
    died = exited("s", "gpt")
    hello = Hello(node="n0", incarnation="0" * 32, addresses={}, network="")
    leaves = Departure(node="n0", incarnation="i", reason="forged")
    async with watching(settings, bus, journal, counters):
        await bus.publish(HEARTBEATS, beat, "n9")
        for endpoint, message in ((SIGNALS, died), (HELLO, hello), (DEPARTURES, leaves)):
            answer = await bus.request(endpoint.at("n9"), message.model_dump_json().encode(), timeout_s=40)
            assert b"it comes from node n9, and names node 'n0'" in answer
        await bus.request(HELLO.at("n0"), hello.model_dump_json().encode(), timeout_s=40)
    assert counters == {"wrong_sender": 4}
    assert caplog.text.count("was dropped, and others like it will be: it comes from node n9") == 1
    assert journal.log.read() == []


async def test_an_exception_is_one_incident_for_each_rank(monitor: LogWatch, agent: Agent, driver: Driver) -> None:
    await train(monitor.journal, driver, behaviour="raise")
    events = await monitor.until(lambda found: len(of(found, ErrorDetected)) >= 2)
    errors = of(events, ErrorDetected)
    assert {e.worker for e in errors} == set(driver.workers)
    assert {e.kind for e in errors} == {ErrorKind.EXCEPTION}
    assert "bad sample" in errors[0].evidence["detail"]


async def test_a_task_that_its_ranks_refuse_fails_without_an_incident(
    monitor: LogWatch, agent: Agent, driver: Driver
) -> None:
    await begin(monitor.journal, driver)
    await driver.prepare(behaviour="refuse")
    events = await monitor.until(lambda found: bool(of(found, TaskFailed)))
    [failed] = of(events, TaskFailed)
    assert failed.reason.startswith("worker n0/")
    assert failed.reason.endswith("of node n0 cannot run it: ModuleNotFoundError: No module named 'missing'")
    assert not of(events, ErrorDetected)


async def test_a_finished_task_is_in_the_log(monitor: LogWatch, agent: Agent, driver: Driver) -> None:
    await train(monitor.journal, driver, behaviour="finish")
    events = await monitor.until(lambda found: bool(of(found, TaskFinished)))
    assert of(events, TaskFinished)[0].samples_sha256 == "abc"
    assert not of(events, ErrorDetected)


async def test_stopped_ranks_are_found_by_their_silence(
    settings: Settings, bus: Bus, journal: Journal, agent: Agent, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "QUIT_GRACE_S", 2 * WAIT_S)
    # Ranks that the machine stalls are not stopped: only those that are count as hanging here.
    async with watching(settings.model_copy(update={"hang_floor_s": WAIT_S}), bus, journal) as monitor:
        pids = await train(journal, driver)
        await monitor.until(lambda found: any(event.type == "task.progressed" for event in found))
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        events = await monitor.until(lambda found: bool(of(found, ErrorDetected)))
    [error] = of(events, ErrorDetected)
    assert (error.kind, error.severity, error.task) == (ErrorKind.HANG, Severity.SEV2, "gpt")
    # The time of each counts from the heartbeat that first shows it stopped: one may be found a tick before the other.
    assert error.evidence["workers"]
    assert set(error.evidence["workers"]) <= set(driver.workers)
    assert {error.evidence["ranks"][worker]["process_state"] for worker in driver.workers} == {"T"}
    # Release kills at once what cannot listen, without the grace.
    assert (await driver.ask("release", 2, workers=driver.workers)).ok


@pytest.mark.slow
async def test_an_outage_of_nats_blames_no_node(
    strict_monitor: LogWatch, agent: Agent, driver: Driver, nats: OpenServer
) -> None:
    monitor = strict_monitor
    await monitor.until(lambda found: bool(of(found, NodeJoined)))
    pids = await train(monitor.journal, driver)
    await nats.stop()
    await asyncio.sleep(STALL_S + 0.5)  # the silence itself is what is tested
    await nats.start()
    os.kill(pids["n0/1"], signal.SIGKILL)
    events = await monitor.until(lambda found: bool(of(found, ErrorDetected)))
    assert [(e.kind, e.worker) for e in of(events, ErrorDetected)] == [(ErrorKind.PROCESS_EXIT, "n0/1")]


async def test_a_silent_node_is_lost_and_comes_back_clean(
    strict_monitor: LogWatch, settings: Settings, bus: Bus
) -> None:
    """A real agent process is stopped for longer than the time-out and goes on afterwards."""
    monitor = strict_monitor
    async with running(settings, "n0", settings.run_dir / "agent.log") as agent:
        await agent.ready()
        await monitor.until(lambda found: bool(of(found, NodeJoined)))
        driver = Driver(bus)
        pids = await train(monitor.journal, driver)
        stopped_s = time.monotonic()
        agent.signal_agent(signal.SIGSTOP)
        events = await monitor.until(lambda found: bool(of(found, ErrorDetected)))
        took_s = time.monotonic() - stopped_s
        [lost] = of(events, ErrorDetected)
        assert (lost.kind, lost.severity, lost.node) == (ErrorKind.NODE_LOST, Severity.SEV1, "n0")
        assert lost.evidence["tasks"]["gpt"]["workers"] == driver.workers
        assert STALL_S - 0.3 < took_s < STALL_S + 20.0
        agent.signal_agent(signal.SIGCONT)
        await monitor.until(lambda found: len(of(found, NodeJoined)) == 2)
        for pid in pids.values():
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        agent.process.terminate()
        assert await agent.process.wait() == 0


class Warned(logging.Handler):
    """Waits for a message of a logger."""

    def __init__(self, text: str) -> None:
        super().__init__(logging.WARNING)
        self.warned = asyncio.Event()
        self._text = text

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.warned.set()


@pytest.mark.slow
async def test_a_node_that_refuses_to_be_cleaned_is_logged(
    strict_monitor: LogWatch, bus: Bus, request: pytest.FixtureRequest
) -> None:
    monitor = strict_monitor
    warned = Warned("n9 does not clean up behind gpt: fenced generation 9 was seen")
    log = logging.getLogger("services.detector.agent_requests")
    log.addHandler(warned)
    request.addfinalizer(lambda: log.removeHandler(warned))

    async def refuse(data: bytes) -> bytes:
        command = COMMANDS.request.decode(data)
        detail = "generation 9 was seen"
        reply = Reply(command_id=command.command_id, node="n9", ok=False, code=FailureCode.FENCED, detail=detail)
        return reply.model_dump_json().encode()

    async def beat(sequence: int, *workers: WorkerStatus) -> None:
        heartbeat = Heartbeat(
            node="n9",
            incarnation="first",
            agent_pid=1,
            sequence=sequence,
            sent_at=datetime.now(UTC),
            interval_s=0.25,
            workers=list(workers),
        )
        await bus.publish(HEARTBEATS, heartbeat, "n9")

    await bus.answer(LEFTOVERS.at("n9"), lambda _, data: refuse(data))
    await beat(1, WorkerStatus(worker="n9/0"))
    await monitor.until(lambda found: bool(of(found, NodeJoined)))
    await monitor.until(lambda found: bool(of(found, ErrorDetected)))
    await beat(2, WorkerStatus(worker="n9/0", state="ready", task="gpt", generation=9))
    async with asyncio.timeout(WAIT_S):
        await warned.warned.wait()


async def test_a_restarted_monitor_adds_nothing(
    settings: Settings, nats: OpenServer, journal: Journal, agent: Agent
) -> None:
    bus = await Bus.connect(settings.nats_url, credential=credential_of(settings), name="first")
    driver = Driver(bus)
    async with watching(settings, bus, journal) as monitor:
        first = await monitor.until(lambda found: bool(of(found, NodeJoined)))
    pids = await train(journal, driver)
    await bus.close()  # its subscriptions end with the connection
    os.kill(pids["n0/0"], signal.SIGKILL)  # no detector listens: the agent repeats the signal
    successor = await Bus.connect(settings.nats_url, credential=credential_of(settings), name="successor")
    async with watching(settings, successor, journal) as monitor:
        events = await monitor.until(lambda found: bool(of(found, ErrorDetected)))
    await successor.close()
    assert len(of(events, NodeJoined)) == len(of(first, NodeJoined)) == 1
    assert [e.worker for e in of(events, ErrorDetected)] == ["n0/0"]


async def test_a_repeated_signal_of_a_node_whose_clock_is_ahead_is_answered(
    settings: Settings, journal: Journal
) -> None:
    submitted = TaskSubmitted(event_id="submitted", occurred_at=datetime.now(UTC), task="gpt", spec=parse_spec(SPEC))
    target = stage(1, ["n0/0"], source="initial")
    change = TaskChange(task="gpt", reason="new", action="move", from_generation=0, prepare=["n0/0"], target=target)
    await journal.append([submitted, plan("p1", "submitted", change), moved("p1", 1, "restored", complete=True)])
    saved = RankCheckpointed(
        signal_id="s1",
        node="n0",
        incarnation="i",
        occurred_at=datetime.now(UTC) + timedelta(hours=1),
        task="gpt",
        worker="n0/0",
        generation=1,
        rank=0,
        step=4,
        path="/c",
    )
    data = saved.model_dump_json().encode()
    for name in ("first", "successor"):
        own = await Bus.connect(settings.nats_url, credential=credential_of(settings), name=name)
        async with watching(settings, own, journal):
            for _ in range(2):
                assert await own.request(SIGNALS.at("n0"), data, timeout_s=40) == b"+"
        await own.close()  # its subscriptions end with the connection
    assert len(of([r.event for r in journal.log.read()], TaskCheckpointed)) == 1


async def test_what_is_heard_shows_in_the_metrics(
    settings: Settings, bus: Bus, journal: Journal, agent: Agent, driver: Driver
) -> None:
    registry = CollectorRegistry()

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(name, labels) or 0.0

    async with watching(patient(settings), bus, journal, registry=registry) as watch:
        pids = await train(journal, driver)
        os.kill(pids["n0/1"], signal.SIGKILL)
        await watch.until(lambda events: bool(of(events, ErrorDetected)))
        assert value("unicron_heartbeats_received_total") >= 1
        assert value("unicron_signals_received_total", kind="process-exited") == 1
        assert 0.0 <= value("unicron_heartbeat_age_seconds", node="n0") < WAIT_S
        assert registry.get_sample_value("unicron_control_plane_cut_off") == 0
