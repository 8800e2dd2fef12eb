"""``/v1/costs``: the cost report."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from services.api.gateway import Api
from services.api.route_parts.parameters import MAX_LIMIT, PROBLEMS, check_order
from services.api.store.accounts import Accounts
from services.api.store.readers import ViewReader
from shared.bus.messages import Time
from shared.costs.report import Period, report
from shared.interface.costs import Costs
from shared.model import utc_now

router = APIRouter(prefix="/v1/costs", tags=["costs"], responses=PROBLEMS)


@router.get("", response_model=Costs)
async def costs(
    api: Api,
    start: Annotated[
        Time | None, Query(alias="from", description="account for the time from here on; default: all")
    ] = None,
    end: Annotated[Time | None, Query(alias="to", description="and up to here; default: now")] = None,
    bucket: Annotated[Period | None, Query(description="also by day or week of UTC")] = None,
    limit: Annotated[
        int | None,
        Query(ge=1, le=MAX_LIMIT, description="only so many tasks and incidents, the costliest first; sums have all"),
    ] = None,
    breakdowns: Annotated[bool, Query(description="false: `breakdowns` is empty; it has a row for every node")] = True,
) -> Response:
    """Report where the allocated worker-seconds went: by kind, task, incident and more, with a check of the sums."""
    as_of = utc_now()
    check_order(start, end)

    def answer(views: ViewReader) -> Costs:
        account = Accounts(views, as_of).account(start=start, end=end, days=bucket is not None, limit=limit)
        return report(account, api.cluster(views), period=bucket, breakdowns=breakdowns)

    return await api.answer(answer)
