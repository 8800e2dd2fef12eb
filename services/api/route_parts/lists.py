"""A list of views that are stored as the interface shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Response

from services.api.gateway import Gateway
from services.api.route_parts.parameters import ListPart, page_json
from services.api.store.readers import ViewReader
from services.api.store.tables import Kind


async def shown_rows(
    api: Gateway,
    kind: Kind[Any],
    part: ListPart,
    *,
    task: str | None,
    states: Sequence[str],
) -> Response:
    """Return a page of a list.

    Args:
        api: the gateway.
        kind: of the views; they have what is shown of them, tasks, states and times.
        part: of the list.
        task: only what concerns it; None: all.
        states: only in one of these; empty: in any.
    """

    def answer(views: ViewReader) -> str:
        found = views.rows(kind, "shown", states=states, task=task or "", **part.arguments())
        return page_json([row.shown for row in found], [row.position for row in found], part.limit)

    return await api.answer(answer)
