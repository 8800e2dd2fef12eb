"""What users say about incidents: notes, and that somebody takes care of one. Each is one event of the log."""

from __future__ import annotations

import uuid

from services.api.access.access import Actor
from services.api.gateway import Gateway
from services.api.store.tables import INCIDENTS
from shared.errors import Conflict
from shared.events.union import IncidentAcknowledged, IncidentNoted
from shared.model import utc_now
from shared.views.documents import IncidentView

MOST_NOTES = 100
"""Notes of one incident: every answer that shows it has them all."""


async def note(api: Gateway, incident: str, who: Actor, text: str) -> None:
    """Add a note to an incident.

    Raises:
        NotFound: there is no such incident.
        Conflict: it has as many notes as it may have.
    """
    view = await _find(api, incident)
    if len(view.notes) >= MOST_NOTES:
        raise Conflict(f"incident {incident!r} has {MOST_NOTES} notes, the most that are kept")
    event = IncidentNoted(
        event_id=str(uuid.uuid4()), occurred_at=utc_now(), incident=incident, text=text, actor=who.name
    )
    await api.add(event)  # the stream is that of all incidents, of which others come meanwhile


async def acknowledge(api: Gateway, incident: str, who: Actor) -> None:
    """Note that somebody takes care of an incident. Once somebody does, a further request changes nothing.

    Raises:
        NotFound: there is no such incident.
    """
    view = await _find(api, incident)
    if view.acknowledged is None:
        event = IncidentAcknowledged(
            event_id=str(uuid.uuid4()), occurred_at=utc_now(), incident=incident, actor=who.name
        )
        await api.add(event)


async def _find(api: Gateway, incident: str) -> IncidentView:
    return await api.read(lambda views: views.find(INCIDENTS, incident))
