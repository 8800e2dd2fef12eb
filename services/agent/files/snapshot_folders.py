"""The node's folder in shared memory, in which its ranks keep the snapshots of their tasks (``unicron.snapshot``).

Ranks write the folder and may die at any moment; their successors go on from the snapshots. So the agent alone makes
and deletes folders: a task's folder when the task's state is saved elsewhere, or when the detector says that the task
is over; all folders when the node leaves. The detector knows from heartbeats which folders have no process
(``kept_copies.py`` there). An agent that is started again finds the folder of its predecessor.
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
from shared.errors import Unavailable

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Pause between two looks whether folders are still there, and which have no process. Without its folder a task has no
snapshots; a look takes some microseconds."""


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
        self.kept: dict[str, int] = {}
        """Task -> bytes of its snapshots at the newest look, for each task without a process here."""

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
            # The agent may have no right to others' files; it may delete whatever is in a folder of its own.
            with contextlib.suppress(OSError):
                os.chown(folder, os.geteuid(), os.getegid(), follow_symlinks=False)
        shutil.rmtree(folder, ignore_errors=True)

    def look(self, present: Iterable[str]) -> None:
        """Find the snapshots of tasks without a process here. ``present``: the tasks with one."""
        self.kept = {task: _size_bytes(self.of_task(task)) for task in sorted(self._present() - set(present))}

    async def keep_looking(self, present: Callable[[], Iterable[str]]) -> None:
        """Restore and look, until cancelled. ``present``: returns the tasks with processes here."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.restore(present())
            self.look(present())

    def close(self) -> None:
        """Delete all snapshots, when the node leaves."""
        for task in self._present():
            self.forget(task)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _present(self) -> set[str]:
        """Return the tasks that have a folder."""
        return {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()


def _size_bytes(folder: Path) -> int:
    """Return the bytes of all files of a folder; a file that is deleted meanwhile does not count."""
    size_bytes = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                size_bytes += path.lstat().st_size
    return size_bytes


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
