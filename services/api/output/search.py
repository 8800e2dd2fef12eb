"""Finds the files of a task (output, metrics): each on its worker's node, or where machines share the run directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from services.api.output.node_files import FileSource, list_files
from services.api.output.owners import FileOwners, node_of
from shared.bus.cancellation import cancelled
from shared.errors import Unavailable
from shared.messages.node_files import ListMetrics, ListOutput, RankFile

ABSENCES = {"lost": "is lost", "left": "has left"}
"""States of a node that explain why it does not answer, in words."""

Key = tuple[int, str]
"""Generation and worker of a file."""


@dataclass(frozen=True)
class FoundFile:
    """A file, and what it can be read from."""

    file: RankFile
    source: FileSource


@dataclass(frozen=True)
class Missing:
    """Output of some workers of a node that cannot be read. ``text``: whose, where and why, as a sentence."""

    node: str
    workers: tuple[str, ...]
    text: str


class FileSearch:
    """The files of one task, as far as they are known.

    Args:
        task: its name.
        own: the files of the api's machine.
        source: returns the files of a node.
        listing: lists the files that are meant.
    """

    def __init__(
        self,
        task: str,
        own: FileSource,
        source: Callable[[str], FileSource],
        listing: type[ListOutput | ListMetrics] = ListOutput,
    ) -> None:
        self._task, self._own, self._source, self._listing = task, own, source, listing
        self._found: dict[Key, FoundFile] = {}
        self._asked: dict[str, asyncio.Task[list[RankFile]]] = {}
        """Node -> the request for its listing that is under way."""
        self._silent: set[str] = set()
        """Sources that did not answer when they were asked last."""
        self._searched: set[str] = set()
        """Silent nodes whose output all other nodes were asked for."""
        self._elsewhere: dict[str, FileSource] = {}
        """Silent node -> the other node that has its output."""

    @property
    def files(self) -> list[FoundFile]:
        """All files that were found and whose source answers, oldest generation first."""
        return [found for _, found in sorted(self._found.items()) if found.source.name not in self._silent]

    @property
    def silent(self) -> frozenset[str]:
        """The nodes that did not answer when they were asked last, and of which nobody else has files."""
        return frozenset(self._silent - {node_of(found.file.worker) for found in self.files})

    async def look(self, owners: FileOwners, limit_s: float | None) -> None:
        """Ask all nodes at the same time.

        Args:
            owners: whose output is looked for.
            limit_s: a node that takes longer may answer until a later look; None: wait until each has answered or its
                time is up (``node_files.TIMEOUT_S``).
        """
        self._silent.discard(self._own.name)
        for node in owners.nodes - self._asked.keys():
            self._asked[node] = asyncio.create_task(list_files(self._source(node), self._task, [node], self._listing))
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=limit_s)
        for node in [node for node, asked in self._asked.items() if asked.done()]:
            try:
                self._take_in(self._asked.pop(node).result(), self._source(node), owners)
            except Unavailable:
                self._silent.add(node)
            else:
                self._silent.discard(node)
                self._searched.discard(node)
                self._elsewhere.pop(node, None)
        await self._look_elsewhere(owners)

    async def note_silence(self, found: FoundFile, owners: FileOwners) -> None:
        """Take note that a source does not answer any more; look for its files elsewhere."""
        self._silent.add(found.source.name)
        owner = node_of(found.file.worker)
        self._elsewhere.pop(owner, None)
        self._searched.discard(owner)
        await self._look_elsewhere(owners)

    def missing(self, owners: FileOwners) -> list[Missing]:
        """Return what cannot be read, by node."""
        return [entry for node in sorted(owners.nodes) if (entry := self._missing_on(node, owners))]

    async def close(self) -> None:
        """End the requests under way."""
        await cancelled(*self._asked.values())

    async def _look_elsewhere(self, owners: FileOwners) -> None:
        """Look for the output of silent nodes: on the api's machine each time, on all other nodes once."""
        silent = self._silent & owners.nodes
        left = silent - await self._list(self._own, silent, owners)
        known = left & self._elsewhere.keys()
        for node in known:
            if not await self._list(self._elsewhere[node], [node], owners):
                del self._elsewhere[node]
        new = left - known - self._searched
        if not new:
            return
        self._searched |= new
        answering = [self._source(node) for node in sorted(owners.nodes - self._silent - self._asked.keys())]
        for source, nodes in zip(
            answering, await asyncio.gather(*(self._list(source, new, owners) for source in answering)), strict=True
        ):
            for node in nodes:
                self._elsewhere.setdefault(node, source)

    async def _list(self, source: FileSource, nodes: Collection[str], owners: FileOwners) -> set[str]:
        """Ask a source for the output of some nodes; return the nodes of which it has any."""
        if not nodes:
            return set()
        try:
            files = await list_files(source, self._task, nodes, self._listing)
        except Unavailable:
            return set()
        self._take_in(files, source, owners)
        return {node_of(file.worker) for file in files}

    def _take_in(self, files: Collection[RankFile], source: FileSource, owners: FileOwners) -> None:
        for file in files:
            if file.worker in owners.workers:
                self._found[file.key] = FoundFile(file, source)

    def _missing_on(self, node: str, owners: FileOwners) -> Missing | None:
        workers = owners.on(node)
        readable = {found.file.worker for found in self.files}
        left = tuple(worker for worker in workers if worker not in readable)
        answers = node not in self._silent and node not in self._asked
        if answers:
            left = tuple(worker for worker in left if worker in owners.trained)
        if not left:
            return None
        text = f"output of {', '.join(left)} is "
        if answers:
            return Missing(node, left, f"{text}not on {node} any more")
        why = ABSENCES.get(owners.states.get(node, ""), "does not answer")
        return Missing(node, left, f"{text}on {node}, which {why}")
