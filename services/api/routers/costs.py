"""``/v1/costs``: the cost report."""

from __future__ import annotations

from fastapi import APIRouter

from services.api.costs import report
from services.api.gateway import Api
from services.api.models import Costs
from services.api.routers.parameters import PROBLEMS
from services.api.store import ViewReader
from services.api.tables import INCIDENTS, PLANS, TASKS
from shared.model import utc_now

router = APIRouter(prefix="/v1/costs", tags=["costs"], responses=PROBLEMS)


@router.get("")
async def costs(api: Api) -> Costs:
    """Report where the worker-seconds went: by task, by incident, in total, with the check that the sums agree."""
    as_of = utc_now()

    def answer(views: ViewReader) -> Costs:
        return report(views.page(TASKS), views.page(INCIDENTS), views.page(PLANS), api.cluster(views), as_of)

    return await api.read(answer)
