"""``/v1/costs``: the cost report."""

from __future__ import annotations

from fastapi import APIRouter

from services.api.costs import report
from services.api.gateway import Api
from services.api.models import Costs
from services.api.routers.parameters import PROBLEMS
from services.api.store import TASKS
from shared.model import utc_now

router = APIRouter(prefix="/v1/costs", tags=["costs"], responses=PROBLEMS)


@router.get("")
def costs(api: Api) -> Costs:
    """Report where the worker-seconds went: by task, by incident, in total, with the check that the sums agree."""
    plans, incidents = api.history()
    return report(api.store.page(TASKS), incidents, plans, api.cluster(), utc_now())
