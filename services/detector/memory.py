"""The node's folder in shared memory, where its ranks keep in-memory copies of their tasks' states.

Ranks write there and die at any moment; what they leave is what their successors go on from. So only the agent deletes:
a task's copies when the task has ended here, or long after its last process has; all of them when the node leaves. An
agent that is started again finds those of its predecessor.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

LINGER_S = 600.0
"""How long copies stay without a process of their task on the node: far beyond the time in which a task that has lost
all its processes is brought back, and short beside the time for which a node gives memory to a task that moved away."""

SWEEP_INTERVAL_S = 30.0


def node_folder(root: Path, run_dir: Path, node: str) -> Path:
    """Return the folder of a node: the same for each of its agents, and no other run's."""
    digest = hashlib.sha256(f"{run_dir.resolve()}\0{node}".encode()).hexdigest()
    return root / f"unicron-{digest[:16]}"


class TaskMemory:
    """The tasks' folders on one node.

    Args:
        folder: the node's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._deserted: dict[str, float] = {}

    def of_task(self, task: str) -> Path:
        """Return the folder of a task; it is made by the task's ranks."""
        return self.folder / task

    def forget(self, task: str) -> None:
        """Delete a task's copies."""
        shutil.rmtree(self.of_task(task), ignore_errors=True)

    def sweep(self, present: Iterable[str], at_s: float) -> None:
        """Delete the copies of tasks that have long had no process here.

        Args:
            present: tasks with processes on this node.
            at_s: time on any steady clock.
        """
        here = set(present)
        found = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        self._deserted = {task: self._deserted.get(task, at_s) for task in found - here}
        for task, since_s in self._deserted.items():
            if at_s - since_s >= LINGER_S:
                self.forget(task)

    def close(self) -> None:
        """Delete everything: the node leaves."""
        shutil.rmtree(self.folder, ignore_errors=True)
