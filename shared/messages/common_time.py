"""One time for all services: one that starts takes the time of those that run, whatever its machine's clock says.

Steady clocks (``shared.clock``) keep services that run together, also when the wall clock under them is stepped. A
service that is started after such a step would be ahead of the others, or behind them, and every duration between its
events and theirs would be wrong. So each answers on ``SUBJECT``, and one that starts asks first.
"""

from __future__ import annotations

import logging

from pydantic import TypeAdapter

from shared.bus.connection import Bus
from shared.bus.messages import Message, Time, decode
from shared.clock import SteadyClock
from shared.errors import Unavailable, Undecodable

logger = logging.getLogger(__name__)

SUBJECT = "unicron.time"
"""Subject of the question (request and reply); the first answer counts."""

ANSWER_S = 0.5
"""Time-out of the question. A service that runs answers within milliseconds, and NATS itself says if there is none."""


class TimeReply(Message):
    """The answer of a service: its time."""

    at: Time


TIME_REPLY: TypeAdapter[TimeReply] = TypeAdapter(TimeReply)


async def join(bus: Bus, clock: SteadyClock) -> None:
    """Take the time of the services that run, if any does, and tell it to others from now on.

    Args:
        bus: connected.
        clock: of this process, which has not used it yet.
    """
    try:
        reply = decode(TIME_REPLY, await bus.request(SUBJECT, b"", timeout_s=ANSWER_S))
    except Unavailable:
        pass  # this is the first one
    except Undecodable as err:
        logger.warning("the time of another service is ignored: %s", err.detail)
    else:
        if (corrected_s := clock.adopt(reply.at)) != 0.0:
            logger.warning("this machine's clock differs from that of the running services by %.0f s", -corrected_s)

    async def answer(_: bytes) -> bytes:
        return TimeReply(at=clock.now()).model_dump_json().encode()

    await bus.serve(SUBJECT, answer)
