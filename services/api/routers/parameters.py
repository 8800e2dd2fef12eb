"""Query parameters that several resources share."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Query, Request
from fastapi.dependencies.models import Dependant
from pydantic import BaseModel

from services.api.models import Page
from shared.errors import InvalidInput

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


async def refuse_unknown(request: Request) -> None:
    """Refuse query parameters that the endpoint does not have (FastAPI dependency): a slip would be ignored else.

    Raises:
        InvalidInput: there is one.
    """
    allowed = sorted(_names(request.scope["route"].dependant))
    unknown = sorted({name for name in request.query_params if name not in allowed})
    if not unknown:
        return
    errors = []
    for name in unknown:
        near = difflib.get_close_matches(name, allowed, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        problem = f"unknown parameter; {hint}allowed: {', '.join(allowed) or 'none'}"
        errors.append({"field": name, "value": request.query_params[name], "problem": problem})
    text = "; ".join(f"{error['field']}: {error['problem']}" for error in errors)
    raise InvalidInput(f"request refused: {text}", errors)


def _names(dependant: Dependant) -> Iterator[str]:
    """Yield the names of an endpoint's query parameters, with those of its dependencies and of models."""
    for found in dependant.query_params:
        annotation = found.field_info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from annotation.model_fields
        else:
            yield found.alias
    for dependency in dependant.dependencies:
        yield from _names(dependency)


def page(items: list[T], positions: list[int], limit: int) -> Page[T]:
    """Return a page of ``items``. ``positions``: of those found, of which one more than ``limit`` was asked for."""
    return Page(items=items[:limit], next_cursor=_next_cursor(positions, limit))


def page_json(items: Sequence[str], positions: list[int], limit: int) -> str:
    """Return the JSON of a page of items that are JSON already; the arguments are as those of ``page``."""
    cursor = _next_cursor(positions, limit)
    return f'{{"items":[{",".join(items[:limit])}],"next_cursor":{json.dumps(cursor)}}}'


def _next_cursor(positions: list[int], limit: int) -> str | None:
    return str(positions[limit - 1]) if len(positions) > limit else None
