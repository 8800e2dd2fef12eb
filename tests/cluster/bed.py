"""The test bed: a machine for the control plane, node machines with an agent each, and the network between them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from cli.stack.machine import RANK_NICE
from tests.cluster.control import Control, service_environment
from tests.cluster.machine import Machine, Process
from tests.cluster.network import Network
from tests.e2e.kit import Client

CONTROL = "control"

CONTROL_NUMBER, FIRST_NODE_NUMBER = 1, 11
"""Last parts of addresses: of the control plane's machine, and of node ``n0``."""

DOMAIN = "example.org"
"""Of the machines' host names."""

CLOSED = ("cordoned", "draining", "drained")
"""States of nodes that a user has taken out of use."""

ANSWER_S = 60.0
"""For an answer of the API, which takes milliseconds. Generous: all machines of a bed share the cores of one."""

AGENT_START_S = 120.0
"""Importing torch and Megatron in every node's fork server takes 5-10 s each; all share the cores."""


class Bed:
    """The whole system on several machines; a context manager.

    Args:
        folder: for what processes print; it outlives the bed.
        nodes: number of node machines, named ``n0``, ``n1``, ...
        workers_per_node: worker slots of each.
        domains: node -> failure domain; a node that is not named has one of its own.
        settings: further ``UNICRON_*`` variables of all services and agents.
        memory_bytes: size of each node's /dev/shm.
        disk_bytes: size of each machine's disk, which has its run directory.
        clock_offsets_s: machine -> by how much the wall clock of its processes is ahead at first; the tests may step
            these clocks (``Machine.clock``). The other machines have the host's.
        seed: of the network's random losses.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 3,
        workers_per_node: int = 1,
        domains: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
        memory_bytes: int = 256 << 20,
        disk_bytes: int = 1 << 30,
        clock_offsets_s: Mapping[str, int] | None = None,
        seed: int = 0,
    ) -> None:
        self.network = Network(seed=seed)
        self._settings = dict(settings or {})
        self._workers_per_node = workers_per_node
        self._domains = dict(domains or {})
        numbers = {CONTROL: CONTROL_NUMBER} | {f"n{i}": FIRST_NODE_NUMBER + i for i in range(nodes)}
        self.machines = {
            name: Machine(
                name,
                number,
                self.network,
                folder / name,
                hosts=hosts_file(name, numbers),
                hostname=f"{name}.{DOMAIN}",
                memory_bytes=memory_bytes,
                disk_bytes=disk_bytes,
                clock_offset_s=(clock_offsets_s or {}).get(name),
            )
            for name, number in numbers.items()
        }
        self.nodes = {name: machine for name, machine in self.machines.items() if name != CONTROL}
        self.control = Control(self.machines[CONTROL], self._settings, self.nodes)
        self.agents: dict[str, Process] = {}
        self._client: Client | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        for machine in self.machines.values():
            machine.power_on()
        for machine in self.machines.values():
            machine.wait_ready()
        # Agents import for seconds, in which the other parts start. They need NATS only.
        self.control.start_nats()
        for name in self.nodes:
            self.begin_agent(name)
        self.control.start()
        for name in self.nodes:
            self.wait_agent(name)
        self._client = Client("http://localhost", transport=self.control.transport())
        self._client.http.timeout = ANSWER_S
        self.client.until("all nodes are ready", lambda: self.ready_nodes() == set(self.nodes))

    def _stop(self) -> None:
        if self._client is not None:
            self._client.http.close()
        for machine in self.machines.values():
            machine.power_off()
        self.network.close()

    @property
    def client(self) -> Client:
        """A client of the API."""
        assert self._client is not None, "the bed has not started"
        return self._client

    def ready_nodes(self) -> set[str]:
        """Return the names of the nodes that are ready."""
        return {node["name"] for node in self.client.items("/v1/nodes") if node["state"] == "ready"}

    # ---- agents

    def begin_agent(self, node: str) -> None:
        """Start a node's agent; ``wait_agent`` waits until it is ready."""
        self.agents[node] = self.start_agent(self.nodes[node])

    def start_agent(self, machine: Machine, **changes: str) -> Process:
        """Start an agent on a machine, with some variables changed; its name and addresses follow by themselves."""
        variables = {
            # Where NATS is and the node's name are in it.
            "UNICRON_NATS_CREDENTIAL": self.control.node_credential(changes.get("UNICRON_NODE", machine.name)),
            "UNICRON_DOMAIN": self._domains.get(machine.name, f"rack-{machine.name}"),
            "UNICRON_WORKERS_PER_NODE": str(self._workers_per_node),
            "UNICRON_RANK_NICE": str(RANK_NICE),
            **self._settings,
            **changes,
        }
        command = [sys.executable, "-P", "-m", "services.agent.main"]
        return machine.start(command, output="agent.log", environment=service_environment(**variables))

    def wait_agent(self, node: str) -> None:
        """Wait until an agent that was begun is ready."""
        self.nodes[node].wait_for_line(self.agents[node], "ready", AGENT_START_S)

    # ---- after faults

    def repair(self) -> None:
        """Heal the network, start what is off or has ended, use closed nodes again; wait until all nodes are ready."""
        self.network.heal()
        dark = [machine for machine in self.nodes.values() if not machine.is_on]
        for machine in dark:
            machine.power_on()
        for machine in dark:
            machine.wait_ready()
        begun = [name for name, m in self.nodes.items() if m in dark or m.exit_code(self.agents[name]) is not None]
        for name in begun:
            self.begin_agent(name)
        for name in begun:
            self.wait_agent(name)
        for node in self.client.items("/v1/nodes"):
            if node["state"] in CLOSED:
                self.client.http.post(f"/v1/nodes/{node['name']}/return").raise_for_status()
        self.client.until("all nodes are ready", lambda: self.ready_nodes() == set(self.nodes))

    def file(self, path: str) -> bytes:
        """Return a file in the nodes' run directories; it is on one node only."""
        found = [machine.path(path) for machine in self.nodes.values() if machine.is_on and machine.path(path).exists()]
        assert len(found) == 1, f"{path} is on {len(found)} nodes"
        return found[0].read_bytes()


def hosts_file(name: str, numbers: Mapping[str, int]) -> str:
    """Return a machine's hosts file as Debian's installer writes it: its own name has a loopback address."""
    others = "".join(f"198.51.100.{number} {other}\n" for other, number in numbers.items() if other != name)
    return f"127.0.0.1 localhost\n127.0.1.1 {name}.{DOMAIN} {name}\n{others}"
