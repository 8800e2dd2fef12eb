"""The planner's service: it follows the log and answers each trigger with a plan.

    python -P -m services.planner.main

``Planner`` is the shell around the pure core: ``log_fold.Fold`` has the state and decides, ``lookahead.LookAhead``
answers the solver's questions ahead of time. Two tasks run beside the following of the log: one solves ahead, one logs
what timers are for (a task has waited too long, a worker's trial has ended).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import uuid
from datetime import datetime

from services.planner.decide import DECIDER
from services.planner.evolve import evolve
from services.planner.log_start import LogStart
from services.planner.lookahead.table import LookAhead
from services.planner.metrics import LOOKED_UP, NO_COUNTS, SOLVED, PlannerMetrics
from services.planner.replay.log_fold import Fold
from services.planner.state.cluster import State
from services.planner.state_snapshot import KEPT
from services.planner.timers import next_timer
from shared.bus.outages import LOG
from shared.errors import UnicronError
from shared.events.union import ClusterConfigured, Event, PlanDecided, Recorded
from shared.model import Clock, utc_now
from shared.planning import compiled, preparation
from shared.planning.preparation import WORKERS_FROM
from shared.service.core import Append, Logged, Started
from shared.service.frame import Context, run
from shared.service.log_lines import ids
from shared.service.runner import Runner
from shared.service.state_keeper import StateKeeper
from shared.settings.model import Settings

logger = logging.getLogger(__name__)

QUIET_S = 0.1
"""How long the service waits after a change of the state before it solves ahead: one plan's reports come in bursts."""

RETRY_S = 1.0
"""Pause before the append of a timer's event is tried again: nobody waits for it."""


class Planner(Runner[State, Logged | Started, Append]):
    """The service: its core, whose problems are solved ahead, and its timers."""

    def __init__(self, context: Context, keeper: StateKeeper[State] | None = None, clock: Clock = utc_now) -> None:
        self.look_ahead = LookAhead()
        self._plans = Fold(self.look_ahead.solve)
        super().__init__(context, self._plans, clock, keeper)
        self._changed = asyncio.Event()
        self._aged = asyncio.Event()
        self._metrics = PlannerMetrics(context.registry, self.look_ahead)
        self._solver_prepared = False

    async def end_of_log(self) -> int:
        """Fold the log behind the snapshot, and log the settings which decisions use, if they have changed.

        Raises:
            Conflict: a planner newer than the next version's has decided in the log.
        """
        journal = self._context.journal
        start = LogStart(self._plans, self.position, self._answer)
        try:
            await journal.outages.outlast(LOG, lambda: start.fold(journal.log))
        finally:
            start.stopped = True
        self.position = start.position
        await journal.follow_time(start.last)
        now = configuration(self._context.settings, event_id=str(uuid.uuid4()), at=self._clock())
        configured = [now] if has_changed(self.state.config, now) else []
        if configured or start.decided:
            await journal.append([*configured, *start.decided])
        if self._snapshots is not None:
            self._snapshots.handled(self.position)
        return start.last

    async def fold_beside(self, handled: int) -> None:
        """Fold up to where the active planner has answered: each answer is folded behind its cause."""
        if handled <= self.position:
            return
        journal = self._context.journal
        start = LogStart(self._plans, self.position, lambda _: [])
        try:
            await journal.outages.outlast(LOG, lambda: start.fold(journal.log, handled))
        finally:
            start.stopped, self.position = True, start.position

    def decide(self, state: State, item: Logged | Started, at: datetime) -> tuple[State, list[Append]]:
        """Decide (``services.planner.decide``), as of the time at which the record was logged."""
        self._changed.set()
        self._aged.set()
        if not isinstance(item, Logged) or not (decided := self._answer(item.record)):
            return state, []
        for event in decided:
            state = evolve(state, event, item.record.recorded_at)
        return state, [Append(decided)]

    def _answer(self, record: Recorded) -> list[Event]:
        table = self.look_ahead
        hits, misses = table.hits, table.misses
        began_s = time.perf_counter()
        decided = self._plans.decide(record)
        seconds = time.perf_counter() - began_s
        self._context.counters.update(table.counters())
        if decided:
            how = SOLVED if table.misses > misses else LOOKED_UP if table.hits > hits else NO_COUNTS
            self._metrics.decided(how, seconds)
        for event in decided:
            if isinstance(event, PlanDecided):
                what = f"{event.plan}: {event.trigger}, {event.response} (position {record.position})"
                totals = f"{table.hits} hits, {table.misses} misses, {len(table)} answers ahead"
                logger.info("%s: %s in %.4f s; %s", what, how, seconds, totals, extra=ids(record.event, event))
        return decided

    async def begin(self) -> None:
        """Work ahead, and append what timers are for."""
        self.spawn(self._keep_looking_ahead(), "look-ahead")
        self.spawn(self._keep_ageing(), "ageing")

    async def _keep_looking_ahead(self) -> None:
        """Solve the next likely problems after every change of the state, until cancelled. Deciding never waits."""
        table = self.look_ahead
        try:
            while True:
                await self._changed.wait()
                await asyncio.sleep(QUIET_S)
                self._changed.clear()
                self._prepare_solver()
                # When this task is cancelled, the thread goes on and ends at its next answer.
                await asyncio.shield(asyncio.to_thread(self._look_ahead, self.state))
                self._context.counters.update(table.counters())
        finally:
            self._changed.set()

    def _prepare_solver(self) -> None:
        """Have the solver compiled once the cluster is large.

        Plans are made meanwhile, and none waits for the compiler.
        """
        workers = sum(len(node.workers) for node in self.state.nodes.values())
        if not self._solver_prepared and workers >= WORKERS_FROM and compiled.can_compile():
            self._solver_prepared = True
            self.spawn(self._compile_solver(), "compile the solver")

    async def _compile_solver(self) -> None:
        began_s = time.perf_counter()
        module = ("-P", "-m", preparation.__name__)
        process = await asyncio.create_subprocess_exec(sys.executable, *module, preexec_fn=preparation.stay_behind)
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
        if status != 0:
            logger.warning("the solver could not be compiled (exit status %d): plans come later", status)
            return
        await asyncio.to_thread(compiled.load)
        logger.info("the solver is compiled, after %.1f s", time.perf_counter() - began_s)

    async def _keep_ageing(self) -> None:
        """Append the events of timers (``timers.py``) when their time has come, until cancelled."""
        while True:
            await self._aged.wait()
            self._aged.clear()
            first = next_timer(self.state)
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
                await self._context.journal.append([first.event])
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


def configuration(settings: Settings, *, event_id: str, at: datetime) -> ClusterConfigured:
    """Return the event that logs the settings which decisions use, all for which it has a field, and who decides."""
    names = Settings.model_fields.keys() & ClusterConfigured.model_fields.keys()
    values = {name: getattr(settings, name) for name in names}
    return ClusterConfigured(event_id=event_id, occurred_at=at, decider=DECIDER, **values)


def has_changed(last: ClusterConfigured | None, now: ClusterConfigured) -> bool:
    """Return whether the parameters differ from those logged last; True if none were logged."""
    identity = {"event_id", "occurred_at"}
    return last is None or last.model_dump(exclude=identity) != now.model_dump(exclude=identity)


async def serve(context: Context) -> None:
    """Run until cancelled.

    Raises:
        Conflict: a planner newer than the next version's has decided in the log.
    """
    async with StateKeeper(context, KEPT) as keeper:
        await Planner(context, keeper).run()


if __name__ == "__main__":
    sys.exit(run("planner", serve, leased=True))
