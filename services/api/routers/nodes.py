"""``/v1/nodes``: nodes and their workers."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from services.api import present
from services.api.gateway import Api
from services.api.models import Node, Page
from services.api.routers.parameters import PROBLEMS, Cursor, Limit, page
from services.api.store import ViewReader
from services.api.tables import NODES, TASKS

NodeState = Literal["ready", "lost", "isolated", "left", "unreachable"]

router = APIRouter(prefix="/v1/nodes", tags=["nodes"], responses=PROBLEMS)


@router.get("")
async def nodes(
    api: Api,
    limit: Limit = 100,
    cursor: Cursor = 0,
    state: Annotated[list[NodeState] | None, Query(description="only these states")] = None,
) -> Page[Node]:
    """List nodes in the order in which they first joined.

    Where ``state`` tells ready and unreachable ones apart, a page may have fewer than ``limit`` though more follow.
    """
    live = api.live.state()
    wanted: set[str] = set(state or [])
    # The log knows nodes that are unreachable as ready.
    logged = sorted({"ready" if name == present.UNREACHABLE else name for name in wanted})

    def answer(views: ViewReader) -> Page[Node]:
        found = views.page(NODES, after=cursor, limit=limit + 1, states=logged)
        tasks = views.page(TASKS)
        shown = page([present.node(view, live, tasks) for view in found], [view.position for view in found], limit)
        return Page(items=[n for n in shown.items if not wanted or n.state in wanted], next_cursor=shown.next_cursor)

    return await api.read(answer)


@router.get("/{name}")
async def node(name: str, api: Api) -> Node:
    """Show a node."""
    live = api.live.state()
    return await api.read(lambda views: present.node(views.find(NODES, name), live, views.page(TASKS)))
