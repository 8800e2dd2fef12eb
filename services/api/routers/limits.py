"""``/v1/limits``: the limits by which the detector judges at this moment."""

from __future__ import annotations

from fastapi import APIRouter

from services.api.gateway import Api, Gateway
from services.api.route_parts.parameters import NAMED, PROBLEMS, Cursor, Limit, TaskName, page
from services.api.store.readers import ViewReader
from services.api.store.tables import NODES
from shared.errors import NotFound, Unavailable
from shared.interface.models import Page
from shared.messages.limits_in_force import (
    LIMITS,
    NODES_LIMIT,
    LimitsReply,
    LimitsRequest,
    NodeLimits,
    TaskLimits,
)

router = APIRouter(prefix="/v1/limits", tags=["nodes"], responses=PROBLEMS)


@router.get("")
async def limits(api: Api, limit: Limit = 100, cursor: Cursor = 0) -> Page[NodeLimits]:
    """Show for how long nodes may be silent and their ranks may make no progress, by what was heard of them of late.

    Nodes that are lost or have left have no limits, so a page may have fewer than ``limit`` though more follow.
    """

    def names(views: ViewReader) -> list[tuple[str, int]]:
        return [(view.name, view.position) for view in views.page(NODES, after=cursor, limit=limit + 1)]

    found = await api.read(names)
    shown = page([name for name, _ in found], [position for _, position in found], limit)
    items: list[NodeLimits] = []
    for first in range(0, len(shown.items), NODES_LIMIT):
        items += await _asked(api, shown.items[first : first + NODES_LIMIT])
    return Page(items=items, next_cursor=shown.next_cursor)


@router.get("/{task}", responses=NAMED)
async def limits_of_task(task: TaskName, api: Api) -> TaskLimits:
    """Show for how long the ranks of a task may make no progress, by what they do. A task that has ended has none."""
    reply = await _ask(api, LimitsRequest(nodes=[], tasks=[task]))
    if not reply.tasks:
        raise NotFound(f"no task {task} is known to the detector that has not ended")
    return reply.tasks[0]


async def _asked(api: Gateway, nodes: list[str]) -> list[NodeLimits]:
    """Ask the detector for the limits of nodes."""
    return (await _ask(api, LimitsRequest(nodes=nodes))).nodes


async def _ask(api: Gateway, request: LimitsRequest) -> LimitsReply:
    """Ask the detector.

    Raises:
        Unavailable: it does not answer, or not readably.
    """
    try:
        return await api.bus.call(LIMITS, request)
    except Unavailable as err:
        raise Unavailable(f"the detector does not answer: {err.detail}") from err
