"""Answers the api's requests about files on this machine (``shared.messages.node_files``).

The work is done in two threads of its own: a file system that does not answer delays neither ranks nor heartbeats.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from services.agent.files import task_inputs
from services.agent.files.rank_users import RankUsers
from services.agent.files.shipped_code import NOT_ALLOWED
from services.agent.files.task_secrets import TaskSecrets
from services.agent.machine.interpreters import Interpreters, probe
from shared.bus.connection import Bus
from shared.bus.messages import REASON_CHARACTERS
from shared.errors import Unavailable, UnicronError
from shared.messages.node_files import (
    FILES,
    CheckInputs,
    FilesAnswer,
    FilesReply,
    FilesRequest,
    InputProblem,
    failed,
)
from shared.messages.task_folders import TaskFolders

logger = logging.getLogger(__name__)

THREADS = 2
"""Threads of the server. One may wait for a slow file system while the other serves the local disk."""

MOST_WAITING = 64
"""Requests under way, those that wait included; further ones are refused at once. With chunks of 256 KB these need at
most 16 MB."""

PYTHON_LIMIT_S = FILES.timeout_s - 1.0
"""Time in which a Python says what it has, so that the reply still comes in time."""

T = TypeVar("T")


class FileServer:
    """Serves the files of one node.

    Args:
        bus: on which requests come.
        node: the node's name.
        run_dir: the run directory.
        users: of the tasks.
        secrets: of the tasks.
        interpreters: the node's Pythons; None: those of a node whose operator has listed none.
        ships: whether code may come along with tasks.
    """

    def __init__(
        self,
        bus: Bus,
        node: str,
        run_dir: Path,
        users: RankUsers,
        secrets: TaskSecrets,
        interpreters: Interpreters | None = None,
        *,
        ships: bool = False,
    ) -> None:
        self._users, self._secrets, self._ships = users, secrets, ships
        self._interpreters = interpreters or Interpreters([], separate_users=users.separate)
        self._bus, self._node = bus, node
        self._folders = TaskFolders(run_dir)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="files")
        self._processes = asyncio.Semaphore(THREADS)
        self._waiting = 0
        self._stopped = False

    async def start(self) -> None:
        """Begin to serve requests."""
        await self._bus.serve(FILES, self.serve, self._node, refuse=failed)

    def stop(self) -> None:
        """Drop the requests that wait."""
        self._stopped = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def serve(self, request: FilesRequest) -> FilesAnswer:
        """Handle one request."""
        if self._stopped:
            return failed(Unavailable("the agent stops"))
        if self._waiting >= MOST_WAITING:
            return failed(Unavailable(f"the agent has {self._waiting} requests for files under way"))
        self._waiting += 1
        try:
            if isinstance(request, CheckInputs):
                return await self._check(request), b""
            return await self._in_thread(lambda: self._folders.answer(request))
        except UnicronError as err:
            return failed(err)
        except Exception as err:
            logger.exception("a request for files failed")
            return failed(Unavailable(f"{type(err).__name__}: {err}"))
        finally:
            self._waiting -= 1

    async def _check(self, request: CheckInputs) -> FilesReply:
        if request.ships and not self._ships:
            return FilesReply(problems=[InputProblem(field="code", problem=NOT_ALLOWED)])
        uid = self._users.uid(request.task or "")
        if uid is None:
            problems = await self._in_thread(lambda: task_inputs.file_problems(request))
        else:
            async with self._processes:
                problems = await task_inputs.file_problems_of(uid, request)
        script = dict(request.paths).get("script")
        if script is not None and "script" not in {problem.field for problem in problems}:
            async with self._processes:
                problems += await task_inputs.compile_problems(script, uid)
        if request.python is not None and (text := await self._interpreter_problem(request.python, uid)):
            problems.append(InputProblem(field="python", problem=text[:REASON_CHARACTERS]))
        for name, place in request.secrets.items():
            if text := await self._in_thread(functools.partial(self._secrets.problem, place)):
                problems.append(InputProblem(field=f"secrets.{name}"[:64], problem=text[:REASON_CHARACTERS]))
        return FilesReply(problems=problems)

    async def _interpreter_problem(self, python: str, uid: int | None) -> str:
        """Return why a task's processes cannot be forked in a Python here; empty: they can, or it does not say in time.

        One that is slow to start may be healthy, on a file system that is. What is wrong with it is found as its fork
        server starts.
        """
        if problem := self._interpreters.refusal(python):
            return problem
        async with self._processes:
            try:
                async with asyncio.timeout(PYTHON_LIMIT_S):
                    lacking = (await probe(python, uid))["lacking"]
            except TimeoutError:
                return ""
            except Unavailable as err:
                return err.detail
        return f"has no {', '.join(lacking)}" if lacking else ""

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
