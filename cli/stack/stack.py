"""The embedded stack: nats-server, the services and some node agents as child processes of this one.

Every child (``cli/stack/child.py``) has a session of its own, so that Ctrl-C reaches this process alone. The stack then
stops the children in order: first planner and transition, which would move tasks as one node after the other leaves;
then the agents, whose departures the detector records; last the api and the bus, which the others need. If this process
is killed, each child gets a parent-death signal.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from cli.here import PORT
from cli.stack.child import START_TIMEOUT_S, Child
from cli.stack.children import SERVICES, STANDBYS, STOP_ORDER, Children
from cli.stack.machine import agent_variables, environment_of, forget_memory, own_address
from cli.stack.meeting import Meeting, Offer
from cli.stack.run_directory import RunDirectory
from cli.waiting import WaitingClient
from shared.bus.cancellation import cancelled
from shared.bus.identities import node_identity
from shared.errors import TimedOut, Unavailable, UnicronError
from shared.nats.nats_server import NatsServer
from shared.settings.model import read_settings

RESTARTS_PER_MINUTE = 5
"""A service that ends more often has a fault that a restart does not mend: the stack gives up."""

NODE_RETURN_S = 10.0
"""A dead agent is started again after this long: its node has been declared lost well before."""

READY_POLL_S = 0.05
"""Time between two looks at whether the stack is ready: short beside the seconds that it takes."""

JOIN_S = 300.0
"""Time until all nodes are ready, where other machines bring some: all import from one file system, at once."""

LEAVE_S = 20.0
"""For the agents of other machines to end, which takes them seconds, and to be heard; then they count as lost."""


class Stack:
    """The whole system on one machine; or its control plane, with a node of its own and others elsewhere.

    Args:
        run_dir: where everything is written.
        port: of the API; 0 for any free one.
        nodes: number of node agents, named ``n0``, ``n1``, ...
        workers_per_node: worker slots of each.
        devices: ``CUDA_VISIBLE_DEVICES`` of each node; empty: all workers train on the CPU.
        environment: further ``UNICRON_*`` settings for all children.
        tls: whether NATS has TLS, with certificates of an authority of its own.
        standby: whether a second detector, planner and transition service stand by.
        meeting: where other machines bring their nodes from; None: all nodes are here. NATS then has TLS.

    Raises:
        InvalidInput: a setting in the environment is not allowed, or contradicts another one.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        port: int = 0,
        nodes: int = 4,
        workers_per_node: int = 2,
        devices: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        tls: bool = False,
        standby: bool = False,
        meeting: Meeting | None = None,
    ) -> None:
        self.run_directory = RunDirectory(run_dir)
        self.run_dir = self.run_directory.path
        self.node_names = [f"n{i}" for i in range(nodes)] if meeting is None else [meeting.node]
        # The nodes share this machine: an agent that saw all of its devices would give them to its own workers. Without
        # devices none sees any, so that no worker trains on one and another worker on the CPU.
        self._devices = dict(zip(self.node_names, devices or [""] * nodes, strict=True))
        self._port = port
        self._standbys = STANDBYS if standby else {}
        self._workers_per_node = workers_per_node
        self._extra = dict(environment or {})
        settings = read_settings()
        self._memory_dir, self._host = settings.memory_dir, settings.host
        self._meeting, self._others = meeting, list[str]()
        if meeting is None:
            self.nats = NatsServer(self.run_dir / "nats", tls=("127.0.0.1",) if tls else ())
        else:
            at = own_address(settings)
            # The stream is made anew from the log, so its store need not be where all nodes see it.
            self._store = tempfile.TemporaryDirectory(prefix="unicron-nats-")
            self.nats = NatsServer(Path(self._store.name), keys=meeting.keys, tls=(at,), host="0.0.0.0")
        self._children = Children(lambda child, reason: pause_s(child, reason, self.node_names))
        self._keeping: list[asyncio.Task[None]] = []
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
        """Start everything and wait until tasks can be submitted.

        Raises:
            Conflict: the run directory is in use.
            Unavailable: the port is in use, or a part did not start.
        """
        from shared.service.http_server import check_free

        self.run_directory.acquire()
        check_free(self._host, self._port)
        if self._meeting is not None:
            self._others = await self._meeting.others()
            pythons = self._extra.get("UNICRON_INTERPRETERS", "")
            self._meeting.offer(Offer(workers_per_node=self._workers_per_node, on_devices=any(self._devices.values()),
                                      interpreters=pythons))  # fmt: skip
        self.nats.keys.make(more=[node_identity(node) for node in (*self.node_names, *self._others)])
        await self.nats.start()
        if self._meeting is not None:
            self._keeping.append(asyncio.create_task(self._meeting.keep_beating()))
            self.nats.keys.make([self.nats.url])  # the other nodes wait for that
        for name, module in SERVICES.items():
            self._children.add(Child(name, module, self._environment(name), self.run_dir))
        for name, service in self._standbys.items():
            self._children.add(Child(name, SERVICES[service], self._environment(service), self.run_dir))
        for node in self.node_names:
            self._children.add(Child(node, "services.agent.main", self.agent_environment(node), self.run_dir))
        self._keeping.append(asyncio.create_task(self._keep_nats()))
        await self._children.start()
        port = (self.run_dir / PORT).read_text().strip()
        self.url = f"http://127.0.0.1:{port}"
        # A restarted api must listen where its clients know it.
        self._children["api"].environment["UNICRON_PORT"] = port
        await self._wait_for_nodes()

    async def stop(self) -> None:
        """Stop everything, in order; returns when no child is left."""
        standbys, movers, *others = STOP_ORDER
        await self._children.stop([standbys, movers])
        await asyncio.gather(self._children.stop([self.node_names]), self._have_others_leave())
        await self._children.stop(others)
        await cancelled(*self._keeping)
        self._keeping.clear()
        await self.nats.stop()
        for node in self.node_names:
            forget_memory(self._memory_dir, self.run_dir, node)  # in place of agents that were killed
        if self._meeting is not None:
            self._store.cleanup()
        self.run_directory.release()

    async def _have_others_leave(self) -> None:
        """Have the agents of other machines end, and wait until the detector has heard of it."""
        if self._meeting is None or not self.url:
            return
        self._meeting.ask_to_leave()

        async def left() -> bool:
            nodes = {node["name"]: node["state"] for node in await client.items("/v1/nodes")}
            return all(nodes.get(name) in (None, "left", "lost") for name in self._others)

        async with WaitingClient(self.url, poll_s=READY_POLL_S) as client:
            with suppress(UnicronError):
                await client.until("the other nodes have left", left, LEAVE_S)

    async def _keep_nats(self) -> None:
        """Start NATS again when it ends: of the children none works without it."""
        try:
            await self.nats.keep(RESTARTS_PER_MINUTE)
        except UnicronError as err:
            self._children.fail(err)

    @property
    def failed(self) -> asyncio.Future[UnicronError]:
        """A future that is done, with the reason, when a part keeps ending."""
        return self._children.failed

    def node_processes(self, node: str) -> list[psutil.Process]:
        """Return the agent of a node and all processes below it, the agent first."""
        return self._children[node].tree()

    async def kill_node(self, node: str) -> float:
        """Kill a node as a power cut would: the agent and everything below it. Return the time (Unix, seconds)."""
        child = self._children[node]
        child.expected_end = True
        processes = child.tree()
        killed_at = time.time()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if child.process is not None:
            await child.process.wait()
        forget_memory(self._memory_dir, self.run_dir, node)
        return killed_at

    def kill_service(self, name: str) -> int | None:
        """Kill a service (one of ``SERVICES`` or ``STANDBYS``), which is then started again.

        Returns its pid, None if it has ended.
        """
        return self._children[name].kill()

    def service_pid(self, name: str) -> int | None:
        """Return the pid of a service (one of ``SERVICES`` or ``STANDBYS``); None if it has ended."""
        process = self._children[name].living
        return None if process is None else process.pid

    async def start_node(self, node: str) -> None:
        """Start a node's agent (again)."""
        await self._children.start_one(node)

    def agent_environment(self, node: str) -> dict[str, str]:
        """Return the environment of a node's agent."""
        more = self._environment(node_identity(node))
        return more | agent_variables(node, self._devices[node], self._workers_per_node)

    def _environment(self, identity: str) -> dict[str, str]:
        credential = self.nats.keys.credential_file(identity)
        common = environment_of(self.run_dir, self.nats.url, credential, self._extra)
        return common | {"UNICRON_PORT": str(self._port)}

    async def _wait_for_nodes(self) -> None:
        """Wait until tasks can be submitted and every node is ready."""
        answer, wanted = "no answer", [*self.node_names, *self._others]
        limit_s = JOIN_S if self._others else START_TIMEOUT_S

        async def ready() -> bool:
            nonlocal answer
            if self._meeting is not None and (refusals := self._meeting.refusals()):
                raise Unavailable("; ".join(refusals))
            try:
                await client.get("/readyz")
                nodes = await client.items("/v1/nodes")
            except UnicronError as err:
                answer = err.detail
                return False
            # A node that was cordoned in an earlier life of the stack still is.
            found = {node["name"] for node in nodes if node["state"] in ("ready", "cordoned")}
            answer = f"nodes {sorted(found)} of {wanted}"
            return found >= set(wanted)

        async with WaitingClient(self.url, poll_s=READY_POLL_S) as client:
            try:
                await client.until("the stack is ready", ready, limit_s)
            except TimedOut as err:
                raise Unavailable(f"the stack was not ready within {limit_s:.0f} s: {answer}") from err


def pause_s(child: Child, reason: UnicronError, nodes: Sequence[str]) -> float:
    """Return how long to wait before a child that has ended is started again. ``nodes``: those that are agents.

    Raises:
        Unavailable: it keeps ending.
    """
    if (starts := child.recent_starts()) > RESTARTS_PER_MINUTE:
        raise Unavailable(f"{child.name} ended {starts} times in a minute ({reason.detail})")
    return NODE_RETURN_S if child.name in nodes else 0.0
