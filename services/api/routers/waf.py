"""``/v1/waf``: WAF over time, beside the healthy line."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Response

from services.api.gateway import Api
from services.api.route_parts.parameters import PROBLEMS, check_order
from services.api.store.readers import ViewReader
from services.api.waf_history import waf_history
from shared.bus.messages import Time
from shared.interface.costs import WafHistory
from shared.model import utc_now

router = APIRouter(prefix="/v1/waf", tags=["costs"], responses=PROBLEMS)

MOST_POINTS = 1000
"""More than a screen has columns for; bounds an answer's size."""

_USUAL = timedelta(hours=1)

_EARLIEST = datetime.fromtimestamp(0.0, UTC)
"""No log is older; an hour before the first of all times would be none."""


@router.get("", response_model=WafHistory)
async def waf(
    api: Api,
    start: Annotated[Time | None, Query(alias="from", description="default: an hour before `to`")] = None,
    end: Annotated[Time | None, Query(alias="to", description="default, and at most: now")] = None,
    points: Annotated[int, Query(ge=1, le=MOST_POINTS, description="into how many times it is cut")] = 240,
) -> Response:
    """Show WAF over time: achieved, and that of the best plan on all allocated workers (the healthy line)."""
    as_of, live = utc_now(), api.live.state()
    until = end or as_of
    begin = start or max(until, _EARLIEST) - _USUAL
    check_order(begin, until)

    def answer(views: ViewReader) -> WafHistory:
        return waf_history(views, begin, until, points, as_of, live)

    return await api.answer(answer)
