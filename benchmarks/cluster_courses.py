"""What ``benchmarks.cluster`` does to a task that trains on several machines, and what must follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cli.stack import SERVICES
from cli.waiting import Record
from shared.errors import NameInUse
from tests.cluster.bed import CONTROL, Bed
from tests.e2e.kit import rank

CONTROL_CUT_S = 30.0
"""Required: the control plane may be away for this long without a replaced rank or a lost step."""

ONE_NODE_S = 3.0
"""Required: one dead node of two is found within this time; here it is one of three."""

SEVERAL_NODES_S = 5.0
"""Required: two dead nodes of three are found within this time."""

PAIR_S = 15.0
"""Required: so soon after a pair of nodes is cut, all but one side train at the size that the plan says."""

PROCESS_S = 1.0
"""The end of a process is found within milliseconds; the network and busy cores come on top."""

NOBODY: frozenset[str] = frozenset()

Strike = Callable[[Bed, Record], frozenset[str]]
"""Makes something fail, given the task as it was before; returns the nodes that may lose their work by it."""


@dataclass(frozen=True)
class Course:
    """One thing that fails.

    Attributes:
        name: of the course, and of its task.
        strike: what is done.
        found_s: an incident must be detected within this time; None: there must be no incident and no new process.
        trains_s: by then the task must have done a step in the generation that answers the fault.
        leaves: how many nodes at most may be without work while the fault lasts.
        replaces: how many processes on the other nodes are replaced.
    """

    name: str
    strike: Strike
    found_s: float | None = None
    trains_s: float = 60.0
    leaves: int = 0
    replaces: int = 0


def kill_rank(bed: Bed, task: Record) -> frozenset[str]:
    """Kill a rank's process."""
    victim = rank(task, 1)
    bed.nodes[victim["node"]].kill(victim["pid"])
    return NOBODY


def cut_links(bed: Bed, task: Record) -> frozenset[str]:
    """Cut all links of a node."""
    node: str = rank(task, 1)["node"]
    bed.network.isolate(node)
    return frozenset({node})


def cut_pair(bed: Bed, task: Record) -> frozenset[str]:
    """Cut the link between two nodes of the task, in both directions."""
    pair = frozenset(sorted(bed.nodes)[-2:])
    bed.network.between(*sorted(pair), cut=True)
    return pair


def cut_control(bed: Bed, task: Record) -> frozenset[str]:
    """Cut the control plane's machine off for a while."""
    bed.network.isolate(CONTROL)
    time.sleep(CONTROL_CUT_S)
    bed.network.heal()
    return NOBODY


def power_off(bed: Bed, task: Record, *, count: int) -> frozenset[str]:
    """Cut the power of the last nodes."""
    nodes = frozenset(sorted(bed.nodes)[-count:])
    for node in nodes:
        bed.nodes[node].power_off()
    return nodes


def kill_supervisor(bed: Bed, task: Record) -> frozenset[str]:
    """Kill a node's main process; all others end by themselves."""
    node: str = rank(task, 1)["node"]
    bed.nodes[node].kill(bed.agents[node].pid)
    return frozenset({node})


def kill_agent(bed: Bed, task: Record) -> frozenset[str]:
    """Kill a node's agent alone."""
    return _replace_agent(bed, task, lambda node: bed.nodes[node["name"]].kill(node["agent_pid"]))


def restart_agent(bed: Bed, task: Record) -> frozenset[str]:
    """Have a node's agent hand over to a successor."""
    return _replace_agent(
        bed, task, lambda node: bed.client.http.post(f"/v1/nodes/{node['name']}/agent/restart").raise_for_status()
    )


def _replace_agent(bed: Bed, task: Record, end: Callable[[Record], object]) -> frozenset[str]:
    """End an agent, and wait until its node has another one."""

    def node() -> Record:
        found: Record = bed.client.http.get(f"/v1/nodes/{rank(task, 1)['node']}").raise_for_status().json()
        return found

    before = node()
    end(before)
    bed.client.until("the node has another agent", lambda: node()["incarnation"] != before["incarnation"])
    return NOBODY


def restart_nats(bed: Bed, task: Record) -> frozenset[str]:
    """Kill nats-server and start it on the data that it has."""
    bed.control.kill("nats")
    bed.control.start_nats()
    return NOBODY


def restart_postgres(bed: Bed, task: Record) -> frozenset[str]:
    """Kill PostgreSQL and start it on the data that it has."""
    bed.control.kill("postgres")
    bed.control.start_postgres()
    return NOBODY


def restart_service(bed: Bed, task: Record, *, name: str) -> frozenset[str]:
    """Kill a service and start it again."""
    bed.control.kill(name)
    bed.control.start_service(name)
    return NOBODY


def start_twin(bed: Bed, task: Record) -> frozenset[str]:
    """Start a second agent with the name of a node, on another node's machine: it must be refused.

    Raises:
        AssertionError: it was not.
    """
    first, second, *_ = sorted(bed.nodes)
    twin = bed.start_agent(bed.nodes[second], UNICRON_NODE=first, UNICRON_RUN_DIR="/run/twin")
    code = bed.nodes[second].wait(twin, PAIR_S)
    assert code == NameInUse.exit_code, f"the second agent named {first} ended with {code}"
    return NOBODY


COURSES = (
    Course("rank-kill", kill_rank, found_s=PROCESS_S, replaces=1),
    Course("supervisor-kill", kill_supervisor, found_s=ONE_NODE_S, leaves=1),
    Course("agent-kill", kill_agent),
    Course("agent-restart", restart_agent),
    Course("link-cut", cut_links, found_s=ONE_NODE_S, leaves=1),
    Course("one-of-three-off", partial(power_off, count=1), found_s=ONE_NODE_S, leaves=1),
    Course("two-of-three-off", partial(power_off, count=2), found_s=SEVERAL_NODES_S, leaves=2),
    Course("pair-cut", cut_pair, found_s=PAIR_S, trains_s=PAIR_S, leaves=1),
    Course("control-cut", cut_control),
    Course("nats-kill", restart_nats),
    Course("postgres-kill", restart_postgres),
    *(Course(f"{name}-kill", partial(restart_service, name=name)) for name in SERVICES),
    Course("name-twice", start_twin),
)
"""In this order. Every machine has Debian's hosts file (``127.0.1.1`` for its own name) and its own run directory."""
