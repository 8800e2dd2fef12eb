"""Who takes care of a cause of trouble: a user says so, and it holds until the cause is no more.

Each of the two is one event of the log.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence, Set

from services.api.access.access import Actor
from services.api.gateway import Gateway
from services.api.requests import incident_requests
from services.api.troubles.causes import causes
from services.api.troubles.findings import read_findings
from shared.errors import NotFound
from shared.events.base import derived_id
from shared.events.union import TroubleAcknowledged, TroubleEnded
from shared.interface.first_look import Trouble
from shared.interface.readiness import Check, Readiness
from shared.model import utc_now

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""Pause between two looks for causes that are no more. Two in a row say so: just after its start an api has not yet
heard what the others say."""


async def _causes(api: Gateway, checks: Sequence[Check]) -> dict[str, Trouble]:
    as_of, live = utc_now(), api.live.state(watched=False)
    found = await api.read(lambda views: causes(read_findings(views, api.cluster(views), live, checks, as_of)))
    return {one.key: one for one in found}


async def acknowledge(api: Gateway, key: str, who: Actor, checks: Sequence[Check]) -> Trouble:
    """Note that somebody takes care of a cause; return it. Once somebody does, a further request changes nothing.

    Args:
        api: has the causes.
        key: of the cause.
        who: takes care of it.
        checks: of the control plane.

    Raises:
        NotFound: there is no such cause now.
    """
    known = await _causes(api, checks)
    if key not in known:
        raise NotFound(f"no cause of trouble {key!r} now", field="key", value=key)
    found = known[key]
    for incident in found.incidents:
        await incident_requests.acknowledge(api, incident, who)
    if not found.incidents and not found.acknowledged:
        event = TroubleAcknowledged(
            event_id=str(uuid.uuid4()), occurred_at=utc_now(), key=key, what=found.what, actor=who.name
        )
        await api.add(event)
    return (await _causes(api, checks)).get(key, found)


async def keep_ending(api: Gateway, readiness: Callable[[Gateway], Awaitable[Readiness]]) -> None:
    """Note which causes are no more that somebody takes care of, until cancelled; ``readiness``: checks all parts."""
    gone: Set[str] = frozenset()
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            gone = await _end_gone(api, readiness, gone)
        except Exception as err:  # what goes wrong here must not end the api
            logger.warning("the ends of causes are not noted: %s %s; again", type(err).__name__, err)
            gone = frozenset()


async def _end_gone(api: Gateway, readiness: Callable[[Gateway], Awaitable[Readiness]], before: Set[str]) -> Set[str]:
    """Note the ends of causes that are no more and were not at the look before; return those of this look."""
    taken = await api.read(lambda views: api.cluster(views).taken)
    if not taken:
        return frozenset()
    gone = taken.keys() - (await _causes(api, (await readiness(api)).checks)).keys()
    for key in gone & before:  # each api appends it: the log takes an id once
        event_id = derived_id(taken[key].event_id, "api")
        await api.append(TroubleEnded(event_id=event_id, occurred_at=utc_now(), key=key), None)
    return gone
