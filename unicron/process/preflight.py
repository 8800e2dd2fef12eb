"""How fast a node does what training does: ``python -P -m unicron.process.preflight REQUEST``, a program of its own.

``REQUEST`` is a JSON object: ``folder``, in which a file is written and read; ``devices``, how many CUDA devices there
are, 0 for none; ``part_s``, the longest time for one part; ``neighbour``: then only the all-reduce with this program on
another node is done, at the store ``host``:``port``, of which ``fd`` is the listening socket if it is this node's, else
null. Each part runs in children that are forked after torch was imported, one for each device, and that are killed when
the time of the part is over:

    disk         a file in the folder: written with fsync, read again without the page cache
    node         the processor's matrix products and copies in its memory, with all of its cores
    device       the same of every device, on all of them at the same time, as in training: they share power and cooling
    all-reduce   among the devices by NCCL, or among some processes by gloo

Every line of the output is a JSON object: ``{"quantity", "device", "value"}``, where ``device`` is the number of a CUDA
device or null, or ``{"problem"}``: what was not measured, and why. ``services/agent/machine/preflight.py`` reads them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from unicron.process.preloading import keep_quiet
from unicron.process.processes import end_with_parent

FILE_BYTES = 128 << 20
"""Size of the file: a second on a disk of 128 MB/s."""

BLOCK_BYTES = 8 << 20
"""Bytes that are written at once. They are random, since some file systems compress."""

HOST_COPY_BYTES = 128 << 20
"""Bytes that are copied in the host's memory: more than caches keep."""

DEVICE_COPY_BYTES = 1 << 30
"""Bytes that are copied in a device's memory, if so much is free twice."""

SIDES = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the matrices: large enough that the product is bound by arithmetic (``hardware.json`` has what
products of side 8192 reach)."""

REDUCED_BYTES = {"gloo": 16 << 20, "nccl": 512 << 20}
"""Bytes that each rank reduces: enough that latency has no part in the time, also where NVLink switches reduce."""

NEIGHBOUR_BYTES = {"gloo": 1 << 20, "nccl": 128 << 20}
"""The same between nodes: few enough that a link of 10 Mbit/s, which is broken, is measured in the time of a part."""

GLOO_RANKS = 2
"""Processes of an all-reduce by gloo: the fewest, since all of them share the cores with one another."""

ROUND_S = 0.1
"""Shortest time of one round: the call of a kernel and the wait for it are a small part of that."""

ROUNDS = 7
"""Rounds of which the median counts: what another program does now and then is left out."""


def main(request: dict[str, Any]) -> int:
    """Measure, and print what was found; return the exit code."""
    end_with_parent(os.getppid(), signal.SIGKILL)
    keep_quiet(os.environ)
    import torch  # before the forks, which then have it

    part_s, devices = float(request["part_s"]), int(request["devices"])
    if "neighbour" in request:
        here = range(devices or 1)
        works: list[Callable[[], None]] = [
            partial(with_neighbour, number, devices, part_s, **request["neighbour"]) for number in here
        ]
        _part("all-reduce with a neighbour", works, part_s)
        return 0
    _part("disk", [partial(disk, Path(request["folder"]))], part_s)
    _part("node", [node], part_s)
    _part("device", [partial(device, number) for number in range(devices)], part_s)
    if not torch.distributed.is_available():
        _say(problem="all-reduce: this torch has no torch.distributed")
        return 0
    with tempfile.TemporaryDirectory(prefix="unicron-preflight-") as folder:
        backend, ranks = ("nccl", devices) if devices > 1 else ("gloo", GLOO_RANKS)
        store = f"{folder}/store"
        _part("all-reduce", [partial(all_reduce, backend, rank, ranks, store, part_s) for rank in range(ranks)], part_s)
    return 0


def _part(name: str, works: list[Callable[[], None]], limit_s: float) -> None:
    """Do the works of one part at the same time, each in a child; say which of them was not done."""
    context = multiprocessing.get_context("fork")
    children: list[BaseProcess] = [context.Process(target=_child, args=(name, work)) for work in works]
    for child in children:
        child.start()
    until_s = time.monotonic() + limit_s
    for child in children:
        child.join(max(0.0, until_s - time.monotonic()))
    for number, child in enumerate(children):
        if child.is_alive():
            child.kill()
            child.join()
            _say(problem=f"{name} {number}: not done within {limit_s:g} s")
        elif child.exitcode:
            _say(problem=f"{name} {number}: the process ended with {child.exitcode}")


def _child(name: str, work: Callable[[], None]) -> None:
    end_with_parent(os.getppid(), signal.SIGKILL)
    try:
        work()
    except Exception as err:  # of torch, of a driver, of the file system: whatever it is, it is said
        _say(problem=f"{name}: {type(err).__name__}: {err}"[:300])


def _say(**line: Any) -> None:
    """Print a line at once: several processes print."""
    os.write(1, f"{json.dumps(line)}\n".encode())


def _found(quantity: str, value: float, device: int | None = None) -> None:
    _say(quantity=quantity, device=device, value=value)


def disk(folder: Path) -> None:
    """Write a file with fsync, and read it again. The file has no name, so that none is left behind in any case."""
    block = os.urandom(BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began_s = time.perf_counter()
        for _ in range(FILE_BYTES // BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
        _found("disk write", FILE_BYTES / (time.perf_counter() - began_s))
        with contextlib.suppress(OSError):  # else the page cache is read; not every file system can
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began_s = time.perf_counter()
        while file.read(BLOCK_BYTES):
            pass
        _found("disk read", FILE_BYTES / (time.perf_counter() - began_s))


def node() -> None:
    """Measure the processor's matrix products (float32) and copies in its memory."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    source = torch.ones(HOST_COPY_BYTES // 4)
    target = torch.empty_like(source)
    _found("host memory", _copied(HOST_COPY_BYTES) / _round_s(lambda: target.copy_(source), lambda: None))
    _found("processor matrix products", _products(torch.device("cpu"), torch.float32, lambda: None))


def device(number: int) -> None:
    """Measure a CUDA device: matrix products in bfloat16, or in float16 before Ampere, and copies in its memory."""
    import torch

    place = torch.device("cuda", number)
    torch.cuda.set_device(place)

    def wait() -> None:
        torch.cuda.synchronize(place)

    kind = torch.bfloat16 if torch.cuda.get_device_capability(place) >= (8, 0) else torch.float16
    _found("matrix products", _products(place, kind, wait), number)
    size = min(DEVICE_COPY_BYTES, torch.cuda.mem_get_info(place)[0] // 4)
    source = torch.ones(size // 4, device=place)
    target = torch.empty_like(source)
    _found("device memory", _copied(size) / _round_s(lambda: target.copy_(source), wait), number)


def _copied(size: int) -> float:
    """Return the bytes of a copy as STREAM counts them: what is read, and what is written."""
    return 2.0 * size


def _products(place: Any, kind: Any, wait: Callable[[], None]) -> float:
    """Return the rate of products of square matrices in FLOP/s: 2 n^3 for each."""
    import torch

    side = SIDES[place.type]
    one, other = (torch.ones(side, side, device=place, dtype=kind) / side for _ in range(2))
    return 2.0 * side**3 / _round_s(lambda: torch.mm(one, other), wait)


def _round_s(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return how long a work takes, in seconds: the median of some rounds, each of several works."""
    for _ in range(2):  # the first call loads kernels
        work()
    wait()
    began_s = time.perf_counter()
    work()
    wait()
    times = max(1, round(ROUND_S / max(time.perf_counter() - began_s, 1e-6)))
    return statistics.median(_timed_s(work, wait, times) for _ in range(ROUNDS))


def _timed_s(work: Callable[[], object], wait: Callable[[], None], times: int) -> float:
    began_s = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - began_s) / times


def all_reduce(backend: str, rank: int, ranks: int, store: str, limit_s: float) -> None:
    """Measure the bus bandwidth of an all-reduce within the node, which rank 0 says."""
    import torch.distributed as dist

    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    found = _bus_bandwidth(backend, rank, rank, ranks, dist.FileStore(store, ranks), limit_s, REDUCED_BYTES[backend])
    if rank == 0:
        _found("all-reduce", found)


def with_neighbour(number: int, devices: int, limit_s: float, host: str, port: int, fd: int | None) -> None:
    """Measure the bus bandwidth of an all-reduce of all devices here and there, which process 0 of each node says.

    Args:
        number: of the device, or of the process where there are none.
        devices: how many this node has, and the other one.
        limit_s: for the other one to come, and for each wait.
        host: address of the store.
        port: of the store.
        fd: the listening socket of the store, if it is of this node; the first process has it.
    """
    import torch.distributed as dist

    serves = fd is not None and number == 0
    store = dist.TCPStore(
        host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=limit_s),
        master_listen_fd=fd if serves else None, use_libuv=True,
    )  # fmt: skip
    own, backend = devices or 1, "nccl" if devices else "gloo"
    rank = number if fd is not None else own + number
    found = _bus_bandwidth(backend, number, rank, 2 * own, store, limit_s, NEIGHBOUR_BYTES[backend])
    if number == 0:
        _found("all-reduce with a neighbour", found)
    if serves:  # the last one to leave: the others need its store up to their end
        store.wait(["left"], timedelta(seconds=limit_s))
    elif number == own - 1:
        store.set("left", "yes")


def _bus_bandwidth(backend: str, number: int, rank: int, ranks: int, store: Any, limit_s: float, size: int) -> float:
    """Return the bus bandwidth of an all-reduce of ``size`` bytes among ranks, of which this is one.

    It is ``2 (n - 1) / n`` times the bytes of one rank, divided by the time: what each rank's link carries, whatever
    the number of ranks (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, "Bus bandwidth").
    """
    import torch
    import torch.distributed as dist

    on_device = backend == "nccl"
    place = torch.device("cuda", number) if on_device else torch.device("cpu")
    if on_device:
        torch.cuda.set_device(place)
    limit = timedelta(seconds=limit_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    tensor = torch.ones(size // 4, device=place)

    def wait() -> None:
        if on_device:
            torch.cuda.synchronize(place)

    def reduce() -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)  # a sum of sums would overflow

    reduce()
    wait()
    dist.barrier()
    time_s = statistics.median(_timed_s(reduce, wait, 2) for _ in range(ROUNDS))
    dist.barrier()
    dist.destroy_process_group()
    return 2.0 * (ranks - 1) / ranks * size / time_s


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
