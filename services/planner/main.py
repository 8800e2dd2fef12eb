"""The planner's shell: follows the log, answers each trigger with a plan.

python -P -m services.planner.main
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid

from services.planner.fold import Fold, answers_to, recorded_answers
from services.planner.lookahead import LookAhead
from services.planner.replay import read_all
from services.planner.state import State
from shared.events import ClusterConfigured, PlanDecided, Recorded
from shared.model import Clock, utc_now
from shared.service import Context, run
from shared.settings import Settings

logger = logging.getLogger(__name__)

QUIET_S = 0.1
"""Changes come in bursts (a plan's milestones): looking ahead begins once this long has passed after the first."""


class Planner:
    """Folds records and answers them."""

    def __init__(self, context: Context, answers: dict[str, Recorded]) -> None:
        """Start from an empty state; ``answers``: what the log held when the service started."""
        self.look_ahead = LookAhead()
        self.fold = Fold(self.look_ahead.solve)
        self._changed = asyncio.Event()
        self._counters = context.counters
        self._journal = context.journal
        self._answers = answers

    async def handle(self, record: Recorded) -> None:
        """Fold a record; append the answer to it unless the log already has one."""
        if not self.fold.take(record):
            return
        self._changed.set()
        recorded = answers_to(record, self._answers)
        if recorded:
            self.fold.answer(record, [r.event for r in recorded])
            return
        table = self.look_ahead
        hits, misses = table.hits, table.misses
        began_s = time.perf_counter()
        decided = self.fold.decide(record)
        seconds = time.perf_counter() - began_s
        self._counters.update(table.counters())
        if not decided:
            return
        how = "looked up" if table.hits > hits else "solved" if table.misses > misses else "no counts to choose"
        self.fold.answer(record, decided)
        await self._journal.append(decided)
        for event in decided:
            if isinstance(event, PlanDecided):
                what = f"{event.plan}: {event.trigger}, {event.response} (position {record.position})"
                totals = f"{table.hits} hits, {table.misses} misses, {len(table)} answers ahead"
                logger.info("%s: %s in %.4f s; %s", what, how, seconds, totals)

    async def keep_looking_ahead(self) -> None:
        """Solve what may come next, anew after every change, until cancelled. Deciding never waits for it."""
        table = self.look_ahead
        try:
            while True:
                await self._changed.wait()
                await asyncio.sleep(QUIET_S)
                self._changed.clear()
                # Cancelled, it is left to the thread to end by itself, at the next answer.
                await asyncio.shield(asyncio.to_thread(self._look_ahead, self.fold.state))
                self._counters.update(table.counters())
        finally:
            self._changed.set()

    def _look_ahead(self, state: State) -> None:
        try:
            self.look_ahead.rebuild(state, utc_now(), lambda: not self._changed.is_set())
        except Exception:
            # Plans do not depend on it: without an answer ahead, the solver is asked.
            logger.exception("could not look ahead")


def configuration(settings: Settings, *, event_id: str, clock: Clock) -> ClusterConfigured:
    """Return the settings that decisions use, as an event."""
    return ClusterConfigured(
        event_id=event_id,
        occurred_at=clock(),
        mtbf_node_s=settings.mtbf_node_s,
        throughput_hysteresis=settings.throughput_hysteresis,
        transition_prior_s=settings.transition_prior_s,
        worker_flop_per_s=settings.worker_flop_per_s,
        price_per_worker_hour=settings.price_per_worker_hour,
        currency=settings.currency,
    )


def has_changed(last: ClusterConfigured | None, now: ClusterConfigured) -> bool:
    """Return whether the parameters differ from the last logged ones."""
    identity = {"event_id", "occurred_at"}
    return last is None or last.model_dump(exclude=identity) != now.model_dump(exclude=identity)


async def serve(context: Context, clock: Clock = utc_now) -> None:
    """Run until cancelled."""
    records = await asyncio.to_thread(lambda: list(read_all(context.journal.log)))
    configured = [r.event for r in records if isinstance(r.event, ClusterConfigured)]
    now = configuration(context.settings, event_id=str(uuid.uuid4()), clock=clock)
    if has_changed(configured[-1] if configured else None, now):
        await context.journal.append([now])
    planner = Planner(context, recorded_answers(records))
    context.ready()
    looking_ahead = asyncio.create_task(planner.keep_looking_ahead(), name="look-ahead")
    try:
        await context.journal.follow(planner.handle, consumer="planner", after=0)
    finally:
        looking_ahead.cancel()
        await asyncio.wait({looking_ahead})


def main() -> int:
    """Run the service; return its exit code."""
    return run("planner", serve)


if __name__ == "__main__":
    sys.exit(main())
