"""``/v1/log``: heads of the log, to be noted elsewhere. ``unicron replay --verify`` compares a log with them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import BaseModel

from services.api.gateway import Api
from services.api.route_parts.parameters import NAMED, PROBLEMS
from services.api.signed_heads import SignedHeads
from shared.archive.signed_heads import SignedHead
from shared.errors import NotFound
from shared.text import Time

router = APIRouter(prefix="/v1/log", tags=["events"], responses=PROBLEMS)


class LogHead(BaseModel):
    """The last event of the log. ``hash`` covers it and every event before it."""

    position: int
    hash: str
    recorded_at: Time


@router.get("/head", responses=NAMED)
async def head(api: Api) -> LogHead:
    """Return the head of the log: what ``unicron replay --verify --expect-head POSITION:HASH`` takes."""
    found = await asyncio.to_thread(api.journal.log.head)
    if found is None:
        raise NotFound("the log is empty")
    return LogHead.model_validate(found._asdict())


@router.get("/heads")
async def heads(api: Api) -> list[SignedHead]:
    """List the signed heads of the days that are over; empty where no key is given."""
    return await asyncio.to_thread(SignedHeads(api.settings, api.journal.log).read)
