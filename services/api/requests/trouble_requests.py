"""Who takes care of a cause of trouble: a user says so, and it holds until the cause is no more.

Each of the two is one event of the log.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Set

from services.api.access.access import Actor
from services.api.gateway import READ_YOUR_WRITES_S, Gateway
from services.api.requests import incident_requests
from services.api.routers import health
from services.api.troubles.causes import causes
from services.api.troubles.findings import read_findings
from shared.errors import NotFound
from shared.events.base import derived_id
from shared.events.union import TroubleAcknowledged, TroubleEnded
from shared.interface.first_look import Trouble
from shared.model import utc_now

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""Pause between two looks for causes that are no more. Two in a row say so: just after its start an api has not yet
heard what the others say."""


async def _causes(api: Gateway) -> dict[str, Trouble]:
    status = await health.readiness(api)
    as_of, live = utc_now(), api.live.state()
    found = await api.read(lambda views: causes(read_findings(views, api.cluster(views), live, status.checks, as_of)))
    return {one.key: one for one in found}


async def acknowledge(api: Gateway, key: str, who: Actor) -> Trouble:
    """Note that somebody takes care of a cause; return it. Once somebody does, a further request changes nothing.

    Raises:
        NotFound: there is no such cause now.
    """
    known = await _causes(api)
    if key not in known:
        raise NotFound(f"no cause of trouble {key!r} now", field="key", value=key)
    found = known[key]
    for incident in found.incidents:
        await incident_requests.acknowledge(api, incident, who)
    if not found.incidents and not found.acknowledged:
        event = TroubleAcknowledged(
            event_id=str(uuid.uuid4()), occurred_at=utc_now(), key=key, what=found.what, actor=who.name
        )
        recorded = await api.append(event, None)
        await api.feed.reach(recorded.position, timeout_s=READ_YOUR_WRITES_S)
    return (await _causes(api)).get(key, found)


async def keep_ending(api: Gateway) -> None:
    """Note which causes are no more that somebody takes care of, until cancelled."""
    gone: Set[str] = frozenset()
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            gone = await end_gone(api, gone)
        except Exception as err:  # what goes wrong here must not end the api
            logger.warning("the ends of causes are not noted: %s %s; again", type(err).__name__, err)
            gone = frozenset()


async def end_gone(api: Gateway, before: Set[str]) -> Set[str]:
    """Note the ends of causes that are no more and were not at the look before; return those of this look."""
    taken = await api.read(lambda views: api.cluster(views).taken)
    gone = taken.keys() - (await _causes(api)).keys() if taken else frozenset[str]()
    for key in gone & before:  # each api appends it: the log takes an id once
        event_id = derived_id(taken[key].event_id, "api")
        await api.append(TroubleEnded(event_id=event_id, occurred_at=utc_now(), key=key), None)
    return gone
