"""``/v1/incidents``: faults, what was done about them, what they cost."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from services.api import present
from services.api.costs import NO_COST, ledger
from services.api.gateway import Api
from services.api.models import Incident, Page
from services.api.routers.parameters import PROBLEMS, Cursor, Limit, TaskFilter, page
from services.api.store import INCIDENTS
from shared.model import utc_now

router = APIRouter(prefix="/v1/incidents", tags=["incidents"], responses=PROBLEMS)


@router.get("")
def incidents(
    api: Api,
    limit: Limit = 100,
    cursor: Cursor = 0,
    task: TaskFilter = None,
    state: Annotated[Literal["open", "closed"] | None, Query(description="closed: back at planned strength")] = None,
) -> Page[Incident]:
    """List incidents, the oldest first."""
    states = [state] if state else []
    views = api.store.page(INCIDENTS, after=cursor, limit=limit + 1, states=states, task=task or "")
    costs = ledger(*api.history(), api.cluster(), utc_now()).by_incident() if views else {}
    items = [present.incident(view, costs.get(view.id, NO_COST)) for view in views]
    return page(items, [view.position for view in views], limit)


@router.get("/{incident}")
def one(incident: str, api: Api) -> Incident:
    """Show an incident."""
    view = api.incident(incident)
    return present.incident(view, ledger(*api.history(), api.cluster(), utc_now()).incident(incident))
