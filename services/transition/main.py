"""The transition service: feeds the core one input at a time and performs what it decides."""

from __future__ import annotations

import asyncio
import logging
import sys
from datetime import datetime

from pydantic import ValidationError

from services.transition.core import FENCED, decide, evolve
from services.transition.state import (
    Append,
    Cancel,
    Effect,
    Input,
    Limits,
    Logged,
    Replied,
    Send,
    State,
    Timer,
    TimerFired,
)
from shared.commands import COMMANDS, Reply
from shared.errors import Unavailable
from shared.events import Recorded
from shared.model import Clock, utc_now
from shared.service import Context, run
from shared.settings import Settings
from shared.signals import RECONNECT_GRACE_S

logger = logging.getLogger(__name__)

ATTEMPT_S = 5.0
"""A command is asked again after this long without an answer: an agent that was restarted has forgotten it, any
other one joins the repeat to the first."""

RETRY_S = 0.05
"""Pause before asking again where nobody listens: an agent that starts or reconnects is back within about as much."""

GRACE_MARGIN_S = 0.5
"""Beside the time in which a lost node is noticed: for the detector's and the planner's answer."""


def limits(settings: Settings) -> Limits:
    """Return the core's limits.

    A failure that the detector hears of by itself may have a lost node behind it, which takes ``node_timeout_s`` to
    be noticed; it is not reported sooner.
    """
    return Limits(
        command_s=settings.command_timeout_s,
        resume_s=settings.resume_timeout_s,
        grace_s=settings.node_timeout_s + GRACE_MARGIN_S,
    )


class Transition:
    """The shell: inputs come from the log, from agents' answers and from timers, through one queue."""

    def __init__(self, context: Context, clock: Clock = utc_now) -> None:
        self._context = context
        self._clock = clock
        self._state = State(limits=limits(context.settings))
        self._inputs: asyncio.Queue[Input] = asyncio.Queue()
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Fold the log, go on with what is unfinished, and serve until cancelled.

        Raises:
            UnicronError: the log or the bus is gone.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._run(tasks)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        journal = self._context.journal
        last = await asyncio.to_thread(journal.log.last_position)
        tasks.create_task(journal.follow(self._logged, consumer="transition", after=0), name="follow")
        if last == 0:
            self._context.ready()
        while True:
            item = await self._inputs.get()
            self._state = evolve(self._state, item)
            position = item.record.position if isinstance(item, Logged) else None
            if position is not None and position < last:
                continue
            # What is resumed starts now, not when the last record was written.
            at = self._clock() if position == last else _time(item)
            self._state, effects = decide(self._state, at)
            for effect in effects:
                await self._perform(effect, tasks)
            if position == last:
                self._context.ready()

    async def _logged(self, record: Recorded) -> None:
        await self._inputs.put(Logged(record))

    async def _perform(self, effect: Effect, tasks: asyncio.TaskGroup) -> None:
        match effect:
            case Append(event=event):
                await self._context.journal.append([event])
            case Send(command=command):
                task = tasks.create_task(self._ask(effect), name=f"{command.kind} {effect.node}")
                self._asking[command.command_id] = task
                task.add_done_callback(lambda _: self._asking.pop(command.command_id, None))
            case Cancel(command_id=command_id):
                asking = self._asking.get(command_id)
                if asking is not None:
                    asking.cancel()
            case Timer():
                tasks.create_task(self._wait(effect), name=f"timer {effect.name}")

    async def _wait(self, timer: Timer) -> None:
        await asyncio.sleep(timer.after_s)
        await self._inputs.put(TimerFired(timer.plan, timer.task, timer.name, self._clock()))

    async def _ask(self, send: Send) -> None:
        """Ask until there is an answer or the time is up, and feed it back.

        Time in which the bus is away does not count: nobody can answer then, and all nodes would be blamed.
        """
        command_id = send.command.command_id
        logger.info("%s of %s to %s", send.command.kind, send.command.task, send.node)
        reply: Reply | None = None
        try:
            async with asyncio.timeout(send.timeout_s) as limit:
                reply = await self._answer(send, limit)
        except TimeoutError:
            logger.warning("%s of %s: no answer from %s", send.command.kind, send.command.task, send.node)
        if reply is not None and not reply.ok and reply.code != FENCED:
            logger.warning("%s of %s at %s: %s %s", send.command.kind, send.command.task, send.node, reply.code, reply)
        await self._inputs.put(Replied(command_id, reply, self._clock()))

    async def _answer(self, send: Send, limit: asyncio.Timeout) -> Reply:
        data = send.command.model_dump_json(by_alias=True).encode()
        while True:
            if not self._context.bus.connected:
                await self._back(limit)
            try:
                answer = await self._context.bus.request(f"{COMMANDS}.{send.node}", data, timeout_s=ATTEMPT_S)
            except Unavailable:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                return Reply.model_validate_json(answer)
            except ValidationError as err:
                return Reply(
                    command_id=send.command.command_id,
                    node=send.node,
                    ok=False,
                    code="invalid-reply",
                    detail=str(err),
                )

    async def _back(self, limit: asyncio.Timeout) -> None:
        """Wait for the bus, and stop the clock of ``limit`` meanwhile."""
        loop = asyncio.get_running_loop()
        ends_at = limit.when()
        assert ends_at is not None
        left_s = ends_at - loop.time()
        limit.reschedule(None)
        await self._context.bus.wait_connected()
        limit.reschedule(loop.time() + left_s + RECONNECT_GRACE_S)


def _time(item: Input) -> datetime:
    return item.record.recorded_at if isinstance(item, Logged) else item.at


async def main(context: Context) -> None:
    """Run the service."""
    await Transition(context).run()


if __name__ == "__main__":
    sys.exit(run("transition", main))
