"""Reads the files in which ranks write metrics (``unicron.training.metrics``) from the nodes, and stores what is new.

This is done now and then while a task trains, so that a lost node takes little with it, and whenever somebody asks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from services.api.output.node_files import FileSource
from services.api.output.owners import FileOwners, file_owners
from services.api.output.search import FileSearch, FoundFile
from services.api.store.readers import ViewReader
from services.api.store.tables import ATTEMPTS, TASKS
from services.api.task_metrics.metric_store import Known, MetricStore, NewLines, file_key
from shared.bus.cancellation import cancelled
from shared.errors import NotFound, Unavailable
from shared.messages.node_files import ListMetrics, ReadMetrics
from shared.tasks.specification import ENDED, TaskState
from shared.views.task_parts import attempt_key

logger = logging.getLogger(__name__)

COLLECT_S = 30.0
"""Pause between two readings of all tasks that go on: so much of its metrics a node takes with it at most."""

FRESH_S = 1.0
"""For how long, at least, a reading is as good as new. Pages ask every ten seconds."""

REST = 10
"""How many times as long as a reading took it is as good as new: with many nodes, or with one that does not answer."""

PATIENCE_S = 0.5
"""How long somebody who asks waits for the nodes; then the answer has what was read before."""

MOST_READ_BYTES = 8 << 20
"""Most bytes that one reading takes of a task, by about one chunk; the rest comes with the next."""


class _Sources:
    """Where the metrics of one task come from."""

    def __init__(self, search: FileSearch) -> None:
        self.search = search
        self.owners = FileOwners()
        self.reading: asyncio.Task[None] | None = None
        self.due_s = float("-inf")
        """From when on, on the monotonic clock, the newest reading is old."""


class Collector:
    """Collects the metrics of all tasks.

    Args:
        store: keeps them.
        read: returns what a function finds in the projections.
        own: the files of the api's machine.
        source: returns the files of a node.
    """

    def __init__(
        self,
        store: MetricStore,
        read: Callable[[Callable[[ViewReader], Any]], Awaitable[Any]],
        own: FileSource,
        source: Callable[[str], FileSource],
    ) -> None:
        self.store, self._read_views, self._own, self._source = store, read, own, source
        self._tasks: dict[str, _Sources] = {}
        self._writing = asyncio.Lock()

    async def refresh(self, task: str) -> list[str]:
        """Read what is new of a task; return the nodes that did not answer, whose values may be missing."""
        sources = self._tasks.setdefault(task, _Sources(FileSearch(task, self._own, self._source, ListMetrics)))
        if sources.reading is None and time.monotonic() >= sources.due_s:
            sources.reading = asyncio.create_task(self._read_or_warn(task, sources))
        if sources.reading is not None:
            await asyncio.wait({sources.reading}, timeout=PATIENCE_S)
        return sorted(sources.search.silent & sources.owners.nodes)

    async def keep_collecting(self) -> None:
        """Read what is new of all tasks that go on, until cancelled; of one that has ended, once more."""
        going = [state.value for state in TaskState if state not in ENDED]
        before: set[str] = set()
        while True:
            try:
                now = await self._read_views(lambda views: {task.name for task in views.page(TASKS, states=going)})
                names = before | now
                # Spread over the time: many tasks on many nodes at once would keep those who look at the page waiting.
                for name in names:
                    await asyncio.sleep(COLLECT_S / len(names))
                    await self.refresh(name)
                if not names:
                    await asyncio.sleep(COLLECT_S)
                # Of others only somebody who asks wants to know.
                self._tasks = {name: one for name, one in self._tasks.items() if name in now or one.reading is not None}
                before = now
            except Exception as err:  # what goes wrong here must not end the api
                logger.warning("metrics of tasks are not collected: %s %s; again", type(err).__name__, err)
                await asyncio.sleep(COLLECT_S)

    async def close(self) -> None:
        """End what is under way."""
        reading = [sources.reading for sources in self._tasks.values() if sources.reading is not None]
        await cancelled(*reading)
        await asyncio.gather(*(sources.search.close() for sources in self._tasks.values()))
        await asyncio.to_thread(self.store.close)

    async def _read_or_warn(self, task: str, sources: _Sources) -> None:
        begun_s = time.monotonic()
        try:
            await self._read(task, sources)
        except Exception as err:  # whoever asks gets what was read before
            logger.warning("metrics of %s were not read: %s %s", task, type(err).__name__, err)
        finally:
            now_s = time.monotonic()
            sources.reading, sources.due_s = None, now_s + max(FRESH_S, REST * (now_s - begun_s))

    async def _read(self, task: str, sources: _Sources) -> None:
        """Read what is new of a task."""
        history = not sources.owners.workers
        owners, ends = await self._read_views(
            lambda views: (file_owners(views, task, None, history=history), _ends(views, task))
        )
        sources.owners = owners.after(sources.owners)
        await sources.search.look(sources.owners, None)
        async with self._writing:  # of one database, which has one writer at a time
            known = await asyncio.to_thread(self.store.known, task)
            new_lines: list[NewLines] = []
            for found in sources.search.files:
                if sum(len(lines.data) for lines in new_lines) < MOST_READ_BYTES:
                    new_lines += await _new_lines(task, found, known)
            if new_lines:
                await asyncio.to_thread(self.store.take, task, known, new_lines, ends)


def _ends(views: ViewReader, task: str) -> list[int]:
    """Return the newest generation of each earlier submission of a task's name, or of those before it."""
    earlier = range(1, views.find(TASKS, task).attempt)
    found = views.several(ATTEMPTS, [attempt_key(task, number) for number in earlier])
    newest = (found[attempt_key(task, number)].generation for number in earlier)
    return list(itertools.accumulate(newest, max))


async def _new_lines(task: str, found: FoundFile, known: Known) -> list[NewLines]:
    """Return what is new of a file, in whole lines; of one whose source does not answer, what it has answered."""
    file, new_lines = found.file, list[NewLines]()
    offset = known.state.offsets.get(file_key(*file.key), 0)
    while offset < file.size_bytes and sum(len(lines.data) for lines in new_lines) < MOST_READ_BYTES:
        request = ReadMetrics(task=task, generation=file.generation, worker=file.worker, offset=offset)
        try:
            _, data = await found.source.ask(request)
        except (NotFound, Unavailable):
            break
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) < request.limit:
            break  # the rest of the line comes
        offset += whole or len(data)  # there is no such long line but what a script has written itself
        new_lines.append(NewLines(file.generation, file.worker, data[:whole], offset))
    return new_lines
