"""``/metrics``: this process and the cluster, for Prometheus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.api.cluster_metrics import Facts, cluster_metrics, read_facts
from services.api.gateway import Api, Gateway
from services.api.route_parts.parameters import problems
from shared.errors import UnicronError
from shared.model import utc_now
from shared.service.metrics import gauge

logger = logging.getLogger(__name__)

router = APIRouter(tags=["health"])

LIMIT_S = 4.0
"""Time for log and projections each: below the 10 s that Prometheus waits by default. What does not answer is left
out; the process's own metrics come all the same."""

_TEXT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "metrics in Prometheus's text format, or that of OpenMetrics",
        "content": {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")},
    }
}


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


@router.get("/metrics", response_class=Response, responses=_TEXT | problems(401, 421, 422, 429))
async def metrics(request: Request, api: Api) -> Response:
    """Return the metrics of the api and of the cluster; those of other processes are at ``UNICRON_METRICS_ADDRESS``."""
    facts, position = await asyncio.gather(_facts(api), _log_position(api))
    families = [*api.registry.collect()]
    readable = float(facts is not None)
    families.append(gauge("unicron_projections_readable", "Whether the projections answer.", readable))
    if facts is not None:
        families += cluster_metrics(facts, api.live.state(watched=False))
    if position is not None:
        families.append(gauge("unicron_log_position", "Position of the last event in the log.", position))
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(_Families(families)), media_type=content_type)


async def _facts(api: Gateway) -> Facts | None:
    now = utc_now()
    try:
        async with asyncio.timeout(LIMIT_S):
            return await api.read(lambda views: read_facts(views, api.cluster(views), now))
    except (UnicronError, TimeoutError) as err:
        logger.debug("the projections do not answer: %s", err)
        return None


async def _log_position(api: Gateway) -> int | None:
    try:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.to_thread(api.journal.log.last_position)
    except (UnicronError, TimeoutError) as err:
        logger.debug("the log does not answer: %s", err)
        return None
