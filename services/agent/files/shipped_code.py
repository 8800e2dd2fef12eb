"""The code that comes along with a task (``shared.tasks.code``), as a node has it: a folder that nobody changes.

    <run-dir>/tasks/<task>/code/<node>/<digest>/

A node that lacks it asks the api for the archive, piece by piece, and unpacks it once digest and size are those that
the specification names. It is in the task's own folder, so that the kernel keeps it from other tasks, and goes when the
task leaves the node for good. Nodes that share a run directory have a folder each: one's may go while the other's is
used.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection
from pathlib import Path

from services.agent.files.rank_users import RankUsers
from services.agent.files.task_files import TaskFiles
from shared.bus.connection import Bus
from shared.errors import InvalidInput, NotFound, Unavailable
from shared.messages.node_files import CODE, ReadCode, successful
from shared.tasks.code import SEARCH_PATH, WORKING_DIRECTORY, Code
from shared.tasks.code_archive import code_of, unpack
from shared.tasks.specification import TaskSpec
from unicron.protocol import environment

logger = logging.getLogger(__name__)

FETCH_LIMIT_S = 40.0
"""How long a node tries to get an archive: less than a command may take (``command_timeout_s``). The longest comes in
about a second."""

PAUSE_S = 0.2
"""Pause between two tries: a control plane that is started anew is away for seconds."""

FORGET_S = 600.0
"""Pause between two looks at which tasks have no process here. One that waits to be tried again has its code fetched
again."""

NOT_ALLOWED = "code that comes along is not run on this node: its operator has not set UNICRON_ALLOW_SHIPPED_CODE=true"


class CodeRefused(Exception):
    """The code cannot be used here, and another try would end alike: the task is to end, and no node is to blame."""


class ShippedCode:
    """The folders of the code of tasks on this node.

    Args:
        bus: on which the api is asked.
        node: the node's name.
        files: of the tasks.
        users: of the tasks.
        present: returns the tasks that have a process on this node.
        allowed: whether the node's operator allows such code.
    """

    def __init__(
        self,
        bus: Bus,
        node: str,
        files: TaskFiles,
        users: RankUsers,
        present: Callable[[], Collection[str]],
        *,
        allowed: bool,
    ) -> None:
        self._bus, self._node, self._files, self._users = bus, node, files, users
        self._present, self._allowed = present, allowed
        self._fetching = asyncio.Lock()
        """Held while a folder is made or deleted."""

    async def environment(self, task: str, spec: TaskSpec) -> dict[str, str]:
        """Return the variables with which a task's ranks find its code; fetch it if the node lacks it.

        Code that is refused is told to the rank, which then ends the task.

        Raises:
            Unavailable: no api answers, or the files cannot be written.
        """
        if spec.code is None:
            return {}
        try:
            folder = await self._folder(task, spec.code)
        except CodeRefused as err:
            return {environment.CODE_REFUSED: str(err)}
        return {
            environment.CODE_DIGEST: spec.code.digest,
            environment.CODE_DIRECTORY: str(folder),
            WORKING_DIRECTORY: str(folder / spec.env.get(WORKING_DIRECTORY, "")),
            **_search_path(folder, spec.env.get(SEARCH_PATH, "")),
        }

    async def keep_forgetting(self) -> None:
        """Delete the code of tasks without a process here now and then, until cancelled: of those that have failed."""
        while True:
            await self.forget()
            await asyncio.sleep(FORGET_S)

    async def forget(self, *tasks: str) -> None:
        """Delete the code that tasks have on this node, unless they have a process here; without ``tasks`` of any."""
        async with self._fetching:
            await asyncio.to_thread(self._forget, {*tasks}, {*self._present()})

    def _forget(self, tasks: set[str], present: set[str]) -> None:
        names = tasks or {path.name for path in self._files.folder("").glob("*")}
        for folder in map(self._of_task, names - present):
            if _is_own(folder.parent) and _is_own(folder):
                _delete(folder)

    def _of_task(self, task: str) -> Path:
        return self._files.folder(task) / "code" / self._node

    async def _folder(self, task: str, code: Code) -> Path:
        if not self._allowed:
            raise CodeRefused(NOT_ALLOWED)
        folder = self._of_task(task) / code.digest
        async with self._fetching:
            try:
                if not await asyncio.to_thread(folder.is_dir):
                    archive = await self._fetched(task, code)
                    await asyncio.to_thread(self._write, task, folder, archive)
                    logger.info("the code of %s is here: %s", task, code)
                await asyncio.to_thread(_delete_others, folder)
            except OSError as err:
                raise Unavailable(f"the code of {task} cannot be written to {folder}: {err.strerror or err}") from err
        return folder

    async def _fetched(self, task: str, code: Code) -> bytes:
        """Return the archive as the api has it.

        Raises:
            CodeRefused: the api has it no more, or it is not the one that the specification names.
            Unavailable: no api answers.
        """
        archive, until_s = bytearray(), time.monotonic() + FETCH_LIMIT_S
        while len(archive) < code.size_bytes:
            request = ReadCode(node=self._node, task=task, digest=code.digest, offset=len(archive))
            try:
                _, data = successful(await self._bus.call(CODE, request, self._node))
            except NotFound as err:
                raise CodeRefused(f"the code that comes along is not kept: {err.detail}") from err
            except Unavailable as err:
                if time.monotonic() > until_s:
                    raise Unavailable(f"the code of {task} cannot be fetched: {err.detail}") from err
                await asyncio.sleep(PAUSE_S)
                continue
            if not data:
                break
            archive += data
        return await asyncio.to_thread(_verified, bytes(archive), code)

    def _write(self, task: str, folder: Path, archive: bytes) -> None:
        """Unpack an archive; the folder is there only once it is whole."""
        self._files.make_output_folder(task)
        # Ranks run as this user, or the task's folder keeps other users away.
        _make(folder.parents[1], 0o755 if self._users.separate else 0o700)
        _make(folder.parent, 0o755)
        partial = folder.with_name(".partial")
        _delete(partial)  # of an agent that has died in here
        unpack(archive, partial)
        partial.rename(folder)


def _verified(archive: bytes, code: Code) -> bytes:
    """Return an archive that is the one that a specification names.

    Raises:
        CodeRefused: it is not.
    """
    found = hashlib.sha256(archive).hexdigest()
    if found != code.digest:
        raise CodeRefused(
            f"the code that has come does not have the digest {code.digest}: {len(archive)} bytes, {found}"
        )
    try:
        known = code_of(archive)
    except InvalidInput as err:
        raise CodeRefused(err.detail) from err
    if known != code:
        raise CodeRefused(f"the code that has come is {known}; the specification says {code}")
    return archive


def _search_path(folder: Path, given: str) -> dict[str, str]:
    parts = [str(folder / part) for part in given.split(os.pathsep) if part]
    return {SEARCH_PATH: os.pathsep.join(parts)} if parts else {}


def _delete_others(folder: Path) -> None:
    """Delete code that an earlier submission of the task had; what still runs of it has read its modules."""
    for other in folder.parent.iterdir():
        if other != folder:
            _delete(other)


def _make(folder: Path, mode: int) -> None:
    """Make a folder of this agent's own, or find it.

    Raises:
        OSError: it cannot be made.
        Unavailable: an earlier process of the task has made one of this name, or a link.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=mode)
    if not _is_own(folder):
        raise Unavailable(f"{folder} is no folder of this agent's: remove it")
    folder.chmod(mode)  # whatever this process's umask is


def _is_own(folder: Path) -> bool:
    """Return whether a folder is this agent's, and no link: the processes of a task may have made it before."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _delete(folder: Path) -> None:
    """Delete a folder whose folders may not be written."""
    for place, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(place, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
