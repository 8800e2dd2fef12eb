"""The files of tasks in the run directory: specification, output of the processes, folders of the generations.

    <run-dir>/tasks/<task>/spec.json
    <run-dir>/tasks/<task>/output/<generation>-<worker>.log
    <run-dir>/tasks/<task>/stacks/<worker>.txt
    <run-dir>/tasks/<task>/generation-<g>/

Several nodes may share the run directory. Where tasks have users of their own (``rank_users``), a task's folder belongs
to the agent and to the group of the task, which alone can enter it and make files in it; those of the agent it cannot
replace.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from services.agent.files.rank_users import RankUsers
from shared.errors import Unavailable
from shared.events.evidence import LAST_OUTPUT_BYTES
from shared.tasks.specification import TaskSpec

SHARED_MODE = 0o1770
"""The mode of the folder of a task that has a user of its own: the sticky bit keeps each owner's files from the
other."""


class TaskFiles:
    """Paths and files of the tasks of one run, as one node uses them.

    Args:
        run_dir: the run directory.
        node: the node's name, which is part of the names of files that each node has for itself.
        users: of the tasks.
    """

    def __init__(self, run_dir: Path, node: str, users: RankUsers) -> None:
        self._run_dir, self._node, self._users = run_dir.resolve(), node, users

    def folder(self, task: str) -> Path:
        """Return the folder of a task."""
        return self._run_dir / "tasks" / task

    def generation_folder(self, task: str, generation: int) -> Path:
        """Return the folder that a generation of a task writes to."""
        return self.folder(task) / f"generation-{generation}"

    def output(self, task: str, worker: str, generation: int) -> Path:
        """Return the file for the output of a process that is started on ``worker`` for ``generation``."""
        return self.folder(task) / "output" / f"{generation}-{worker.replace('/', '-')}.log"

    def store_output(self, task: str, generation: int) -> Path:
        """Return the file for the output of this node's rendezvous store of a generation."""
        return self.folder(task) / "output" / f"{generation}-store-{self._node}.log"

    def stacks(self, task: str, worker: str) -> Path:
        """Return the file to which the newest process on ``worker`` writes its stacks (``process.processes``)."""
        return self.folder(task) / "stacks" / f"{worker.replace('/', '-')}.txt"

    def make_output_folder(self, task: str) -> None:
        """Make the folder of a task, and those of its output and its stacks, which only the agent can write.

        Raises:
            OSError: a folder cannot be made, or cannot be given to the task.
        """
        folder = self.folder(task)
        (folder / "output").mkdir(parents=True, exist_ok=True)
        (folder / "stacks").mkdir(mode=0o700, exist_ok=True)
        if (gid := self._users.uid(task)) is not None:
            os.chown(folder, -1, gid)
            os.chmod(folder, SHARED_MODE)

    def write_spec(self, task: str, spec: TaskSpec) -> Path:
        """Write the specification for the ranks of a task; return its path.

        The file is replaced as a whole, so that a rank of another node never reads a part of it. A file with the same
        content stays: a rank can be started again on a node whose disk is full.

        Raises:
            Unavailable: the file cannot be written.
        """
        folder = self.folder(task)
        path = folder / "spec.json"
        partial = folder / f".spec.{self._node}.{uuid.uuid4().hex}.json"
        text = spec.model_dump_json(by_alias=True)
        try:
            self.make_output_folder(task)
            if path.exists() and path.read_text() == text:
                return path
            partial.write_text(text)
            os.replace(partial, path)
        except OSError as err:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise Unavailable(f"the specification cannot be written to {folder}: {err.strerror}") from err
        return path


def last_output(path: Path) -> str:
    """Return the end of a process's output; empty if the process wrote nothing."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LAST_OUTPUT_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
