"""Child processes that are kept running: the services of a control plane, and in the embedded stack the agents.

``cli/stack/stack.py`` and ``cli/stack/control_plane.py`` say what the children are, and when one that has ended is
started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from cli.stack.child import Child
from shared.bus.cancellation import cancelled
from shared.errors import Unavailable, UnicronError

SERVICES = {
    "detector": "services.detector.main",
    "planner": "services.planner.main",
    "transition": "services.transition.main",
    "api": "services.api.main",
}
"""The services of the control plane -> their modules."""

FIRST = "detector"
"""Started before all others: the log's first opener creates its table; the others find it."""

DECIDING = ("detector", "planner", "transition")
"""Services of which one instance decides, and others may stand by."""

STANDBYS = {f"{name}-standby": name for name in DECIDING}
"""Children that stand by -> their services."""

STOP_ORDER: tuple[Sequence[str], ...] = (tuple(STANDBYS), ("transition", "planner"), ("detector",), ("api",))
"""Services that are ended together, group after group: first those that would take over, then those that would move
tasks as nodes leave, last the api, which shows what becomes of them."""

PauseOf = Callable[[Child, UnicronError], float]
"""Returns how long to wait before a child that has ended, for this reason, is started again, in seconds; raises the
error with which all is to end instead."""


class Children:
    """Some child processes, by name.

    Args:
        pause_s: for how long a child that has ended stays away.
    """

    def __init__(self, pause_s: PauseOf) -> None:
        self._pause_s = pause_s
        self._children: dict[str, Child] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._failed: asyncio.Future[UnicronError] | None = None

    def add(self, child: Child) -> None:
        """Have a child among those that are started."""
        self._children[child.name] = child

    def __getitem__(self, name: str) -> Child:
        """Return a child."""
        return self._children[name]

    @property
    def failed(self) -> asyncio.Future[UnicronError]:
        """A future that is done, with the reason, when a child is not started again."""
        assert self._failed is not None, "not started"
        return self._failed

    def fail(self, reason: UnicronError) -> None:
        """Note that something does not come back without which the children cannot work."""
        if not self.failed.done():
            self.failed.set_result(reason)

    async def start(self) -> None:
        """Start all children; return when they are ready.

        Raises:
            UnicronError: one did not start; the others may run.
        """
        self._failed = asyncio.get_running_loop().create_future()
        if FIRST in self._children:
            await self.start_one(FIRST)
        await self._start_all(name for name in self._children if name != FIRST and name not in STANDBYS)
        await self._start_all(name for name in self._children if name in STANDBYS)

    async def _start_all(self, names: Iterable[str]) -> None:
        starts = [asyncio.create_task(self.start_one(name)) for name in names]
        try:
            await asyncio.gather(*starts)
        finally:
            await cancelled(*starts)

    async def start_one(self, name: str) -> None:
        """Start a child (again); return when it is ready.

        Raises:
            UnicronError: it did not start.
        """
        child = self._children[name]
        watcher = asyncio.create_task(self._watch(child, await child.start()))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def stop(self, order: Sequence[Sequence[str]]) -> None:
        """End all children, group after group; return when none is left."""
        self._stopping = True
        await cancelled(*self._watchers)
        for names in order:
            await asyncio.gather(*(self._children[name].end() for name in names if name in self._children))

    async def _watch(self, child: Child, process: asyncio.subprocess.Process) -> None:
        """Start a child again after an unexpected end."""
        reason: UnicronError = Unavailable(f"exit code {await process.wait()}")
        while not (self._stopping or child.expected_end):
            try:
                pause_s = self._pause_s(child, reason)
            except UnicronError as err:
                self.fail(err)
                return
            await asyncio.sleep(pause_s)
            try:
                await self.start_one(child.name)
                return
            except UnicronError as err:
                reason = err  # counts as an end: a child may be killed while it starts
