"""The api's end of ``shared.messages.node_files``: files of tasks on the nodes, and on the api's own machine.

Several machines may share a run directory. So the api reads its own where a node does not answer, and another node may
have what that node wrote.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from shared.bus.connection import Bus
from shared.errors import InvalidReply, Unavailable
from shared.messages.node_files import FILES, CheckInputs, FilesReply, ListMetrics, ListOutput, RankFile, successful
from shared.messages.task_folders import TaskFilesRequest, TaskFolders

TIMEOUT_S = FILES.timeout_s
"""How long a node, or the api's own machine, may take for one request."""

SHARED_S = 0.5
"""Age of an answer that is given to another reader: the time between two looks at output that is followed."""

OWN_THREADS = 4
"""Reads of the api's own run directory at the same time: one takes milliseconds."""


class FileSource(Protocol):
    """A machine whose files can be asked for. ``name``: of the node; empty: the api's machine."""

    name: str

    async def ask(self, request: TaskFilesRequest) -> tuple[FilesReply, bytes]:
        """Return the reply to a request, and the bytes that were read.

        Raises:
            NotFound: it has no such file.
            Unavailable: it does not answer, or cannot read the file.
        """


class OwnFiles:
    """The run directory of the api's machine.

    Its threads are its own: those that a file system keeps for ever (a network file system whose server is away) are
    none of those that the fold and other requests need.
    """

    name = ""

    def __init__(self, run_dir: Path) -> None:
        self._folders = TaskFolders(run_dir)
        self._threads = ThreadPoolExecutor(OWN_THREADS, "own-files")

    async def ask(self, request: TaskFilesRequest) -> tuple[FilesReply, bytes]:
        """Return the reply to a request, and the bytes that were read.

        Raises:
            NotFound: there is no such file.
            Unavailable: it cannot be read, or not within ``TIMEOUT_S``.
        """
        answering = asyncio.get_running_loop().run_in_executor(self._threads, self._folders.answer, request)
        try:
            return await asyncio.wait_for(answering, TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(
                f"the run directory of the api's machine does not answer within {TIMEOUT_S:g} s"
            ) from None


class NodeFiles:
    """The files of one node, through its agent.

    Args:
        bus: of the api.
        node: the node's name.
    """

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus, self.name = bus, node

    async def ask(
        self, request: TaskFilesRequest | CheckInputs, timeout_s: float | None = None
    ) -> tuple[FilesReply, bytes]:
        """Return the reply to a request, and the bytes that were read.

        Args:
            request: what is asked.
            timeout_s: how long the node may take; None: ``TIMEOUT_S``.

        Raises:
            NotFound: the node has no such file.
            Unavailable: the node does not answer in time, or cannot do it.
        """
        try:
            return successful(await self._bus.call(FILES, request, self.name, timeout_s=timeout_s or TIMEOUT_S))
        except InvalidReply as err:
            raise Unavailable(f"node {self.name}: {err.detail}") from err


class SharedAnswers:
    """One answer to equal requests within ``SHARED_S``, for all who follow the output of the same task."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str], tuple[float, asyncio.Task[tuple[FilesReply, bytes]]]] = {}

    def of(self, source: FileSource) -> FileSource:
        """Return a machine whose answers are shared."""
        return _SharedSource(self, source)

    async def ask(self, source: FileSource, request: TaskFilesRequest) -> tuple[FilesReply, bytes]:
        """Return the answer of a source to a request, as it may have given it to others.

        Raises:
            NotFound, Unavailable: of the source.
        """
        key, now_s = (source.name, request.model_dump_json()), time.monotonic()
        while self._asked and now_s - next(iter(self._asked.values()))[0] > SHARED_S:
            del self._asked[next(iter(self._asked))]
        if key not in self._asked:
            self._asked[key] = (now_s, asyncio.create_task(source.ask(request)))
            self._asked[key][1].add_done_callback(_retrieve)
        return await asyncio.shield(self._asked[key][1])  # others may wait for it when this reader goes away


class _SharedSource:
    def __init__(self, shared: SharedAnswers, source: FileSource) -> None:
        self._shared, self._source, self.name = shared, source, source.name

    async def ask(self, request: TaskFilesRequest) -> tuple[FilesReply, bytes]:
        return await self._shared.ask(self._source, request)


def _retrieve(task: asyncio.Task[tuple[FilesReply, bytes]]) -> None:
    """Take note of a failure, which is raised where it is waited for; perhaps nobody does any more."""
    if not task.cancelled():
        task.exception()


async def list_files(
    source: FileSource, task: str, nodes: Collection[str], listing: type[ListOutput | ListMetrics] = ListOutput
) -> list[RankFile]:
    """Return the files that a source has of processes on the workers of some nodes: by default their output.

    Raises:
        Unavailable: the source does not answer.
    """
    found: list[RankFile] = []
    more = True
    while more:
        after = found[-1].key if found else (-1, "")
        reply, _ = await source.ask(listing(task=task, nodes=sorted(nodes), after=after))
        found += reply.files
        # An answer that gets no further would be asked for again for ever.
        more = reply.more and bool(reply.files) and reply.files[-1].key > after
    return found
