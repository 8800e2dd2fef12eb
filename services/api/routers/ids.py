"""``/v1/ids``: the ids that begin with a text, so that a user may type the beginning of one only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from services.api.gateway import Api
from services.api.route_parts.parameters import PROBLEMS
from services.api.store.tables import INCIDENTS, NODES, PLANS, SLOWDOWNS, TASKS, Kind
from shared.bus.messages import ID_PATTERN

router = APIRouter(prefix="/v1/ids", tags=["ids"], responses=PROBLEMS)

_KINDS: dict[str, Kind[Any]] = {
    "incident": INCIDENTS,
    "slow-worker": SLOWDOWNS,
    "plan": PLANS,
    "task": TASKS,
    "node": NODES,
}

MOST_IDS = 100
"""More candidates than somebody reads."""


class Ids(BaseModel):
    """Ids in their order as text: one that is the prefix itself comes first. ``more``: there are further ones."""

    ids: list[str]
    more: bool


@router.get("")
async def ids(
    api: Api,
    kind: Annotated[Literal["incident", "slow-worker", "plan", "task", "node"], Query(description="of what")],
    prefix: Annotated[
        str,
        Query(max_length=256, pattern=ID_PATTERN, description="what the ids begin with, upper and lower case apart"),
    ] = "",
    limit: Annotated[int, Query(ge=1, le=MOST_IDS, description="most ids of the answer")] = 20,
) -> Ids:
    """List the ids of incidents, slow workers or plans, or the names of tasks or nodes, that begin with a text."""
    found = await api.read(lambda views: views.keys(_KINDS[kind], prefix, limit + 1))
    return Ids(ids=found[:limit], more=len(found) > limit)
