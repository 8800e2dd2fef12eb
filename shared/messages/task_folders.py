"""What tasks leave on a machine, below the run directory: the output of their processes, and their results.

    <run-dir>/tasks/<task>/output/<generation>-<node>-<slot>.log
    <run-dir>/tasks/<task>/generation-<g>/metrics/<node>-<slot>.jsonl
    <run-dir>/tasks/<task>/generation-<g>/result/parameters.safetensors
    <run-dir>/tasks/<task>/generation-<g>/result/parameters-<k>-of-<n>.safetensors, parameters.safetensors.index.json

A result is one file, or several that are read as one (``shared.messages.joined_result``).

Node agents read it for the api, and the api reads its own machine's, since several machines may share the run
directory. Paths are made only of names that match their patterns. A task's processes run the user's code with the same
rights, which may put links into the task's folders: what is opened has to be a regular file inside the task's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from shared.errors import NotFound, Unavailable
from shared.machine.output_times import MOST_BYTES, size_at, times_path
from shared.messages.joined_result import HEADER_BYTES, LENGTH, JoinedResult, join, names_in
from shared.messages.node_files import (
    CHUNK_BYTES,
    LIST_LIMIT,
    DescribeResult,
    FilesReply,
    ListMetrics,
    ListOutput,
    RankFile,
    ReadMetrics,
    ReadOutput,
    ReadResult,
)
from shared.names import is_name

TaskFilesRequest = ListOutput | ReadOutput | ListMetrics | ReadMetrics | DescribeResult | ReadResult
"""The requests that ``TaskFolders`` answers."""

_GENERATION, _WORKER = r"(?P<generation>[0-9]{1,15})", r"(?P<node>[a-z0-9-]{1,63})-(?P<slot>[0-9]{1,6})"

_OUTPUT_NAME = re.compile(rf"{_GENERATION}-{_WORKER}\.log")
"""Name of the file with a process's output. Rendezvous stores have files of other names."""

_METRICS_NAME = re.compile(rf"generation-{_GENERATION}/{_WORKER}\.jsonl")
"""Name of the file with what a process has logged in a generation, behind that of the generation's folder."""

_RESULT, _INDEX = "parameters.safetensors", "parameters.safetensors.index.json"
"""The parameters in the folder of a result, or the index of several files (``unicron.checkpoint.export``)."""

_JOINED_KEPT = 4
"""Most results of several files whose headers are kept: more than are usually fetched at one time."""

DIGEST_SLICE_S = 0.5
"""How long one request computes a digest: below every time-out of a request. The next request goes on from there."""

_READS = 3
"""How often output is read at most if the agent frees it meanwhile, which it does every quarter of a second."""

_DIGEST_BLOCK_BYTES = 1 << 20
"""Number of bytes that are read at a time for a digest: a millisecond's work."""

_DIGESTS_KEPT = 16
"""Most digests, begun or complete, that are kept: more results than are fetched at one time."""


@dataclass
class _Digest:
    """The SHA-256 of a file's first ``offset`` bytes."""

    sha256: Any = field(default_factory=hashlib.sha256)
    offset: int = 0


class _Result(NamedTuple):
    """A result that can be read."""

    size_bytes: int
    version: str
    """A text that changes when the result is changed."""
    read: Callable[[int, int], bytes]
    """Returns up to so many bytes from an offset on."""


class TaskFolders:
    """The folders of all tasks on this machine, read-only. Its methods block, and may be called in several threads.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._tasks = run_dir.resolve() / "tasks"
        self._joined: dict[tuple[str, int, str], JoinedResult] = {}
        self._digests: OrderedDict[tuple[str, str], _Digest] = OrderedDict()
        self._digesting = threading.Lock()

    def answer(self, request: TaskFilesRequest) -> tuple[FilesReply, bytes]:
        """Return the reply to a request, and the bytes that were read.

        Raises:
            NotFound: there is no such file.
            Unavailable: it cannot be read.
        """
        match request:
            case ListOutput() | ListMetrics():
                files = self._files(request)
                return FilesReply(files=files[:LIST_LIMIT], more=len(files) > LIST_LIMIT), b""
            case ReadOutput():
                name = f"{request.generation}-{request.worker.replace('/', '-')}.log"
                path = Path("output", name)
                if request.since_s is not None:
                    begin = self._begin(request.task, path, request.since_s)
                    request = request.model_copy(update={"offset": max(begin, request.offset)})
                return self._read(request.task, path, request, skips=request.skips)
            case ReadMetrics():
                name = f"{request.worker.replace('/', '-')}.jsonl"
                return self._read(request.task, Path(f"generation-{request.generation}", "metrics", name), request)
            case DescribeResult():
                return self._describe(request), b""
            case ReadResult():
                with self._opened_result(request.task, request.generation) as result:
                    data = result.read(request.limit, request.offset)
                return FilesReply(size_bytes=result.size_bytes, offset=request.offset, version=result.version), data

    def _files(self, request: ListOutput | ListMetrics) -> list[RankFile]:
        """Return the files that a request lists: one more than ``LIST_LIMIT`` at most."""
        folder, wanted = self._tasks / request.task, set(request.nodes)
        found = _outputs(folder) if isinstance(request, ListOutput) else _metrics(folder)
        files = (file for match, entry in found if match["node"] in wanted and (file := _file(match, entry)))
        return nsmallest(
            LIST_LIMIT + 1, (file for file in files if file.key > request.after), key=lambda file: file.key
        )

    def _read(
        self, task: str, path: Path, request: ReadOutput | ReadMetrics, *, skips: bool = False
    ) -> tuple[FilesReply, bytes]:
        with self._opened(task, path) as (descriptor, status):
            offset, data = request.offset, b""
            for _ in range(_READS):
                offset = _data_from(descriptor, offset) if skips else offset
                data = os.pread(descriptor, request.limit, offset)
                if not skips or _data_from(descriptor, offset) == offset:
                    break  # otherwise the agent has freed meanwhile what was to be read
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
                return 0  # an older agent noted no sizes
            size_bytes = size_at(noted.splitlines(), since_s) or 0
            return _line_begin(output, size_bytes) if size_bytes <= status.st_size else 0

    def _describe(self, request: DescribeResult) -> FilesReply:
        with self._opened_result(request.task, request.generation) as result:
            sha256 = self._sha256(f"{request.task}/{request.generation}", result)
        return FilesReply(size_bytes=result.size_bytes, version=result.version, sha256=sha256)

    @contextmanager
    def _opened_result(self, task: str, generation: int) -> Iterator[_Result]:
        """Yield a result that can be read.

        Raises:
            NotFound, Unavailable: as ``_opened``; also: the files of the result are not those of one.
        """
        folder = _result_folder(generation)
        joined = self._joined_result(task, generation)
        if joined is None:
            with self._opened(task, folder / _RESULT) as (descriptor, status):
                yield _Result(status.st_size, _version(status), partial(os.pread, descriptor))
            return
        version = hashlib.sha256(" ".join(part.version for part in joined.parts).encode()).hexdigest()
        yield _Result(joined.size_bytes, version, partial(self._read_joined, task, folder, joined))

    def _joined_result(self, task: str, generation: int) -> JoinedResult | None:
        """Return a result of several files; None: there is none here."""
        folder = _result_folder(generation)
        try:
            with self._opened(task, folder / _INDEX) as (descriptor, status):
                key = task, generation, _version(status)
                if (known := self._joined.get(key)) is not None:
                    return known
                index = os.pread(descriptor, HEADER_BYTES, 0)
        except NotFound:
            return None
        try:
            found = join([self._part(task, folder, name) for name in names_in(index)])
        except ValueError as err:
            raise Unavailable(f"the result of task {task!r} cannot be read: {str(err).splitlines()[0]}") from err
        if len(self._joined) >= _JOINED_KEPT:
            self._joined.clear()
        self._joined[key] = found
        return found

    def _part(self, task: str, folder: Path, name: str) -> tuple[str, str, int, bytes]:
        """Return name, version, size and header of one file of a result.

        Raises:
            ValueError: the file has no header.
        """
        with self._opened(task, folder / name) as (descriptor, status):
            length = os.pread(descriptor, LENGTH.size, 0)
            (size_bytes,) = LENGTH.unpack(length) if len(length) == LENGTH.size else (0,)
            if not 0 < size_bytes <= min(HEADER_BYTES, status.st_size - LENGTH.size):
                raise ValueError(f"{name} has no header that can be read")
            return name, _version(status), status.st_size, os.pread(descriptor, size_bytes, LENGTH.size)

    def _read_joined(self, task: str, folder: Path, joined: JoinedResult, limit: int, offset: int) -> bytes:
        """Return a range of the one file that several make.

        Raises:
            Unavailable: a file was changed meanwhile.
        """
        data = b""
        for part, begin, length in joined.spans(offset, limit):
            if part is None:
                data += joined.header[begin : begin + length]
                continue
            with self._opened(task, folder / part.name) as (descriptor, status):
                if _version(status) != part.version:
                    self._joined.clear()
                    raise Unavailable(f"{part.name} of task {task!r} was changed while it was read")
                data += os.pread(descriptor, length, begin)
        return data

    def _sha256(self, name: str, result: _Result) -> str:
        """Go on with a result's digest for ``DIGEST_SLICE_S``; return it in hexadecimal, or "" if it takes longer.

        One digest is computed at a time: what many requests can make the machine do is bounded.
        """
        if not self._digesting.acquire(timeout=DIGEST_SLICE_S):
            return ""
        until_s = monotonic() + DIGEST_SLICE_S
        try:
            digest = self._digests.setdefault((name, result.version), _Digest())
            self._digests.move_to_end((name, result.version))
            if len(self._digests) > _DIGESTS_KEPT:
                self._digests.popitem(last=False)
            while digest.offset < result.size_bytes:
                block = result.read(min(_DIGEST_BLOCK_BYTES, result.size_bytes - digest.offset), digest.offset)
                if not block:
                    return ""  # the file was cut off: its version differs at the next request
                digest.sha256.update(block)
                digest.offset += len(block)
                if monotonic() > until_s:
                    break
            return digest.sha256.hexdigest() if digest.offset == result.size_bytes else ""
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
        return offset  # there are no data, or the file system knows no holes


def _outputs(folder: Path) -> Iterator[tuple[re.Match[str], os.DirEntry[str]]]:
    """Yield the entries of a task's folder that are named as output."""
    for entry in _entries(folder / "output"):
        if match := _OUTPUT_NAME.fullmatch(entry.name):
            yield match, entry


def _metrics(folder: Path) -> Iterator[tuple[re.Match[str], os.DirEntry[str]]]:
    """Yield the entries of the folders of a task's generations that are named as metrics."""
    generations = (entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False))
    for generation in generations:
        for entry in _entries(Path(generation.path, "metrics")):
            if match := _METRICS_NAME.fullmatch(f"{generation.name}/{entry.name}"):
                yield match, entry


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder; none if it is not there, or is a link."""
    with contextlib.suppress(OSError):
        if not folder.is_symlink():
            with os.scandir(folder) as entries:
                yield from entries


def _file(match: re.Match[str], entry: os.DirEntry[str]) -> RankFile | None:
    """Return a file; None if it is no regular one."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None  # removed meanwhile
    if not stat.S_ISREG(status.st_mode):
        return None
    worker = f"{match['node']}/{match['slot']}"
    return RankFile(generation=int(match["generation"]), worker=worker, size_bytes=status.st_size)


def _result_folder(generation: int) -> Path:
    return Path(f"generation-{generation}", "result")


def _version(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"
