"""Simulated nodes, all in one process: each has a connection, a key, a probe listener and heartbeats, and no rank.

A node is a few objects and no task of its own: one task sends the heartbeats of all of them, each in its turn of the
interval. The parts of a heartbeat that do not change between two commands are written once.

    python -m benchmarks.fleet.nodes KEYS URL COUNT WORKERS INTERVAL_S

A node asks for admission, answers probes and is greeted as an agent does, by the agent's own code, and carries out
commands by saying that it has. A line of JSON on standard input is a request (``{"op": ...}``), one on standard output
the answer to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fleet.wire import CONNECTING, Wire
from services.agent.cluster.admission import Admission
from services.agent.cluster.probe import ProbeServer
from shared.bus import credentials
from shared.bus.connection import PING_INTERVAL_S
from shared.bus.endpoints import Codec, Endpoint
from shared.errors import Unavailable
from shared.events.worker_runs import full_members
from shared.machine.network import network_stack
from shared.messages.admission import Hello
from shared.messages.commands import COMMANDS, LEFTOVERS, Reply, WorkerResult
from shared.messages.node_files import FILES, FilesAnswer, FilesReply
from shared.messages.self_test import SELF_TEST, SelfTest, SelfTestResult
from shared.messages.signals import HEARTBEATS, SIGNALS, Heartbeat, ProcessExited, WorkerStatus
from shared.messages.stacks import STACKS, StacksReply, StacksRequest
from shared.model import utc_now

STEP_S = 2.0
"""A step of the simulated task: that of a large model, so that each heartbeat has another progress, and few a step."""

MICRO_BATCH_S = STEP_S / 4
"""Time between two reports of progress."""

TURN_S = 0.02
"""Pause between two looks at whose heartbeat is due."""

NODES_OF_A_DOMAIN = 16

IP = "127.0.0.1"
"""All nodes are on the detector's machine, as the detector is told; so a loopback address reaches each."""


class _Raw(Codec[dict[str, Any]]):
    """A message as JSON values: the members of a large stage are read once, and not for each node."""

    def decode(self, data: bytes) -> dict[str, Any]:
        return {**json.loads(data), "bytes": len(data)}


_COMMANDS, _LEFTOVERS = (
    Endpoint(each.subject, _Raw(dict), Reply, by=each.by, to=each.to) for each in (COMMANDS, LEFTOVERS)
)


_stages: dict[tuple[str, int], dict[str, dict[str, int]]] = {}
"""Node -> worker -> rank, of the newest stages by plan and generation: each is read once, and not for each node."""


def _ranks(plan: str, generation: int, members: Any) -> dict[str, dict[str, int]]:
    """Return node -> worker -> rank of a stage's members."""
    if (plan, generation) not in _stages:
        found: dict[str, dict[str, int]] = {}
        for member in full_members(members):
            found.setdefault(member["node"], {})[member["worker"]] = member["rank"]
        while len(_stages) >= 8:
            del _stages[next(iter(_stages))]
        _stages[plan, generation] = found
    return _stages[plan, generation]


_STEP, _DONE, _AGE_S = 900_001, 900_002, 900_003.5
"""What stands in a heartbeat's text, as it is written once, for the numbers that every heartbeat has anew."""


@dataclass
class Worker:
    """What a rank on it would report."""

    name: str
    state: str = "idle"
    task: str | None = None
    generation: int | None = None
    rank: int | None = None
    pid: int | None = None
    step: int = 0

    def text(self) -> str:
        """Return its part of a heartbeat, with ``%(name)s`` for each number that changes while it trains."""
        if self.task is None:
            return WorkerStatus(worker=self.name).model_dump_json()
        known: dict[str, Any] = {
            "worker": self.name,
            "state": self.state,
            "task": self.task,
            "generation": self.generation,
            "rank": self.rank,
            "pid": self.pid,
            "step": _STEP if self.state == "training" else self.step,
            "process_state": "S",
        }
        if self.state == "training":
            known |= {"phase": "compute", "micro_batch": 0, "progress_age_s": _AGE_S, "gaps_s": {"compute": 0.1}}
            known |= {"steps_timed": _DONE, "steps_done": _DONE, "step_s": STEP_S}
        text = WorkerStatus.model_construct(**known).model_dump_json()
        for number, name in ((_STEP, "%(step)d"), (_DONE, "%(done)d"), (_AGE_S, "%(age_s).2f")):
            text = text.replace(str(number), name)
        return text.replace('"steps":[]', f'"steps":[%({"losses" if self.rank == 0 else "steps"})s]')


@dataclass
class Sent:
    """Commands of one kind that nodes have got. ``last_at``: Unix time of the newest."""

    nodes: int = 0
    bytes: int = 0
    last_at: float = 0.0


@dataclass
class Fleet:
    """What all nodes share."""

    interval_s: float
    pids: int = 1000
    sent: dict[str, Sent] = field(default_factory=dict)
    late_s: float = 0.0
    """The longest time by which a heartbeat of a living node was late: the simulator itself was busy then."""

    def note(self, kind: str, size: int) -> None:
        """Note a command."""
        one = self.sent.setdefault(kind, Sent())
        one.nodes, one.bytes, one.last_at = one.nodes + 1, one.bytes + size, time.time()


class Node:
    """A simulated node."""

    def __init__(self, fleet: Fleet, number: int, workers: int, keys: Path) -> None:
        self.name = f"n{number:04d}"
        self._fleet, self._domain = fleet, f"r{number // NODES_OF_A_DOMAIN}"
        self._credential = credentials.read(keys / "nodes" / f"{self.name}.json")
        self._incarnation, self._supervisor = uuid.uuid4().hex, uuid.uuid4().hex
        self.workers = {f"{self.name}/{slot}": Worker(f"{self.name}/{slot}") for slot in range(workers)}
        self._since, self._since_s, self._sequence = 0, 0.0, 0
        """The step with which its ranks began to train, and when; the number of its newest heartbeat."""
        self._text = ""
        """The text of a heartbeat (``Worker.text``); empty: a command has changed something."""
        self.is_member = False

    async def connect(self, url: str, turn: asyncio.Semaphore) -> None:
        """Connect to NATS, and answer on it."""
        self.bus = self._bus = Wire(url, self._credential, f"agent {self.name}", turn)
        self._probe = ProbeServer(self._bus, self.name, self._incarnation, IP)
        self._beat = Heartbeat(
            node=self.name,
            incarnation=self._incarnation,
            agent_pid=os.getpid(),
            sequence=0,
            sent_at=utc_now(),
            interval_s=self._fleet.interval_s,
            domain=self._domain,
            addresses={"address": IP},
            network=network_stack(),
            probe=await self._probe.start(),
            supervisor=self._supervisor,
            workers=[],
        )
        await self._bus.serve(_COMMANDS, self._carry_out, self.name, refuse=None)
        await self._bus.serve(_LEFTOVERS, self._carry_out, self.name, refuse=None)
        await self._bus.serve(FILES, self._files, self.name)
        await self._bus.serve(STACKS, self._stacks, self.name)
        await self._bus.serve(SELF_TEST, self._self_test, self.name)
        await self._bus.open()

    async def join(self) -> None:
        """Ask for admission until it is given, and send heartbeats from then on."""
        hello = Hello(
            node=self.name,
            incarnation=self._incarnation,
            addresses={"address": IP},
            network=network_stack(),
            supervisor=self._supervisor,
        )
        await Admission(self._bus, hello).obtain()
        self.is_member = True
        await self.publish()

    async def end(self) -> None:
        """End as an agent that is killed: its connection breaks, and a probe finds nobody."""
        self.is_member = False
        self._probe.stop()
        await self._bus.close()

    async def exit_rank(self, slot: int) -> float:
        """Have a rank's process end by SIGKILL; return when the signal was sent (Unix time) and wait for its answer."""
        worker = self.workers[f"{self.name}/{slot}"]
        signal = ProcessExited(
            signal_id=str(uuid.uuid4()),
            node=self.name,
            incarnation=self._incarnation,
            occurred_at=utc_now(),
            sent_at=utc_now(),
            task=worker.task or "",
            worker=worker.name,
            generation=worker.generation or 0,
            rank=worker.rank,
            step=worker.step + self._done(),
            pid=worker.pid or 0,
            exit_code=-9,
        )
        self._text = ""
        worker.state, worker.task, worker.rank, worker.pid = "idle", None, None, None
        sent_at = time.time()
        await self._bus.call(SIGNALS, signal, self.name, timeout_s=30.0)
        return sent_at

    def _done(self) -> int:
        """Return how many steps its ranks have done since they began to train."""
        return int((time.monotonic() - self._since_s) / STEP_S)

    async def publish(self) -> None:
        """Send a heartbeat."""
        if not self._text:
            rest = self._beat.model_dump_json(exclude={"sequence", "sent_at", "workers"})
            workers = ",".join(worker.text() for worker in self.workers.values())
            head = rest.removesuffix("}").replace("%", "%%")
            self._text = f'{head},"sequence":%(sequence)d,"sent_at":"%(at)s","workers":[{workers}]}}'
        self._sequence += 1
        done, age_s = self._done(), (time.monotonic() - self._since_s) % MICRO_BATCH_S
        steps = [self._since + number for number in range(max(1, done - 1), done + 1)]
        fields = {
            "sequence": self._sequence,
            "at": utc_now().isoformat(),
            "step": self._since + done,
            "done": done,
            "age_s": age_s,
            "steps": ",".join(f"[{step},{0.8 * STEP_S},4,null,null]" for step in steps),
            "losses": ",".join(f"[{step},{0.8 * STEP_S},4,{STEP_S},3.0]" for step in steps),
        }
        with contextlib.suppress(Unavailable):  # the next one follows
            await self._bus.send(HEARTBEATS.at(self.name), (self._text % fields).encode())

    # ---- what is asked of a node

    async def _carry_out(self, command: dict[str, Any]) -> Reply:
        kind, generation = command["kind"], command["generation"]
        self._fleet.note(kind, command["bytes"])
        base: dict[str, Any] = {"command_id": command["command_id"], "node": self.name, "ok": True, "seconds": 0.01}
        if kind == "open-store":
            return Reply(**base, host=IP, port=29_500)
        if kind == "configure":
            ranks = _ranks(command["plan"], generation, command["stage"]["members"]).get(self.name, {})
            workers = [self.workers[name] for name in ranks]
            for worker in workers:
                self._leave_step(worker)
            self._since = max(command["fault_step"], *(worker.step for worker in workers))
            self._since_s = time.monotonic()
            for worker in workers:
                worker.step = self._since
                worker.state, worker.generation, worker.rank = "training", generation, ranks[worker.name]
        else:
            workers = [self.workers[name] for name in command["workers"]]
            self._change(kind, workers, command)
        results = {each.name: WorkerResult(pid=each.pid, step=each.step, source="live") for each in workers}
        self._text = ""
        await self.publish()
        return Reply(**base, workers=results)

    def _leave_step(self, worker: Worker) -> None:
        worker.step += self._done() if worker.state == "training" else 0

    def _change(self, kind: str, workers: list[Worker], command: dict[str, Any]) -> None:
        for worker in workers:
            self._leave_step(worker)
            if kind == "prepare":
                self._fleet.pids += 1
                worker.task, worker.state, worker.pid = command["task"], "ready", self._fleet.pids
                worker.generation, worker.rank, worker.step = command["generation"], None, 0
            elif kind in ("hold", "drain"):
                worker.state = "waiting" if worker.task else worker.state
            else:  # stop, release
                worker.state, worker.task, worker.generation, worker.rank, worker.pid = "idle", None, None, None, None

    async def _files(self, _: object) -> FilesAnswer:
        return FilesReply(), b""

    async def _stacks(self, _: StacksRequest) -> StacksReply:
        return StacksReply(node=self.name, workers={})

    async def _self_test(self, _: SelfTest) -> SelfTestResult:
        return SelfTestResult(incarnation=self._incarnation)


class _Turns:
    """Whose turn it is, where each of a set of nodes has one in an interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s, self._at_s = interval_s, time.monotonic()
        self._next, self._owed = 0, 0.0

    def due(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes whose turn has come since the last call: all at most, if that was longer ago."""
        now_s = time.monotonic()
        self._owed += (now_s - self._at_s) / self._interval_s * len(nodes)
        self._at_s, count = now_s, min(int(self._owed), len(nodes))
        self._owed -= int(self._owed)
        first, self._next = self._next, self._next + count
        return [nodes[turn % len(nodes)] for turn in range(first, self._next)]


async def _keep_beating(nodes: dict[str, Node], fleet: Fleet) -> None:
    """Send the heartbeats of all members, spread over the interval, and the pings of all connections."""
    beats, pings, looked_s = _Turns(fleet.interval_s), _Turns(PING_INTERVAL_S), time.monotonic()
    while True:
        ring = list(nodes.values())
        for node in beats.due(ring):
            if node.is_member:
                await node.publish()
        for node in pings.due(ring):
            node.bus.ping()
        await asyncio.sleep(TURN_S)
        fleet.late_s, looked_s = max(fleet.late_s, time.monotonic() - looked_s - TURN_S), time.monotonic()


async def _serve(nodes: dict[str, Node], fleet: Fleet, url: str) -> None:
    """Do what lines of standard input ask for, until it ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        request = json.loads(line)
        match request["op"]:
            case "connect":
                turn = asyncio.Semaphore(CONNECTING)
                await asyncio.gather(*(node.connect(url, turn) for node in nodes.values()))
                answer: dict[str, Any] = {}
            case "join":
                began_s = time.monotonic()
                await asyncio.gather(*(node.join() for node in nodes.values()))
                answer = {"seconds": time.monotonic() - began_s}
            case "exit":
                answer = {"sent_at": await nodes[request["node"]].exit_rank(request["slot"])}
            case "end":
                answer = {"at": time.time()}
                await asyncio.gather(*(nodes.pop(name).end() for name in request["nodes"]))
            case _:
                states = Counter(worker.state for node in nodes.values() for worker in node.workers.values())
                sent = {kind: vars(one) for kind, one in fleet.sent.items()}
                answer = {"states": states, "sent": sent, "late_s": fleet.late_s, "cpu_s": time.process_time()}
                fleet.sent.clear()
                fleet.late_s = 0.0
        print(json.dumps(answer), flush=True)


async def main(keys: str, url: str, count: str, workers: str, interval_s: str) -> None:
    """Simulate ``count`` nodes."""
    logging.disable(logging.WARNING)  # thousands of connections that break together
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    fleet = Fleet(float(interval_s))
    nodes = [Node(fleet, number, int(workers), Path(keys)) for number in range(int(count))]
    known = {node.name: node for node in nodes}
    beats = asyncio.create_task(_keep_beating(known, fleet))
    await _serve(known, fleet, url)
    beats.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
