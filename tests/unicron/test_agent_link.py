"""The link of a training process to its agent: what it answers while it waits, and when collectives are broken off."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from tests.condition import until_blocking
from unicron.link.agent_link import EXIT_INCOMPATIBLE, NOTHING, STOP, AgentLink
from unicron.link.breaker import Breakable, Breaker, BreakMethod
from unicron.link.connection import socket_address
from unicron.protocol import environment
from unicron.protocol.messages import (
    Checkpointed,
    Configure,
    Drain,
    Drained,
    Finished,
    Held,
    Hello,
    Hold,
    Incompatible,
    Message,
    Progress,
    Received,
    Resumed,
    Stop,
    decode,
    encode,
)

TIMEOUT_S = 10.0

START_S = 40.0
"""A process that imports torch on a busy machine."""


class FakeAgent:
    """The agent's end of the connection."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_address(address))
        self._listener.listen()
        self._listener.settimeout(TIMEOUT_S)

    def accept(self, timeout_s: float = TIMEOUT_S) -> None:
        self._listener.settimeout(timeout_s)
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(TIMEOUT_S)
        self._lines = self._connection.makefile("rb")

    def send(self, message: Message) -> None:
        self._connection.sendall(encode(message))

    def send_line(self, line: bytes) -> None:
        self._connection.sendall(line + b"\n")

    def receive(self) -> Message:
        return decode(self._lines.readline())

    def disconnect(self) -> None:
        self._lines.close()
        self._connection.close()

    def close(self) -> None:
        self.disconnect()
        self._listener.close()


@pytest.fixture
def interval_s(request: pytest.FixtureRequest) -> float:
    """Return for how long progress may be kept back."""
    return float(getattr(request, "param", environment.DEFAULTS[environment.REPORT_INTERVAL_S]))


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch, interval_s: float) -> Iterator[tuple[FakeAgent, AgentLink]]:
    """An agent, and a link to it that has joined generation 2."""
    address = f"@unicron-test-{uuid4().hex}"
    monkeypatch.setenv(environment.SOCKET, address)
    monkeypatch.setenv(environment.REPORT_INTERVAL_S, str(interval_s))
    agent = FakeAgent(address)
    link = AgentLink()
    agent.accept()
    assert isinstance(agent.receive(), Hello)
    agent.send(generation(2))
    joined = link.next_generation(0)
    assert joined == generation(2)
    assert isinstance(agent.receive(), Progress)
    yield agent, link
    agent.send(generation(99))  # ends a wait that a failed test has left
    link.close()
    agent.close()


def generation(number: int) -> Configure:
    return Configure(
        generation=number, stage="boundary", rank=0, world_size=1, tensor=1, pipeline=1, store_host="", store_port=0,
        members=[[0, "n/0", "initial"]],
    )  # fmt: skip


def waits(agent: FakeAgent, link: AgentLink, *, drained: bool = False) -> Future[Configure]:
    """Let the link wait for a generation after three updates; return its result once it waits."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(link.next_generation, 3, drained=drained)
    pool.shutdown(wait=False)
    if drained:
        assert agent.receive() == Drained(generation=2, step=3)
    message = agent.receive()
    assert isinstance(message, Progress)
    assert (message.step, message.phase) == (4, "waiting")
    return future


def test_a_held_process_answers_and_joins_the_next_generation(connected: tuple[FakeAgent, AgentLink]) -> None:
    agent, link = connected
    future = waits(agent, link)
    agent.send(Hold(generation=1))  # of a past generation: there is no answer
    agent.send(Hold(generation=2))
    assert agent.receive() == Held(generation=2, step=3)
    assert link.is_held()
    agent.send(generation(2))  # not a new one
    agent.send(generation(3))
    assert future.result(TIMEOUT_S) == generation(3)
    assert not link.is_held()


@pytest.mark.parametrize("held", [False, True])
def test_a_drain_is_answered_by_what_the_process_waits_for(held: bool, connected: tuple[FakeAgent, AgentLink]) -> None:
    agent, link = connected
    future = waits(agent, link)
    if held:
        agent.send(Hold(generation=2))
        assert agent.receive() == Held(generation=2, step=3)
    agent.send(Drain(generation=2))
    assert agent.receive() == (Held if held else Drained)(generation=2, step=3)
    agent.send(generation(3))
    assert future.result(TIMEOUT_S) == generation(3)


@pytest.mark.parametrize("left", ["by a fault", "held", "drained"])
@pytest.mark.parametrize("lose_steps", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_process_between_two_generations_keeps_its_state_when_asked_to_stop(
    left: str, lose_steps: bool, early: bool, connected: tuple[FakeAgent, AgentLink]
) -> None:
    """Whether the stop comes before the process waits or behind; other requests are answered as without it."""
    agent, link = connected
    stop = Stop(generation=2, lose_steps=lose_steps)
    if early:
        agent.send(stop)
        until_blocking(lambda: link.request >= STOP)
    future = waits(agent, link, drained=left == "drained")
    if not early:
        agent.send(stop)
    if left == "held":
        agent.send(Hold(generation=2))
        assert agent.receive() == Held(generation=2, step=3)
    agent.send(Drain(generation=2))
    assert agent.receive() == (Held if left == "held" else Drained)(generation=2, step=3)
    assert not future.done()
    agent.send(generation(3))
    assert future.result(TIMEOUT_S) == generation(3)
    assert link.request == NOTHING, "the plan that has configured the generation asks again"


def test_the_successor_of_an_agent_gets_what_was_not_answered_and_the_newest_progress(
    connected: tuple[FakeAgent, AgentLink],
) -> None:
    agent, link = connected
    resumed, written = Resumed(generation=2, step=1, source="own"), Checkpointed(generation=2, step=2, path="/two")
    for message in (resumed, written):
        link.send(message)
        assert agent.receive() == message
    link.progress(3, "begun")
    assert isinstance(agent.receive(), Progress)
    agent.send(Received())
    agent.send(Hold(generation=2))
    future = waits(agent, link)
    assert agent.receive() == Held(generation=2, step=3)
    for _ in range(2):  # an answer counts on its own connection only
        agent.disconnect()
        agent.accept()
        assert isinstance(agent.receive(), Hello)
        assert agent.receive() == written
        assert agent.receive() == Held(generation=2, step=3)
        progress = agent.receive()
        assert isinstance(progress, Progress)
        assert (progress.step, progress.phase) == (4, "waiting")
    agent.send(Received())
    agent.send(Received())
    agent.send(generation(3))
    assert future.result(TIMEOUT_S) == generation(3)
    agent.disconnect()
    agent.accept()
    assert isinstance(agent.receive(), Hello)
    assert isinstance(agent.receive(), Progress)


def test_a_process_does_not_end_before_the_successor_has_its_last_message(
    connected: tuple[FakeAgent, AgentLink],
) -> None:
    agent, link = connected
    link.send(Resumed(generation=2, step=1, source="own"))
    assert isinstance(agent.receive(), Resumed)
    agent.send(Received())
    agent.send(Hold(generation=2))
    waiting = waits(agent, link)
    assert isinstance(agent.receive(), Held)  # so the answer before has arrived, too
    agent.send(Received())
    agent.send(generation(3))
    assert waiting.result(TIMEOUT_S) == generation(3)
    agent.disconnect()  # what is sent from here on reaches the successor alone
    last = Finished(generation=3, rank=0, step=9)
    link.send(last)
    assert link._connection is not None
    flushing = threading.Thread(target=link._connection.flush, args=(0.0, TIMEOUT_S))
    flushing.start()
    agent.accept()
    assert isinstance(agent.receive(), Hello)
    while (found := agent.receive()) != last:
        assert isinstance(found, Progress)
    assert flushing.is_alive()
    agent.send(Received())
    flushing.join(TIMEOUT_S)
    assert not flushing.is_alive()


@pytest.mark.parametrize("interval_s", [3600.0], indirect=True)
def test_progress_inside_a_step_waits_for_what_must_be_sent(connected: tuple[FakeAgent, AgentLink]) -> None:
    agent, link = connected
    link.progress(1, "begun")
    for k in range(3):
        link.progress(1, "compute", micro_batch=k)
    link.progress(1, "ended", loss=2.0, duration_s=0.5)
    link.progress(2, "begun")
    link.progress(2, "compute", micro_batch=0)
    link.progress(2, "reduce")
    link.send(Resumed(generation=2, step=2, source="own"))
    link.progress(2, "update")
    link.send(Resumed(generation=2, step=2, source="own"))

    def progress(step: int, phase: str, **fields: float) -> Progress:
        return Progress(generation=2, rank=0, step=step, phase=phase, sections=0, **fields)  # type: ignore[arg-type]

    assert [agent.receive() for _ in range(7)] == [
        progress(1, "begun"),
        progress(1, "ended", loss=2.0, duration_s=0.5),
        progress(2, "begun"),
        progress(2, "reduce"),
        Resumed(generation=2, step=2, source="own"),
        progress(2, "update"),
        Resumed(generation=2, step=2, source="own"),
    ]


def test_progress_that_is_kept_back_comes_although_nothing_follows(connected: tuple[FakeAgent, AgentLink]) -> None:
    agent, link = connected
    for step in (1, 2):  # the thread waits for the agent's messages alone; and it waits for the time
        link.progress(step, "begun")
        link.progress(step, "reduce")
        while agent.receive() != Progress(generation=2, rank=0, step=step, phase="reduce", sections=0):
            pass


class WatchedCondition(threading.Condition):
    """A condition that shows whether a thread has waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.set()
        return super().wait(timeout)


def test_sockets_are_shut_only_while_the_training_thread_may_block_in_a_held_generation() -> None:
    changed, held, aborted = WatchedCondition(), [True], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        inode = os.fstat(client.fileno()).st_ino
        breaker = Breaker(changed, lambda: held[0])
        breaker.set_method(BreakMethod(shared=Breakable(has_socket=lambda i: i == inode, interrupt=aborted.set)))
        breaker.start()
        assert changed.waited.wait(TIMEOUT_S)
        assert breaker.broken_at_s is None
        breaker.enter()
        assert aborted.wait(TIMEOUT_S)
        assert breaker.broken_at_s is not None
        assert client.recv(1) == b""
        changed.waited.clear()
        breaker.leave()
        assert changed.waited.wait(TIMEOUT_S)
        breaker.enter()
        changed.waited.clear()
        with changed:
            held[0] = False
        assert changed.waited.wait(TIMEOUT_S)


def test_a_message_that_is_not_known_is_ignored_and_reported_once(
    connected: tuple[FakeAgent, AgentLink], capfd: pytest.CaptureFixture[str]
) -> None:
    agent, link = connected
    for line in (b'{"message":"later"}', b'{"message":"later","x":2}', b"\xff", b"[" * 100_000, b'{"message":"hold"}'):
        agent.send_line(line)
    waiting = waits(agent, link)
    newer = {**json.loads(encode(generation(3))), "added_later": {"deep": [1]}}
    agent.send_line(json.dumps(newer).encode())
    assert waiting.result(TIMEOUT_S) == generation(3)
    ignored = [line for line in capfd.readouterr().err.splitlines() if "is ignored" in line]
    assert len(ignored) == 3, ignored  # later; what has no name; hold without its generation


@pytest.mark.slow
def test_a_process_that_the_agent_does_not_read_ends_with_its_reason(tmp_path: Path) -> None:
    address = f"@unicron-test-{uuid4().hex}"
    agent = FakeAgent(address)
    program = "from unicron.link.agent_link import AgentLink; AgentLink().next_generation(0)"
    variables = {environment.SOCKET: address, environment.TASK: "gpt", environment.WORKER: "n0/0"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | variables, stderr=subprocess.PIPE, text=True
    )
    agent.accept(START_S)
    assert isinstance(agent.receive(), Hello)
    agent.send(Incompatible(reason="n0/0 speaks protocol 9"))
    _, errors = process.communicate(timeout=START_S)
    agent.close()
    assert process.returncode == EXIT_INCOMPATIBLE
    assert "the node agent refuses this process: n0/0 speaks protocol 9" in errors
