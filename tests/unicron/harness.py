"""A small node agent for tests: one fork server, one Unix socket, messages recorded in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.condition import until
from tests.unicron.zygote import environment, zygote
from unicron.protocol.messages import (
    Configure,
    Drain,
    Drained,
    Finished,
    Held,
    Hello,
    Hold,
    Message,
    Progress,
    Raised,
    Resumed,
    decode,
    encode,
)

PATIENCE_S = float(os.environ.get("UNICRON_TEST_PATIENCE_S", "60"))
"""How long to wait for what must come: far longer than it takes, also on a busy machine."""

LOG_CHARACTERS = 6000
"""How much of the end of each log a failed test shows."""

STACKS_S = 0.5
"""How long processes may take to write their stacks, once a test has failed."""

LATE_S = float(os.environ.get("UNICRON_TEST_LATE_S", "0"))
"""0, or for how long nothing may have been heard before the test goes on after each wait: the test is then as late as a
stalled machine makes it, and fails if a task must not have gone on meanwhile."""

ON_ONE_DEVICE = os.environ.get("UNICRON_TEST_ON_ONE_DEVICE") == "1"
"""Whether all workers share the first CUDA device (``make test-gpu``)."""

_CREDENTIALS = struct.Struct("3i")
"""What ``SO_PEERCRED`` gives: pid, uid, gid."""


class Agent:
    """Forks ranks, hears them, and does what a plan would make an agent do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"@unicron-test-{os.getpid()}-{id(self)}"
        self.messages: list[tuple[float, str, Message]] = []
        self.writers: dict[str, asyncio.StreamWriter] = {}
        self.pids: dict[str, int] = {}
        self.exits: dict[str, tuple[float, int]] = {}
        """Time and exit code of each process that has ended, once all that it said has been read."""
        self.events: list[dict[str, Any]] = []
        self.process: asyncio.subprocess.Process | None = None
        """The fork server, unless it was forked from a warm one."""
        self.generation = 0
        self.members: list[str] = []
        self._connections: Counter[int] = Counter()
        """Open connections of each process, by its pid."""
        self._stops_awaited: Counter[int] = Counter()
        self._going_on: set[str] = set()
        """Workers that no injected fault of kind ``hang`` stops before they are in a new generation (``go_on``)."""
        self._ends: set[asyncio.Task[None]] = set()
        self._stores = 0

    async def start(self, *arguments: str, warm: bool = True) -> None:
        """Start the fork server: forked from one that is ``warm``, or as a node agent starts it."""
        self.log = (self.folder / "forkserver.log").open("ab")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name := f"\0{self.address[1:]}-fork-server")
            listener.listen()
            if warm:
                pid = await asyncio.to_thread(zygote().fork, listener.fileno(), self.log.fileno())
            else:
                self.process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", "unicron.forkserver", "--fd", str(listener.fileno()),
                    "--parent", str(os.getpid()), *arguments,
                    pass_fds=(listener.fileno(),), env=environment(),
                    stdout=self.log, stderr=self.log, start_new_session=True,
                )  # fmt: skip
                pid = self.process.pid
            self._server_pidfd = os.pidfd_open(pid)
        self._fs_reader, self._fs_writer = await asyncio.open_unix_connection(name)
        self._server = await asyncio.start_unix_server(self._attach, "\0" + self.address[1:])
        self._task = asyncio.create_task(self._hear_forkserver())
        await self.until(lambda: any(e["event"] == "ready" for e in self.events))

    def kill_server(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the fork server a signal, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._server_pidfd, number)

    async def close(self) -> None:
        self.kill_server()
        await asyncio.to_thread(select.select, [self._server_pidfd], [], [])
        os.close(self._server_pidfd)
        if self.process is not None:
            await self.process.wait()
        await self._task
        await asyncio.gather(*self._ends)
        self._fs_writer.close()
        self._server.close()
        self.log.close()

    async def until(self, condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
        """Wait for a condition on what was heard; tell what was heard when it does not come."""
        answer = await until(condition, limit_s=timeout_s, seen=self._heard)
        if LATE_S:
            await self._until_quiet()
        return answer

    async def _heard(self) -> str:
        """Return what was heard, and the logs, in which the processes write what their threads are at."""
        for worker in self.pids.keys() - self.exits.keys():
            with contextlib.suppress(ProcessLookupError):
                self.kill(worker, signal.SIGUSR2)
        await asyncio.sleep(STACKS_S)
        reported = "\n".join(f"{t:.3f} {w} {m}" for t, w, m in self.messages[-40:])
        logs = "\n".join(f"{path.name}: {path.read_text()[-LOG_CHARACTERS:]}" for path in self.folder.glob("*.log"))
        return f"{logs}\n{self.events}\n{reported}"

    async def _until_quiet(self) -> None:
        heard = -1
        while heard != len(self.messages) + len(self.events):
            heard = len(self.messages) + len(self.events)
            await asyncio.sleep(LATE_S)

    async def _hear_forkserver(self) -> None:
        with contextlib.suppress(ConnectionError):
            async for line in self._fs_reader:
                event = json.loads(line)
                self.events.append(event)
                match event["event"]:
                    case "exited":
                        self._ends.add(asyncio.create_task(self._note_end(event["id"], event["pid"], event["code"])))
                    case "forked":
                        self.pids[event["id"]] = event["pid"]
                    case "stopped" if event["id"] in self._going_on:
                        self._stops_awaited[event["pid"]] += 1
                        self._continue(event["id"])

    async def _note_end(self, worker: str, pid: int, code: int) -> None:
        """Note that a process has ended. What it said last comes on another connection, and may come later."""
        ended_at = time.monotonic()
        await self._accept_all()
        await until(lambda: not self._connections[pid])
        self.exits[worker] = (ended_at, code)

    async def _accept_all(self) -> None:
        """Wait until every connection is accepted that was made before now: they are accepted in order."""
        with contextlib.suppress(ConnectionError):  # nobody listens: a test has closed the server
            reader, writer = await asyncio.open_unix_connection("\0" + self.address[1:])
            await reader.read()
            writer.close()

    async def _attach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = ""
        peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(peer)
        if pid == os.getpid():  # from ``_accept_all``
            writer.close()
            return
        self._connections[pid] += 1
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            async for line in reader:
                message = decode(line)
                if isinstance(message, Hello):
                    worker = message.worker
                    self.writers[worker] = writer
                self.messages.append((time.monotonic(), worker, message))
        writer.close()
        self._connections[pid] -= 1

    def ask(self, **request: Any) -> None:
        self._fs_writer.write(json.dumps(request).encode() + b"\n")

    async def fork(self, worker: str, spec: Path, env: Mapping[str, str] | None = None) -> None:
        self.exits.pop(worker, None)
        before = len(self.of(Hello, worker))
        self.ask(
            do="fork", id=worker, task="a", worker=worker, spec=str(spec),
            output=str(self.folder / f"{worker.replace('/', '-')}.log"),
            env={"UNICRON_SOCKET": self.address, **_device(worker), **(env or {})},
        )  # fmt: skip
        await self.until(lambda: len(self.of(Hello, worker)) > before or worker in self.exits)

    async def store(self) -> int:
        self._stores += 1
        name = f"store-{self._stores}"
        self.ask(do="store", id=name, host="127.0.0.1", output=str(self.folder / "store.log"))
        found = await self.until(lambda: [e for e in self.events if e["event"] == "store" and e["id"] == name])
        return int(found[0]["port"])

    def of(self, kind: type[Message], worker: str | None = None, generation: int | None = None) -> list[Any]:
        return [
            m
            for _, w, m in self.messages
            if isinstance(m, kind)
            and (worker is None or w == worker)
            and (generation is None or getattr(m, "generation", None) == generation)
        ]

    def phases(self, worker: str) -> list[tuple[int, str]]:
        """Return the steps and phases that a worker reported, in order."""
        return [(m.step, m.phase) for m in self.of(Progress, worker)]

    def send(self, worker: str, message: Message) -> None:
        self.writers[worker].write(encode(message))

    async def configure(
        self,
        members: Mapping[str, str],
        *,
        stage: str = "boundary",
        tensor: int = 1,
        pipeline: int = 1,
        checkpoint: str = "",
        complete: bool = True,
        fault_step: int = 0,
        shares: Mapping[str, list[int]] | None = None,
        identity: Mapping[str, str] | None = None,
    ) -> int:
        """Bring workers (worker -> source) into a new generation; return its number.

        ``shares``: of micro-batches by replica, as each worker is told.
        """
        port = await self.store()
        self.generation += 1
        self.members = list(members)
        self._going_on.difference_update(members)
        listed = [[rank, worker, source] for rank, (worker, source) in enumerate(members.items())]
        for rank, worker in enumerate(members):
            self.send(
                worker,
                Configure(
                    generation=self.generation, stage=stage, rank=rank, world_size=len(members),
                    tensor=tensor, pipeline=pipeline, store_host="127.0.0.1", store_port=port, members=listed,
                    checkpoint=checkpoint, complete=complete, fault_step=fault_step,
                    directory=str(self.folder / f"generation-{self.generation}"),
                    shares=(shares or {}).get(worker, []), identity=dict(identity or {}),
                ),
            )  # fmt: skip
        return self.generation

    async def resumed(self, generation: int) -> list[Resumed]:
        """Wait until every member has done its first step of a generation."""
        count = len(self.members)
        return list(await self.until(lambda: r if len(r := self.of(Resumed, generation=generation)) == count else None))

    async def hold(self, workers: list[str]) -> None:
        """Hold the current generation on some workers, the others of which are lost; wait until they are out of it."""
        generation = self.generation
        lost = [worker for worker in self.members if worker not in workers]
        self.send_all(workers, Hold(generation=generation, lost=lost))
        await self.until(lambda: all(self.of(Held, worker, generation) for worker in workers))

    async def drain(self, workers: list[str]) -> None:
        """Drain some workers at a step boundary and wait until they have left the generation."""
        generation = self.generation
        self.send_all(workers, Drain(generation=generation))
        await self.until(lambda: all(self.of(Drained, worker, generation) for worker in workers))

    def send_all(self, workers: list[str], message: Message) -> None:
        """Send a message to workers, and have them go on."""
        for worker in workers:
            self.send(worker, message)
        self.go_on(workers)

    def go_on(self, workers: list[str]) -> None:
        """Have workers go on that are stopped (``stopped``), and let no fault stop them before the next generation."""
        self._going_on.update(workers)
        for worker in workers:
            self._continue(worker)

    def _continue(self, worker: str) -> None:
        """Continue a worker's process if it is stopped. Once one goes on, others may end before they are told."""
        with contextlib.suppress(ProcessLookupError):
            self.kill(worker, signal.SIGCONT)

    async def stopped(self, worker: str) -> None:
        """Wait until a worker's injected fault of kind ``hang`` has stopped it; once more: until the next one has.

        A task of which one member is stopped does not come to its end before the test has done what it is about. So a
        test that asks something of a task that trains has a member stop first, in each generation anew: how far the
        others come before they are asked depends on how fast the test is.
        """
        pid = self.pids[worker]
        self._stops_awaited[pid] += 1
        await self.until(lambda: self._stops(pid) >= self._stops_awaited[pid])

    def _stops(self, pid: int) -> int:
        return sum(event["event"] == "stopped" and event["pid"] == pid for event in self.events)

    async def in_step(self, workers: Iterable[str], step: int, phase: str = "") -> None:
        """Wait until workers are in a step, or in a phase of it."""
        names = list(workers)
        await self.until(lambda: all(self._has_come(worker, step, phase) for worker in names))

    def _has_come(self, worker: str, step: int, phase: str) -> bool:
        reported = self.phases(worker)
        return (step, phase) in reported if phase else any(at >= step for at, _ in reported)

    async def lose(self, worker: str, step: int, phase: str = "") -> None:
        """Kill a member that its injected fault (``hang``) has stopped, once the others are in its step.

        What a killed process sent last may not arrive. Others that still need it are left in the step before.
        """
        await self.stopped(worker)
        await self.in_step((w for w in self.members if w != worker), step, phase)
        self.kill(worker)
        await self.until(lambda: worker in self.exits)

    async def finished(self, count: int) -> Finished:
        """Wait until the task is done and its processes have ended; return rank 0's message."""
        await self.until(lambda: sum(message.ended for message in self.of(Finished)) == count)
        await self.until(lambda: all(worker in self.exits for worker in self.members))
        assert [self.exits[w][1] for w in self.members] == [0] * len(self.members)
        first: Finished = next(m for m in self.of(Finished) if m.samples_sha256)
        return first

    def kill(self, worker: str, number: int = signal.SIGKILL) -> float:
        now = time.monotonic()
        os.kill(self.pids[worker], number)
        return now

    def errors(self) -> list[Raised]:
        return self.of(Raised)

    def output(self, worker: str) -> str:
        return (self.folder / f"{worker.replace('/', '-')}.log").read_text()


def _device(worker: str) -> dict[str, str]:
    """Return the environment in which NCCL lets a worker share a device with others: as if each were a host.

    NCCL refuses two ranks with one device on one host. Those of several hosts talk over sockets, also on loopback.
    """
    if not ON_ONE_DEVICE:
        return {}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return {"CUDA_VISIBLE_DEVICES": first, "NCCL_HOSTID": worker, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def _determining(spec: Path) -> str:
    """Return what the result of a specification depends on, whatever the names of its files."""
    fields = json.loads(spec.read_text())
    fields.pop("checkpoint", None)
    for name in {"data", "script"} & fields.keys():
        fields[name] = hashlib.sha256(Path(fields[name]).read_bytes()).hexdigest()
    return json.dumps(fields, sort_keys=True)


def _references(spec: Path) -> Path:
    """Return the folder of references, which all processes of this run share; ``spec`` is in a test's folder."""
    own = spec.parents[1]
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "references"


async def reference_of(a: Agent, spec: Path) -> Finished:
    """Return the result of a failure-free run of a specification in one process.

    Specifications that differ in their checkpoints alone have the same result, which is trained once.
    """
    place = _references(spec) / hashlib.sha256(_determining(spec).encode()).hexdigest()
    place.mkdir(parents=True, exist_ok=True)
    result, parameters = place / "finished.json", place / "parameters.safetensors"
    lock = FileLock(place / "lock", thread_local=False)
    await asyncio.to_thread(lock.acquire)
    try:
        if not result.exists():
            a.messages.clear()
            await a.fork("reference", spec)
            await a.configure({"reference": "initial"})
            finished = await a.finished(1)
            shutil.copy(finished.parameters_path, parameters)
            result.write_bytes(encode(dataclasses.replace(finished, parameters_path=str(parameters))))
    finally:
        lock.release()
    answer = decode(result.read_bytes())
    assert isinstance(answer, Finished)
    return answer


@contextlib.asynccontextmanager
async def agent(folder: Path, *arguments: str, warm: bool = True) -> AsyncIterator[Agent]:
    """A started agent; its fork server and every rank are gone afterwards."""
    it = Agent(folder)
    await it.start(*arguments, warm=warm and not arguments)
    try:
        yield it
    finally:
        await it.close()
