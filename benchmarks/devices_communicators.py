"""What communicators cost, bare: made, used once, aborted, destroyed, by processes that do nothing else.

    .venv/bin/python -m benchmarks.devices_communicators [--ranks 3] [--on-cpu]

Each rank is a process that lives on while one generation of communicators follows the other, as the survivors of a
fault do. A generation has torch's default group and one more, of the same ranks. ``make test-gpu`` holds the recovery
of a task beside what this measures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.report import Report, run
from services.agent.machine import hardware
from services.agent.machine.hardware import VISIBLE_VARIABLE
from shared.errors import InvalidInput
from unicron import backend, device

ROOT = Path(__file__).resolve().parents[1]
RANKS = 3
GENERATIONS = 6
"""The first is apart: it also starts CUDA in the process."""
LIMIT_S = 120.0


def shared_device(name: str) -> dict[str, str]:
    """Return the environment in which several ranks may share one device."""
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


class Laps:
    """Times from one call to the next, the device waited for."""

    def __init__(self) -> None:
        self.laps_s: dict[str, float] = {}
        self._last_s = time.monotonic()

    def lap(self, name: str) -> None:
        """Note the time since the last call under a name."""
        if device.is_cuda():
            device.synchronize()
        now_s = time.monotonic()
        self.laps_s[name], self._last_s = now_s - self._last_s, now_s


def generation(store: dist.Store, rank: int, size: int) -> dict[str, float]:
    """Make, use, abort and destroy two communicators; return what each took, in seconds."""
    chosen = backend.current()
    tensor = torch.ones(1, device=device.current())
    laps = Laps()
    dist.init_process_group(chosen.name, store=store, rank=rank, world_size=size)
    groups: list[dist.ProcessGroup] = [dist.distributed_c10d._get_default_group()]
    chosen.connect(groups[0])
    laps.lap("make the first")
    dist.all_reduce(tensor)
    laps.lap("use the first")
    groups.append(dist.new_group(range(size)))
    chosen.connect(groups[1])
    laps.lap("make the second")
    dist.all_reduce(tensor, group=groups[1])
    laps.lap("use the second")
    chosen.abort(groups)
    laps.lap("abort both, idle")
    dist.destroy_process_group()
    laps.lap("destroy both")
    return laps.laps_s


def rank_main(rank: int, size: int, port: int) -> None:
    """Be one of the ranks; rank 0 prints the times of each generation as a JSON line."""
    for name, value in backend.current().settings.items():
        os.environ.setdefault(name, value)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    for number in range(GENERATIONS):
        times_s = generation(dist.PrefixStore(str(number), store), rank, size)
        if rank == 0:
            print(json.dumps(times_s), flush=True)


def initialisation_s(report: Report, entries: Sequence[str]) -> float:
    """Measure; return the seconds from nothing to the end of a first collective, in a process that has been in another.

    Args:
        report: gets a line for each operation.
        entries: for each rank its device, as ``CUDA_VISIBLE_DEVICES`` has it; empty: none, and gloo.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shares = len(set(entries)) < len(entries)
    command = [sys.executable, "-m", "benchmarks.devices_communicators", "--ranks", str(len(entries))]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--port", str(server.port)],
            cwd=ROOT,
            env=os.environ
            | {VISIBLE_VARIABLE: entry, "GLOO_SOCKET_IFNAME": "lo"}
            | (shared_device(f"rank-{rank}") if shares and entry else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, entry in enumerate(entries)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise InvalidInput(f"a rank ended with {[process.returncode for process in processes]}")
    generations: list[dict[str, float]] = [json.loads(line) for line in outputs[0].splitlines()]
    first, *later = generations
    for name in first:
        report.line(
            "communicators",
            operation=name,
            ranks=len(entries),
            first_s=round(first[name], 4),
            median_s=round(statistics.median(one[name] for one in later), 4),
            longest_s=round(max(one[name] for one in later), 4),
        )
    return statistics.median(one["make the first"] + one["use the first"] for one in later)


def measure(report: Report, ranks: int, on_cpu: bool) -> None:
    """Measure on the devices that there are."""
    there = hardware.devices(os.environ.get(VISIBLE_VARIABLE)).entries
    if not there and not on_cpu:
        raise InvalidInput("there is no CUDA device")
    initialisation_s(report, [there[i % len(there)] if there else "" for i in range(ranks)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=RANKS, help="how many")
    parser.add_argument("--on-cpu", action="store_true", help="on gloo, where there is no device")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        rank_main(options.rank, options.ranks, options.port)
        return 0
    return run(lambda report: measure(report, options.ranks, options.on_cpu))


if __name__ == "__main__":
    sys.exit(main())
