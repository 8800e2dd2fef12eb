"""The agent's self-test: whether the node can run ranks, asked before it is used again (``messages/self_test.py``).

It is a list of named checks (``SelfTests.checks``), done in their order; the first that fails says what is wrong:

    processes     an isolated node has none
    devices       none is lost, none needs a reset
    folders       those that ranks write to take a file
    fork server   starts a process, which is reached at the node's address
    compute       a product is what it must be, bit by bit, on the processor and on each device
    memory        patterns are read back as they were written, in part of the host's and each device's memory
    preflight     how fast the node does what training does, where its operator wants that (``cluster/preflight.py``)
    bandwidth     of the links to some healthy nodes of its kind, against that of those among themselves

The load is small where tasks train on the node: one process of the lowest priority for about a second, and 16 MiB of
memory. Devices are tested only where no process of a task is there, since a context takes memory that tasks may need.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from services.agent.machine import bandwidth
from services.agent.machine.writing import write_problem
from services.agent.node.slots import Node
from services.agent.ranks.fork_server import ForkServer
from services.agent.ranks.stores import ID_PREFIX
from shared.bus.connection import Bus
from shared.bus.messages import REASON_CHARACTERS
from shared.errors import Unavailable, Undecodable
from shared.events.node_events import CheckResult
from shared.messages.self_test import BANDWIDTH, SELF_TEST, SelfTest, SelfTestResult

logger = logging.getLogger(__name__)

PROCESS_TIMEOUT_S = 5.0
"""Time for a process that the fork server starts: it takes 50 ms, on a busy machine a second."""

CHECK_TIMEOUT_S = 25.0
"""Time for the process that computes and tests memory: a second, and ten more on a busy machine where the fork server
has not imported torch."""

MEMORY_BYTES = 256 << 20
"""Memory that is tested where no task is. It is a part of all, so a failing module shows only by chance; to test more
would take longer than operators and tasks wait."""

BUSY_MEMORY_BYTES = 16 << 20
"""Memory that the test takes beside processes of tasks, which may need the rest."""

Check = Callable[[SelfTest], Awaitable[list[CheckResult]]]
"""Does one check, or several of one kind; returns what they found."""

_CHECKS = TypeAdapter(list[CheckResult])


class SelfTests:
    """Tests the node on request.

    Args:
        node: whose workers may have processes.
        ip: an address of the node, on which a process of the test listens.
        folders: where ranks write; each must take a file.
        server: returns the fork server, once one runs.
        devices: returns which device cannot be used; empty: all can.
        preflight: the check of how fast the node is.

    Attributes:
        checks: name -> check, in the order in which they are done. More checks may be added.
    """

    def __init__(
        self,
        node: Node,
        ip: str,
        folders: list[Path],
        server: Callable[[], Awaitable[ForkServer]],
        devices: Callable[[], Awaitable[str]],
        preflight: Check,
    ) -> None:
        self._devices = devices
        self._node, self._ip, self._folders, self._server = node, ip, folders, server
        self.checks: dict[str, Check] = {
            "processes": self._processes,
            "devices": self._works,
            "folders": self._writes,
            "fork server": self._forks,
            "compute and memory": self._computes,
            "preflight": preflight,
            BANDWIDTH: self._reaches,
        }
        self._one_test = asyncio.Lock()

    async def serve(self, bus: Bus) -> None:
        """Answer requests from now on. Two requests are answered one after the other."""
        await bus.serve(SELF_TEST, self._answer, self._node.name, refuse=self._refuse)

    async def _answer(self, request: SelfTest) -> SelfTestResult:
        async with self._one_test:
            checks = await self._run(request)
        problem = next((str(check) for check in checks if not check.ok), "")
        level = logging.WARNING if problem else logging.INFO
        logger.log(level, "self-test: %s", "; ".join(map(str, checks)) or "nothing was asked for")
        return self._result(problem, checks)

    def _refuse(self, err: Undecodable) -> SelfTestResult:
        return self._result(f"the request cannot be read: {err.detail}", [])

    def _result(self, problem: str, checks: list[CheckResult]) -> SelfTestResult:
        return SelfTestResult(incarnation=self._node.incarnation, problem=problem[:REASON_CHARACTERS], checks=checks)

    async def _run(self, request: SelfTest) -> list[CheckResult]:
        """Do the checks that are asked for, up to the first one that fails."""
        done: list[CheckResult] = []
        for name, check in self.checks.items():
            if request.checks and name not in request.checks:
                continue
            done += await check(request)
            if not all(one.ok for one in done):
                break
        return done

    async def _processes(self, request: SelfTest) -> list[CheckResult]:
        processes = list(self._node.processes())
        if not request.empty or not processes:
            return [CheckResult(name="processes", ok=True, detail=f"{len(processes)} of tasks")]
        first = processes[0]
        detail = f"{first.worker} still has a process of task {first.task} (pid {first.pid})"
        return [CheckResult(name="processes", ok=False, detail=detail)]

    async def _works(self, _: SelfTest) -> list[CheckResult]:
        problem = await self._devices()
        return [CheckResult(name="devices", ok=not problem, detail=problem or "none is lost, none needs a reset")]

    async def _writes(self, _: SelfTest) -> list[CheckResult]:
        for folder in self._folders:
            if problem := await asyncio.to_thread(write_problem, folder):
                return [CheckResult(name="folders", ok=False, detail=problem)]
        return [CheckResult(name="folders", ok=True, detail=f"{len(self._folders)} take a file")]

    async def _forks(self, _: SelfTest) -> list[CheckResult]:
        problem = ""
        try:
            async with asyncio.timeout(PROCESS_TIMEOUT_S):
                await self._start_process()
        except TimeoutError:
            problem = f"the fork server has not started a process within {PROCESS_TIMEOUT_S:g} s"
        except Unavailable as err:
            problem = f"the fork server starts no process: {err.detail}"
        except OSError as err:
            problem = f"a process on this node cannot be reached at {self._ip}: {err}"
        return [CheckResult(name="fork server", ok=not problem, detail=problem or "starts a process that is reached")]

    async def _start_process(self) -> None:
        """Start a process that listens on the node's address, connect to it, and end it."""
        server = await self._server()
        output = self._folders[0] / "self-test.log"
        forked, port = await server.store(f"{ID_PREFIX}self-test-{uuid.uuid4().hex}", host=self._ip, output=output)
        try:
            _, writer = await asyncio.open_connection(self._ip, port)
            writer.close()
        finally:
            forked.kill()
            forked.close()

    async def _computes(self, _: SelfTest) -> list[CheckResult]:
        """Have a process compute, and test memory (``unicron.process.self_check``)."""
        try:
            async with asyncio.timeout(PROCESS_TIMEOUT_S):
                server = await self._server()
            return await self._check_process(server)
        except TimeoutError:
            problem = f"no answer of the process within {CHECK_TIMEOUT_S:g} s"
        except Unavailable as err:
            problem = f"the fork server starts no process: {err.detail}"
        except OSError as err:
            problem = f"the process's output cannot be read: {err.strerror or err}"
        return [CheckResult(name="compute", ok=False, detail=problem)]

    async def _check_process(self, server: ForkServer) -> list[CheckResult]:
        """Run the process; return what it found.

        Raises:
            TimeoutError: it does not end.
            Unavailable: it could not be started.
            OSError: its output cannot be read.
        """
        number = uuid.uuid4().hex
        output = self._folders[0] / f"self-test-{number}.log"
        idle = not any(self._node.processes())
        memory_bytes = MEMORY_BYTES if idle else BUSY_MEMORY_BYTES
        try:
            forked = await server.check(
                f"{ID_PREFIX}self-test-{number}", output=output, memory_bytes=memory_bytes, devices=idle
            )
            try:
                if not await asyncio.to_thread(forked.wait, CHECK_TIMEOUT_S):
                    raise TimeoutError
            finally:
                forked.kill()
                forked.close()
            lines = (await asyncio.to_thread(output.read_text, errors="replace")).strip().splitlines()
        finally:
            with contextlib.suppress(OSError):
                output.unlink()
        last = lines[-1] if lines else ""
        try:
            return _CHECKS.validate_json(last)
        except ValidationError:
            detail = f"the process ended without a result: {last[:REASON_CHARACTERS]}"
            return [CheckResult(name="compute", ok=False, detail=detail)]

    async def _reaches(self, request: SelfTest) -> list[CheckResult]:
        """Measure the links to peers."""
        rates = await bandwidth.measure(request.peers)
        if not rates:
            detail = "left out: no peer to measure with"
            return [CheckResult(name=BANDWIDTH, ok=True, detail=detail)]
        value, least = bandwidth.typical(rates), request.least_bytes_per_s
        detail = ", ".join(f"{peer} {rate:.3g}" for peer, rate in rates.items())
        ok = value >= least
        return [CheckResult(name=BANDWIDTH, ok=ok, value=value, bound=least, unit="bytes/s", detail=detail)]
