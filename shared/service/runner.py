"""The frame of every service that decides: input, fold, decide, append, effects, answer.

A service is a ``Runner``: a core (``shared.service.core``), and what carries out its effects. One input at a time is
folded and decided on, its events are appended and its other effects begun, before the next one. A record of the log
then counts as handled, and the caller that brought another input gets the effects.

At the start the service folds the log: from a state snapshot on, where it is given one, or from the first event. What
the log has at the start was decided on before, and its answers, if any, are folded in their turn.

An instance that does not hold the lease of its service (``shared.service.lease_keeper``) stands by: it folds the log,
and decides and answers nothing. Its start is when it takes the lease. One that loses the lease ends with an error, and
whoever has started it starts it again, to stand by.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar

from shared.bus.cancellation import cancelled
from shared.events.union import Recorded
from shared.model import Clock
from shared.service.changes import Changes
from shared.service.core import Append, Logged, Started, StateFold
from shared.service.frame import Context
from shared.service.lease_keeper import LeaseKeeper
from shared.service.shared_reads import SharedRead

logger = logging.getLogger(__name__)

State = TypeVar("State")
LoadedState = TypeVar("LoadedState", covariant=True)
Input = TypeVar("Input")
Effect = TypeVar("Effect")


class Snapshots(Protocol[LoadedState]):
    """State snapshots; ``shared.service.state_keeper.StateKeeper`` has a live service's."""

    async def load(self) -> tuple[int, LoadedState] | None:
        """Return the newest snapshot with its position; None if there is none."""

    def handled(self, position: int) -> None:
        """Note that the service has handled the log up to a position."""


class Runner(ABC, Generic[State, Input, Effect]):
    """A service, from its start until it is cancelled.

    ``position``: the position up to which the log was handled. ``taken``: how many inputs of each type came, beside the
    log. ``started``: set once the log of the start was folded.

    Args:
        context: the context of its process, which is ready once ``begin`` has returned.
        fold: the core's, before the first event.
        clock: gives the times of inputs.
        snapshots: None: the service folds the whole log when it starts.
    """

    def __init__(
        self, context: Context, fold: StateFold[State], clock: Clock, snapshots: Snapshots[State] | None = None
    ) -> None:
        self.fold = fold
        self.position = 0
        self.taken: Counter[type] = Counter()
        self.started = asyncio.Event()
        self._context, self._clock, self._snapshots = context, clock, snapshots
        self._last = 0
        """Position of the last event that the log had at the start."""
        self._fold_on: Callable[[], Awaitable[object]] | None = None
        self._one_input = asyncio.Lock()
        self._moved_on = Changes()
        self._end_now = SharedRead[int]()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def state(self) -> State:
        """The state behind the last input."""
        return self.fold.state

    # ---- what a service defines

    @abstractmethod
    def decide(self, state: State, item: Input | Logged | Started, at: datetime) -> tuple[State, Sequence[Effect]]:
        """Return the state after an input, in which the events of ``Append`` effects are folded, and the effects."""

    def perform(self, effect: Effect) -> None:
        """Begin what follows from an effect; the events of an ``Append`` are in the log by now."""

    async def begin(self) -> None:
        """Begin what the service does beside the log, once the log of the start was folded."""

    async def begin_standing_by(self) -> None:
        """Begin what the service does while another instance of it is active."""

    async def fold_beside(self, handled: int) -> None:
        """Fold what the log has by now, without deciding. ``handled``: position up to which holders have handled it."""
        if self._fold_on is None:
            self._fold_on = self._context.journal.reader(self._fold, after=self.position)
        await self._fold_on()

    async def end_of_log(self) -> int:
        """Return the position of the last event of the start; a service may fold up to it by itself."""
        return await self._context.journal.last_position()

    # ---- inputs

    async def run(self) -> None:
        """Fold the log, then handle what comes until cancelled.

        Raises:
            LeaseLost: another instance decides from now on.
            UnicronError: the log or the bus is lost. The state may have events then that could not be appended.
        """
        if self._snapshots is not None and (found := await self._snapshots.load()) is not None:
            self.position, self.fold.state = found
        lease = self._context.lease
        try:
            if lease is not None:
                await self._stand_by(lease)
                self.spawn(lease.kept(), "lease")
            self._last = await self.end_of_log()
            if self._last <= self.position:
                await self._start()
            journal, name = self._context.journal, self._context.name
            self.spawn(journal.follow(self.take, consumer=name, after=self.position), "follow")
            await self._failed
        finally:
            await cancelled(*self._tasks)
            if lease is not None:
                await lease.give_back()

    async def _stand_by(self, lease: LeaseKeeper) -> None:
        """Fold the log until this instance holds the lease."""
        waits_for = ""
        while not await lease.seek():
            if not waits_for:
                await self.begin_standing_by()
            if lease.waits_for != waits_for:
                waits_for = lease.waits_for
                logger.warning("%s", waits_for)
            await self.fold_beside(lease.seen.handled if lease.seen is not None else 0)
            self._context.journal.handled = self.position
            self._context.ready()
            await asyncio.sleep(lease.look_s)
        if waits_for:
            logger.warning("this %s takes over (token %d)", lease.service, lease.token)

    async def _fold(self, record: Recorded) -> None:
        self.fold.take(record)
        self.position = record.position

    async def take(self, record: Recorded) -> None:
        """Handle the next record of the log."""
        async with self._one_input:
            if self.fold.take(record) and record.position > self._last:
                await self._decide(Logged(record), self._clock())
            self.position = record.position
            if self.position >= self._last and not self.started.is_set():
                await self._start()
            if self._snapshots is not None:
                self._snapshots.handled(self.position)
        self._moved_on.notify()

    async def feed(self, item: Input, at: datetime | None = None) -> Sequence[Effect]:
        """Handle an input that does not come from the log; return its effects.

        ``at``: its time; None: the time of its turn.
        """
        self.taken[type(item)] += 1
        async with self._one_input:
            return await self._decide(item, at or self._clock())

    async def has_folded_log(self) -> None:
        """Wait until all that the log has now was folded."""
        position = await self._end_now.value(self._context.journal.position_now)
        await self._moved_on.until(lambda: self.position >= position)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Do some work beside the service, until it ends at the longest; an error of the work ends the service."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    @property
    def has_failed(self) -> bool:
        """Whether the service ends with an error."""
        return self._failed.done()

    async def _start(self) -> None:
        await self._decide(Started(), self._clock())
        self.started.set()
        self.spawn(self._begin(), "begin")

    async def _begin(self) -> None:
        await self.begin()
        self._context.ready()

    async def _decide(self, item: Input | Logged | Started, at: datetime) -> Sequence[Effect]:
        if self._context.lease is not None:
            await self._context.lease.confirmed()
        state, effects = self.decide(self.fold.state, item, at)
        self.fold.decided(state, effects)
        for effect in effects:
            if isinstance(effect, Append):
                try:
                    await self._context.journal.append(effect.events)
                except Exception as err:
                    self._fail(err)
                    raise
            self.perform(effect)
        return effects

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
