"""Output of ranks, read from ``<run_dir>/tasks/<task>/output/<generation>-<node>-<slot>.log``."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(?P<generation>\d+)-(?P<node>.+)-(?P<slot>\d+)\.log")
"""Name of the file with a worker process's output; the rendezvous stores have files of other names beside it."""

POLL_S = 0.2
"""Time between two looks at followed files: too short for a reader to notice, and a look costs microseconds."""

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, order=True)
class OutputFile:
    """The output of one process. Ordered by generation, then worker."""

    generation: int
    worker: str
    path: Path


@dataclass(frozen=True)
class Line:
    """One line of output, without its end."""

    file: OutputFile
    text: str

    def plain(self, *, named: bool) -> str:
        """Return the line as text; ``named``: after the name of its worker."""
        return f"{self.file.worker} | {self.text}\n" if named else f"{self.text}\n"

    def json(self) -> str:
        """Return the line as one JSON object."""
        line = {"worker": self.file.worker, "generation": self.file.generation, "line": self.text}
        return json.dumps(line, ensure_ascii=False) + "\n"


def output_files(directory: Path, workers: frozenset[str] | None = None) -> list[OutputFile]:
    """Return the output files in a task's folder, oldest generation first; ``workers``: only theirs; None: all."""
    files = []
    for path in directory.glob("*.log"):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        worker = f"{match['node']}/{match['slot']}"
        if workers is None or worker in workers:
            files.append(OutputFile(int(match["generation"]), worker, path))
    return sorted(files)


class _Tail:
    """Reads the lines that were appended to a file since the last look."""

    def __init__(self, file: OutputFile) -> None:
        self._file = file
        self._offset = 0
        self._rest = b""

    def more(self) -> list[Line]:
        """Return the next whole lines, of at most ``_CHUNK_BYTES``."""
        try:
            with open(self._file.path, "rb") as stream:
                stream.seek(self._offset)
                data = stream.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [self._line(line) for line in whole]

    def last(self) -> list[Line]:
        """Return the text after the last end of line, as a line; none if there is no such text."""
        rest, self._rest = self._rest, b""
        return [self._line(rest)] if rest else []

    def _line(self, data: bytes) -> Line:
        return Line(self._file, data.decode(errors="replace").rstrip("\r"))


async def read_lines(
    directory: Path, workers: Callable[[], Awaitable[frozenset[str] | None]], *, going_on: Callable[[], Awaitable[bool]]
) -> AsyncIterator[Line]:
    """Yield the lines of a task's output; while more can come, wait for it, also from new files.

    Args:
        directory: the task's output folder.
        workers: returns the workers whose output is read, None for all; called at each look, because ranks move.
        going_on: returns whether more can come; always False for a reader that does not follow.
    """
    tails: dict[Path, _Tail] = {}
    while True:
        more_can_come = await going_on()
        wanted = await workers()
        for file in await asyncio.to_thread(output_files, directory, wanted):
            tails.setdefault(file.path, _Tail(file))
        quiet = True
        for tail in tails.values():
            while lines := await asyncio.to_thread(tail.more):
                quiet = False
                for line in lines:
                    yield line
        if not more_can_come:
            for tail in tails.values():
                for line in tail.last():
                    yield line
            return
        if quiet:
            await asyncio.sleep(POLL_S)
