"""What forming the process groups of a generation takes of a rank: calls, store, sockets, threads and processor time.

    .venv/bin/python -m benchmarks.groups [--worlds 4,8,16,24] [--tensor 1] [--pipeline 1] [--imagined 1024]

Each rank is a process, forked from one that has imported torch and megatron-core; it has no model. A line ``groups``
has what the rank with the most took, of a generation of ``world`` ranks (``start``) and of the one that follows when
the last replica is lost (``fault``). ``store`` counts the rank's requests to the generation's store by kind, ``keys``
the keys that it wrote there. Times are of a second run, in which nothing is counted.

A line ``imagined`` is one rank of a world of which the others do not exist: torch's ``fake`` backend, which connects
nothing. It has the processor time of the calls alone; then what the reports of all ranks have, in bytes, and the
processor time in which a rank reads them and deals out what a lost replica has left of a step (eight micro-batches for
each replica, half of them done).
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch.distributed as dist

from benchmarks.report import Report, at_least, run
from shared.errors import UnicronError
from unicron import backend
from unicron.accounting import bits_of
from unicron.join import dealing, groups, reports
from unicron.link.agent_link import AgentLink
from unicron.process import sockets
from unicron.protocol.messages import Configure

WORLDS = [4, 8, 16, 24]
IMAGINED = [1024]
MICRO_BATCHES = 8
"""Micro-batches of a step for each replica, in the reports of imagined ranks."""


class RankFailed(UnicronError):
    """A rank ended before it had measured; its output says why."""

    code = "rank-failed"


class _Link:
    """In place of the connection to an agent: nobody holds these generations."""

    waits_in_slices = False

    def set_break_method(self, *method: Any) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""


class _CountedStore(dist.Store):
    """A store that counts what is asked of it; torch's C++ code asks it as well."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store: Any = store
        self.counts: collections.Counter[str] = collections.Counter()
        self.keys: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        store = object.__getattribute__(self, "__dict__").get("_store")
        if name.startswith("_") or name in ("counts", "keys") or not hasattr(store, name):
            return object.__getattribute__(self, name)
        return self._counted(name, getattr(store, name))

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.counts[name] += 1
            if name in ("set", "add", "compare_set", "append"):
                self.keys.add(arguments[0])
            if name == "multi_set":
                self.keys.update(arguments[0])
            return method(*arguments)

        return call


@contextmanager
def _counted() -> Iterator[dict[str, Any]]:
    """Count calls of ``new_group`` and requests to the stores of generations."""
    torch_distributed: Any = dist
    joining: Any = groups
    torch_new_group, make_store = dist.new_group, joining._store
    found: dict[str, Any] = {"new_group": 0, "stores": []}

    def new_group(*arguments: Any, **options: Any) -> Any:
        found["new_group"] += 1
        return torch_new_group(*arguments, **options)

    def counted_store(*arguments: Any) -> Any:
        found["stores"].append(_CountedStore(make_store(*arguments)))
        return found["stores"][-1]

    torch_distributed.new_group, joining._store = new_group, counted_store
    try:
        yield found
    finally:
        torch_distributed.new_group, joining._store = torch_new_group, make_store


def _generation(number: int, rank: int, world: int, layout: tuple[int, int], port: int, *, count: bool) -> Any:
    """Form a generation as one rank; return what it took."""
    configure = Configure(
        generation=number,
        stage="boundary",
        rank=rank,
        world_size=world,
        tensor=layout[0],
        pipeline=layout[1],
        store_host="127.0.0.1",
        store_port=port,
        members=[],
    )
    link = cast(AgentLink, _Link())
    groups.leave()
    if not count:
        cpu_s, wall_s = time.process_time(), time.monotonic()
        groups.make(configure, link)
        return {
            "cpu_s": round(time.process_time() - cpu_s, 4),
            "wall_s": round(time.monotonic() - wall_s, 4),
        }
    with _counted() as found:
        groups.make(configure, link)
    (store,) = found["stores"]
    return {
        "new_group": found["new_group"],
        "store": dict(store.counts),
        "keys": len(store.keys),
        "sockets": len(sockets.connected()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _rank(rank: int, world: int, layout: tuple[int, int], port: int) -> list[Any]:
    """Form both generations, counted and then timed; return what each took."""
    left = world - layout[0] * layout[1]
    taken: list[Any] = []
    for number, count in ((1, True), (3, False)):
        taken.append(_generation(number, rank, world, layout, port, count=count))
        dist.barrier()
        # Those of the lost replica wait here, outside of any group, for the next start.
        if rank < left:
            taken.append(_generation(number + 1, rank, left, layout, port, count=count))
            dist.barrier()
        else:
            groups.leave()
    return taken


def _imagined(world: int, layout: tuple[int, int]) -> dict[str, Any]:
    """Form a generation of which the other ranks do not exist, as the one in the middle."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Fake(backend.Gloo):
        name = "fake"

    joining: Any = groups
    joining._store = lambda *arguments: FakeStore()
    joining._connections = lambda configure: 0
    backend.use(Fake())
    with _counted() as found:
        cpu_s = time.process_time()
        _generation(1, world // 2, world, layout, 0, count=False)
        cpu_s = time.process_time() - cpu_s
    report_bytes, reports_cpu_s = _reports(world, layout)
    return {
        "new_group": found["new_group"],
        "cpu_s": round(cpu_s, 3),
        "report_bytes": report_bytes,
        "reports_cpu_s": round(reports_cpu_s, 3),
    }


def _reports(world: int, layout: tuple[int, int]) -> tuple[int, float]:
    """Return the size in bytes of all ranks' reports after a replica is lost, and the processor time that they take."""
    replicas = world // (layout[0] * layout[1]) - 1
    micro_batches = MICRO_BATCHES * (replicas + 1)
    size = (micro_batches + 7) // 8
    packed = []
    for rank in range((world // (replicas + 1)) * replicas):
        replica = rank // layout[0] % replicas
        row = reports.Row(rank % layout[0], rank // (layout[0] * replicas), replica, 4, 1, partial=5, generation=1)
        own = range(replica, micro_batches, replicas + 1)
        packed.append(reports.pack(row, [bits_of(own), bits_of(own[: MICRO_BATCHES // 2])], size))
    cpu_s = time.process_time()
    dealing.deal([reports.unpack(one, size) for one in packed], 5, micro_batches, in_place=False)
    return sum(map(len, packed)), time.process_time() - cpu_s


def _fork(body: Callable[[], Any]) -> tuple[int, int]:
    """Start a process that runs a function; return its number and where it writes the result, as JSON."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = 1
    try:
        os.close(reading)
        os.write(writing, json.dumps(body()).encode() + b"\n")
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _result(reading: int) -> Any:
    with os.fdopen(reading) as pipe:
        line = pipe.readline()
    if not line:
        raise RankFailed("a rank ended before it had measured")
    return json.loads(line)


def _end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _serve(writing: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, json.dumps(server.port).encode() + b"\n")
    while True:
        signal.pause()


def _largest(values: Sequence[Any]) -> Any:
    """Return the largest of each field."""
    if isinstance(values[0], dict):
        return {name: _largest([value.get(name, 0) for value in values]) for name in values[0]}
    return max(values)


def measure_world(report: Report, world: int, layout: tuple[int, int]) -> None:
    """Measure one number of ranks; print a line for the start and one for the fault."""
    with ExitStack() as cleanup:
        reading, writing = os.pipe()
        server, _ = _fork(lambda: _serve(writing))
        cleanup.callback(_end, server)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            port = int(pipe.readline())
        ranks = []
        for rank in range(world):
            ranks.append(_fork(lambda rank=rank: _rank(rank, world, layout, port)))  # type: ignore[misc]
            cleanup.callback(_end, ranks[-1][0])
        taken = [_result(pipe) for _, pipe in ranks]
    left = taken[: world - layout[0] * layout[1]]
    for event, counted, timed in (
        ("start", [one[0] for one in taken], [one[2] for one in left]),
        ("fault", [one[1] for one in left], [one[3] for one in left]),
    ):
        report.line(
            "groups",
            world=world,
            tensor=layout[0],
            pipeline=layout[1],
            event=event,
            **_largest(counted),
            **_largest(timed),
        )


def measure(report: Report, worlds: Sequence[int], layout: tuple[int, int], imagined: Sequence[int]) -> None:
    """Measure all numbers of ranks."""
    from unicron.megatron import cpu

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cpu.enable()
    import megatron.core.parallel_state
    import megatron.core.pipeline_parallel.p2p_communication  # noqa: F401

    gc.collect()
    gc.freeze()
    for world in worlds:
        measure_world(report, world, layout)
    for world in imagined:
        process, reading = _fork(lambda world=world: _imagined(world, layout))  # type: ignore[misc]
        report.line("imagined", world=world, tensor=layout[0], pipeline=layout[1], **_result(reading))
        os.waitpid(process, 0)


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=_numbers, default=WORLDS, help="numbers of ranks")
    parser.add_argument("--tensor", type=at_least(1), default=1, help="tensor-parallel size")
    parser.add_argument("--pipeline", type=at_least(1), default=1, help="pipeline-parallel size")
    parser.add_argument("--imagined", type=_numbers, default=IMAGINED, help="numbers of ranks of which one exists")
    options = parser.parse_args(arguments)
    layout = (options.tensor, options.pipeline)
    return run(lambda report: measure(report, options.worlds, layout, options.imagined))


if __name__ == "__main__":
    sys.exit(main())
