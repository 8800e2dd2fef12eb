"""Where the last lines of a task's output begin: the files are read from their ends backwards, as far as is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from services.api.output.search import FoundFile, Key
from shared.errors import NotFound, Unavailable
from shared.messages.node_files import CHUNK_BYTES, ReadOutput


async def line_begins(task: str, files: Iterable[FoundFile], number: int) -> dict[Key, int]:
    """Return the offset in each file at which the last ``number`` lines of its worker begin.

    A worker has a file for each of its processes. Where the newest one has fewer lines, the others are in older files;
    the offset in a file that has none of them is its size.
    """
    of_worker: dict[str, list[FoundFile]] = {}
    for found in files:
        of_worker.setdefault(found.file.worker, []).append(found)
    begins = await asyncio.gather(*(_of_worker(task, one, number) for one in of_worker.values()))
    return {key: offset for found in begins for key, offset in found.items()}


async def _of_worker(task: str, files: Sequence[FoundFile], number: int) -> dict[Key, int]:
    """Return the offsets in the files of one worker."""
    begins: dict[Key, int] = {}
    left = number
    for found in sorted(files, key=lambda each: each.file.generation, reverse=True):
        begins[found.file.key], lines = await _begin(task, found, left)
        left -= lines
    return begins


async def _begin(task: str, found: FoundFile, number: int) -> tuple[int, int]:
    """Return where the last ``number`` lines of a file begin, and how many there are; it may have fewer.

    A file that cannot be read counts as empty: whoever reads it then finds out.
    """
    file = found.file
    end, lines = file.size_bytes, 0
    while end > 0 and number > 0:
        begin = max(end - CHUNK_BYTES, 0)
        request = ReadOutput(
            task=task, generation=file.generation, worker=file.worker, offset=begin, limit=end - begin, skips=True
        )
        try:
            reply, data = await found.source.ask(request)
        except (NotFound, Unavailable):
            return 0, 0
        offset = begin if reply.offset is None else reply.offset
        data = data[: max(end - offset, 0)]
        if end == file.size_bytes and data and not data.endswith(b"\n"):
            lines = 1  # the last line has no end yet
        place = len(data)
        while (place := data.rfind(b"\n", 0, place)) >= 0:
            if lines == number:
                return offset + place + 1, lines
            lines += 1
        if offset > begin:
            return 0, lines  # what was before is left out; reading from the file's beginning on says so
        end = begin
    return (0, lines) if number > 0 else (file.size_bytes, 0)
