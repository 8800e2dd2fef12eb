"""The planner's service: it follows the log and answers each trigger with a plan.

    python -P -m services.planner.main

``Planner`` is the shell around the pure core: ``log_fold.Fold`` has the state and decides, ``lookahead.LookAhead``
answers the solver's questions ahead of time, the journal appends the answers. Two tasks run beside the following of the
log: one solves ahead, one logs what timers are for (a task has waited too long, a worker's trial has ended).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import uuid

from services.planner.log_start import LogStart, check_decider, last_parameters, start_of
from services.planner.logged_answers import LoggedAnswers
from services.planner.lookahead.table import LookAhead
from services.planner.metrics import LOOKED_UP, NO_COUNTS, SOLVED, PlannerMetrics
from services.planner.replay.log_fold import Fold
from services.planner.state.cluster import State
from services.planner.state_snapshot import KEPT
from services.planner.timers import next_timer
from shared.bus.outages import LOG
from shared.errors import UnicronError
from shared.events.union import ClusterConfigured, PlanDecided, Recorded
from shared.model import Clock, utc_now
from shared.service.frame import Context, run
from shared.service.log_lines import ids
from shared.service.state_keeper import StateKeeper
from shared.service.state_snapshots import StateSnapshot
from shared.settings.model import Settings

logger = logging.getLogger(__name__)

QUIET_S = 0.1
"""Wait after a change of the state before solving ahead: the reports of one plan's execution come in bursts."""

RETRY_S = 1.0
"""Pause before an event that nobody waits for is appended again."""


class Planner:
    """Folds records and appends the answers to them."""

    def __init__(
        self, context: Context, start: LogStart, clock: Clock, found: StateSnapshot[State] | None = None
    ) -> None:
        """Start from an empty state, or from a snapshot.

        Args:
            context: the service's journal and counters; it is ready once the log of its start is folded.
            start: the log as it was when the service started; answers in it are folded, not decided again.
            clock: the time by which a wait is too long.
            found: the snapshot behind which the log is folded.
        """
        self.look_ahead = LookAhead()
        self.fold = Fold(self.look_ahead.solve, found.state if found is not None else None)
        self._changed = asyncio.Event()
        self._counters = context.counters
        self._aged = asyncio.Event()
        self._journal = context.journal
        self._answers = LoggedAnswers(context.journal.read, start.answers, start.older)
        self._caught_up_at = start.last
        self._ready = context.ready
        self._clock = clock
        self._metrics = PlannerMetrics(context.registry, self.look_ahead)
        if found is not None:
            self._changed.set()
        if start.last <= (found.position if found is not None else 0):
            self._caught_up()

    async def handle(self, record: Recorded) -> None:
        """Fold a record; append the answer to it unless the log has one already."""
        try:
            await self._handle(record)
        finally:
            if record.position >= self._caught_up_at:
                self._aged.set()
        if record.position == self._caught_up_at:
            self._changed.set()
            self._caught_up()

    def _caught_up(self) -> None:
        """The log that was there at the start has been folded."""
        self._answers.forget()
        self._aged.set()
        self._ready()

    async def _handle(self, record: Recorded) -> None:
        if not self.fold.take(record):
            return
        if record.position > self._caught_up_at:  # what came next before is in the log
            self._changed.set()
        recorded = await self._answers.to(record)
        if recorded:
            self.fold.answer(record, [r.event for r in recorded])
            return
        if self._answers.has_older:
            return  # that decider has passed over it
        table = self.look_ahead
        hits, misses = table.hits, table.misses
        began_s = time.perf_counter()
        decided = self.fold.decide(record)
        seconds = time.perf_counter() - began_s
        self._counters.update(table.counters())
        if not decided:
            return
        how = SOLVED if table.misses > misses else LOOKED_UP if table.hits > hits else NO_COUNTS
        self._metrics.decided(how, seconds)
        self.fold.answer(record, decided)
        await self._journal.append(decided)
        for event in decided:
            if isinstance(event, PlanDecided):
                what = f"{event.plan}: {event.trigger}, {event.response} (position {record.position})"
                totals = f"{table.hits} hits, {table.misses} misses, {len(table)} answers ahead"
                logger.info("%s: %s in %.4f s; %s", what, how, seconds, totals, extra=ids(record.event, event))

    async def keep_looking_ahead(self) -> None:
        """Solve the next likely problems after every change of the state, until cancelled. Deciding never waits."""
        table = self.look_ahead
        try:
            while True:
                await self._changed.wait()
                await asyncio.sleep(QUIET_S)
                self._changed.clear()
                # When this task is cancelled, the thread goes on and ends at its next answer.
                await asyncio.shield(asyncio.to_thread(self._look_ahead, self.fold.state))
                self._counters.update(table.counters())
        finally:
            self._changed.set()

    async def keep_ageing(self) -> None:
        """Append the events of timers (``timers.py``) when their time has come, until cancelled.

        The first look comes after the log was folded to its end at the start: what is due before may be in the log.
        """
        while True:
            await self._aged.wait()
            self._aged.clear()
            first = next_timer(self.fold.state)
            if first is None:
                continue
            remaining_s = (first.at - self._clock()).total_seconds()
            if remaining_s > 0.0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(remaining_s):
                        await self._aged.wait()
                self._aged.set()
                continue
            # The next timer is looked at when the log has delivered this event and it was answered.
            try:
                await self._journal.append([first.event])
            except UnicronError as err:
                logger.warning(
                    "cannot log %s of task %s: %s; again",
                    first.event.type,
                    first.event.task,
                    err.detail,
                    extra=ids(first.event),
                )
                await asyncio.sleep(RETRY_S)
                self._aged.set()

    def _look_ahead(self, state: State) -> None:
        try:
            self.look_ahead.rebuild(state, utc_now(), lambda: not self._changed.is_set())
        except Exception:
            # Plans do not depend on the table: the solver is asked where it has no answer.
            logger.exception("could not look ahead")


def configuration(settings: Settings, *, event_id: str, clock: Clock) -> ClusterConfigured:
    """Return the event that logs the settings which decisions use."""
    return ClusterConfigured(
        event_id=event_id,
        occurred_at=clock(),
        mtbf_node_s=settings.mtbf_node_s,
        throughput_hysteresis=settings.throughput_hysteresis,
        transition_prior_s=settings.transition_prior_s,
        worker_flop_per_s=settings.worker_flop_per_s,
        price_per_worker_hour=settings.price_per_worker_hour,
        currency=settings.currency,
        storage_bytes_per_s=settings.storage_bytes_per_s,
        starvation_s=settings.starvation_s,
        allow_pausing=settings.allow_pausing,
        memory_copies=settings.memory_copies,
        prices=settings.prices,
        value_per_eflop=settings.value_per_eflop,
    )


def has_changed(last: ClusterConfigured | None, now: ClusterConfigured) -> bool:
    """Return whether the parameters differ from those logged last; True if none were logged."""
    identity = {"event_id", "occurred_at"}
    return last is None or last.model_dump(exclude=identity) != now.model_dump(exclude=identity)


async def serve(context: Context, clock: Clock = utc_now) -> None:
    """Run until cancelled.

    Raises:
        Conflict: a newer planner has decided in the log.
    """
    async with StateKeeper(context, KEPT) as keeper:
        found = await keeper.load()
        await _serve(context, clock, keeper, found)


async def _serve(
    context: Context, clock: Clock, keeper: StateKeeper[State], found: StateSnapshot[State] | None
) -> None:
    journal = context.journal
    after = found.position if found is not None else 0
    start = await journal.outages.outlast(LOG, lambda: start_of(journal.log, after))
    check_decider(start.decider)
    await journal.follow_time(start.last)
    configured = await last_parameters(journal.read, start) or (found.state.config if found is not None else None)
    now = configuration(context.settings, event_id=str(uuid.uuid4()), clock=clock)
    if has_changed(configured, now):
        await journal.append([now])
    planner = Planner(context, start, clock, found)

    async def handle(record: Recorded) -> None:
        await planner.handle(record)
        keeper.handled(record.position)

    beside = {
        asyncio.create_task(planner.keep_looking_ahead(), name="look-ahead"),
        asyncio.create_task(planner.keep_ageing(), name="ageing"),
    }
    try:
        await journal.follow(handle, consumer="planner", after=after)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)


def main() -> int:
    """Run the service; return its exit code."""
    return run("planner", serve)


if __name__ == "__main__":
    sys.exit(main())
