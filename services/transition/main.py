"""The transition service: feeds its core one input at a time and performs the effects that the core decides.

Inputs are records of the log (``shared.log.journal``), replies of node agents (``shared.bus.connection``) and timers;
effects are commands to agents, events and timers. The core is ``evolve`` and ``decide``.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace
from datetime import datetime

from services.transition.decide import decide
from services.transition.evolve import evolve
from services.transition.metrics import TransitionMetrics
from services.transition.state import (
    Append,
    Cancel,
    Effect,
    Input,
    Logged,
    Replied,
    Send,
    State,
    Timer,
    TimerFired,
    TransitionLimits,
)
from services.transition.state_snapshot import KEPT
from shared.errors import InvalidReply, Unavailable
from shared.events.codes import FailureCode
from shared.events.union import Recorded
from shared.log.own_events import OwnEvents
from shared.messages.commands import COMMANDS, Reply
from shared.messages.signals import RECONNECT_GRACE_S
from shared.model import Clock, utc_now
from shared.service.frame import Context, run
from shared.service.log_lines import concerning, ids
from shared.service.state_keeper import StateKeeper
from shared.settings.model import Settings

logger = logging.getLogger(__name__)

RETRY_S = 0.05
"""Pause before a command is sent again to a node where no agent listens. An agent that starts or reconnects takes about
as long."""

GRACE_MARGIN_S = 0.5
"""Time for the detector's event and the planner's plan after a lost node was noticed."""


def limits(settings: Settings) -> TransitionLimits:
    """Return the core's limits.

    A failure that the detector learns of by itself may be the consequence of a lost node, which the detector notices
    after ``node_timeout_s``. The transition service does not record such a failure sooner.
    """
    return TransitionLimits(
        command_s=settings.command_timeout_s,
        resume_s=settings.resume_timeout_s,
        grace_s=settings.node_timeout_s + GRACE_MARGIN_S,
    )


class Transition:
    """The shell of the service. All inputs go through one queue to the core."""

    def __init__(self, context: Context, clock: Clock = utc_now) -> None:
        self._context = context
        self._clock = clock
        self._state = State(limits=limits(context.settings))
        self._inputs: asyncio.Queue[Input] = asyncio.Queue()
        self._requests: dict[str, asyncio.Task[None]] = {}
        """Command id -> the task that waits for the reply."""
        self._own = OwnEvents()
        self._metrics = TransitionMetrics(context.registry, lambda: self._state)

    async def run(self) -> None:
        """Fold the log, continue the unfinished parts, and serve until cancelled.

        Raises:
            UnicronError: the log or the bus is lost.
        """
        try:
            async with StateKeeper(self._context, KEPT) as keeper, asyncio.TaskGroup() as tasks:
                await self._run(tasks, keeper)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _run(self, tasks: asyncio.TaskGroup, keeper: StateKeeper[State]) -> None:
        journal = self._context.journal
        after = 0
        if (found := await keeper.load()) is not None:
            self._state, after = replace(found.state, limits=self._state.limits), found.position
        last = await journal.last_position()
        tasks.create_task(journal.follow(self._logged, consumer="transition", after=after), name="follow")
        if last <= after:
            await self._decide(self._clock(), tasks)
            self._context.ready()
        while True:
            item = await self._inputs.get()
            if not (isinstance(item, Logged) and self._own.skip(item.record.event)):
                self._state = evolve(self._state, item)
            position = item.record.position if isinstance(item, Logged) else None
            if position is not None and position < last:
                continue
            # By this service's clock: what follows from a record begins now, and not when another service recorded it.
            await self._decide(self._clock() if isinstance(item, Logged) else item.at, tasks)
            if position is None:
                continue
            if position == last:
                self._context.ready()
            keeper.handled(position)

    async def _decide(self, at: datetime, tasks: asyncio.TaskGroup) -> None:
        self._state, effects = decide(self._state, at)
        for effect in effects:
            await self._perform(effect, tasks)

    async def _logged(self, record: Recorded) -> None:
        await self._inputs.put(Logged(record))

    async def _perform(self, effect: Effect, tasks: asyncio.TaskGroup) -> None:
        match effect:
            case Append(event=event):
                self._own.add([event])
                await self._context.journal.append([event])
            case Send(command=command):
                request = tasks.create_task(self._request(effect), name=f"{command.kind} {effect.node}")
                self._requests[command.command_id] = request
                request.add_done_callback(lambda _: self._requests.pop(command.command_id, None))
            case Cancel(command_id=command_id):
                if (waiting := self._requests.get(command_id)) is not None:
                    waiting.cancel()
            case Timer():
                tasks.create_task(self._wait(effect), name=f"timer {effect.name}")

    async def _wait(self, timer: Timer) -> None:
        await self._context.journal.sleep(timer.after_s)
        await self._inputs.put(TimerFired(timer.plan, timer.task, timer.name, self._clock()))

    async def _request(self, send: Send) -> None:
        """Send the command until there is a reply or its time is up, and feed the reply back.

        Outages of the bus do not count towards the time-out: no agent can reply then, and all nodes would be blamed.
        """
        part = self._state.task(send.command.task).part
        incident = part.incident if part is not None and part.plan == send.command.plan else None
        with concerning(ids(send.command, node=send.node, incident=incident)):
            await self._replied(send)

    async def _replied(self, send: Send) -> None:
        command_id = send.command.command_id
        logger.info("%s of %s to %s", send.command.kind, send.command.task, send.node)
        reply: Reply | None = None
        began_s = asyncio.get_running_loop().time()
        self._metrics.sent(send.command)
        try:
            async with asyncio.timeout(send.timeout_s) as limit:
                reply = await self._reply(send, limit)
        except TimeoutError:
            logger.warning("%s of %s: no reply from %s", send.command.kind, send.command.task, send.node)
        finally:
            self._metrics.ended(send.command)
        self._metrics.replied(send.command, reply, asyncio.get_running_loop().time() - began_s)
        if reply is not None and not reply.ok and reply.code is not FailureCode.FENCED:
            logger.warning("%s of %s at %s: %s %s", send.command.kind, send.command.task, send.node, reply.code, reply)
        await self._inputs.put(Replied(command_id, reply, self._clock()))

    async def _reply(self, send: Send, limit: asyncio.Timeout) -> Reply:
        while True:
            if not self._context.bus.connected:
                await self._reconnected(limit)
            try:
                return await self._context.bus.call(COMMANDS, send.command, send.node)
            except InvalidReply as err:
                return Reply(
                    command_id=send.command.command_id,
                    node=send.node,
                    ok=False,
                    code=FailureCode.INVALID_REPLY,
                    detail=err.detail,
                )
            except Unavailable:
                await asyncio.sleep(RETRY_S)

    async def _reconnected(self, limit: asyncio.Timeout) -> None:
        """Wait until the bus is connected again; stop the clock of ``limit`` meanwhile."""
        loop = asyncio.get_running_loop()
        ends_at = limit.when()
        assert ends_at is not None
        left_s = ends_at - loop.time()
        limit.reschedule(None)
        await self._context.bus.wait_connected()
        limit.reschedule(loop.time() + left_s + RECONNECT_GRACE_S)


async def main(context: Context) -> None:
    """Run the service in the frame that all services share (``shared.service.frame.run``)."""
    await Transition(context).run()


if __name__ == "__main__":
    sys.exit(run("transition", main))
