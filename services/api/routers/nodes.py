"""``/v1/nodes``: nodes and their workers."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from services.api import present
from services.api.gateway import Api
from services.api.models import Node, Page
from services.api.routers.parameters import PROBLEMS, Cursor, Limit, page
from services.api.store import NODES, TASKS
from shared.errors import NotFound

router = APIRouter(prefix="/v1/nodes", tags=["nodes"], responses=PROBLEMS)


@router.get("")
def nodes(
    api: Api,
    limit: Limit = 100,
    cursor: Cursor = 0,
    state: Annotated[list[Literal["ready", "lost", "isolated"]] | None, Query(description="only these states")] = None,
) -> Page[Node]:
    """List nodes in the order in which they first joined."""
    views = api.store.page(NODES, after=cursor, limit=limit + 1, states=list(state or []))
    tasks = api.store.page(TASKS)
    return page([present.node(view, api.live, tasks) for view in views], [view.position for view in views], limit)


@router.get("/{name}")
def node(name: str, api: Api) -> Node:
    """Show a node."""
    view = api.store.get(NODES, name)
    if view is None:
        raise NotFound(f"no node named {name!r}")
    return present.node(view, api.live, api.store.page(TASKS))
