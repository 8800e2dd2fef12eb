"""Services, agent and ranks on a real bus and a real log, beside other versions and messages of any kind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from services.agent.agent import Agent
from services.planner import main as planner
from services.transition.main import Transition
from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.events.plans import TaskChange
from shared.events.union import ErrorDetected, NodeJoined, StateMoved, TaskFinished, TaskSubmitted
from shared.log.journal import Journal
from shared.messages.commands import COMMANDS
from shared.messages.signals import HEARTBEATS, SIGNALS, ProcessExited, RankCheckpointed
from shared.service.frame import Context
from shared.settings.model import Settings
from shared.tasks.specification import parse_spec
from tests.agent.conftest import agent, driver, ear, inherited
from tests.agent.kit import HERE, SPEC, WAIT_S, WORKERS, Driver, Ear, stage, supervision
from tests.api.kit import Server, serving
from tests.condition import until
from tests.detector.conftest import watching
from tests.detector.kit import moved, plan
from tests.nats_server import OpenServer
from tests.versions.kit import (
    COMMAND_SAMPLES,
    REPLY_SAMPLES,
    SIGNAL_SAMPLES,
    about_rank,
    catalogue,
    document,
    extended,
    heartbeat,
)
from unicron.protocol.versions import OLDEST, VERSION

__all__ = ["agent", "driver", "ear", "inherited"]


def of(journal: Journal, kind: type[Any]) -> list[Any]:
    return [record.event for record in journal.log.read_all() if isinstance(record.event, kind)]


async def finished(journal: Journal) -> bool:
    return bool(await asyncio.to_thread(of, journal, TaskFinished))


async def ended(journal: Journal, plans: int) -> bool:
    """Return whether each of so many plans has been carried out or has failed."""
    moves = await asyncio.to_thread(of, journal, StateMoved)
    return len({move.plan for move in moves if move.phase == "failed" or move.complete}) == plans


# ---- programs of another version


@pytest.mark.slow
async def test_heartbeats_of_a_newer_agent_are_as_good_as_ordinary_ones(
    settings: Settings, bus: Bus, journal: Journal
) -> None:
    """The node joins, and stays for longer than the time-out."""
    async with watching(settings, bus, journal) as monitor:
        loop = asyncio.get_running_loop()
        until_s, sequence = loop.time() + 2 * settings.node_timeout_s, 0
        while loop.time() < until_s:
            sequence += 1
            newer = extended(document(heartbeat(sequence, sent_at=datetime.now(UTC))))
            await bus.send(HEARTBEATS.at("n0"), json.dumps(newer).encode())
            await asyncio.sleep(settings.heartbeat_interval_s)  # the interval of the agent that this stands for
        events = await monitor.until(lambda found: bool(found))
    [joined] = events
    assert isinstance(joined, NodeJoined)
    assert joined.workers == ["n0/0", "n0/1"]


async def test_a_signal_of_an_unknown_kind_does_not_keep_the_next_one_back(
    settings: Settings, bus: Bus, bus_server: OpenServer, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent's own queue, with a signal that only a newer detector knows."""
    from services.agent.cluster.signals import SignalQueue

    class Later(RankCheckpointed):
        kind: Any = "rank-dreamt"

    own = await Bus.connect(bus_server.url, credential=bus_server.credential, name="agent")
    queue = SignalQueue(own)
    submitted = TaskSubmitted(event_id="submitted", occurred_at=datetime.now(UTC), task="gpt", spec=parse_spec(SPEC))
    target = stage(1, ["n0/0", "n0/1"], source="initial")
    change = TaskChange(task="gpt", reason="new", action="move", from_generation=0, prepare=["n0/1"], target=target)
    await journal.append([submitted, plan("p1", "submitted", change), moved("p1", 1, "restored", complete=True)])
    async with watching(settings, bus, journal) as monitor:
        sending = asyncio.create_task(queue.run())
        for number in range(3):
            queue.put([Later(**about_rank(f"later{number}"), path="/c")])
        queue.put([ProcessExited(**about_rank("s9"), pid=7, exit_code=-9)])
        await monitor.until(lambda found: any(isinstance(event, ErrorDetected) for event in found))
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    assert own.dropped.counters == {"signals_refused": 3}
    await own.close()
    lines = [r.getMessage() for r in caplog.records if "rank-dreamt" in r.getMessage()]
    assert len(lines) == 2, lines  # one line of the detector, one of the agent


async def test_an_agent_answers_a_command_that_it_cannot_read(agent: Agent, driver: Driver, ear: Ear) -> None:
    for number in range(3):
        later = await driver.send({"kind": "dream", "command_id": f"c9{number}", "task": "gpt"})
        assert (later.ok, later.code, later.command_id, later.node) == (False, "undecodable", f"c9{number}", "n0")
        assert "'dream'" in later.detail
    newer = await driver.send({**document(COMMAND_SAMPLES[1]), "protocol": 3})
    assert newer.detail == "protocol version 3 is not readable here: this program reads version 1, 2"
    await ear.until(lambda: bool(ear.heartbeats) and ear.heartbeats[-1].counters == {"undecodable": 4})
    prepared = await driver.send(extended(document(COMMAND_SAMPLES[0])))
    assert prepared.ok
    assert prepared.workers["n0/0"].pid


async def test_what_an_agent_cannot_read_of_a_rank_is_dropped_and_the_rank_trains_on(
    agent: Agent, driver: Driver, ear: Ear
) -> None:
    assert (await driver.prepare(behaviour="babble")).ok
    assert (await driver.configure()).ok
    await ear.until(lambda: bool(ear.heartbeats) and any(w.step >= 4 for w in ear.heartbeats[-1].workers))
    assert all(status.attached for status in agent.node.processes())
    assert ear.signals == []
    assert ear.heartbeats[-1].counters["undecodable"] >= 2 * 8  # each of the two ranks sends eight such lines


async def test_a_rank_of_a_version_that_the_agent_does_not_read_is_told_so(
    agent: Agent, driver: Driver, ear: Ear, settings: Settings
) -> None:
    refused = await driver.prepare(workers=["n0/0"], behaviour="newer")
    assert refused.code == "process-exited"
    await ear.until(lambda: "process-exited" in ear.kinds())
    [exited] = ear.signals
    assert isinstance(exited, ProcessExited)
    assert exited.exit_code == 76
    assert "n0/0: unicron of another version speaks protocol 99; the node agent, unicron-cluster" in exited.last_output
    assert f"speaks {OLDEST} to {VERSION}: install a newer agent" in exited.last_output


async def test_a_fork_server_of_another_version_is_refused_and_lines_that_are_no_events_are_dropped(
    settings: Settings, bus: Bus, tmp_path: Path
) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        "import json, socket, sys\n"
        "listener = socket.socket(fileno=int(sys.argv[sys.argv.index('--fd') + 1]))\n"
        "agent, _ = listener.accept()\n"
        "def say(**event): agent.sendall(json.dumps(event).encode() + b'\\n')\n"
        "agent.sendall(b'[' * 99999 + b'\\n' + b'x' * 200000 + b'\\n\\xff\\n{\"event\": 1}\\n[]\\n')\n"
        "say(event='later', id='a'); say(event='exited', id='a'); say(event='exited', code=1); say(event='forked')\n"
        "say(event='ready', pid=1, version=int(sys.argv[1]), added_later={})\n"
        "agent.recv(99)\n"
    )
    async with supervision(settings, (sys.executable, str(script), str(OLDEST - 1))) as inherited:
        older = Agent(settings, bus, HERE, WORKERS, "0" * 32, inherited)
        with pytest.raises(Unavailable, match=f"speaks protocol {OLDEST - 1}; .* install a newer library there"):
            await older.start()
        await older.stop()
    async with supervision(settings, (sys.executable, str(script), str(OLDEST))) as inherited:
        same = Agent(settings, bus, HERE, WORKERS, "0" * 32, inherited)
        await same.start()
        await same.stop()
    assert bus.dropped.counters["undecodable"] >= 2 * 9


# ---- messages of any kind


@contextlib.asynccontextmanager
async def background(*tasks: asyncio.Task[None]) -> AsyncIterator[None]:
    """Tasks that must not end by themselves."""
    try:
        yield
        assert not [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def cluster(
    settings: Settings, bus: Bus, bus_server: OpenServer, journal: Journal, beats: Sequence[bytes] = ()
) -> AsyncIterator[tuple[Server, dict[str, int]]]:
    """Every service, and an agent whose ranks train nothing; the counters of the agent, which has a bus of its own.

    The detector hears ``beats`` first: one that can be read is of another agent of the node, which this one follows.
    """
    own = await Bus.connect(bus_server.url, credential=bus_server.credential, name="agent")
    contexts = [Context(settings, bus, journal, asyncio.Event(), name) for name in ("transition", "planner")]
    async with (
        supervision(settings) as inherited,
        serving(settings, bus, journal) as server,
        watching(settings, bus, journal),
    ):
        agent = Agent(settings, own, HERE, WORKERS, "0" * 32, inherited)
        works = [Transition(contexts[0]).run(), planner.serve(contexts[1])]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            async with background(*tasks):
                for name in ("n0", "n7"):
                    for data in beats:
                        await bus.send(HEARTBEATS.at(name), data)
                # Its answer comes behind all that was sent before.
                await bus.request(SIGNALS.at("n0"), b"{}", timeout_s=WAIT_S)
                await agent.start()
                yield server, own.dropped.counters
        finally:
            await agent.stop()
            await own.close()


async def test_no_message_ends_a_service(
    settings: Settings, bus: Bus, bus_server: OpenServer, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    """Hundreds of messages to every subject; then a task is submitted, planned, trained and finished."""
    caplog.set_level(logging.WARNING)
    beats = catalogue([heartbeat()])
    async with cluster(settings, bus, bus_server, journal, beats) as (server, counters):
        for data in catalogue(SIGNAL_SAMPLES):
            answer = await bus.request(SIGNALS.at("n0"), data, timeout_s=WAIT_S)
            assert answer == b"+" or answer.startswith(b"-")
        # Only what cannot be read: a command that can be read is carried out.
        for data in catalogue(COMMAND_SAMPLES):
            if b'"node": "n0"' not in data:
                reply = json.loads(await bus.request(COMMANDS.at("n0"), data, timeout_s=WAIT_S))
                assert reply["node"] == "n0"
        for name in ("detector", "planner", "transition", "api"):
            for data in beats[:20]:
                await bus.send(f"unicron.health.{name}", data)
        for subject in ("unicron.log.node.joined", "unicron.log.x"):
            for data in beats[:5]:
                await bus.send(subject, data)
        assert counters["undecodable"] > 50

        data_file = server.data
        spec = {**SPEC, "name": "last", "data": str(data_file), "env": {"BEHAVIOUR": "finish"}}
        accepted = await server.http.post("/v1/tasks", json=spec)
        assert accepted.status_code == 201, accepted.text
        await until(lambda: finished(journal))
        ready = (await server.http.get("/readyz")).json()
        checks = {check["name"]: check["counters"] for check in ready["checks"]}
        assert checks["bus"]["undecodable"] > 50  # the api's own
        assert checks["nodes"]["undecodable"] == counters["undecodable"]
    lines = [r.getMessage() for r in caplog.records if "was dropped" in r.getMessage()]
    assert 0 < len(lines) < 100, len(lines)


@pytest.mark.slow
async def test_replies_of_any_kind_fail_a_plan_and_not_the_service(
    settings: Settings, bus: Bus, journal: Journal
) -> None:
    """An agent that answers every command with something else."""
    replies = iter(catalogue(REPLY_SAMPLES) * 9)

    async def answer(_: bytes) -> bytes:
        return next(replies)

    await bus.answer(COMMANDS.at("n0"), lambda _, data: answer(data))
    context = Context(settings, bus, journal, asyncio.Event(), "transition")
    async with background(asyncio.create_task(Transition(context).run())):
        for number in range(1, 41):
            name = f"gpt{number}"
            submitted = TaskSubmitted(
                event_id=name, occurred_at=datetime.now(UTC), task=name, spec=parse_spec({**SPEC, "name": name})
            )
            worker = f"n0/{number}"
            target = stage(1, [worker], source="initial")
            change = TaskChange(
                task=name, reason="new", action="move", from_generation=0, prepare=[worker], target=target
            )
            await journal.append([submitted, plan(f"p{number}", name, change)])
        await until(lambda: ended(journal, 40))
    assert bus.dropped.counters["undecodable"] > 20
