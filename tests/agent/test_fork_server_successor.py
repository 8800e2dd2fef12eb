"""A fork server that serves one agent after the other: what the second one learns, and with whom the server ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.kit import STAND_IN, WAIT_S


class Connection:
    """An agent's connection to the fork server: to the name of its socket, or one that another process has made."""

    def __init__(self, server: bytes | socket.socket) -> None:
        if isinstance(server, socket.socket):
            self._socket = server
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(server)
        self._socket.settimeout(WAIT_S)
        self._lines = self._socket.makefile("rb")

    def ask(self, **request: Any) -> None:
        self._socket.sendall(json.dumps(request).encode() + b"\n")

    def ask_partly(self) -> None:
        self._socket.sendall(b'{"do": "ack')

    def event(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._lines.readline())
        return found

    def greeting(self) -> list[dict[str, Any]]:
        """Return what the server says up to ``ready``."""
        events = [self.event()]
        while events[-1]["event"] != "ready":
            events.append(self.event())
        return events[:-1]

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"\0unicron-test-{uuid.uuid4().hex}")
        bound.listen()
        yield bound


@contextlib.contextmanager
def server(listener: socket.socket, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*STAND_IN, "--fd", str(listener.fileno()), *arguments]
    process = subprocess.Popen(command, pass_fds=[listener.fileno()], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ended(pid: int) -> bool:
    """Wait until a process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with contextlib.closing(os.fdopen(descriptor)):
        return bool(select.select([descriptor], [], [], WAIT_S)[0])


def start(agent: Connection, name: str, output: Path) -> int:
    agent.ask(do="store", id=name, host="127.0.0.1", output=str(output))
    event = agent.event()
    assert (event["event"], event["id"]) == ("store", name), event
    return int(event["pid"])


def test_a_successor_learns_who_lives_and_who_has_ended_until_it_acknowledges(
    listener: socket.socket, tmp_path: Path
) -> None:
    with server(listener):
        first = Connection(listener.getsockname())
        assert first.greeting() == []
        pids = {name: start(first, name, tmp_path / "output") for name in ("a", "b", "c")}
        os.kill(pids["a"], signal.SIGKILL)
        end_of_a = {"event": "exited", "id": "a", "pid": pids["a"], "code": -9}
        assert first.event() == end_of_a
        first.ask_partly()
        first.close()
        os.kill(pids["b"], signal.SIGKILL)  # while there is no agent
        assert ended(pids["b"])
        end_of_b = {"event": "exited", "id": "b", "pid": pids["b"], "code": -9}
        for _ in range(2):
            agent = Connection(listener.getsockname())
            found = agent.greeting()
            if end_of_b not in found:  # it has noticed the end just after it began to greet
                found += [agent.event()]
                found.remove({"event": "forked", "id": "b", "pid": pids["b"]})
            assert sorted(found, key=lambda event: str(event["id"])) == [
                end_of_a,
                end_of_b,
                {"event": "forked", "id": "c", "pid": pids["c"]},
            ]
            agent.close()
        agent = Connection(listener.getsockname())
        agent.greeting()
        for name in ("a", "b", "unknown"):
            agent.ask(do="acknowledge", id=name)
        start(agent, "d", tmp_path / "output")
        agent.close()
        last = Connection(listener.getsockname())
        assert [(event["event"], event["id"]) for event in last.greeting()] == [("forked", "c"), ("forked", "d")]
        last.close()


def test_the_server_and_its_children_end_on_sigterm(listener: socket.socket, tmp_path: Path) -> None:
    with server(listener) as process:
        agent = Connection(listener.getsockname())
        agent.greeting()
        pid = start(agent, "a", tmp_path / "output")
        process.terminate()
        assert process.wait(WAIT_S) == 0
        assert ended(pid)
        agent.close()


def test_the_server_ends_with_its_parent(listener: socket.socket, tmp_path: Path) -> None:
    """It serves a connection of its parent's, and none of another process."""
    program = (
        "import os, socket, subprocess, sys, time;"
        "listener, ours = (socket.socket(fileno=int(number)) for number in sys.argv[1:3]);"
        "command = [*sys.argv[3:], '--parent', str(os.getpid())];"
        "server = subprocess.Popen(command, pass_fds=[listener.fileno()]);"
        "agent = socket.socket(socket.AF_UNIX); agent.connect(listener.getsockname());"
        "socket.send_fds(ours, [str(server.pid).encode()], [agent.fileno()]); time.sleep(3600)"
    )
    ours, theirs = socket.socketpair()
    number = str(listener.fileno())
    parent = subprocess.Popen(
        [sys.executable, "-c", program, number, str(theirs.fileno()), *STAND_IN, "--fd", number],
        pass_fds=[listener.fileno(), theirs.fileno()],
    )
    ours.settimeout(WAIT_S)
    text, [descriptor], _, _ = socket.recv_fds(ours, 100, 1)
    server_pid = int(text)
    stranger = Connection(listener.getsockname())
    with pytest.raises(json.JSONDecodeError):
        stranger.event()
    stranger.close()
    agent = Connection(socket.socket(fileno=descriptor))
    agent.greeting()
    pid = start(agent, "a", tmp_path / "output")
    parent.kill()
    assert ended(server_pid)
    assert ended(pid)
    parent.wait()
    for one in (ours, theirs, agent):
        one.close()


def test_a_server_whose_parent_has_ended_does_not_start(listener: socket.socket) -> None:
    with server(listener, "--parent", "1") as process:
        assert process.wait(WAIT_S) == 1
