"""``/healthz`` and ``/readyz``."""

from __future__ import annotations

import asyncio
import json

from fastapi import APIRouter, Response, status

from services.api.gateway import Api, Gateway
from services.api.models import Check, Readiness
from services.api.store import NODES
from shared.errors import UnicronError
from shared.service import HEALTH

router = APIRouter(tags=["health"])

SERVICES = ("detector", "planner", "transition")

_HEALTH_TIMEOUT_S = 1.0
"""An answer takes milliseconds; a probe of a container platform is given about a second by default."""


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Tell that this process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"model": Readiness}})
async def readyz(response: Response, api: Api) -> Readiness:
    """Tell whether tasks can be taken: log, bus, the other services and at least one node."""
    checks = await asyncio.gather(_log(api), _nodes(api), *(_service(api, name) for name in SERVICES))
    bus = Check(name="bus", ok=api.bus.connected, detail="" if api.bus.connected else "not connected")
    readiness = Readiness(ready=bus.ok and all(check.ok for check in checks), checks=[bus, *checks])
    if not readiness.ready:
        response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    return readiness


async def _log(api: Gateway) -> Check:
    try:
        position = await asyncio.to_thread(api.journal.log.last_position)
    except UnicronError as err:
        return Check(name="log", ok=False, detail=err.detail)
    return Check(name="log", ok=True, detail=f"position {position}, projected {api.feed.position}")


async def _nodes(api: Gateway) -> Check:
    try:
        count = await asyncio.to_thread(api.store.count, NODES, "ready")
    except UnicronError as err:
        return Check(name="nodes", ok=False, detail=err.detail)
    return Check(name="nodes", ok=count > 0, detail=f"{count} ready")


async def _service(api: Gateway, name: str) -> Check:
    try:
        answer = await api.bus.request(f"{HEALTH}.{name}", b"", timeout_s=_HEALTH_TIMEOUT_S)
        health = json.loads(answer)
    except UnicronError as err:
        return Check(name=name, ok=False, detail=err.detail)
    ready = bool(health.get("ready"))
    return Check(name=name, ok=ready, detail="" if ready else "starting", counters=health.get("counters", {}))
