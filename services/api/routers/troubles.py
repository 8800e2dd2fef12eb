"""``/v1/troubles``: what is wrong now, the gravest first."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter, Response

from services.api.access.access import Submitter
from services.api.gateway import Api, as_json
from services.api.requests import trouble_requests
from services.api.route_parts.parameters import CHANGE, PROBLEMS, Id
from services.api.routers import health
from services.api.store.readers import ViewReader
from services.api.troubles.causes import MOST, causes
from services.api.troubles.findings import Findings, read_findings
from shared.errors import Unavailable
from shared.interface.first_look import Trouble, Troubles
from shared.interface.readiness import Readiness
from shared.model import utc_now
from shared.views.documents import ClusterView

router = APIRouter(prefix="/v1/troubles", tags=["health"], responses=PROBLEMS)


@router.get("", response_model=Troubles)
async def troubles(api: Api) -> Response:
    """Show what is wrong now: one entry for each cause, with what to do, what it loses each hour, and who is on it."""
    status = await health.readiness(api)
    as_of, live = utc_now(), api.live.state()

    def answer(views: ViewReader) -> Troubles:
        cluster = api.cluster(views)
        return _answer(causes(read_findings(views, cluster, live, status.checks, as_of)), cluster, status, as_of)

    try:
        return await api.answer(answer)
    except Unavailable:  # the projections, of which the checks know: what is wrong is said all the same
        alone = causes(Findings(cluster=api.cluster_by_settings(), checks=status.checks))
        return as_json(_answer(alone, api.cluster_by_settings(), status, as_of))


@router.post("/{key}/acknowledge", response_model=Trouble, responses=CHANGE)
async def acknowledge(key: Id, api: Api, who: Submitter) -> Response:
    """Say that somebody takes care of a cause, or of the incidents that it has. It holds until the cause is no more."""
    status = await health.readiness(api)
    return as_json(await trouble_requests.acknowledge(api, key, who, status.checks))


def _answer(found: list[Trouble], cluster: ClusterView, status: Readiness, as_of: datetime) -> Troubles:
    return Troubles(
        as_of=as_of,
        items=found[:MOST],
        more=max(len(found) - MOST, 0),
        money_per_hour=sum(one.money_per_hour or 0.0 for one in found),
        currency=cluster.currency,
        status=status,
    )
