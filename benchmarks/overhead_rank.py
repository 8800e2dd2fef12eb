"""One rank of ``benchmarks.overhead``: steps of stock Megatron and steps of this library, in turns.

``benchmarks/ranks.py`` starts it with the folder of the run as argument; under a node agent it is the task's script.
In each pair the two take turns at who is first. Under an agent, some seconds of this library's steps alone follow, in
which the processor time of the agent and of the control plane is measured.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import unicron
from benchmarks.intervals import median_interval
from benchmarks.overhead_model import Workload, build, our_step, stock, stock_step

SETTLING_PAIRS = 5
"""Pairs at the beginning that do not count: memory is allocated and caches are filled."""

CHECKED_EVERY = 25
"""Pairs between two looks at whether there are enough."""

STEPS = 1_000_000
"""More than any measurement takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the ranks of one run do."""

    work: Workload
    most_pairs: int = 0
    """Pairs of steps after which the measurement ends, whatever it has shown."""
    most_s: float = math.inf
    """The same in seconds, on the clock of the rank that is slowest."""
    width: float = math.inf
    """Largest width of the 95% intervals at which the measurement ends."""
    bounds: dict[str, float] = field(default_factory=dict)
    """Kind of ratio (those of ``ratios``) -> what is required of it. The measurement ends when each of them is decided:
    its interval is narrow enough, and the bound lies outside of it."""
    alone_s: float = 0.0
    """For how long this library's steps follow without stock ones."""
    processes: dict[str, list[int]] = field(default_factory=dict)
    """Name -> pids of other processes, whose processor time is measured meanwhile."""

    def write(self, folder: Path) -> None:
        """Write the plan for the ranks."""
        (folder / "plan.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Plan:
        """Return the plan that ``write`` has written."""
        fields = json.loads((folder / "plan.json").read_text())
        return Plan(**{**fields, "work": Workload(**fields["work"])})


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt`` (mallopt(3))."""

_KEPT_BYTES = 1 << 30
"""Free memory that the process keeps: more than it ever has."""

_LARGEST_BYTES = 32 << 20
"""Of an allocation from the heap: the most that glibc allows, and more than any tensor of the models has."""


def keep_memory() -> None:
    """Have the allocator give no memory back to the kernel, for stock steps and ours alike.

    It would do so at moments that depend on all that was allocated before: in one process some steps take 4,000 page
    faults, which is 2% of their time, and in another none.
    """
    libc = ctypes.CDLL(None)
    if not libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES) or not libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES):
        raise OSError("glibc's allocator takes no parameters here")


Pair = dict[str, dict[str, float]]
"""``stock`` and ``ours`` -> ``s``, the wall time, and ``cpu_s``, the processor time of this rank, of its step."""


def timed(work: Callable[[], None]) -> dict[str, float]:
    """Return the wall time and the CPU-seconds of this rank's part of a step."""
    dist.barrier()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return {"s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}


def ratios(ranks: list[list[Pair]]) -> dict[str, list[float]]:
    """Return the ratios of pairs of steps, ours over stock: of wall times of rank 0, of CPU-seconds of all ranks."""
    return {
        "wall time": [pair["ours"]["s"] / pair["stock"]["s"] for pair in ranks[0]],
        "CPU-seconds": [
            sum(pair["ours"]["cpu_s"] for pair in pairs) / sum(pair["stock"]["cpu_s"] for pair in pairs)
            for pairs in zip(*ranks, strict=True)
        ],
    }


def is_decided(found: Sequence[float], bound: float, width: float) -> bool:
    """Return whether the 95% interval of the median is at most ``width`` wide, and the bound outside of it."""
    _, low, high = median_interval(found)
    return high - low <= width and not low <= bound < high


class Measurement:
    """The pairs of steps of all ranks, as rank 0 needs them to know when there are enough."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._began_s = time.perf_counter()
        self.pairs: list[Pair] = []
        """Of this rank."""
        self._ranks: list[list[Pair]] = [[] for _ in range(plan.work.ranks)]

    def add(self, pair: Pair) -> bool:
        """Add a pair; return whether there are enough, which all ranks find alike."""
        self.pairs.append(pair)
        if len(self.pairs) % CHECKED_EVERY:
            return False
        newest: list[Any] = [None] * self._plan.work.ranks
        dist.all_gather_object(newest, (time.perf_counter() - self._began_s, self.pairs[-CHECKED_EVERY:]))
        for rank, (_, pairs) in enumerate(newest):
            self._ranks[rank] += pairs
        if len(self.pairs) >= self._plan.most_pairs or max(spent_s for spent_s, _ in newest) >= self._plan.most_s:
            return True
        found = ratios(self._ranks)
        return all(is_decided(found[kind], bound, self._plan.width) for kind, bound in self._plan.bounds.items())


def attach(plan: Plan, folder: Path) -> unicron.Run:
    """Attach to the agent or, without one, train in the layout of the plan."""
    from unicron.link import agent_link
    from unicron.link.torchrun import standalone_generation
    from unicron.megatron import cpu
    from unicron.training.generations import Training
    from unicron.training.run import Run

    cpu.enable()
    work = plan.work
    link = agent_link.from_environment(standalone_generation(str(folder), tensor=work.tensor, pipeline=work.pipeline))
    training = Training(
        link,
        steps=STEPS,
        micro_batches=work.all_micro_batches,
        build=partial(build, work),
        interleave=work.interleave,
    )
    return Run(training)


class OwnLoop:
    """This library's training loop, step by step."""

    def __init__(self, work: Workload, run: unicron.Run) -> None:
        """Begin the first step."""
        self._work, self._run = work, run
        self._steps = run.steps()
        self._step = next(self._steps)

    def step(self) -> None:
        """Do a step, and what the library does between it and the next one."""
        our_step(self._work, self._run, self._step)
        self._step = next(self._steps)


def measure(plan: Plan, folder: Path) -> dict[str, Any]:
    """Train both; return what was measured."""
    own = OwnLoop(plan.work, attach(plan, folder))
    stock_model = stock(plan.work)
    measurement = Measurement(plan)
    for number in range(1, SETTLING_PAIRS + plan.most_pairs + 1):
        ways: dict[str, Callable[[], None]] = {
            "stock": partial(stock_step, plan.work, *stock_model, number),
            "ours": own.step,
        }
        order = list(ways) if number % 2 else list(ways)[::-1]
        pair = {way: timed(ways[way]) for way in order}
        if number > SETTLING_PAIRS and measurement.add(pair):
            break
    return {"pairs": measurement.pairs, "alone": measure_alone(plan, own)}


def measure_alone(plan: Plan, own: OwnLoop) -> dict[str, Any]:
    """Do this library's steps alone; return how many cores every process took meanwhile."""
    if not plan.alone_s:
        return {}
    own_s: list[float] = []
    dist.barrier()
    began_s, before = time.perf_counter(), _processor_s(plan)
    while True:
        step_began_s = time.perf_counter()
        own.step()
        own_s.append(time.perf_counter() - step_began_s)
        over = torch.tensor([float(time.perf_counter() - began_s >= plan.alone_s)])
        dist.broadcast(over, 0)
        if over:
            break
    lasted_s = time.perf_counter() - began_s
    cores = {name: (seconds - before[name]) / lasted_s for name, seconds in _processor_s(plan).items()}
    return {"cores": cores, "step_s": statistics.median(own_s), "steps": len(own_s)}


def _processor_s(plan: Plan) -> dict[str, float]:
    """Return the processor time that each group of processes has taken, and this rank."""
    found = {"rank": time.process_time()}
    for name, pids in plan.processes.items():
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        found[name] = sum(one.user + one.system for one in times)
    return found


def main(folder: Path) -> None:
    """Measure as one rank; under an agent, wait for the end of the stack."""
    import scipy.stats  # noqa: F401  # which intervals take: a second that would be missing between two steps

    torch.set_num_threads(1)
    keep_memory()
    plan = Plan.read(folder)
    measured = measure(plan, folder)
    result = folder / f"rank-{dist.get_rank()}.json"
    part = result.with_suffix(".part")
    part.write_text(json.dumps(measured))
    part.rename(result)
    sys.stdout.flush()
    if "UNICRON_SOCKET" in os.environ:
        signal.pause()
    os._exit(0)  # the run has not come to its last step


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
