"""The transition service: its core (``evolve``, ``decide``) in the runner that all services have.

Inputs are records of the log, replies of node agents (``shared.bus.connection``) and timers; effects are commands to
agents, events and timers.
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
    Cancel,
    Effect,
    Input,
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
from shared.messages.commands import COMMANDS, Reply
from shared.messages.signals import RECONNECT_GRACE_S
from shared.model import Clock, utc_now
from shared.service.core import Started, StateFold
from shared.service.frame import Context, run
from shared.service.log_lines import concerning, ids
from shared.service.runner import Runner
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


class Transition(Runner[State, Input, Effect]):
    """The service: its core, and the requests and timers that follow from effects."""

    def __init__(self, context: Context, keeper: StateKeeper[State] | None = None, clock: Clock = utc_now) -> None:
        super().__init__(context, StateFold(evolve, State()), clock, keeper)
        self._limits = limits(context.settings)
        self._requests: dict[str, asyncio.Task[None]] = {}
        """Command id -> the task that waits for the reply."""
        self._metrics = TransitionMetrics(context.registry, lambda: self.state)

    def decide(self, state: State, item: Input, at: datetime) -> tuple[State, list[Effect]]:
        """Decide (``services.transition.decide``).

        Timers that follow from a record begin now, by this service's clock, and not when another service recorded it.
        """
        return decide(replace(state, limits=self._limits) if isinstance(item, Started) else state, item, at)

    def perform(self, effect: Effect) -> None:
        """Begin a request or a timer, or end a request."""
        match effect:
            case Send(command=command):
                request = self.spawn(self._request(effect), f"{command.kind} {effect.node}")
                self._requests[command.command_id] = request
                request.add_done_callback(lambda _: self._requests.pop(command.command_id, None))
            case Cancel(command_id=command_id):
                if (waiting := self._requests.get(command_id)) is not None:
                    waiting.cancel()
            case Timer():
                self.spawn(self._wait(effect), f"timer {effect.name}")

    async def _wait(self, timer: Timer) -> None:
        await self._context.journal.sleep(timer.after_s)
        fired = TimerFired(timer.plan, timer.task, timer.name, self._clock())
        await self.feed(fired, fired.at)

    async def _request(self, send: Send) -> None:
        """Send the command until there is a reply or its time is up, and feed the reply back.

        Outages of the bus do not count towards the time-out: no agent can reply then, and all nodes would be blamed.
        """
        part = self.state.task(send.command.task).part
        incident = part.incident if part is not None and part.plan == send.command.plan else None
        with concerning(ids(send.command, node=send.node, incident=incident)):
            replied = Replied(send.command.command_id, await self._replied(send), self._clock())
        self._requests.pop(replied.command_id, None)  # what follows from the reply does not cancel this task
        await self.feed(replied, replied.at)

    async def _replied(self, send: Send) -> Reply | None:
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
        return reply

    async def _reply(self, send: Send, limit: asyncio.Timeout) -> Reply:
        lease = self._context.lease
        command = send.command.model_copy(update={"token": lease.token if lease is not None else 0})
        while True:
            if not self._context.bus.connected:
                await self._reconnected(limit)
            try:
                return await self._context.bus.call(COMMANDS, command, send.node)
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
    async with StateKeeper(context, KEPT) as keeper:
        await Transition(context, keeper).run()


if __name__ == "__main__":
    sys.exit(run("transition", main, leased=True))
