"""The supervisor's processes: the agent is started again, and ranks outlive it; all of them end with the supervisor."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from shared.bus.connection import Bus
from shared.messages.admission import AGENT_RESTART, HELLO, AgentRestart, Answer
from shared.messages.probes import Outcome, ProbeTarget, probe
from shared.messages.signals import Heartbeat, ProcessExited
from shared.settings.model import Settings
from tests.agent.kit import WAIT_S, Driver, Ear, parent, train
from tests.agent.program import Program, running

pytestmark = pytest.mark.timeout(180)

START_S = 60.0
"""An agent starts in a second or two, and this test's machine may be busy with others."""


@pytest.fixture
async def node(settings: Settings, bus: Bus, ear: Ear, tmp_path: Path) -> AsyncIterator[Program]:
    """A node whose supervisor, agent and fork server run."""

    async def admit(_: bytes) -> bytes:
        return Answer(verdict="admitted").model_dump_json().encode()

    await bus.answer(HELLO.subject, lambda _, data: admit(data))
    async with running(settings, "n0", tmp_path / "agent.log") as program:
        await program.ready()
        async with asyncio.timeout(START_S):
            await ear.until(lambda: bool(ear.heartbeats))
        yield program


async def successor(ear: Ear, before: Heartbeat) -> Heartbeat:
    """Return a heartbeat of the agent after the one that has sent ``before``."""
    async with asyncio.timeout(START_S):
        await ear.until(lambda: ear.heartbeats[-1].incarnation != before.incarnation)
    return ear.heartbeats[-1]


def pids(beat: Heartbeat) -> dict[str, int | None]:
    return {status.worker: status.pid for status in beat.workers if status.state == "training"}


async def gone(pid: int) -> bool:
    """Wait until a process has ended, which need not be a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = await asyncio.to_thread(select.select, [descriptor], [], [], WAIT_S)
        return bool(ready)
    finally:
        os.close(descriptor)


async def kill(ear: Ear) -> Heartbeat:
    """Kill the agent; return its last heartbeat."""
    last = ear.heartbeats[-1]
    os.kill(last.agent_pid, signal.SIGKILL)
    return last


async def hand_over(bus: Bus, ear: Ear) -> Heartbeat:
    """Ask the agent to hand over; return its last heartbeat."""
    last = ear.heartbeats[-1]
    request = AgentRestart(incarnation=last.incarnation).model_dump_json().encode()
    answer = await bus.request(AGENT_RESTART.at("n0"), request, timeout_s=WAIT_S)
    assert AGENT_RESTART.reply.decode(answer).incarnation == last.incarnation
    return last


async def test_ranks_train_on_when_their_agent_is_killed(node: Program, bus: Bus, ear: Ear) -> None:
    driver = Driver(bus)
    ranks = await train(driver)
    await ear.until(lambda: ear.heartbeats[-1].workers[0].steps_timed > 0)
    for _ in range(2):
        before = await kill(ear)
        after = await successor(ear, before)
        assert after.supervisor == before.supervisor != ""
        assert after.agent_pid != before.agent_pid
        assert {status.pid for status in after.workers} == set(ranks.values())
        await ear.until(lambda ran=before.workers[0].step: pids(ear.heartbeats[-1]) == ranks and (  # type: ignore[misc]
            ear.heartbeats[-1].workers[0].step > ran
        ))  # fmt: skip
    held = await driver.ask("hold", 2, workers=driver.workers)
    assert held.ok
    assert {worker: result.pid for worker, result in held.workers.items()} == ranks
    assert (await driver.configure(2)).ok
    stopped = await driver.ask("stop", 3, workers=driver.workers)
    assert stopped.ok
    assert ear.kinds() == ["rank-stopped"]


@pytest.mark.slow
async def test_an_agent_hands_over_on_request(node: Program, bus: Bus, ear: Ear) -> None:
    ranks = await train(Driver(bus))
    for _ in range(2):
        before = await hand_over(bus, ear)
        await successor(ear, before)
    await ear.until(lambda: pids(ear.heartbeats[-1]) == ranks)
    request = AgentRestart(incarnation="of another agent").model_dump_json().encode()
    answer = await bus.request(AGENT_RESTART.at("n0"), request, timeout_s=WAIT_S)
    assert AGENT_RESTART.reply.decode(answer).incarnation == ear.heartbeats[-1].incarnation
    assert ear.signals == []
    assert "is started again" not in node.log.read_text()


@pytest.mark.slow
async def test_a_rank_that_ends_while_there_is_no_agent_is_signalled_by_the_successor(
    node: Program, bus: Bus, ear: Ear
) -> None:
    ranks = await train(Driver(bus))
    supervisor = psutil.Process(node.process.pid)
    supervisor.suspend()  # so that no successor comes before the rank has ended
    try:
        before = await kill(ear)
        os.kill(ranks["n0/1"], signal.SIGKILL)
        await gone(ranks["n0/1"])
    finally:
        supervisor.resume()
    after = await successor(ear, before)
    await ear.until(lambda: bool(ear.signals))
    [exited] = ear.signals
    assert isinstance(exited, ProcessExited)
    assert (exited.worker, exited.exit_code, exited.pid) == ("n0/1", -9, ranks["n0/1"])
    assert (exited.generation, exited.incarnation) == (1, after.incarnation)
    await ear.until(lambda: pids(ear.heartbeats[-1]) == {"n0/0": ranks["n0/0"]})
    again = await hand_over(bus, ear)
    await successor(ear, again)
    await ear.until(lambda: len(ear.heartbeats) > 3)
    assert len(ear.signals) == 1


@pytest.mark.slow
async def test_a_task_that_finishes_while_there_is_no_agent_is_signalled_by_the_successor(
    node: Program, bus: Bus, ear: Ear
) -> None:
    driver = Driver(bus)
    supervisor = psutil.Process(node.process.pid)
    assert (await driver.prepare(behaviour="finish")).ok
    supervisor.suspend()
    try:
        assert (await driver.configure()).ok
        await kill(ear)
    finally:
        supervisor.resume()
    async with asyncio.timeout(START_S):
        await ear.until(lambda: "rank-finished" in ear.kinds())
    await ear.until(lambda: set(ear.workers().values()) == {"idle"})
    assert set(ear.kinds()) == {"rank-checkpointed", "rank-finished"}


@pytest.mark.slow
async def test_a_signal_without_an_answer_is_sent_by_the_successor(node: Program, bus: Bus, ear: Ear) -> None:
    ranks = await train(Driver(bus))
    ear.answering = False
    os.kill(ranks["n0/0"], signal.SIGKILL)
    await ear.until(lambda: bool(ear.signals))
    before = await kill(ear)
    ear.answering = True
    after = await successor(ear, before)
    await ear.until(lambda: ear.signals[-1].incarnation == after.incarnation)
    assert {signal.signal_id for signal in ear.signals} == {ear.signals[0].signal_id}


@pytest.mark.slow
async def test_a_command_that_was_carried_out_is_answered_by_the_successor(node: Program, bus: Bus, ear: Ear) -> None:
    driver = Driver(bus)
    await train(driver)
    stop = {"kind": "stop", "command_id": "once", "plan": "p2", "task": "gpt", "generation": 2}
    first = await driver.send({**stop, "workers": driver.workers})
    assert first.ok
    await successor(ear, await kill(ear))
    assert await driver.send({**stop, "workers": driver.workers}) == first
    refused = await driver.ask("hold", 1, workers=driver.workers)
    assert (refused.ok, refused.code) == (False, "fenced")  # so the fence has outlived the agent


async def test_commands_of_a_service_that_was_succeeded_are_refused(node: Program, bus: Bus, ear: Ear) -> None:
    """Of two transition services the one with the newer token counts, also for the agent's successor."""
    driver = Driver(bus)
    hold = {"kind": "hold", "plan": "p", "task": "gpt", "generation": 1, "workers": []}
    assert (await driver.send({**hold, "command_id": "newer", "token": 8})).ok
    assert (await driver.send({**hold, "command_id": "without a lease"})).ok
    await successor(ear, await kill(ear))
    refused = await driver.send({**hold, "command_id": "older", "generation": 9, "token": 7})
    assert (refused.ok, refused.code) == (False, "fenced")
    assert "a transition service with 8 has taken over" in refused.detail
    assert (await driver.send({**hold, "command_id": "newest", "token": 9})).ok


@pytest.mark.slow
async def test_probes_are_answered_while_there_is_no_agent(node: Program, ear: Ear) -> None:
    """As long as the supervisor lives the node is cut off, and not lost."""
    last = ear.heartbeats[-1]
    target = {"n0": ProbeTarget(address=last.probe, incarnation=last.incarnation)}
    blocked = psutil.Process(node.process.pid)
    children = {process.pid for process in blocked.children()}
    os.kill(last.agent_pid, signal.SIGKILL)
    assert await probe(target, WAIT_S) == {"n0": Outcome.REACHED}
    after = await successor(ear, last)
    renewed = {"n0": ProbeTarget(address=after.probe, incarnation=after.incarnation)}
    assert await probe(renewed, WAIT_S) == {"n0": Outcome.REACHED}
    assert len({process.pid for process in blocked.children()} & children) == 1  # the fork server
    node.process.kill()
    assert await gone(after.agent_pid)
    assert await probe(renewed, WAIT_S) == {"n0": Outcome.ABSENT}


async def test_all_ends_with_the_supervisor(node: Program, bus: Bus, ear: Ear) -> None:
    ranks = await train(Driver(bus))
    server, agent = parent(ranks["n0/0"]), ear.heartbeats[-1].agent_pid
    node.process.kill()
    for pid in (agent, server, *ranks.values()):
        assert await gone(pid)


@pytest.mark.slow
async def test_a_fork_server_that_ends_takes_its_ranks_with_it_and_is_replaced(
    node: Program, bus: Bus, ear: Ear
) -> None:
    driver = Driver(bus)
    ranks = await train(driver)
    agent = ear.heartbeats[-1].agent_pid
    os.kill(parent(ranks["n0/0"]), signal.SIGKILL)
    await ear.until(lambda: len(ear.signals) == 2)
    assert (await driver.prepare(2)).ok
    assert ear.heartbeats[-1].agent_pid == agent


@pytest.mark.slow
async def test_only_an_agent_turns_to_the_fork_server(node: Program, bus: Bus, ear: Ear) -> None:
    """A rank has the same user, where ``rank_uids`` is not set; it is no child of the supervisor, like this process."""
    driver = Driver(bus)
    ranks = await train(driver)
    command = psutil.Process(ear.heartbeats[-1].agent_pid).cmdline()
    name = command[command.index("--fork-servers") + 1]
    reader, writer = await asyncio.open_unix_connection(f"\0{name}")
    async with asyncio.timeout(WAIT_S):
        assert await reader.read() == b"", "not even a greeting"
    writer.close()
    # The agent's own connection is as it was: it learns of an end, and has another process forked.
    os.kill(ranks["n0/0"], signal.SIGKILL)
    await ear.until(lambda: "process-exited" in ear.kinds())
    assert (await driver.prepare(2, ["n0/0"])).ok


@pytest.mark.slow
async def test_an_agent_that_never_worked_is_not_started_again(settings: Settings, tmp_path: Path) -> None:
    nowhere = {"UNICRON_NATS_URL": "nats://127.0.0.1:1", "UNICRON_CONNECT_TIMEOUT_S": "0.1"}
    async with running(settings, "n0", tmp_path / "agent.log", environment=nowhere) as program:
        async with asyncio.timeout(START_S):
            assert await program.process.wait() == 5
    assert program.log.read_text().count("unavailable") == 1


async def test_a_fork_server_that_does_not_start_ends_the_node(settings: Settings, bus: Bus, tmp_path: Path) -> None:
    program = "from services.agent import main as agent; import sys; sys.exit(agent.main(fork_server=['false']))"
    async with running(settings, "n0", tmp_path / "agent.log", program=program) as started:
        async with asyncio.timeout(START_S):
            assert await started.process.wait() == 5
    assert "the fork server ended with 1 before the agent worked" in started.log.read_text()


async def test_an_agent_that_keeps_ending_ends_the_node(settings: Settings, tmp_path: Path) -> None:
    """The first one has worked; each further one ends at once."""
    code = (
        "import socket, sys;"
        "at = sys.argv.index('--reports'); reports = socket.socket(fileno=int(sys.argv[at + 1]));"
        "probes = socket.create_server(('127.0.0.1', 0)); socket.send_fds(reports, [b'x'], [probes.fileno()]);"
        "sys.exit(3)"
    )
    program = (
        "from services.agent import main as agent; from services.agent.succession import restarts; import sys;"
        "restarts.FIRST_PAUSE_S = 0.01;"
        f"sys.exit(agent.main(agent=[sys.executable, '-c', {code!r}],"
        "fork_server=[sys.executable, '-m', 'tests.agent.stand_in']))"
    )
    async with running(settings, "n0", tmp_path / "agent.log", program=program) as started:
        async with asyncio.timeout(2 * START_S):
            assert await started.process.wait() == 1
    lines = started.log.read_text()
    assert lines.count("it is started again") == 5
    assert "the agent ended with 3, after 5 restarts in 60 s" in lines
