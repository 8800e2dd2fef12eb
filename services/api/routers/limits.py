"""``/v1/limits``: the limits by which the detector judges at this moment."""

from __future__ import annotations

from fastapi import APIRouter

from services.api.gateway import Api, Gateway
from services.api.models import Page
from services.api.readers import ViewReader
from services.api.routers.parameters import PROBLEMS, Cursor, Limit, page
from services.api.tables import NODES
from shared.errors import Unavailable, Undecodable
from shared.limits_in_force import LIMITS, LIMITS_REPLY, NODES_LIMIT, LimitsRequest, NodeLimits
from shared.messages import decode

router = APIRouter(prefix="/v1/limits", tags=["nodes"], responses=PROBLEMS)

_TIMEOUT_S = 3.0
"""Time for the detector's answer, which takes milliseconds; a busy machine has a hundred times that."""


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


async def _asked(api: Gateway, nodes: list[str]) -> list[NodeLimits]:
    """Ask the detector for the limits of nodes.

    Raises:
        Unavailable: it does not answer, or not readably.
    """
    request = LimitsRequest(nodes=nodes).model_dump_json().encode()
    try:
        return decode(LIMITS_REPLY, await api.bus.request(LIMITS, request, timeout_s=_TIMEOUT_S)).nodes
    except (Unavailable, Undecodable) as err:
        raise Unavailable(f"the detector does not answer: {err.detail}") from err
