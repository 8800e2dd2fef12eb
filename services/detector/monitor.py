"""The cluster monitor: the shell around ``core``. ``python -P -m services.detector.monitor``.

One input at a time: it is decided on, folded and appended before the next one is looked at. A signal is answered once
what follows from it is in the log, so an agent that hears no answer repeats it and nothing is lost in a restart. A
signal may overtake the log (a rank can die before the plan that started it has been delivered here): it waits for what
was in the log when it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from services.detector import stalls
from services.detector.changes import Changes
from services.detector.clock import SteadyClock
from services.detector.core import Clean, Decision, Limits, Monitor
from shared.bus import Bus
from shared.commands import COMMANDS, ReleaseTask, Reply
from shared.errors import Unavailable
from shared.events import Recorded
from shared.journal import Journal
from shared.service import Context, run
from shared.settings import Settings
from shared.signals import HEARTBEATS, SIGNAL, SIGNALS, Heartbeat

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""How often silence is looked for: a fifteenth of the default node time-out."""

CLEAN_TIMEOUT_S = 5.0
"""Ending left-behind ranks kills them; the answer comes within the agent's own grace."""

RETRY_S = 0.1
"""Pause before a log that did not answer is tried again."""

CONSUMER = "detector"


class MonitorService:
    """The monitor, its journal and its bus."""

    def __init__(self, settings: Settings, bus: Bus, journal: Journal) -> None:
        """Take what the service runs on; ``start`` begins."""
        self._bus, self._journal, self._settings = bus, journal, settings
        self._clock = SteadyClock()
        limits = Limits(
            node_timeout_s=settings.node_timeout_s,
            progress_interval_s=settings.progress_interval_s,
            restart_window_s=settings.restart_window_s,
            stalls=stalls.Limits(
                hang_factor=settings.hang_factor,
                hang_floor_s=settings.hang_floor_s,
                stop_factor=settings.stop_factor,
                stop_floor_s=settings.stop_floor_s,
                collective_floor_s=settings.collective_floor_s,
                slow_region_timeout_s=settings.slow_region_timeout_s,
            ),
        )
        self.monitor = Monitor(limits=limits, started_at=self._clock.now())
        self._one_input = asyncio.Lock()
        self._own: set[str] = set()
        self._last = 0
        self._folded = asyncio.Event()
        self._position = 0
        self._moved_on = Changes()
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cleaning: set[asyncio.Task[None]] = set()
        self._echo = f"unicron.echo.{uuid.uuid4().hex}"

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Fold the log, then work until cancelled. ``ready`` is called when agents are heard."""
        self._last = await asyncio.to_thread(self._journal.log.last_position)
        following = asyncio.create_task(self._journal.follow(self._record, consumer=CONSUMER, after=0))
        try:
            await self._caught_up(following)
            self.monitor.started_at = self._clock.now()
            async with self._one_input:
                await self._carry_out(self.monitor.escalate(self._clock.now()))
            await self._bus.subscribe(self._echo, self._heard_itself)
            await self._bus.subscribe(f"{HEARTBEATS}.*", self._heartbeat)
            await self._bus.serve(SIGNALS, self._signal)
            ready()
            ticking = asyncio.create_task(self._tick())
            try:
                await asyncio.gather(following, ticking, self._fatal)
            finally:
                await _end(ticking)
        finally:
            await _end(following, *self._cleaning)

    # ---- inputs

    async def _caught_up(self, following: asyncio.Task[None]) -> None:
        """Wait until what the log held at the start has been folded; nothing in it is decided again."""
        if self._last == 0:
            self._folded.set()
        waiting = asyncio.create_task(self._folded.wait())
        try:
            await asyncio.wait({waiting, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                await following
        finally:
            await _end(waiting)

    async def _record(self, record: Recorded) -> None:
        async with self._one_input:
            if record.event.event_id in self._own:
                self._own.discard(record.event.event_id)
            elif self._folded.is_set():
                await self._carry_out(self.monitor.record(record.event, self._clock.now()))
            else:
                self.monitor.fold(record.event)
            if record.position >= self._last:
                self._folded.set()
            self._position = record.position
        self._moved_on.notify()

    async def _signal(self, data: bytes) -> bytes:
        signal = SIGNAL.validate_json(data)
        position = await asyncio.to_thread(self._journal.log.last_position)
        await self._moved_on.until(lambda: self._position >= position)
        async with self._one_input:
            await self._carry_out(self.monitor.signal(signal, self._clock.now()))
        return b"+"

    async def _heartbeat(self, _: str, data: bytes) -> None:
        received_at = self._clock.now()
        heartbeat = Heartbeat.model_validate_json(data)
        async with self._one_input:
            await self._carry_out(self.monitor.heartbeat(heartbeat, received_at))

    async def _heard_itself(self, _: str, __: bytes) -> None:
        async with self._one_input:
            self.monitor.echo(self._clock.now())

    async def _tick(self) -> None:
        while True:
            async with self._one_input:
                await self._carry_out(self.monitor.tick(self._clock.now()))
            with contextlib.suppress(Unavailable):
                await self._bus.publish(self._echo, b"")
            await asyncio.sleep(TICK_S)

    # ---- effects

    async def _carry_out(self, decision: Decision) -> None:
        if decision.events:
            self._own.update(event.event_id for event in decision.events)
            await self._append(decision)
            for event in decision.events:
                logger.info("%s %s", event.type, event.stream)
        for clean in decision.cleans:
            task = asyncio.create_task(self._clean(clean))
            self._cleaning.add(task)
            task.add_done_callback(self._cleaning.discard)

    async def _append(self, decision: Decision) -> None:
        """Append; what has been folded must reach the log, or this process must not go on."""
        while True:
            try:
                await self._journal.append(decision.events)
                return
            except Unavailable as err:
                logger.error("the log cannot be written: %s", err.detail)
                await asyncio.sleep(RETRY_S)
            except Exception as err:
                if not self._fatal.done():
                    self._fatal.set_exception(err)
                raise

    async def _clean(self, clean: Clean) -> None:
        command = ReleaseTask(
            command_id=str(uuid.uuid4()),
            plan=f"clean/{clean.node}",
            task=clean.task,
            generation=clean.generation,
            workers=clean.workers,
        )
        subject = f"{COMMANDS}.{clean.node}"
        try:
            answer = await self._bus.request(subject, command.model_dump_json().encode(), timeout_s=CLEAN_TIMEOUT_S)
            reply = Reply.model_validate_json(answer)
        except Unavailable as err:
            logger.warning("node %s is back and not clean yet: %s", clean.node, err.detail)
            return
        except ValidationError as err:
            logger.warning("node %s is back and its answer about cleaning is none: %s", clean.node, err)
            return
        if not reply.ok:
            logger.warning(
                "node %s is back and does not end %s: %s %s", clean.node, clean.task, reply.code, reply.detail
            )


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def serve(context: Context) -> None:
    """Run the cluster monitor until cancelled."""
    await MonitorService(context.settings, context.bus, context.journal).run(context.ready)


def main() -> int:
    """Run the cluster monitor."""
    return run("detector", serve)


if __name__ == "__main__":
    raise SystemExit(main())
