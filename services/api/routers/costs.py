"""``/v1/costs``: the cost report."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import AwareDatetime

from services.api.cost_models import Costs
from services.api.costs import Period, report
from services.api.gateway import Api
from services.api.ledger import History
from services.api.readers import ViewReader
from services.api.routers.parameters import PROBLEMS
from services.api.tables import INCIDENTS, NODES, PLANS, SPANS, TASKS
from shared.errors import InvalidInput
from shared.model import utc_now

router = APIRouter(prefix="/v1/costs", tags=["costs"], responses=PROBLEMS)


@router.get("")
async def costs(
    api: Api,
    start: Annotated[
        AwareDatetime | None, Query(alias="from", description="account for the time from here on; default: all")
    ] = None,
    end: Annotated[AwareDatetime | None, Query(alias="to", description="and up to here; default: now")] = None,
    bucket: Annotated[Period | None, Query(description="also by day or week of UTC")] = None,
) -> Costs:
    """Report where the allocated worker-seconds went: by kind, task, incident and more, with a check of the sums."""
    as_of = utc_now()
    _check_order(start, end)

    def answer(views: ViewReader) -> Costs:
        history = History(views.page(PLANS), views.page(INCIDENTS), views.page(SPANS))
        cluster, tasks, nodes = api.cluster(views), views.page(TASKS), views.page(NODES)
        return report(tasks, history, nodes, cluster, as_of, start=start, end=end, period=bucket)

    return await api.read(answer)


def _check_order(start: datetime | None, end: datetime | None) -> None:
    """Refuse a window that ends before it begins.

    Raises:
        InvalidInput: it does.
    """
    if start is not None and end is not None and end < start:
        text = f"must not be before from, {start.isoformat()}"
        raise InvalidInput(f"to: {text}", [{"field": "to", "value": end.isoformat(), "problem": text}])
