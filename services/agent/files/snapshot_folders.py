"""The node's folder in shared memory, in which its ranks keep the snapshots of their tasks (``unicron.snapshot``).

Ranks write the folder and may die at any moment; their successors go on from the snapshots. So the agent alone makes
and deletes folders: a task's when what it has is saved elsewhere, or long after the task's last process there; all when
the node leaves. An agent that is started again finds the folder of its predecessor.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from services.agent.files.rank_users import RankUsers
from shared.clock import SteadyClock
from shared.errors import Unavailable

logger = logging.getLogger(__name__)

LINGER_S = 600.0
"""How long snapshots stay on a node without a process of their task. A task that has lost all its processes is back
within much less; a node can spare the memory for a task that moved away for this long."""

SWEEP_INTERVAL_S = 30.0
"""Time between two searches for snapshots to delete: short beside ``LINGER_S``."""

CHECK_INTERVAL_S = 1.0
"""Pause between two looks whether folders are still there. Without its folder a task has no snapshots; a look takes
some microseconds."""


def node_folder(root: Path, run_dir: Path, node: str) -> Path:
    """Return the folder of a node: the same for each of the node's agents, and different for every other run."""
    digest = hashlib.sha256(f"{run_dir.resolve()}\0{node}".encode()).hexdigest()
    return root / f"unicron-{digest[:16]}"


class SnapshotFolders:
    """The snapshot folders of the tasks on one node.

    Args:
        folder: the node's folder, which contains one folder for each task.
        users: of the tasks.
    """

    def __init__(self, folder: Path, users: RankUsers) -> None:
        self.folder, self._users = folder, users
        self._deserted_s: dict[str, float] = {}
        """Task -> the time of the first sweep that found no process of the task."""

    def of_task(self, task: str) -> Path:
        """Return the folder of a task."""
        return self.folder / task

    def make(self, task: str) -> None:
        """Make the folder of a task, which its ranks alone can enter.

        Where it cannot be made, memory is short for instance, the ranks find that too, train without snapshots and
        report it.

        Raises:
            Unavailable: somebody else has made a folder of this name.
        """
        try:
            _make(self.folder, os.geteuid(), 0o711)
            _make(self.of_task(task), self._users.owner(task), 0o700)
        except OSError as err:
            logger.warning("no folder for the snapshots of %s in %s: %s", task, self.folder, err.strerror or err)

    def restore(self, present: Iterable[str]) -> None:
        """Make folders that something else has removed; the ranks see them and store new snapshots there.

        Args:
            present: the tasks with processes on this node.
        """
        for task in present:
            if not self.of_task(task).is_dir():
                logger.warning("the folder of the snapshots of %s is gone from %s: it is made anew", task, self.folder)
                with contextlib.suppress(Unavailable):
                    self.make(task)

    def forget(self, task: str) -> None:
        """Delete the snapshots of a task."""
        folder = self.of_task(task)
        if self._users.separate:
            # The agent may have no right to others' files; what is in a folder of its own it may delete.
            with contextlib.suppress(OSError):
                os.chown(folder, os.geteuid(), os.getegid(), follow_symlinks=False)
        shutil.rmtree(folder, ignore_errors=True)

    def sweep(self, present: Iterable[str], at_s: float) -> None:
        """Delete the snapshots of tasks that have had no process on this node for ``LINGER_S``.

        Args:
            present: the tasks with processes on this node.
            at_s: the time on any steady clock.
        """
        here = set(present)
        self._deserted_s = {task: self._deserted_s.get(task, at_s) for task in self._present() - here}
        for task, since_s in self._deserted_s.items():
            if at_s - since_s >= LINGER_S:
                self.forget(task)

    async def keep_sweeping(self, present: Callable[[], Iterable[str]], clock: SteadyClock) -> None:
        """Restore and sweep, until cancelled. ``present``: returns the tasks with processes here."""
        swept_s = clock.seconds()
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.restore(present())
            if clock.seconds() - swept_s >= SWEEP_INTERVAL_S:
                swept_s = clock.seconds()
                self.sweep(present(), swept_s)

    def close(self) -> None:
        """Delete all snapshots, when the node leaves."""
        for task in self._present():
            self.forget(task)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _present(self) -> set[str]:
        """Return the tasks that have a folder."""
        return {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()


def _make(folder: Path, uid: int, mode: int) -> None:
    """Make a folder of a user, or find it.

    Two processes of a task may start on the node at once, and an agent may die in here. So a folder may be found that
    has not been given to its task yet. Any step may be done twice, also behind the other process's last one: an agent
    may have no right to change the mode of a folder that it has given away.

    Args:
        folder: in one that is the agent's, or sticky.
        uid: of the user: the agent's own, or that of a task.
        mode: of a folder of the agent's own; a task's is 0700.

    Raises:
        OSError: it cannot be made.
        Unavailable: there is one of another user: any user can make one in ``/dev/shm``, before this agent does.
    """
    own = os.geteuid()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (uid, own):
        raise Unavailable(f"{folder} belongs to user {found.st_uid} and not to {uid}: remove it")
    if uid == own:
        folder.chmod(mode)
    elif found.st_uid == own:
        os.chown(folder, uid, uid)
