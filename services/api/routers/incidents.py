"""``/v1/incidents``: faults, the plans that answered them, and their costs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from services.api import present
from services.api.accounts import Accounts
from services.api.costs import incident_cost
from services.api.counterfactuals import Answers
from services.api.gateway import Api, Gateway
from services.api.models import Incident, Page
from services.api.readers import ViewReader
from services.api.routers.parameters import NAMED, PROBLEMS, Cursor, Id, Limit, TaskFilter, page
from services.api.tables import INCIDENTS, PLANS
from services.api.views import IncidentView
from shared.model import utc_now

router = APIRouter(prefix="/v1/incidents", tags=["incidents"], responses=PROBLEMS)


def _shown(api: Gateway, views: ViewReader, found: list[IncidentView], now: datetime) -> list[Incident]:
    """Return incidents with their costs, and what other answers would have cost."""
    accounts, price = Accounts(views, now), api.cluster(views).price_per_worker_hour
    amounts = accounts.incidents(view.id for view in found)
    plans = views.several(PLANS, {plan for view in found for plan in view.plans})
    answers = Answers(plans, views.next_solved, now)
    items = []
    for view in found:
        cost = incident_cost(amounts.get(view.id), price)
        items.append(present.incident(view, cost, answers.counterfactuals(view, cost)))
    return items


@router.get("", response_model=Page[Incident])
async def incidents(
    api: Api,
    limit: Limit = 100,
    cursor: Cursor = 0,
    task: TaskFilter = None,
    state: Annotated[Literal["open", "closed"] | None, Query(description="closed: back at planned strength")] = None,
) -> Response:
    """List incidents, the oldest first."""
    as_of = utc_now()

    def answer(views: ViewReader) -> Page[Incident]:
        states = [state] if state else []
        found = views.page(INCIDENTS, after=cursor, limit=limit + 1, states=states, task=task or "")
        items = _shown(api, views, found[:limit], as_of)
        return page(items, [view.position for view in found], limit)

    return await api.answer(answer)


@router.get("/{incident}", responses=NAMED)
async def one(incident: Id, api: Api) -> Incident:
    """Show an incident."""
    as_of = utc_now()

    def answer(views: ViewReader) -> Incident:
        (shown,) = _shown(api, views, [views.find(INCIDENTS, incident)], as_of)
        return shown

    return await api.read(answer)
