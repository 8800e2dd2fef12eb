"""The output of a task's ranks, read from the machines that have it, line by line.

``FileSearch`` finds the files; ``OutputReader`` reads them one after the other in chunks, and says what is missing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.api.output.node_files import FileSource
from services.api.output.owners import FileOwners
from services.api.output.search import FileSearch, FoundFile, Key, Missing
from services.api.output.tails import line_begins
from shared.errors import NotFound, Unavailable
from shared.messages.node_files import CHUNK_BYTES, RankFile, ReadOutput

POLL_S = 0.5
"""Time between two looks at followed files: a reader hardly notices it, and a look sends each node one request."""

LEAST_BYTES = 4096
"""What is read of each file at least where a reader wants the newest bytes alone: some thirty lines."""

MAX_LINE_BYTES = 1 << 20
"""A longer line is divided: a process may never end its line, and the memory of the api is bounded."""


@dataclass(frozen=True)
class Line:
    """One line of output, without its end."""

    generation: int
    worker: str
    text: str


def plain_line(entry: Line | Missing, *, named: bool) -> str:
    """Return a line as text, after the name of its worker if ``named``; or as such a line, what is missing."""
    if isinstance(entry, Missing):
        return f"unicron: {entry.text}\n"
    return f"{entry.worker} | {entry.text}\n" if named else f"{entry.text}\n"


def json_line(entry: Line | Missing) -> str:
    """Return a line as one JSON object in ASCII, since readers differ in which other characters end a line.

    What is missing has a ``problem`` in place of a line.
    """
    if isinstance(entry, Missing):
        return json.dumps({"workers": list(entry.workers), "node": entry.node, "problem": entry.text}) + "\n"
    return json.dumps({"worker": entry.worker, "generation": entry.generation, "line": entry.text}) + "\n"


class _Tail:
    """Reads the lines that were appended to a file since the last look."""

    def __init__(self, task: str, file: RankFile, since_s: float | None, begin: int = 0) -> None:
        self._task, self._generation, self._worker = task, file.generation, file.worker
        self._since_s = since_s
        self._offset = begin
        self._listed_bytes = 0
        self._rest = b""
        self._cut = False
        """Whether what comes next may begin in the middle of a line, of which the rest is left out."""

    def listed(self, file: RankFile) -> list[Line]:
        """Take note of the file's size in a listing; begin anew if the file was emptied, and return a line about it."""
        emptied, self._listed_bytes = file.size_bytes < self._listed_bytes, file.size_bytes
        if not emptied:
            return []
        self._offset = 0
        return [*self.last(), self._note("the output before this is left out: over the limit")]

    def leave_out(self, file: RankFile, newest_bytes: int) -> list[Line]:
        """Go on with the newest bytes of a file; return what there is to say about those before them."""
        begin = file.size_bytes - newest_bytes
        if begin <= self._offset:
            return []
        said = self._skip_to(begin, "more than is shown while it is printed")
        self._cut = True
        return said

    def is_behind(self, file: RankFile) -> bool:
        """Return whether the file has more than was read."""
        return self._offset < file.size_bytes

    async def more(self, source: FileSource, size_bytes: int) -> list[Line] | None:
        """Return the next whole lines, of at most one chunk and up to the size that was listed; None at the file's end.

        All who have the same listing ask for the same bytes.

        Raises:
            Unavailable: the source does not answer.
        """
        if self._offset >= size_bytes:
            return None
        request = ReadOutput(
            task=self._task,
            generation=self._generation,
            worker=self._worker,
            offset=self._offset,
            limit=min(size_bytes - self._offset, CHUNK_BYTES),
            skips=True,
            since_s=self._since_s,
        )
        try:
            reply, data = await source.ask(request)
        except NotFound:
            return None  # it was removed
        if self._since_s is not None and reply.offset is not None:
            self._since_s, self._offset = None, reply.offset  # what was before is not missing
        if not data:
            return None
        skipped = [] if reply.offset is None else self._skip_to(reply.offset, "over the limit")
        self._offset += len(data)
        if self._cut:
            _, end, data = data.partition(b"\n")
            self._cut = not end
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        return [*skipped, *(self._line(line) for line in whole)]

    def _skip_to(self, offset: int, why: str) -> list[Line]:
        """Go on from an offset; return what there is to say about the bytes before it, which are left out."""
        skipped_bytes = offset - self._offset
        if skipped_bytes <= 0:
            return []
        self._offset = offset
        return [*self.last(), self._note(f"{skipped_bytes} bytes of output are left out: {why}")]

    def _note(self, text: str) -> Line:
        return Line(self._generation, self._worker, f"unicron: {text}")

    def last(self) -> list[Line]:
        """Return the text after the last end of line, as a line; none if there is no such text."""
        rest, self._rest = self._rest, b""
        return [self._line(rest)] if rest else []

    def _line(self, data: bytes) -> Line:
        return Line(self._generation, self._worker, data.decode(errors="replace").rstrip("\r"))


@dataclass(frozen=True)
class LastLines:
    """The last lines of what there is when a reader begins: only those of each worker, of files up to a generation.

    Processes of later generations start afterwards: all that they print is read.
    """

    number: int
    generation: int


class OutputReader:
    """Reads the output of one task.

    Args:
        task: its name.
        search: finds its files.
        owners: returns whose output is read; called at each look, because ranks move.
        since_s: only what was printed from then on, in seconds since the epoch (``ReadOutput``); None: all.
        last: only the last lines of what there is at the beginning; None: all.
        newest_bytes: of what is printed between two looks only so much, the newest, of all files together
            (``LEAST_BYTES`` of each at least); it says what it leaves out. None: all.
    """

    def __init__(
        self,
        task: str,
        search: FileSearch,
        owners: Callable[[], Awaitable[FileOwners]],
        since_s: float | None = None,
        last: LastLines | None = None,
        newest_bytes: int | None = None,
    ) -> None:
        self._task, self._search, self._owners_now = task, search, owners
        self._since_s, self._last, self._newest_bytes = since_s, last, newest_bytes
        self._owners = FileOwners()
        self._tails: dict[Key, _Tail] = {}
        self._reported: set[Missing] = set()

    async def read(self, *, going_on: Callable[[], Awaitable[bool]]) -> AsyncGenerator[Sequence[Line | Missing]]:
        """Yield lines, oldest generation first; while more can come, wait for it, also from new files.

        Args:
            going_on: returns whether more can come; always False for a reader that does not follow.
        """
        first = True
        try:
            while True:
                more_can_come = await going_on()
                self._owners = (await self._owners_now()).after(self._owners)
                await self._search.look(self._owners, None if first or not more_can_come else POLL_S)
                first = False
                await self._skip_to_last_lines()
                quiet = True
                async for lines in self._new_lines(following=more_can_come):
                    quiet = quiet and not lines
                    yield lines
                if not more_can_come:
                    yield [line for _, tail in sorted(self._tails.items()) for line in tail.last()]
                yield self._new_missing()
                if not more_can_come:
                    return
                if quiet or self._newest_bytes is not None:
                    await asyncio.sleep(POLL_S)
        finally:
            await self._search.close()

    async def _skip_to_last_lines(self) -> None:
        """Begin files that were found for the first time at their last lines, if no others are asked for."""
        if self._last is None:
            return
        new = [
            found
            for found in self._search.files
            if found.file.key not in self._tails and found.file.generation <= self._last.generation
        ]
        begins = await line_begins(self._task, new, self._last.number)
        for found in new:
            self._tails[found.file.key] = _Tail(self._task, found.file, self._since_s, begins[found.file.key])

    async def _new_lines(self, *, following: bool) -> AsyncIterator[list[Line]]:
        """Yield the lines of all files up to the sizes that were listed; a follower may get the newest alone."""
        failed: FoundFile | None
        while True:
            failed = None
            files = self._search.files
            for file in (found.file for found in files):
                yield self._tails.setdefault(file.key, _Tail(self._task, file, self._since_s)).listed(file)
            if following and self._newest_bytes is not None:
                behind = [found.file for found in files if self._tails[found.file.key].is_behind(found.file)]
                for file in behind:
                    yield self._tails[file.key].leave_out(file, max(self._newest_bytes // len(behind), LEAST_BYTES))
            for found in files:
                tail, file = self._tails[found.file.key], found.file
                try:
                    while (lines := await tail.more(found.source, file.size_bytes)) is not None:
                        yield lines
                except Unavailable:
                    failed = found
                    break
            if failed is None:
                return
            await self._search.note_silence(failed, self._owners)

    def _new_missing(self) -> list[Missing]:
        """Return what cannot be read and was not reported yet."""
        missing = self._search.missing(self._owners)
        new = [entry for entry in missing if entry not in self._reported]
        self._reported = set(missing)
        return new
