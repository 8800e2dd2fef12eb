"""Query parameters that several resources share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends, Path, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import BaseRoute

from services.api.http.problems import TEMPORARY
from shared.bus.messages import ID_PATTERN, Time
from shared.errors import InvalidInput, NotFound
from shared.interface.models import Page
from shared.names import NAME_PATTERN
from shared.unknown_names import nearest
from shared.views.documents import TaskView

MAX_LIMIT = 1000
"""Most items of one page: bounds an answer's size."""

T = TypeVar("T")

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="most items of this page")]
Cursor = Annotated[
    int, Query(ge=0, lt=2**63, description="`next_cursor` of the page before", json_schema_extra={"example": 0})
]
Order = Annotated[Literal["oldest", "newest"], Query(description="what comes first")]
Since = Annotated[Time | None, Query(description="only from then on: ISO 8601 with a time zone")]
Until = Annotated[Time | None, Query(description="only before then: ISO 8601 with a time zone")]
TaskFilter = Annotated[str | None, Query(pattern=NAME_PATTERN, description="only what concerns this task")]
TaskName = Annotated[str, Path(pattern=NAME_PATTERN, description="the task's name")]
NodeName = Annotated[str, Path(pattern=NAME_PATTERN, description="the node's name")]
AskedSubmission = Annotated[int | None, Query(ge=1, le=1_000_000, description="number of the submission")]
MostPoints = Annotated[int, Query(ge=2, le=2000, description="most points")]
Id = Annotated[str, Path(min_length=1, max_length=256, pattern=ID_PATTERN)]
"""The id of an incident or a plan: any line of text, as far as the log is concerned."""

_RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}

_MEANINGS = {
    401: "nothing says who sends the request",
    403: "whoever sends it may not do this",
    404: "there is no such thing",
    409: "it contradicts the present state",
    412: "it is not as the client has read it",
    413: "the body is too large",
    415: "the body is of another type than is taken",
    416: "the range begins behind the end",
    421: "the host is no name of this server",
    422: "a field, its value, and what is allowed",
    429: "one client asks for too much",
    500: "stored data fails its checks",
    503: "something that is needed does not answer",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the description of the problem documents that an endpoint answers, for FastAPI's ``responses``."""
    schema = {"$ref": "#/components/schemas/Problem"}
    content = {"application/problem+json": {"schema": schema}}
    return {
        status: {"description": _MEANINGS[status], "content": content}
        | ({"headers": _RETRY_AFTER} if status in TEMPORARY else {})
        for status in statuses
    }


PROBLEMS = problems(401, 403, 421, 422, 429, 500, 503)
"""The problems that every endpoint but the probes may answer with."""

NAMED = problems(404)
"""The problems of an endpoint that shows something by its name, besides ``PROBLEMS``."""

CHANGE = problems(404, 409, 413, 415)
"""The problems of an endpoint that changes something, besides ``PROBLEMS``."""

CONDITIONAL = problems(412)
"""The problem of a change with ``If-Match``, besides."""

TAGGED: dict[int | str, dict[str, Any]] = {
    200: {"headers": {"ETag": {"description": "of this answer", "schema": {"type": "string"}}}},
    304: {"description": "the client has this answer already"},
}
"""The answers of an endpoint that shows something with an ``ETag``, besides."""


READ_PARAMETERS = ("min_position",)
"""The parameters of every read (``routing.log_positions``); an application adds them when it is put together."""


async def refuse_unknown(request: Request) -> None:
    """Refuse query parameters that the endpoint does not have (FastAPI dependency): a slip would be ignored else.

    Raises:
        InvalidInput: there is one.
    """
    route = request.scope["route"]
    allowed = sorted({*_names(route.dependant), *(READ_PARAMETERS if is_read(route) else ())})
    unknown = sorted({name for name in request.query_params if name not in allowed})
    if not unknown:
        return
    errors = []
    for name in unknown:
        hint = nearest(name, allowed) or ";"
        problem = f"unknown parameter{hint} allowed: {', '.join(allowed) or 'none'}"
        errors.append({"field": name, "value": request.query_params[name], "problem": problem})
    text = "; ".join(f"{error['field']}: {error['problem']}" for error in errors)
    raise InvalidInput(f"request refused: {text}", errors)


def is_read(route: BaseRoute) -> bool:
    """Return whether a route shows something of the log, and changes nothing."""
    return isinstance(route, APIRoute) and "GET" in (route.methods or ()) and route.path.startswith("/v1/")


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


@dataclass(frozen=True)
class ListPart:
    """Which part of a list is asked for. ``times``: of what is listed, from the first on and before the second."""

    limit: int
    after: int
    newest: bool
    times: tuple[datetime | None, datetime | None]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``ViewReader.rows``: one row more shows whether there is a further page."""
        return {**vars(self), "limit": self.limit + 1}


async def list_part(
    limit: Limit = 100, cursor: Cursor = 0, order: Order = "oldest", since: Since = None, until: Until = None
) -> ListPart:
    """Return which part of a list is asked for (FastAPI dependency).

    Raises:
        InvalidInput: its time ends before it begins.
    """
    check_order(since, until, ("since", "until"))
    return ListPart(limit, cursor, order == "newest", (since, until))


AskedPart = Annotated[ListPart, Depends(list_part)]


def check_order(start: datetime | None, end: datetime | None, names: tuple[str, str] = ("from", "to")) -> None:
    """Refuse a window that ends before it begins. ``names``: of the two parameters.

    Raises:
        InvalidInput: it does.
    """
    if start is not None and end is not None and end < start:
        text = f"must not be before {names[0]}, {start.isoformat()}"
        raise InvalidInput.of(names[1], end.isoformat(), text, f"{names[1]}: {text}")


def submission_number(task: TaskView, asked: int | None) -> int:
    """Return the number of the submission of a task's name that is asked for; None: the present one.

    Raises:
        NotFound: the name was not submitted so often.
    """
    number = asked or task.attempt
    if number > task.attempt:
        raise NotFound(f"task {task.name!r} was submitted {task.attempt} times", field="attempt", value=number)
    return number
