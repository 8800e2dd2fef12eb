"""What tasks leave on a machine, below the run directory: the output of their processes, and their results.

    <run-dir>/tasks/<task>/output/<generation>-<node>-<slot>.log
    <run-dir>/tasks/<task>/generation-<g>/result/parameters.safetensors

Node agents read it for the api, and the api reads its own machine's, since several machines may share the run
directory. Paths are made of names that match their patterns. A task's processes run the user's code with the same
rights, which may put links into the task's folders: what is opened has to be a regular file inside the task's folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nsmallest
from pathlib import Path
from time import monotonic
from typing import Any

from shared.errors import NotFound, Unavailable
from shared.machine.output_times import MOST_BYTES, size_at, times_path
from shared.messages.node_files import (
    CHUNK_BYTES,
    LIST_LIMIT,
    DescribeResult,
    FilesReply,
    ListOutput,
    OutputFile,
    ReadOutput,
    ReadResult,
)
from shared.names import is_name

TaskFilesRequest = ListOutput | ReadOutput | DescribeResult | ReadResult
"""The requests that ``TaskFolders`` answers."""

_OUTPUT_NAME = re.compile(r"([0-9]{1,15})-([a-z0-9-]{1,63})-([0-9]{1,6})\.log")
"""Name of the file with a process's output: generation, node, slot. Rendezvous stores have files of other names."""

_RESULT = Path("result", "parameters.safetensors")
"""Path of the parameters in the folder of a generation (``unicron.training.generations``)."""

DIGEST_SLICE_S = 0.5
"""How long one request computes a digest: below every time-out of a request. The next request goes on from there."""

_READS = 3
"""How often output is read, at most, while the agent frees it meanwhile: it does so every quarter of a second."""

_DIGEST_BLOCK_BYTES = 1 << 20
"""How much is read at a time for a digest: a millisecond's work."""

_DIGESTS_KEPT = 16
"""Digests, begun or complete, that are kept: more results than are fetched at one time."""


@dataclass
class _Digest:
    """The SHA-256 of a file's first ``offset`` bytes."""

    sha256: Any = field(default_factory=hashlib.sha256)
    offset: int = 0


class TaskFolders:
    """The folders of all tasks on this machine, read-only. Its methods block, and may be called in several threads.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._tasks = run_dir.resolve() / "tasks"
        self._digests: OrderedDict[tuple[str, str], _Digest] = OrderedDict()
        self._digesting = threading.Lock()

    def answer(self, request: TaskFilesRequest) -> tuple[FilesReply, bytes]:
        """Return the reply to a request, and the bytes that were read.

        Raises:
            NotFound: there is no such file.
            Unavailable: it cannot be read.
        """
        match request:
            case ListOutput():
                files = self._output_files(request.task, request.nodes, request.after)
                return FilesReply(files=files[:LIST_LIMIT], more=len(files) > LIST_LIMIT), b""
            case ReadOutput():
                name = f"{request.generation}-{request.worker.replace('/', '-')}.log"
                path = Path("output", name)
                if request.since_s is not None:
                    begin = self._begin(request.task, path, request.since_s)
                    request = request.model_copy(update={"offset": max(begin, request.offset)})
                return self._read(request.task, path, request, skips=request.skips)
            case DescribeResult():
                return self._describe(request), b""
            case ReadResult():
                return self._read(request.task, _result_path(request.generation), request)

    def _output_files(self, task: str, nodes: Collection[str], after: tuple[int, str]) -> list[OutputFile]:
        """Return the output files of the workers of some nodes behind a key; one more than ``LIST_LIMIT`` at most."""
        wanted = set(nodes)
        try:
            with os.scandir(self._tasks / task / "output") as entries:
                found = (file for entry in entries if (file := _output_file(entry, wanted)) and file.key > after)
                return nsmallest(LIST_LIMIT + 1, found, key=lambda file: file.key)
        except OSError:
            return []  # the task has no process here

    def _read(
        self, task: str, path: Path, request: ReadOutput | ReadResult, *, skips: bool = False
    ) -> tuple[FilesReply, bytes]:
        with self._opened(task, path) as (descriptor, status):
            offset, data = request.offset, b""
            for _ in range(_READS):
                offset = _data_from(descriptor, offset) if skips else offset
                data = os.pread(descriptor, request.limit, offset)
                if not skips or _data_from(descriptor, offset) == offset:
                    break  # or else the agent has freed meanwhile what was to be read
        return FilesReply(size_bytes=status.st_size, offset=offset, version=_version(status)), data

    def _begin(self, task: str, path: Path, since_s: float) -> int:
        """Return where the lines of an output begin that were printed from a time on, as far as that is known.

        Raises:
            NotFound, Unavailable: of the output, as ``_opened``.
        """
        with self._opened(task, path) as (output, status):
            if status.st_mtime < since_s:
                return status.st_size
            try:
                with self._opened(task, times_path(path)) as (descriptor, _):
                    noted = os.pread(descriptor, MOST_BYTES, 0)
            except NotFound:
                return 0  # an older agent noted none
            size_bytes = size_at(noted.splitlines(), since_s) or 0
            return _line_begin(output, size_bytes) if size_bytes <= status.st_size else 0

    def _describe(self, request: DescribeResult) -> FilesReply:
        path = _result_path(request.generation)
        with self._opened(request.task, path) as (descriptor, status):
            version = _version(status)
            sha256 = self._sha256(f"{request.task}/{path}", version, descriptor, status.st_size)
        return FilesReply(size_bytes=status.st_size, version=version, sha256=sha256)

    def _sha256(self, name: str, version: str, descriptor: int, size_bytes: int) -> str:
        """Go on with a file's digest for ``DIGEST_SLICE_S``; return it in hexadecimal, or "" if it takes longer.

        One digest is computed at a time: what many requests can make the machine do is bounded.
        """
        if not self._digesting.acquire(timeout=DIGEST_SLICE_S):
            return ""
        until_s = monotonic() + DIGEST_SLICE_S
        try:
            digest = self._digests.setdefault((name, version), _Digest())
            self._digests.move_to_end((name, version))
            if len(self._digests) > _DIGESTS_KEPT:
                self._digests.popitem(last=False)
            while digest.offset < size_bytes:
                block = os.pread(descriptor, min(_DIGEST_BLOCK_BYTES, size_bytes - digest.offset), digest.offset)
                if not block:
                    return ""  # the file was cut off: its version is another one at the next request
                digest.sha256.update(block)
                digest.offset += len(block)
                if monotonic() > until_s:
                    break
            return digest.sha256.hexdigest() if digest.offset == size_bytes else ""
        finally:
            self._digesting.release()

    @contextmanager
    def _opened(self, task: str, path: Path) -> Iterator[tuple[int, os.stat_result]]:
        """Open a file of a task; give its descriptor and status.

        Raises:
            NotFound: it is not there, is no regular file, or is reached by a link that leaves the task's folder.
            Unavailable: it cannot be read.
        """
        assert is_name(task)
        missing = NotFound(f"task {task!r} has no {path} here")
        try:
            # O_NONBLOCK: a pipe in the file's place would wait for a writer.
            descriptor = os.open(self._tasks / task / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as err:
            raise missing from err
        try:
            status = os.fstat(descriptor)
            # The path of what was opened, whatever was renamed meanwhile.
            real = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not stat.S_ISREG(status.st_mode) or not real.is_relative_to(self._tasks.resolve() / task):
                raise missing
            yield descriptor, status
        except OSError as err:
            raise Unavailable(f"{path} of task {task!r} cannot be read: {err.strerror or err}") from err
        finally:
            os.close(descriptor)


def _line_begin(descriptor: int, offset: int) -> int:
    """Return where the first line of a file begins from an offset on; the offset, if its line is a very long one."""
    if offset == 0:
        return 0
    end = os.pread(descriptor, CHUNK_BYTES, offset - 1).find(b"\n")
    return offset + end if end >= 0 else offset


def _data_from(descriptor: int, offset: int) -> int:
    """Return where the first data of a file from an offset on are; agents make holes (``services.agent``)."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:
        return offset  # there are none, or the file system knows no holes


def _output_file(entry: os.DirEntry[str], nodes: set[str]) -> OutputFile | None:
    """Return what an entry of an output folder is; None if it is no output of a worker of one of the nodes."""
    match = _OUTPUT_NAME.fullmatch(entry.name)
    if match is None or match[2] not in nodes:
        return None
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None  # removed meanwhile
    if not stat.S_ISREG(status.st_mode):
        return None
    return OutputFile(generation=int(match[1]), worker=f"{match[2]}/{match[3]}", size_bytes=status.st_size)


def _result_path(generation: int) -> Path:
    return Path(f"generation-{generation}") / _RESULT


def _version(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"
