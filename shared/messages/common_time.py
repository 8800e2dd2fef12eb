"""One time for all services: one that starts takes the time of those that run, whatever its machine's clock says.

Steady clocks (``shared.clock``) keep services that run together, also when the wall clock under them is stepped. A
service that is started after such a step would be ahead of the others, or behind them, and every duration between its
events and theirs would be wrong. So each answers on ``TIME``, and one that starts asks first.
"""

from __future__ import annotations

import logging

from shared.bus.connection import Bus
from shared.bus.endpoints import NOTHING, Endpoint
from shared.bus.identities import SERVICES
from shared.bus.messages import Message, Time
from shared.clock import SteadyClock
from shared.errors import Unavailable

logger = logging.getLogger(__name__)


class TimeReply(Message):
    """The answer of a service: its time."""

    at: Time


TIME = Endpoint("unicron.time", NOTHING, TimeReply, by=SERVICES, to=SERVICES, timeout_s=0.5)
"""The first answer counts. A service that runs answers within milliseconds, and NATS itself says if there is none."""


async def join(bus: Bus, clock: SteadyClock) -> None:
    """Take the time of the services that run, if any does, and tell it to others from now on.

    Args:
        bus: connected.
        clock: the clock of this process, which has not used it yet.
    """
    try:
        reply = await bus.call(TIME, None)
    except Unavailable:
        pass  # this service is the first one, or another version's time cannot be read
    else:
        if (corrected_s := clock.adopt(reply.at)) != 0.0:
            logger.warning("this machine's clock differs from that of the running services by %.0f s", -corrected_s)

    async def answer(_: None) -> TimeReply:
        return TimeReply(at=clock.now())

    await bus.serve(TIME, answer)
