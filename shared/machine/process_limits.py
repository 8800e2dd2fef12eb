"""How many descriptors, threads and ports the processes of a node may have, and what tasks need of them.

Ranks inherit the limits of their agent. ``unicron doctor`` shows them, and an agent that starts warns of those that are
short: a rank finds out in the middle of a recovery otherwise, when its new groups need more than the old ones had left.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import NamedTuple

OPEN_FILES = 4096
"""Descriptors that are enough. A rank has a connection to each rank of its groups, and the agent a few to each of its
own. The usual limit of 1024 is reached at some hundreds of ranks."""

RAISED_OPEN_FILES = 65_536
"""Number of descriptors to which an agent raises its own limit, as far as it may: what container engines give."""

THREADS_PER_WORKER = 256
"""Threads of a rank: those of its mathematics library, of gloo or NCCL for each of its groups, and of its data loaders
(measured: 30 to 60 of a rank of the examples on two cores)."""

PORTS = 4096
"""Local ports for the connections of the node's ranks, each to every other rank of its groups."""


class ProcessLimits(NamedTuple):
    """What one process, or all of one user or control group, may have; None: there is no limit, or it is not known."""

    open_files: int | None
    threads: int | None
    ports: int | None


class LimitFinding(NamedTuple):
    """What there may be of a resource, in words. ``advice``: what to do where that is too little; else empty."""

    resource: str
    what: str
    advice: str


def of_this_process() -> ProcessLimits:
    """Return the limits of this process."""
    threads = [n for n in (_soft(resource.RLIMIT_NPROC), _pids_max()) if n is not None]
    return ProcessLimits(_soft(resource.RLIMIT_NOFILE), min(threads, default=None), _local_ports())


def raise_open_files() -> None:
    """Raise the soft limit of open files to what is allowed, ``RAISED_OPEN_FILES`` at most; never lower it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = RAISED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, RAISED_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


ADVICE = {
    "open files": "raise it (systemd: LimitNOFILE=65536, docker: --ulimit, shell: ulimit -n)",
    "threads": "raise it (systemd: TasksMax, docker: --pids-limit, shell: ulimit -u)",
    "ports": "widen net.ipv4.ip_local_port_range (sysctl)",
}
"""Resource -> what to do if there may be too few."""


def judged(limits: ProcessLimits, workers: int) -> list[LimitFinding]:
    """Return what the ranks of a node may have, and of what that is less than they need.

    Args:
        limits: the limits of its processes.
        workers: the number of the node's workers.
    """
    needs = (
        ("open files", limits.open_files, OPEN_FILES),
        ("threads", limits.threads, THREADS_PER_WORKER * (workers + 1)),
        ("ports", limits.ports, PORTS),
    )
    return [_finding(name, found, needed) for name, found, needed in needs]


def _finding(name: str, found: int | None, needed: int) -> LimitFinding:
    if found is None:
        return LimitFinding(name, "no limit is known", "")
    if found < needed:
        return LimitFinding(name, f"{found} at most, and ranks may need {needed}", ADVICE[name])
    return LimitFinding(name, f"{found} at most", "")


def _soft(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def _pids_max() -> int | None:
    """Return ``pids.max`` of the control group of this process (v2); None: there is none."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
        return int(Path(f"/sys/fs/cgroup{group}/pids.max").read_text())
    except (OSError, ValueError):  # there is no such group in here, or the limit is ``max``
        return None


def _local_ports() -> int | None:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return None
    return int(last) - int(first) + 1
