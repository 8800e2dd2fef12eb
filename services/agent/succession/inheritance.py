"""What the agents of one supervisor share, one after the other, their credential among it.

The supervisor makes it, and passes it to each agent as descriptors and arguments of the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import logging
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.agent.node.record import RecordFile
from shared.errors import InvalidInput
from shared.settings.model import Settings

BACKLOG = 1024
"""Number of ranks that may wait to be accepted while there is no agent: all that a node can have
(``Settings.workers_per_node``)."""

ENDING = b"ending"
"""An agent's report that it hands over."""

FORK_SERVER_IN = b"fork server in "
"""The beginning of an agent's request for a further fork server; a Python's path follows. It comes with the socket on
which that fork server is to listen."""

LINE_BYTES = 8192
"""Longest message of an agent to its supervisor: a path has at most 4,096 bytes."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inheritance:
    """What an agent finds and leaves.

    Attributes:
        supervisor: id of the supervisor, new for each of its starts.
        ranks: listens for ranks. They connect to the same name whichever agent serves it.
        fork_servers: name of the socket on which the fork server listens for agents, in Linux's abstract namespace;
            those of other Pythons listen on names that begin so.
        record: the state of the node.
        reports: to the supervisor.
    """

    supervisor: str
    ranks: socket.socket
    fork_servers: str
    record: RecordFile
    reports: socket.socket

    @property
    def ranks_name(self) -> str:
        """Name of the socket for ranks, in Linux's abstract namespace."""
        name: bytes = self.ranks.getsockname()
        return name.removeprefix(b"\0").decode()

    def report_started(self, answer: bytes, probes: socket.socket) -> None:
        """Report to the supervisor that the agent works.

        Args:
            answer: what the agent answers to probes.
            probes: listens for probes; the supervisor answers them while there is no agent.
        """
        socket.send_fds(self.reports, [answer], [probes.fileno()])

    def fork_server_name(self, python: str) -> str:
        """Return the name of the socket of a Python's fork server; empty: of the node's own."""
        return f"{self.fork_servers}-{_digest(python)}" if python else self.fork_servers

    def fork_server_log(self, python: str) -> str:
        """Return the name of the file with what the fork server of a Python prints; empty: of the node's own."""
        return f"forkserver-{_digest(python)}.log" if python else "forkserver.log"

    def ask_for_fork_server(self, python: str) -> None:
        """Have the supervisor start the fork server of a Python, if none runs.

        Raises:
            OSError: the supervisor has ended.
        """
        try:
            listening = listener(self.fork_server_name(python))
        except OSError as err:
            if err.errno != errno.EADDRINUSE:
                raise
            return  # a fork server listens already
        with contextlib.closing(listening):
            socket.send_fds(self.reports, [FORK_SERVER_IN + os.fsencode(python)], [listening.fileno()])

    def report_ending(self) -> None:
        """Report to the supervisor that the agent hands over: it answers probes no more."""
        self.reports.send(ENDING)


def listener(name: str) -> socket.socket:
    """Return a socket that listens on a name in Linux's abstract namespace."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(f"\0{name}")
    found.listen(BACKLOG)
    return found


def _digest(python: str) -> str:
    """Return what stands for a Python's path in names of sockets and files."""
    return hashlib.sha256(os.fsencode(python)).hexdigest()[:16]


def new_id() -> str:
    """Return an id for a supervisor."""
    return uuid.uuid4().hex


def arguments(inherited: Inheritance, parent: int) -> list[str]:
    """Return the arguments from which ``read`` makes the same in another process.

    Args:
        inherited: what the agent gets; its descriptors have the same numbers there.
        parent: pid of the supervisor.
    """
    first, second = inherited.record.descriptors
    return [
        *("--supervisor", inherited.supervisor),
        *("--parent", str(parent)),
        *("--ranks", str(inherited.ranks.fileno())),
        *("--fork-servers", inherited.fork_servers),
        *("--record", str(first), str(second)),
        *("--reports", str(inherited.reports.fileno())),
    ]


def descriptors(inherited: Inheritance) -> list[int]:
    """Return the descriptors that another process must get."""
    return [inherited.ranks.fileno(), *inherited.record.descriptors, inherited.reports.fileno()]


def read(command_line: Sequence[str]) -> tuple[Inheritance, int]:
    """Return what ``arguments`` describe, and the pid of the supervisor."""
    parser = argparse.ArgumentParser(
        prog="services.agent.agent_process", description="A node agent; services.agent.main starts it."
    )
    parser.add_argument("--supervisor", required=True, help="the supervisor's id")
    parser.add_argument("--parent", type=int, required=True, help="the supervisor's pid")
    parser.add_argument("--ranks", type=int, required=True, help="descriptor: listens for ranks")
    parser.add_argument("--fork-servers", required=True, help="name of the fork server's socket")
    parser.add_argument("--record", type=int, nargs=2, required=True, help="descriptors: the state of the node")
    parser.add_argument("--reports", type=int, required=True, help="descriptor: to the supervisor")
    given = parser.parse_args(command_line)
    first, second = given.record
    ranks, reports = socket.socket(fileno=given.ranks), socket.socket(fileno=given.reports)
    for descriptor in (given.ranks, given.reports, first, second):
        os.set_inheritable(descriptor, False)
    found = Inheritance(given.supervisor, ranks, given.fork_servers, RecordFile((first, second)), reports)
    return found, given.parent


class CredentialSource:
    """Opens the credential for one agent after the other.

    The supervisor opens the file, so that the agent knows no path, and each agent has the file as it then is. Where it
    cannot be opened any more, since a later user of this process may not read it or it is being replaced, the agent
    gets the one that was opened last.

    Args:
        settings: ``nats_credential``, or ``nats_credential_fd``, which was opened for good by whoever started this.
    """

    def __init__(self, settings: Settings) -> None:
        self._path: Path | None = None if settings.nats_credential_fd is not None else settings.nats_credential
        self._opened = settings.nats_credential_fd

    def open(self) -> int:
        """Return a descriptor of the credential, which stays this object's.

        Raises:
            InvalidInput: there is none, and never was.
        """
        if self._path is not None:
            try:
                opened = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as err:
                problem = f"credential {self._path}: {err.strerror or err}"
                if self._opened is None:
                    raise InvalidInput(problem) from err
                logger.warning("%s: the next agent has the one that was opened before", problem)
            else:
                self.close()
                self._opened = opened
        if self._opened is None:
            raise InvalidInput("there is no credential: UNICRON_NATS_CREDENTIAL names its file")
        return self._opened

    def close(self) -> None:
        """Close the descriptor."""
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None
