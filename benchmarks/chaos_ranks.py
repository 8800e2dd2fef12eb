"""The processes of ranks, found below the node agents of a stack."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cli.stack.stack import Stack


@dataclass(frozen=True)
class Rank:
    """A living process of a task."""

    pid: int
    task: str
    worker: str


def living_ranks(stack: Stack) -> list[Rank]:
    """Return the ranks that live, in the order of their workers."""
    found = []
    for node in stack.node_names:
        with suppress(psutil.NoSuchProcess):
            found += [rank_of(process.pid, stack.run_dir) for process in stack.node_processes(node)]
    return sorted((rank for rank in found if rank is not None), key=lambda rank: (rank.worker, rank.pid))


def rank_of(pid: int, run_dir: Path) -> Rank | None:
    """Return the rank that a process is, by the file that its output goes to; None if it is no rank."""
    try:
        path = Path(os.readlink(f"/proc/{pid}/fd/1"))
    except OSError:
        return None
    if path.parent.name != "output" or not path.is_relative_to(run_dir / "tasks"):
        return None
    _, node, slot = path.stem.rsplit("-", 2)
    return None if node == "store" else Rank(pid, path.parent.parent.name, f"{node}/{slot}")
