"""The rendezvous stores of a node, each in a process of its own, by task and generation.

Commands open and close stores through the agent; the fork server runs them (``fork_server.py``).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.agent.files.rank_users import RankUsers
from services.agent.files.task_files import TaskFiles
from services.agent.node.record import StoreRecord
from services.agent.ranks.fork_server import Forked, ForkServer
from shared.errors import Unavailable

logger = logging.getLogger(__name__)

ID_PREFIX = "store-"
"""The fork server's ids of stores begin with this; those of ranks do not."""


@dataclass(eq=False, slots=True)
class _Opening:
    """A store that is being opened. ``closed``: it was closed before it was open."""

    task: str
    generation: int
    closed: bool = False


@dataclass(frozen=True, slots=True)
class _Store:
    """A store that runs. ``id``: the fork server's name of the process; ``python``: the Python of the fork server."""

    id: str
    python: str
    forked: Forked


class Stores:
    """The stores of one node.

    Args:
        host: the address under which other nodes reach the stores.
        ip: the address on which the stores listen: that of ``host`` on this machine.
        files: where the stores' output goes.
        users: of the tasks.
        server: returns the fork server of a Python, once it runs.
    """

    def __init__(
        self, host: str, ip: str, files: TaskFiles, users: RankUsers, server: Callable[[str], Awaitable[ForkServer]]
    ) -> None:
        self._host, self._ip, self._files, self._users, self._server = host, ip, files, users, server
        self._running: dict[tuple[str, int], _Store] = {}
        """Running stores by task and generation."""
        self._openings: set[_Opening] = set()

    def __len__(self) -> int:
        """Return the number of running stores."""
        return len(self._running)

    async def open(self, task: str, generation: int, python: str = "") -> tuple[str, int]:
        """Run a store in the Python of its task; return its host and port.

        Raises:
            Unavailable: no store could be started, or it was closed meanwhile.
        """
        opening = _Opening(task, generation)
        self._openings.add(opening)
        try:
            server = await self._server(python)
            output = self._files.store_output(task, generation)
            self._files.make_output_folder(task)
            store_id, uid = f"{ID_PREFIX}{uuid.uuid4().hex}", self._users.uid(task)
            forked, port = await server.store(store_id, host=self._ip, output=output, uid=uid)
        finally:
            self._openings.discard(opening)
        if opening.closed:
            _end(forked)
            raise Unavailable(f"the store of {task}, generation {generation}, was closed while it was opened")
        previous = self._running.pop((task, generation), None)
        if previous is not None:
            _end(previous.forked)
        self._running[(task, generation)] = _Store(store_id, python, forked)
        return self._host, port

    def records(self) -> list[StoreRecord]:
        """Return what a successor of the agent has to know."""
        return [
            StoreRecord(task=key[0], generation=key[1], id=store.id, python=store.python)
            for key, store in self._running.items()
        ]

    def restore(self, record: StoreRecord, pid: int) -> None:
        """Take over a store that runs."""
        self._running[(record.task, record.generation)] = _Store(record.id, record.python, Forked(pid))

    def close(self, task: str, before: int | None = None) -> None:
        """End a task's stores, and those that are being opened.

        Args:
            task: the task.
            before: only stores of generations older than this; None: all.
        """
        for key in [k for k in self._running if k[0] == task and (before is None or k[1] < before)]:
            _end(self._running.pop(key).forked)
        for opening in self._openings:
            if opening.task == task and (before is None or opening.generation < before):
                opening.closed = True

    def close_all(self, python: str | None = None) -> None:
        """End every running store, or those of one Python's fork server."""
        for key in [k for k, store in self._running.items() if python in (None, store.python)]:
            _end(self._running.pop(key).forked)

    def exited(self, store_id: str, exit_code: int) -> None:
        """Forget a store whose process has ended."""
        for key, store in list(self._running.items()):
            if store.id == store_id:
                # Established collectives need no store, and the next generation opens its own.
                logger.warning("the store of %s, generation %d, exited with %d", *key, exit_code)
                del self._running[key]
                store.forked.close()


def _end(forked: Forked) -> None:
    forked.kill()
    forked.close()
