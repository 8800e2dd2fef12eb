"""The return of the storage on which a task waits that has lent its workers.

Nothing but a try tells whether a whole result can be written, and a try takes workers from others. So the task has the
next one after minutes (``detector.progress.unwritten_results``), or as soon as this node finds that folders of the task
take a small file which did not before. If the folders take a file from the beginning, they do not show what is wrong,
and the task waits for its next try. So it does when the agent has a successor.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from services.agent.machine.writing import write_problem
from services.agent.node.process import Process

LOOK_S = 10.0
"""Pause between two looks. Chosen: within seconds of the return, and next to nothing beside what training writes."""

LONGEST_S = 600.0
"""How long a node looks: by then the task has another try anyhow."""

ROOM_BYTES = 1 << 20
"""Free bytes below which a file system counts as full. A file of the agent, which may be root, can fit into the reserve
of a file system in which a rank's does not."""


class StorageReturns:
    """Looks after the folders of tasks.

    Args:
        look_s: pause between two looks.
    """

    def __init__(self, look_s: float = LOOK_S) -> None:
        self._look_s = look_s
        self._watched: set[str] = set()

    async def wait(self, process: Process, folders: Sequence[str], returned: Callable[[Process], None]) -> None:
        """Wait until the folders of a task can be written to again, and call ``returned``; once for each process.

        Args:
            process: has reported that the task's workers may be lent; it may end meanwhile.
            folders: local folders, at least one of which could not be written to; they need not exist.
            returned: called if this agent could not write to them either, and now can.
        """
        if not folders or process.id in self._watched:
            return
        self._watched.add(process.id)
        refused = False
        for _ in range(int(LONGEST_S / self._look_s)):
            if all([await asyncio.to_thread(takes_a_file, Path(folder)) for folder in folders]):
                if refused:
                    returned(process)
                return
            refused = True
            await asyncio.sleep(self._look_s)


def takes_a_file(folder: Path) -> bool:
    """Return whether a folder, or the nearest one above it that there is, takes a file, and has room for one."""
    nearest = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    if write_problem(nearest):
        return False
    try:
        usage = shutil.disk_usage(nearest)
    except OSError:
        return False
    return usage.total == 0 or usage.free >= ROOM_BYTES  # some file systems do not say what they have
