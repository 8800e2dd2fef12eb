"""``/v1/actor``: who sends the request. The live page offers what its session may do."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from services.api.access.access import Who
from services.api.routing.parameters import PROBLEMS
from shared.service.tokens import Scope

router = APIRouter(tags=["browser"])


class ActorShown(BaseModel):
    """Who sends a request. ``name``: as the log and the owners of tasks have it; ``scope``: what they may do."""

    name: str
    scope: Scope


@router.get("/v1/actor", responses=PROBLEMS)
async def actor(who: Who) -> ActorShown:
    """Show who you are to the server, and what you may do."""
    return ActorShown(name=who.name, scope=who.scope)
