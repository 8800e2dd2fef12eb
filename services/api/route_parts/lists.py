"""A list of views that are stored as the interface shows them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from fastapi import Response

from services.api.gateway import Gateway
from services.api.route_parts.parameters import Order, page_json, times
from services.api.store.readers import ViewReader
from services.api.store.tables import Kind


async def shown_rows(
    api: Gateway,
    kind: Kind[Any],
    *,
    limit: int,
    cursor: int,
    order: Order,
    task: str | None,
    states: Sequence[str],
    since: datetime | None,
    until: datetime | None,
) -> Response:
    """Return a page of a list.

    Args:
        api: the gateway.
        kind: of the views; they have what is shown of them, tasks, states and times.
        limit: most items.
        cursor: of the page before.
        order: of their positions in the log.
        task: only what concerns it; None: all.
        states: only in one of these; empty: in any.
        since: only from then on; None: all.
        until: only before then; None: all.
    """
    window = times(since, until)

    def answer(views: ViewReader) -> str:
        found = views.rows(
            kind,
            "shown",
            after=cursor,
            limit=limit + 1,
            states=states,
            task=task or "",
            newest=order == "newest",
            times=window,
        )
        return page_json([row.shown for row in found], [row.position for row in found], limit)

    return await api.answer(answer)
