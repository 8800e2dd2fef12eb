"""The embedded stack: nats-server, the services and some node agents as child processes of this one.

Every child has a session of its own, so that Ctrl-C reaches this process alone, which then stops the others in order:
first who would misread the end of the rest (the detector), last what all need (the bus). Should this process be killed,
each child gets a parent-death signal.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from services.detector.memory import node_folder
from shared.errors import Conflict, Unavailable
from shared.nats_server import NatsServer
from shared.settings import Settings

START_TIMEOUT_S = 120.0
"""Importing torch and Megatron in every node's fork server takes 5-10 s each; several share the cores."""

STOP_TIMEOUT_S = 10.0
"""After SIGTERM; then SIGKILL. A service stops in milliseconds, an agent ends its ranks first."""

RESTARTS_PER_MINUTE = 5
"""A service that dies more often has a fault that a restart does not mend: the stack gives up."""

NODE_RETURN_S = 10.0
"""A dead agent is started again after this long, well past the time in which its node is declared lost."""

RANK_NICE = 5
"""Ranks of several nodes share this machine's cores with the services: these must answer in milliseconds, and a node
that comes back must not wait for ranks to import what it needs. Five gives ranks a third of a contended core."""

DEMO_MARKER = "made-by-demo"
"""File in a run directory that only demos have used: the next demo may replace it."""

LOCK = "lock"
"""File in a run directory that the stack which uses it has locked; holds that stack's pid."""

SERVICES = {
    "detector": "services.detector.monitor",
    "planner": "services.planner.main",
    "transition": "services.transition.main",
    "api": "services.api.main",
}


@dataclass
class Child:
    """One child process and when it was last started."""

    name: str
    module: str
    environment: dict[str, str]
    process: asyncio.subprocess.Process | None = None
    starts: list[float] = field(default_factory=list)
    expected_end: bool = False


class RunDirectory:
    """The folder everything is written to, held by one stack at a time through a file lock."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._lock: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            Conflict: another stack uses the folder.
        """
        (self.path / "services").mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            holder = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise Conflict(
                f"run directory {self.path} is in use by the stack with pid {holder}; "
                "stop it first or give another --run-dir"
            ) from err
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        self._lock = lock

    def release(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class Stack:
    """The whole system on one machine.

    Args:
        run_dir: where everything is written.
        port: of the API; 0 for any free one.
        nodes: number of node agents, named ``n0``, ``n1``, ...
        workers_per_node: worker slots of each.
        environment: further ``UNICRON_*`` settings for all children.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        port: int = 0,
        nodes: int = 4,
        workers_per_node: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.run_directory = RunDirectory(run_dir)
        self.run_dir = self.run_directory.path
        self.node_names = [f"n{i}" for i in range(nodes)]
        self._port = port
        self._workers_per_node = workers_per_node
        self._extra = dict(environment or {})
        self.nats = NatsServer(self.run_dir / "nats")
        self._children: dict[str, Child] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._failed: asyncio.Future[str] | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything and wait until the API says that tasks can be taken.

        Raises:
            Conflict: the run directory or the port is in use.
            Unavailable: something did not start.
        """
        self.run_directory.acquire()
        self._failed = asyncio.get_running_loop().create_future()
        await self.nats.start()
        for name, module in SERVICES.items():
            self._children[name] = Child(name, module, self._environment())
        for node in self.node_names:
            self._children[node] = Child(node, "services.detector.agent", self._environment(UNICRON_NODE=node))
        # The log's first opener creates its table; the others find it.
        await self._start(self._children["detector"])
        await self._start_all([child for name, child in self._children.items() if name != "detector"])
        port = (self.run_dir / "services" / "api.port").read_text().strip()
        self.url = f"http://127.0.0.1:{port}"
        # Restarted, it must be where its clients know it to be.
        self._children["api"].environment["UNICRON_PORT"] = port
        await self._wait_for_nodes()

    async def stop(self) -> None:
        """Stop everything, in order; returns when no child is left."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        order = [["detector"], ["transition", "planner"], self.node_names, ["api"]]
        for names in order:
            await asyncio.gather(*(self._end(self._children[n]) for n in names if n in self._children))
        await self.nats.stop()
        for node in self.node_names:
            self._forget_memory(node)  # an agent that was killed could not
        self.run_directory.release()

    @property
    def failed(self) -> asyncio.Future[str]:
        """Done, with the reason, when a part cannot be kept running."""
        assert self._failed is not None, "not started"
        return self._failed

    def node_processes(self, node: str) -> list[psutil.Process]:
        """Return the agent of a node and all processes below it, the agent first."""
        process = self._children[node].process
        if process is None or process.returncode is not None:
            return []
        agent = psutil.Process(process.pid)
        return [agent, *agent.children(recursive=True)]

    async def kill_node(self, node: str) -> float:
        """Kill a node as a power cut would: the agent and everything below it. Return the time (Unix, seconds)."""
        child = self._children[node]
        child.expected_end = True
        processes = self.node_processes(node)
        killed_at = time.time()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if child.process is not None:
            await child.process.wait()
        self._forget_memory(node)
        return killed_at

    def _forget_memory(self, node: str) -> None:
        """Delete what a node had in memory."""
        settings = Settings(run_dir=self.run_dir, node=node)
        shutil.rmtree(node_folder(settings.memory_dir, settings.run_dir, node), ignore_errors=True)

    def kill_service(self, name: str) -> int | None:
        """Kill a service (see ``SERVICES``), which is then started again; return its pid, None if it is not running."""
        process = self._children[name].process
        if process is None or process.returncode is not None:
            return None
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        return process.pid

    async def start_node(self, node: str) -> None:
        """Start a node's agent (again)."""
        await self._start(self._children[node])

    def _environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            # One thread a process: workers share the cores, and sums come out the same everywhere.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "UNICRON_RANK_NICE": str(RANK_NICE),
            **self._extra,
            # The pid, not 1: a parent that ended while the child was starting is then noticed too.
            "UNICRON_PARENT_DEATH": str(os.getpid()),
            "UNICRON_RUN_DIR": str(self.run_dir),
            "UNICRON_NATS_URL": self.nats.url,
            "UNICRON_NATS_TOKEN": self.nats.token,
            "UNICRON_PORT": str(self._port),
            "UNICRON_WORKERS_PER_NODE": str(self._workers_per_node),
            **more,
        }

    async def _start_all(self, children: Sequence[Child]) -> None:
        """Start children side by side; if one fails, none is left half-started behind the caller's back."""
        starts = [asyncio.create_task(self._start(child)) for child in children]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _start(self, child: Child) -> None:
        child.expected_end = False
        child.starts.append(time.monotonic())
        log_path = self.run_dir / "services" / f"{child.name}.log"
        with log_path.open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                child.module,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=child.environment,
                start_new_session=True,
                cwd=self.run_dir,
            )
        assert child.process.stdout is not None
        try:
            line = await asyncio.wait_for(child.process.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            line = b""
        if line.strip() != b"ready":
            with suppress(ProcessLookupError):
                child.process.kill()
            await child.process.wait()
            tail = log_path.read_text(errors="replace")[-2000:]
            raise Unavailable(f"{child.name} did not start; the end of {log_path}:\n{tail}")
        watcher = asyncio.create_task(self._watch(child, child.process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, child: Child, process: asyncio.subprocess.Process) -> None:
        """Start a child again that ended unasked; give up on one that keeps ending."""
        reason = f"exit code {await process.wait()}"
        while not (self._stopping or child.expected_end):
            now = time.monotonic()
            child.starts = [t for t in child.starts if now - t < 60.0]
            if len(child.starts) > RESTARTS_PER_MINUTE:
                if not self.failed.done():
                    self.failed.set_result(f"{child.name} ended {len(child.starts)} times in a minute ({reason})")
                return
            if child.name in self.node_names:
                await asyncio.sleep(NODE_RETURN_S)
            try:
                await self._start(child)
                return
            except Unavailable as err:
                reason = err.detail  # one more end: a child may be killed while it starts, too

    async def _end(self, child: Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        child.expected_end = True
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            # It may end just now after all.
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                for left in [parent, *parent.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess):
                        left.kill()
            await process.wait()

    async def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        answer = "no answer"
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                with suppress(httpx.HTTPError):
                    ready = await client.get("/readyz")
                    nodes = (await client.get("/v1/nodes")).json().get("items", [])
                    healthy = {n["name"] for n in nodes if n["state"] == "ready"}
                    if ready.status_code == 200 and healthy >= set(self.node_names):
                        return
                    answer = f"/readyz says {ready.status_code}, nodes {sorted(healthy)}"
                await asyncio.sleep(0.05)
        raise Unavailable(f"the stack was not ready within {START_TIMEOUT_S:.0f} s: {answer}")
