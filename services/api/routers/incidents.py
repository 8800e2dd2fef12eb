"""``/v1/incidents``: faults, the plans that answered them, and their costs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from services.api import present
from services.api.costs import NO_COST
from services.api.counterfactuals import Answers
from services.api.gateway import Api, Gateway
from services.api.ledger import History, Ledger, ledger
from services.api.models import Incident, Page
from services.api.readers import ViewReader
from services.api.routers.parameters import PROBLEMS, Cursor, Limit, TaskFilter, page
from services.api.tables import INCIDENTS, PLANS, SPANS
from shared.model import utc_now

router = APIRouter(prefix="/v1/incidents", tags=["incidents"], responses=PROBLEMS)


def _book(api: Gateway, views: ViewReader, as_of: datetime) -> tuple[Ledger, Answers]:
    """Return what all incidents cost together (one's cost depends on those before it), and how they were answered."""
    plans = views.page(PLANS)
    history = History(plans, views.page(INCIDENTS), views.page(SPANS))
    return ledger(history, api.cluster(views).price_per_worker_hour, as_of), Answers(plans, as_of)


@router.get("")
async def incidents(
    api: Api,
    limit: Limit = 100,
    cursor: Cursor = 0,
    task: TaskFilter = None,
    state: Annotated[Literal["open", "closed"] | None, Query(description="closed: back at planned strength")] = None,
) -> Page[Incident]:
    """List incidents, the oldest first."""
    as_of = utc_now()

    def answer(views: ViewReader) -> Page[Incident]:
        states = [state] if state else []
        found = views.page(INCIDENTS, after=cursor, limit=limit + 1, states=states, task=task or "")
        if not found:
            return page([], [], limit)
        book, answers = _book(api, views, as_of)
        costs = book.by_incident()
        items = []
        for view in found:
            cost = costs.get(view.id, NO_COST)
            items.append(present.incident(view, cost, answers.counterfactuals(view, cost)))
        return page(items, [view.position for view in found], limit)

    return await api.read(answer)


@router.get("/{incident}")
async def one(incident: str, api: Api) -> Incident:
    """Show an incident."""
    as_of = utc_now()

    def answer(views: ViewReader) -> Incident:
        view = views.find(INCIDENTS, incident)
        book, answers = _book(api, views, as_of)
        cost = book.incident(incident)
        return present.incident(view, cost, answers.counterfactuals(view, cost))

    return await api.read(answer)
