"""What ``benchmarks.cluster`` does to a task that trains on several machines, and what must follow."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cli.stack.children import SERVICES
from cli.waiting import Record
from shared.errors import NameInUse, UnreachableAddress
from shared.messages.signals import ProcessExited
from tests.cluster import accept_signals
from tests.cluster.bed import CONTROL, DOMAIN, Bed
from tests.cluster.object_store import BUCKET, ObjectStore
from tests.cluster.outputs import printed
from tests.e2e.kit import pids, rank

CONTROL_CUT_S = 30.0
"""Required: the control plane may be away for this long without a replaced rank or a lost step."""

ONE_NODE_S = 3.0
"""Required: one dead node of two is found within this time; here it is one of three."""

SEVERAL_NODES_S = 5.0
"""Required: two dead nodes of three are found within this time."""

PAIR_S = 15.0
"""Required: so soon after a pair of nodes is cut, all but one side train at the size that the plan says."""

VANISHED_S = 2.0
"""Required: a rank of whose end no signal arrives is found within this time."""

CHECKPOINT_EVERY = 4
"""Steps between two checkpoints in the object store; no more are lost with all processes."""

LIMIT_S = 60.0
"""For what must come, and comes within seconds."""

PROCESS_S = 1.0
"""The end of a process is found within milliseconds; the network and busy cores come on top."""

NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Struck:
    """What a strike has done.

    Attributes:
        may_lose: nodes that may lose their work by it.
        at: Unix time from which on the fault can be found; None: since the strike began.
        seen: what -> what was seen, and what it must be.
    """

    may_lose: frozenset[str] = NOBODY
    at: float | None = None
    seen: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


Strike = Callable[[Bed, Record], Struck]
"""Makes something fail, given the task as it was before."""


def without_checkpoints(bed: Bed, name: str) -> Record:
    """Return the changes of a task that writes no checkpoints."""
    return {"checkpoint": {"every": 0}}


def with_object_store(bed: Bed, name: str) -> Record:
    """Return the changes of a task with checkpoints in an object store, which is on the control plane's machine."""
    place = {"every": CHECKPOINT_EVERY, "memory_every": 0, "url": f"s3://{BUCKET}/{name}"}
    return {"checkpoint": place, "env": dict(ObjectStore(bed.machines[CONTROL]).variables)}


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
        recomputes: how many steps at most are computed again.
        changes: of the task's specification.
    """

    name: str
    strike: Strike
    found_s: float | None = None
    trains_s: float = 60.0
    leaves: int = 0
    replaces: int = 0
    recomputes: int = 0
    changes: Callable[[Bed, str], Record] = without_checkpoints


def kill_rank(bed: Bed, task: Record) -> Struck:
    """Kill a rank's process."""
    victim = rank(task, 1)
    bed.nodes[victim["node"]].kill(victim["pid"])
    return Struck()


def cut_links(bed: Bed, task: Record) -> Struck:
    """Cut all links of a node."""
    node: str = rank(task, 1)["node"]
    bed.network.isolate(node)
    return Struck(frozenset({node}))


def cut_pair(bed: Bed, task: Record) -> Struck:
    """Cut the link between two nodes of the task, in both directions."""
    pair = frozenset(sorted(bed.nodes)[-2:])
    bed.network.between(*sorted(pair), cut=True)
    return Struck(pair)


def cut_control(bed: Bed, task: Record) -> Struck:
    """Cut the control plane's machine off for a while."""
    bed.network.isolate(CONTROL)
    time.sleep(CONTROL_CUT_S)
    bed.network.heal()
    return Struck()


def power_off(bed: Bed, task: Record, *, count: int) -> Struck:
    """Cut the power of the last nodes."""
    nodes = frozenset(sorted(bed.nodes)[-count:])
    for node in nodes:
        bed.nodes[node].power_off()
    return Struck(nodes)


def kill_supervisor(bed: Bed, task: Record) -> Struck:
    """Kill a node's main process; all others end by themselves."""
    node: str = rank(task, 1)["node"]
    bed.nodes[node].kill(bed.agents[node].pid)
    return Struck(frozenset({node}))


def kill_agent(bed: Bed, task: Record) -> Struck:
    """Kill a node's agent alone."""
    return _replace_agent(bed, task, lambda node: bed.nodes[node["name"]].kill(node["agent_pid"]))


def restart_agent(bed: Bed, task: Record) -> Struck:
    """Have a node's agent hand over to a successor."""
    return _replace_agent(
        bed, task, lambda node: bed.client.http.post(f"/v1/nodes/{node['name']}/agent/restart").raise_for_status()
    )


def _replace_agent(bed: Bed, task: Record, end: Callable[[Record], object]) -> Struck:
    """End an agent, and wait until its node has another one."""

    def node() -> Record:
        found: Record = bed.client.http.get(f"/v1/nodes/{rank(task, 1)['node']}").raise_for_status().json()
        return found

    before = node()
    end(before)
    bed.client.until("the node has another agent", lambda: node()["incarnation"] != before["incarnation"])
    return Struck()


def restart_nats(bed: Bed, task: Record) -> Struck:
    """Kill nats-server and start it on the data that it has."""
    bed.control.kill("nats")
    bed.control.start_nats()
    return Struck()


def restart_postgres(bed: Bed, task: Record) -> Struck:
    """Kill PostgreSQL and start it on the data that it has."""
    bed.control.kill("postgres")
    bed.control.start_postgres()
    return Struck()


def restart_service(bed: Bed, task: Record, *, name: str) -> Struck:
    """Kill a service and start it again."""
    bed.control.kill(name)
    bed.control.start_service(name)
    return Struck()


def lose_exit(bed: Bed, task: Record) -> Struck:
    """Kill a rank, and lose every signal of its end: the detector is away meanwhile, and another program accepts them.

    The fault can be found once the detector is there again.
    """
    control, victim = bed.control, rank(task, 1)
    control.kill("detector")
    command = [sys.executable, "-P", accept_signals.__file__, control.nats_url, control.credential("detector")]
    thief = control.machine.start(command, output="accept-signals.log")
    control.machine.wait_for_line(thief, "ready", LIMIT_S)
    bed.nodes[victim["node"]].kill(victim["pid"])
    exited = ProcessExited.model_fields["kind"].default
    control.machine.wait_for_line(thief, f"{exited} {victim['worker']}", LIMIT_S)
    control.machine.kill(thief.pid)
    control.machine.wait(thief, LIMIT_S)
    control.start_service("detector")
    return Struck(at=time.time())


def drain_node(bed: Bed, task: Record) -> Struck:
    """Have a node drained; all its work must move without a lost step."""
    node: str = rank(task, 1)["node"]
    bed.client.http.post(f"/v1/nodes/{node}/drain").raise_for_status()

    def state() -> str:
        return str(bed.client.http.get(f"/v1/nodes/{node}").raise_for_status().json()["state"])

    bed.client.until(f"{node} is drained", lambda: state() == "drained", LIMIT_S)
    there = [r["node"] for r in bed.client.task(task["name"])["ranks"]].count(node)
    return Struck(frozenset({node}), seen={"processes on the drained node": (there, 0)})


def kill_all_ranks(bed: Bed, task: Record) -> Struck:
    """Kill all processes of the task once it has a checkpoint in the object store."""
    name = task["name"]
    before = bed.client.until(
        "a checkpoint is saved", lambda: (t := bed.client.task(name))["saved_step"] and t, LIMIT_S
    )
    struck_at = time.time()
    for victim in before["ranks"]:
        bed.nodes[victim["node"]].kill(victim["pid"])

    def read() -> bool:
        events = [entry["event"] for entry in bed.client.items("/v1/events") if entry["type"] == "state.moved"]
        return any("checkpoint" in e["sources"].values() for e in events if e["task"] == name)

    bed.client.until("the state is read from the store", read, LIMIT_S)
    failures = [e for e in bed.client.items("/v1/events") if e["type"] == "task.checkpoint-failed"]
    lost = [e for e in failures if e["event"]["task"] == name]
    return Struck(frozenset(bed.nodes), at=struck_at, seen={"checkpoints that failed": (len(lost), 0)})


def separate_folders(bed: Bed, task: Record) -> Struck:
    """Nothing fails, but each machine has a run directory of its own: output is readable, and a stop is refused.

    The parameters of every course's task come through the agents, too.
    """
    client, name = bed.client, task["name"]
    workers = {worker for worker, _ in printed(client, name)}
    client.http.post(f"/v1/tasks/{name}/stop").raise_for_status()
    refused = client.until("the stop is refused", lambda: client.task(name)["stop_refused"], LIMIT_S)
    silent = pids(task).keys() - workers
    words = "do not see the checkpoints that node" in refused["reason"]
    return Struck(seen={"workers without output": (len(silent), 0), "stop refused for the place": (words, True)})


def advertise_loopback(bed: Bed, task: Record) -> Struck:
    """Start an agent that is told to advertise its host name, which Debian's hosts file gives 127.0.1.1: refused."""
    node = min(bed.nodes)
    machine = bed.nodes[node]
    script = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    own = machine.run([sys.executable, "-c", script], output="own-address.log").strip()
    agent = bed.start_agent(
        machine, UNICRON_NODE="looped", UNICRON_ADDRESS=f"{node}.{DOMAIN}", UNICRON_RUN_DIR="/run/looped"
    )
    code = machine.wait(agent, LIMIT_S)
    said = agent.output.read_bytes()[agent.offset :].decode()
    return Struck(
        seen={
            "address of the own host name": (own, "127.0.1.1"),
            "exit status of an agent that advertises it": (code, UnreachableAddress.exit_code),
            "it names the setting": ("UNICRON_ADDRESS" in said, True),
        }
    )


def start_twin(bed: Bed, task: Record) -> Struck:
    """Start a second agent with the name of a node, on another node's machine: it must be refused."""
    first, second, *_ = sorted(bed.nodes)
    twin = bed.start_agent(bed.nodes[second], UNICRON_NODE=first, UNICRON_RUN_DIR="/run/twin")
    code = bed.nodes[second].wait(twin, LIMIT_S)
    return Struck(seen={"exit status of the second agent": (code, NameInUse.exit_code)})


COURSES = (
    Course("rank-kill", kill_rank, found_s=PROCESS_S, replaces=1),
    Course("rank-vanished", lose_exit, found_s=VANISHED_S, replaces=1),
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
    Course("drain", drain_node),
    Course("name-twice", start_twin),
    Course("loopback-name", advertise_loopback),
    Course("separate-folders", separate_folders),
    Course("object-store", kill_all_ranks, found_s=PROCESS_S, recomputes=CHECKPOINT_EVERY, changes=with_object_store),
)
"""In this order. Every machine has Debian's hosts file (``127.0.1.1`` for its own name) and its own run directory."""
