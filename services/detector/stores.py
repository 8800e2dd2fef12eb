"""The rendezvous stores that run on a node, each in a process of its own, by task and generation."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.detector.fork_server import Forked, ForkServer
from shared.errors import Unavailable
from shared.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Opening:
    """A store that is being opened. ``closed``: it was closed before it was there."""

    task: str
    generation: int
    closed: bool = False


class Stores:
    """A node's stores.

    Args:
        settings: ``node``, ``run_dir``, ``store_host``.
        server: returns the fork server, once there is one.
    """

    def __init__(self, settings: Settings, server: Callable[[], Awaitable[ForkServer]]) -> None:
        self._settings, self._server = settings, server
        self._running: dict[tuple[str, int], tuple[str, Forked]] = {}
        self._openings: set[_Opening] = set()

    def __len__(self) -> int:
        """Return how many run."""
        return len(self._running)

    async def open(self, task: str, generation: int) -> tuple[str, int]:
        """Run a store; return its address.

        Raises:
            Unavailable: that is not possible, or it was closed meanwhile.
        """
        opening = _Opening(task, generation)
        self._openings.add(opening)
        try:
            server = await self._server()
            output = self._settings.run_dir.resolve() / "tasks" / task / "output"
            output.mkdir(parents=True, exist_ok=True)
            store_id = f"store-{uuid.uuid4().hex}"
            host = self._settings.store_host
            name = f"{generation}-store-{self._settings.node}.log"
            forked, port = await server.store(store_id, host=host, output=output / name)
        finally:
            self._openings.discard(opening)
        if opening.closed:
            _end(forked)
            raise Unavailable(f"the store of {task}, generation {generation}, was closed while it was opened")
        previous = self._running.pop((task, generation), None)
        if previous is not None:
            _end(previous[1])
        self._running[(task, generation)] = (store_id, forked)
        return host, port

    def close(self, task: str, before: int | None = None) -> None:
        """End the task's stores, all or those of generations older than ``before``; also those being opened."""
        for key in [k for k in self._running if k[0] == task and (before is None or k[1] < before)]:
            _end(self._running.pop(key)[1])
        for opening in self._openings:
            if opening.task == task and (before is None or opening.generation < before):
                opening.closed = True

    def close_all(self) -> None:
        """End what runs."""
        for _, forked in self._running.values():
            _end(forked)
        self._running.clear()

    def exited(self, store_id: str, exit_code: int) -> None:
        """Take note that a store's process has ended, if it is one of these."""
        for key, (known, forked) in list(self._running.items()):
            if known == store_id:
                # Established collectives do without it; the next generation opens its own.
                logger.warning("the store of %s, generation %d, exited with %d", *key, exit_code)
                del self._running[key]
                forked.close()


def _end(forked: Forked) -> None:
    forked.kill()
    forked.close()
