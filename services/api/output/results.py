"""The parameters that a finished task left, read from the node that wrote them.

The file stays on that node. Where machines share the run directory, any of them can serve it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from services.api.output.node_files import FileSource
from services.api.output.search import ABSENCES
from shared.bus.cancellation import cancelled
from shared.errors import Corrupt, NotFound, Unavailable
from shared.messages.node_files import CHUNK_BYTES, DescribeResult, FilesReply, ReadResult
from shared.tasks.specification import IS, TaskState
from shared.views.documents import TaskView

DIGEST_TIMEOUT_S = 600.0
"""How long the digest of a file may take: 300 GB at the 0.5 GB/s of a slow core or disk."""

READ_AHEAD = 4
"""Chunks that are under way at a time: 1 MB, so that a delay of 200 ms on the way leaves 5 MB/s."""

ATTEMPTS = 3
"""How often a chunk is asked for: a restart of the bus, or of an agent, loses one or two replies."""

RETRY_PAUSE_S = 1.0
"""Pause before a chunk is asked for again: clients reconnect to the bus within 0.2 s."""

_RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{1,15})?", re.ASCII)
"""A range from an offset on. Other forms (several ranges, the last bytes) are answered with the whole file, as RFC
9110, section 14.2, allows."""


@dataclass(frozen=True)
class ResultFile:
    """A result that can be read.

    ``version``: another one once the file was changed. ``sha256``: of the whole file, in hexadecimal.
    """

    source: FileSource
    task: str
    generation: int
    size_bytes: int
    version: str
    sha256: str


class RangeNotSatisfiable(NotFound):
    """A range that begins behind the end of the file."""

    status = 416


async def find_result(task: TaskView, sources: Sequence[FileSource], state: str) -> ResultFile:
    """Return the result of a task.

    Args:
        task: the task.
        sources: where it may be; the first one that has it is taken.
        state: of the node that wrote it.

    Raises:
        NotFound: the task has not succeeded, or the file is not there any more.
        Unavailable: the node that wrote it does not answer, and no other one has it.
    """
    if task.result is None or task.state is not TaskState.SUCCEEDED:
        raise NotFound(f"task {task.name!r} has no result: it {IS[task.state]}", state=task.state.value)
    if task.spec.restarts_whole:
        raise NotFound(f"task {task.name!r} has none but what its script has written: it restarts whole")
    request = DescribeResult(task=task.name, generation=task.result.generation)
    silent = ""
    for source in sources:
        try:
            reply = await _describe(source, request)
        except NotFound:
            continue
        except Unavailable as err:
            silent = silent or err.detail
            continue
        return ResultFile(
            source, task.name, task.result.generation, reply.size_bytes, reply.version, sha256=reply.sha256
        )
    node, path = task.result.node or "a node that the log does not name", task.result.parameters_path
    if silent:
        why = ABSENCES.get(state, f"does not answer ({silent})")
        raise Unavailable(f"the result of {task.name!r} is on {node}, which {why}: {path}", node=task.result.node)
    raise NotFound(f"the result of {task.name!r} is not on {node} any more: {path}", node=task.result.node)


async def _describe(source: FileSource, request: DescribeResult) -> FilesReply:
    """Return size, version and digest, for which the source is asked as often as it takes."""
    deadline = time.monotonic() + DIGEST_TIMEOUT_S
    while True:
        reply, _ = await source.ask(request)
        if reply.sha256:
            return reply
        if time.monotonic() > deadline:
            raise Unavailable(f"no digest of {reply.size_bytes} bytes within {DIGEST_TIMEOUT_S:g} s")


def wanted_range(header: str, size_bytes: int) -> tuple[int, int] | None:
    """Return the first byte and the one behind the last that a Range header asks for; None: the whole file.

    Raises:
        RangeNotSatisfiable: the range begins behind the end of the file.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        return None
    first, last = int(match[1]), int(match[2]) if match[2] is not None else size_bytes - 1
    if first >= size_bytes:
        raise RangeNotSatisfiable(f"bytes from {first} of a file of {size_bytes}")
    return first, min(last + 1, size_bytes)


async def read_result(file: ResultFile, first: int, end: int) -> AsyncGenerator[bytes]:
    """Yield the bytes from ``first`` up to ``end``. Of a whole file the last chunk comes only if the digest is right.

    Raises:
        Unavailable: the source does not answer any more.
        Corrupt: the file was changed meanwhile, or what arrived is not what the source described.
    """
    digest = hashlib.sha256() if (first, end) == (0, file.size_bytes) else None
    offsets = iter(range(first, end, CHUNK_BYTES))
    under_way: deque[asyncio.Task[bytes]] = deque()
    left = end - first
    try:
        while True:
            while len(under_way) < READ_AHEAD and (offset := next(offsets, None)) is not None:
                under_way.append(asyncio.create_task(_chunk(file, offset, min(CHUNK_BYTES, end - offset))))
            if not under_way:
                return
            data = await under_way[0]
            under_way.popleft()
            left -= len(data)
            if digest is not None:
                digest.update(data)
                if left == 0 and digest.hexdigest() != file.sha256:
                    raise Corrupt(f"the result of {file.task!r} does not have the digest that its node computed")
            yield data
    finally:
        await cancelled(*under_way)


async def _chunk(file: ResultFile, offset: int, limit: int) -> bytes:
    """Return one chunk; ask again where the reply is lost."""
    request = ReadResult(task=file.task, generation=file.generation, offset=offset, limit=limit)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            reply, data = await file.source.ask(request)
            break
        except Unavailable:
            if attempt == ATTEMPTS:
                raise
            await asyncio.sleep(RETRY_PAUSE_S)
    if reply.version != file.version or len(data) != limit:
        raise Corrupt(f"the result of {file.task!r} was changed while it was read")
    return data


def headers(file: ResultFile) -> dict[str, str]:
    """Return the headers that describe a result: RFC 9110 (ETag, ranges) and RFC 9530 (Repr-Digest)."""
    digest = base64.b64encode(bytes.fromhex(file.sha256)).decode()
    return {
        "ETag": f'"{file.sha256}"',
        "Repr-Digest": f"sha-256=:{digest}:",
        "Accept-Ranges": "bytes",
        "Content-Disposition": f'attachment; filename="{file.task}.safetensors"',
    }
