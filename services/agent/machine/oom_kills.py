"""Whether the kernel has just ended processes of this node's control group because memory was used up.

The kernel ends a process for memory by SIGKILL, which does not tell who sent it. But the kernel counts such ends for
each control group (``oom_kill`` in ``memory.oom_control`` of version 1 and in ``memory.events`` of version 2; Linux,
Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst). Ranks are in the agent's group.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from shared.clock import SteadyClock

LOOK_S = 0.25
"""Seconds between two reads of the count, which is a small file: the interval of heartbeats."""

RECENT_S = 1.0
"""A process that ends by SIGKILL was ended for memory if the count rose at most so many seconds before. The kernel
counts as it sends the signal; a process with much memory takes a part of a second to end."""

_CONTROLLER = "memory"


class OomKills:
    """Follows the kernel's count.

    Args:
        clock: of the process.
        counter: the file with the count; None: the node has none.
    """

    def __init__(self, clock: SteadyClock, counter: Path | None) -> None:
        self._clock, self._counter = clock, counter
        self._count = self._read()
        self._risen_at_s: float | None = None

    async def watch(self) -> None:
        """Read the count now and then, until cancelled."""
        while self._counter is not None:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Note whether the count has risen."""
        if (count := self._read()) > self._count:
            self._risen_at_s = self._clock.seconds()
        self._count = count

    def explain(self, exit_code: int) -> bool:
        """Return whether a process that has just ended was ended by SIGKILL as the count rose."""
        self.look()
        if exit_code != -signal.SIGKILL:
            return False
        return self._risen_at_s is not None and self._clock.seconds() - self._risen_at_s <= RECENT_S

    def _read(self) -> int:
        if self._counter is None:
            return 0
        try:
            lines = self._counter.read_text().splitlines()
        except OSError:
            return 0
        return next((int(count) for name, _, count in (line.partition(" ") for line in lines) if name == "oom_kill"), 0)


def counter_of(membership: str, root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Return the file with the count of a process's control group; None: the kernel has none, or does not show it.

    Args:
        membership: ``/proc/<pid>/cgroup`` of the process.
        root: where the hierarchies are mounted. In a container the hierarchy may show the container's own group alone,
            whatever path ``membership`` has.
    """
    lines = [line.split(":", 2) for line in membership.splitlines() if line.count(":") >= 2]
    by_version = {
        "memory.oom_control": [path for _, names, path in lines if _CONTROLLER in names.split(",")],
        "memory.events": [path for number, names, path in lines if (number, names) == ("0", "")],
    }
    folders = {"memory.oom_control": root / _CONTROLLER, "memory.events": root}
    for name, paths in by_version.items():
        for path in paths:
            for found in (folders[name] / path.lstrip("/") / name, folders[name] / name):
                if found.exists():
                    return found
    return None


def own_counter() -> Path | None:
    """Return the file with the count of this process's control group."""
    try:
        return counter_of(Path("/proc/self/cgroup").read_text())
    except OSError:
        return None
