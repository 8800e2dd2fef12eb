"""Query parameters that several resources share."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import Query

from services.api.models import Page

MAX_LIMIT = 1000
"""Most items of one page: bounds an answer's size."""

T = TypeVar("T")

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="most items of this page")]
Cursor = Annotated[
    int, Query(ge=0, lt=2**63, description="`next_cursor` of the page before", json_schema_extra={"example": 0})
]
TaskFilter = Annotated[str | None, Query(max_length=64, description="only what concerns this task")]

PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "a problem document (RFC 9457)", "content": {"application/problem+json": {}}},
}


def page(items: list[T], positions: list[int], limit: int) -> Page[T]:
    """Return a page of ``items``. ``positions``: of those found, of which one more than ``limit`` was asked for."""
    more = len(positions) > limit
    return Page(items=items[:limit], next_cursor=str(positions[limit - 1]) if more else None)
