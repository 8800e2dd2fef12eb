"""The node's main process: it starts the fork servers and the agent, and the agent again when it has ended.

Ranks are children of the fork server. They outlive the agent, whose successor finds them, and end with the supervisor:
the kernel signals both of its children when it ends. An agent that was asked to end, that may not join, or that has
never worked is not started again: everything ends with it. The supervisor talks to no other machine, except that it
answers probes while there is no agent: so the node counts as cut off, and not as lost, until the successor is heard.

The fork server of the node's own Python runs always, and is replaced when it has ended. Fork servers of other Pythons,
which tasks name, run from an agent's request on; one that has ended is replaced at the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

from services.agent.machine.hardware import CPU, NO_DEVICES
from services.agent.node.record import RecordFile
from services.agent.succession import inheritance
from services.agent.succession.inheritance import ENDING, FORK_SERVER_IN, LINE_BYTES, CredentialSource, Inheritance
from services.agent.succession.restarts import HANDED_OVER, MAX_RESTARTS, WINDOW_S, Restarts
from shared.bus.cancellation import cancelled
from shared.errors import NameInUse, Unavailable
from shared.machine.process import END_SIGNAL, PARENT_DEATH_VARIABLE
from shared.service.joining import CREDENTIAL, CREDENTIAL_FD
from shared.settings.model import Settings
from unicron.protocol import environment

logger = logging.getLogger(__name__)

AGENT = (sys.executable, "-P", "-m", "services.agent.agent_process")
"""The agent's command line. ``-P`` keeps a ``services/`` folder in the working directory off the module path."""

FORK_SERVER = (sys.executable, "-P", "-m", "unicron.forkserver")
"""The fork server's command line."""

FORK_SERVER_END_S = 2.0
"""How long a fork server that was asked to end may take; it then is killed."""

_SECRET_VARIABLES = frozenset({CREDENTIAL, CREDENTIAL_FD, "UNICRON_LOG_URL"})
"""Variables that are removed from the environment of training processes, because these run the user's code."""

_OWN_VARIABLES = frozenset({PARENT_DEATH_VARIABLE, CREDENTIAL, CREDENTIAL_FD})
"""Variables that are not passed on to the agent, which gets a descriptor of its own."""

_FINAL = frozenset({0, NameInUse.exit_code})
"""Exit statuses of an agent that is not started again: it was asked to end, or its name belongs to another one."""


class Supervisor:
    """Keeps one agent and one fork server running.

    Args:
        settings: ``node``, ``run_dir``, ``hardware``, ``interpreters``, ``orphan_grace_s``, ``nats_credential``,
            ``nats_credential_fd``.
        agent: the agent's command line, to which arguments are added.
        fork_server: the fork server's; ``interpreters`` may put another Python in front.
    """

    def __init__(
        self, settings: Settings, *, agent: Sequence[str] = AGENT, fork_server: Sequence[str] = FORK_SERVER
    ) -> None:
        self._settings, self._agent_command = settings, agent
        own = settings.rank_interpreters[:1] or fork_server[:1]
        self._fork_server_command = (*own, *fork_server[1:])
        self._credential = CredentialSource(settings)
        supervisor = inheritance.new_id()
        self._fork_servers = inheritance.listener(f"unicron-{supervisor}-fork-server")
        self._reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reports.setblocking(False)
        self._inherited = Inheritance(
            supervisor=supervisor,
            ranks=inheritance.listener(f"unicron-{supervisor}-ranks"),
            fork_servers=f"unicron-{supervisor}-fork-server",
            record=RecordFile.create(),
            reports=theirs,
        )
        self._agent: asyncio.subprocess.Process | None = None
        self._fork_server: asyncio.subprocess.Process | None = None
        self._others: set[asyncio.Task[None]] = set()
        """The tasks that each run the fork server of another Python, from the request to its end."""
        self._probes: socket.socket | None = None
        self._answer = b""
        self._worked = False
        """Whether an agent of this supervisor has ever reported that it works."""
        self._ending = asyncio.Event()

    async def run(self) -> int:
        """Work until asked to end, or until a process ends that is not started again; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, END_SIGNAL):
            loop.add_signal_handler(number, self._ask_to_end, number)
        loop.add_reader(self._reports, self._take_report)
        work = [asyncio.create_task(one) for one in (self._keep_agent(), self._keep_fork_server())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            return max(task.result() for task in done)
        finally:
            await cancelled(*work)
            await self._end_children()
            loop.remove_reader(self._reports)
            self._close()

    # ---- the agent

    async def _keep_agent(self) -> int:
        """Run agents, one after the other; return the exit code once none is to follow."""
        restarts = Restarts()
        while True:
            self._agent = process = await self._start_agent()
            if self._ending.is_set():
                process.send_signal(END_SIGNAL)
            code = await process.wait()
            self._agent = None
            if self._ending.is_set():
                return max(code, 0)
            if code in _FINAL or not self._worked:
                return code if code >= 0 else 1
            self._answer_probes()
            if code == HANDED_OVER:
                logger.info("the agent has handed over: its successor starts")
                continue
            if not await self._may_restart("agent", code, restarts):
                return 0 if self._ending.is_set() else 1

    async def _start_agent(self) -> asyncio.subprocess.Process:
        variables = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
        credential = self._credential.open()
        return await asyncio.create_subprocess_exec(
            *self._agent_command,
            *inheritance.arguments(self._inherited, os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[*inheritance.descriptors(self._inherited), credential],
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which passes it on
            env=variables | {CREDENTIAL_FD: str(credential)},
        )

    def _ask_to_end(self, number: signal.Signals) -> None:
        """Pass a request to end on to the agent, which drains its node first. Without an agent everything ends."""
        logger.info("%s: stopping", number.name)
        self._ending.set()
        if self._agent is not None:
            with contextlib.suppress(ProcessLookupError):
                self._agent.send_signal(END_SIGNAL)

    # ---- the fork server

    async def _keep_fork_server(self) -> int:
        """Run fork servers, one after the other; return the exit code once none is to follow."""
        restarts = Restarts()
        while True:
            code = await self._run_fork_server()
            if not self._worked:
                logger.error("the fork server ended with %s before the agent worked; see forkserver.log", code)
                return Unavailable.exit_code
            if not await self._may_restart("fork server", code, restarts):
                return Unavailable.exit_code

    async def _run_fork_server(self) -> int | str:
        """Run a fork server of the node's own Python; return its exit status, or why there is none."""
        try:
            self._fork_server = await self._start_fork_server(
                self._fork_server_command, self._fork_servers, "forkserver.log"
            )
        except OSError as err:
            # A machine that is short of memory or processes may have some again later.
            return f"{err.strerror or err}"
        return await self._fork_server.wait()

    async def _start_fork_server(
        self, command: Sequence[str], listening: socket.socket, log: str
    ) -> asyncio.subprocess.Process:
        """Start a fork server that listens on a socket, and writes to a file of the node's folder.

        Raises:
            OSError: it cannot be started.
        """
        output = self._settings.run_dir.resolve() / "nodes" / self._settings.node / log
        variables = {name: value for name, value in os.environ.items() if name not in _SECRET_VARIABLES} | {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "OPENBLAS_NUM_THREADS": "1",
            environment.ORPHAN_GRACE_S: str(self._settings.orphan_grace_s),
        }
        if self._settings.hardware == CPU:
            # What the process imports might look for devices, and a process forked from it would go by what was found
            # then.
            variables |= NO_DEVICES
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as file:
            return await asyncio.create_subprocess_exec(
                *command,
                *("--fd", str(listening.fileno()), "--parent", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=[listening.fileno()],
                start_new_session=True,
                env=variables,
            )

    async def _run_other(self, python: str, listening: socket.socket) -> None:
        """Run the fork server of another Python until it ends, or this supervisor does."""
        # Nobody else holds the socket afterwards: its end is seen by whoever waits for an answer.
        with contextlib.closing(listening):
            command = (python, *self._fork_server_command[1:])
            try:
                process = await self._start_fork_server(command, listening, self._inherited.fork_server_log(python))
            except (OSError, ValueError) as err:
                logger.error("no fork server in %s: %s", python, err)
                return
        try:
            logger.info("a fork server runs in %s", python)
            code = await process.wait()
            logger.error("the fork server in %s ended with %s", python, code)
        finally:
            await _end(process)

    # ---- both

    async def _may_restart(self, what: str, code: int | str, restarts: Restarts) -> bool:
        """Wait as long as it takes until a process that has ended may be started again; return whether it may."""
        pause_s = restarts.pause_s(asyncio.get_running_loop().time())
        if pause_s is None:
            logger.error("the %s ended with %s, after %d restarts in %g s", what, code, MAX_RESTARTS, WINDOW_S)
            return False
        logger.error("the %s ended with %s; it is started again in %g s", what, code, pause_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._ending.wait()
        return not self._ending.is_set()

    async def _end_children(self) -> None:
        """End what still runs: the agent at once, the fork servers together with their children."""
        if self._agent is not None and self._agent.returncode is None:
            self._agent.kill()
            await self._agent.wait()
        await cancelled(*self._others)
        if self._fork_server is not None:
            await _end(self._fork_server)

    def _close(self) -> None:
        self._take_probes(None)
        self._credential.close()
        self._inherited.record.close()
        for owned in (self._reports, self._inherited.reports, self._inherited.ranks, self._fork_servers):
            owned.close()

    # ---- probes

    def _take_report(self) -> None:
        """Take an agent's report: that it works, and answers probes from now on, or does so no more; or its request."""
        with contextlib.suppress(OSError):
            text, found, _, _ = socket.recv_fds(self._reports, LINE_BYTES, 1)
            if found and text.startswith(FORK_SERVER_IN):
                python = os.fsdecode(text.removeprefix(FORK_SERVER_IN))
                running = asyncio.create_task(self._run_other(python, socket.socket(fileno=found[0])))
                self._others.add(running)
                running.add_done_callback(self._others.discard)
            elif found:
                self._worked, self._answer = True, text
                self._take_probes(socket.socket(fileno=found[0]))
            elif text == ENDING:
                self._answer_probes()

    def _take_probes(self, probes: socket.socket | None) -> None:
        """Hold the socket on which the present agent listens for probes, in place of its predecessor's."""
        if self._probes is not None:
            asyncio.get_running_loop().remove_reader(self._probes)
            self._probes.close()
        self._probes = probes

    def _answer_probes(self) -> None:
        """Answer probes as the agent did that has ended, until its successor works."""
        if self._probes is not None:
            asyncio.get_running_loop().add_reader(self._probes, functools.partial(self._answer_probe, self._probes))

    def _answer_probe(self, probes: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = probes.accept()
            with contextlib.closing(connection):
                connection.setblocking(False)
                connection.send(self._answer)


async def _end(server: asyncio.subprocess.Process) -> None:
    """End a fork server, together with its children; nothing happens if it has ended."""
    if server.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        server.send_signal(END_SIGNAL)
    try:
        async with asyncio.timeout(FORK_SERVER_END_S):
            await server.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        await server.wait()
