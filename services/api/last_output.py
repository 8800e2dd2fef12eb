"""The last lines that failed workers have printed, read from the machines that have them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from services.api.output.node_files import FileSource
from services.api.output.owners import FileOwners
from services.api.output.search import FileSearch, FoundFile
from services.api.postmortem.model import FailedWorker, LastOutput
from shared.errors import NotFound, Unavailable
from shared.messages.node_files import ReadOutput

LIMIT_S = 3.0
"""How long all nodes together may take: a page without these lines is better than none. A lost node does not answer."""

BYTES = 4096
"""Most that is read of a worker's output: some thirty lines, as in the evidence of a process that ended."""

MOST_WORKERS = 8
"""Workers whose lines are shown: those of a node."""


async def last_output(
    failed: Sequence[FailedWorker], own: FileSource, source: Callable[[str], FileSource]
) -> tuple[list[LastOutput], list[str]]:
    """Return the last lines of failed workers, and in words whose lines there are not.

    The file is that of the newest process that was started for the worker up to the fault: one that was started in its
    place writes into another.

    Args:
        failed: the workers, with their tasks and generations.
        own: the files of the api's machine.
        source: returns the files of a node.
    """
    by_task: dict[str, list[FailedWorker]] = {}
    for one in failed[:MOST_WORKERS]:
        by_task.setdefault(one.task, []).append(one)
    answers = await asyncio.gather(*(_of_task(task, workers, own, source) for task, workers in by_task.items()))
    found = [one for answer in answers for one in answer]
    there = {(one.task, one.worker) for one in found}
    without = [one.worker for one in failed[:MOST_WORKERS] if (one.task, one.worker) not in there]
    missing = [f"the last lines of {', '.join(without)}: no machine that answers has them"] if without else []
    if len(failed) > MOST_WORKERS:
        missing.append(f"the last lines of {len(failed) - MOST_WORKERS} more workers")
    return found, missing


async def _of_task(
    task: str, workers: Collection[FailedWorker], own: FileSource, source: Callable[[str], FileSource]
) -> list[LastOutput]:
    search = FileSearch(task, own, source)
    found: list[LastOutput] = []
    try:
        async with asyncio.timeout(LIMIT_S):
            await search.look(FileOwners(frozenset(one.worker for one in workers)), LIMIT_S / 2)
            for one in workers:
                files = [
                    each
                    for each in search.files
                    if each.file.worker == one.worker and each.file.generation <= one.generation
                ]
                if files and (text := await _end(task, max(files, key=lambda each: each.file.generation))):
                    found.append(LastOutput(task=task, worker=one.worker, text=text))
    except TimeoutError:
        pass  # what is missing is named
    finally:
        await search.close()
    return found


async def _end(task: str, found: FoundFile) -> str:
    """Return the last whole lines of a file; empty if it cannot be read."""
    file, offset = found.file, max(found.file.size_bytes - BYTES, 0)
    request = ReadOutput(
        task=task, generation=file.generation, worker=file.worker, offset=offset, limit=BYTES, skips=True
    )
    try:
        _, data = await found.source.ask(request)
    except (NotFound, Unavailable):
        return ""
    text = data.decode(errors="replace")
    return (text.partition("\n")[2] if offset else text).rstrip()
