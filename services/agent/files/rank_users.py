"""The user under which the processes of a task run on this node (``rank_uids``).

Each task has a user id of its own, so that the kernel keeps the files, memory copies and processes of a task from those
of another one, and the agent's credential from all. The id follows from the task's name and so is the same on every
node, which a common storage of checkpoints needs, without anything that the nodes would have to agree on.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from shared.errors import InvalidInput, Unavailable
from shared.settings.model import uid_range

NEEDED = {0: "CAP_CHOWN", 5: "CAP_KILL", 6: "CAP_SETGID", 7: "CAP_SETUID"}
"""The capabilities that the supervisor and its children need: bit of the capability (linux/capability.h) -> name. The
first gives each task its folders, the second ends its processes, the others start them."""

CHECK_TIMEOUT_S = 20.0
"""Time for an interpreter to start, which takes 0.02 s."""

REACHABLE = (
    "tasks run as this agent's user, and can read its credential and other tasks' files: to give each a user of its "
    "own, run the agent as root and set UNICRON_RANK_UIDS"
)
"""What a node without ``rank_uids`` says when it starts."""


class RankUsers:
    """The users of the tasks.

    Args:
        rank_uids: the setting; empty: all processes run as the agent's user.
    """

    def __init__(self, rank_uids: str) -> None:
        self._range = uid_range(rank_uids)

    @property
    def separate(self) -> bool:
        """Whether each task has a user of its own."""
        return len(self._range) > 0

    def uid(self, task: str) -> int | None:
        """Return the user id, and group id, of a task's processes; None: those of the agent.

        Two tasks have the same id with a probability of one in the size of the range.
        """
        if not self.separate:
            return None
        digest = hashlib.sha256(task.encode()).digest()
        return self._range[int.from_bytes(digest[:8]) % len(self._range)]

    def owner(self, task: str) -> int:
        """Return the user id under which a task's processes run, be it the agent's."""
        uid = self.uid(task)
        return os.geteuid() if uid is None else uid

    def includes(self, uid: int) -> bool:
        """Return whether a user id is one that a task can have."""
        return uid in self._range

    def check(self, run_dir: Path) -> None:
        """Refuse to start where processes could not be run as these users.

        Args:
            run_dir: the run directory, which is made where it is missing. A folder above it may be closed to other
                users, as home folders are.

        Raises:
            Unavailable: the run directory cannot be made.
            InvalidInput: this process may not switch users, or one of them could not use Python or the run directory.
        """
        if not self.separate:
            return
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise Unavailable(f"the run directory {run_dir} cannot be made: {err.strerror or err}") from err
        problem = may_not_switch(os.geteuid(), Path("/proc/self/status").read_text()) or self._unreachable(run_dir)
        if problem:
            raise InvalidInput.of("rank_uids", str(self), problem, f"rank_uids: {problem}")

    def _unreachable(self, run_dir: Path) -> str:
        """Return which of the files that every rank uses the first user of the range cannot reach; empty if none."""
        uid = self._range.start
        program = "import os, sys; sys.exit(not os.access(sys.argv[1], os.X_OK))"
        command = [sys.executable, "-I", "-c", program, str(run_dir)]
        try:
            status = subprocess.run(  # nosec B603 # a program of this module; the folder is an argument of its own
                command,
                user=uid,
                group=uid,
                extra_groups=[],
                cwd="/",
                env={},
                timeout=CHECK_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ).returncode
        except PermissionError:
            status = -1
        except subprocess.TimeoutExpired:
            return ""  # a machine this busy shows nothing
        if status == 1:
            return f"the run directory {run_dir} must let other users in (mode 0711, each folder above it as well)"
        return f"other users cannot run {sys.executable}: Python must be where they can read it" if status else ""

    def __str__(self) -> str:
        """Return the range as the setting has it."""
        return f"{self._range.start}-{self._range.stop - 1}" if self.separate else ""


def may_not_switch(euid: int, status: str) -> str:
    """Return why a process may not start others as other users; empty if it may.

    Only root counts: a process of another user that has the capabilities keeps them when it switches users.

    Args:
        euid: effective user id of the process.
        status: of the process, as proc(5) shows it.
    """
    have = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    missing = [name for bit, name in NEEDED.items() if not have >> bit & 1]
    if euid == 0 and not missing:
        return ""
    why = f"lacks {', '.join(missing)}" if missing else f"runs as user {euid}"
    return f"needs an agent that runs as root, with {', '.join(NEEDED.values())}; this one {why}"
