"""Problem documents (RFC 9457): the answer to every error, those of FastAPI included."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from services.api.http.methods import allowed_methods
from shared.errors import InvalidInput, PreconditionFailed, UnicronError
from shared.field_problems import problem_of, sentence

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"

RETRY_AFTER_S = 2
"""When a client may ask again for what is unavailable: services notice within this time that the log or the bus is back
(``shared.bus.outages.LONGEST_PAUSE_S``)."""


class FieldProblem(BaseModel):
    """What is wrong with one field of a request. ``value``: as it was given, shortened."""

    field: str
    value: str | int | float | bool | None
    problem: str


class Problem(BaseModel):
    """A problem document (RFC 9457). ``code`` is stable. Some have further members."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    code: str
    detail: str
    errors: list[FieldProblem] = []


class TooLarge(InvalidInput):
    """A body above the limit."""

    status = 413


TEMPORARY = frozenset({429, 503})
"""Status codes of what may succeed later."""

MOST_ECHOED = 200
"""Characters of a request's own text that an error repeats."""

MOST_DETAIL = 4000
"""Characters of an error's sentence: one that names many fields is still readable."""


class _ProblemResponse(Response):
    """A problem document. It is ASCII: what it repeats need not be valid Unicode."""

    media_type = MEDIA_TYPE

    def render(self, content: Any) -> bytes:
        return json.dumps(_cut(content)).encode()


def _cut(value: Any) -> Any:
    """Return a part of a problem document with what it repeats cut to ``MOST_ECHOED``."""
    match value:
        case dict():
            return {name: _cut(part) for name, part in value.items()}
        case list():
            return [_cut(part) for part in value]
        case str():
            text = re.sub(rf"(\S{{{MOST_ECHOED}}})\S+", r"\1...", value)
            return text if len(text) <= MOST_DETAIL else f"{text[:MOST_DETAIL]}..."
        case float() if not math.isfinite(value):
            return str(value)
    return value


def problem_response(problem: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """Return a response with a problem document and its status."""
    return _ProblemResponse(problem, status_code=problem["status"], headers=headers)


def install(app: FastAPI) -> None:
    """Answer every error of ``app`` with a problem document."""

    @app.exception_handler(UnicronError)
    async def _unicron(_: Request, err: UnicronError) -> Response:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if err.status in TEMPORARY else None
        if isinstance(err, PreconditionFailed) and "etag" in err.extra:
            headers = {"ETag": err.extra["etag"]}
        return problem_response(err.problem(), headers)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, err: HTTPException) -> Response:
        phrase = HTTPStatus(err.status_code).phrase
        code = phrase.lower().replace(" ", "-")
        detail = err.detail
        if err.status_code == HTTPStatus.NOT_FOUND and detail == phrase:
            detail = f"no such path: {request.url.path} (see /docs)"
        if err.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = allowed_methods(app.routes, request.scope)
            err.headers = {**(err.headers or {}), "Allow": allowed}
            detail = f"{request.method} is not allowed on {request.url.path}; allowed: {allowed}"
        problem = {
            "type": f"urn:unicron:{code}",
            "title": phrase.lower(),
            "status": err.status_code,
            "code": code,
            "detail": detail,
        }
        return problem_response(problem, dict(err.headers) if err.headers else None)

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, err: RequestValidationError) -> Response:
        return problem_response(refused_request(err.errors()).problem())

    @app.exception_handler(Exception)
    async def _other(_: Request, err: Exception) -> Response:
        logger.error("unexpected error", exc_info=err)
        return problem_response(UnicronError(f"unexpected error: {type(err).__name__}").problem())


def refused_request(found: Iterable[Any]) -> InvalidInput:
    """Return the error of a request that is refused for what FastAPI or pydantic has found."""
    errors = [_entry(item) for item in found]
    text = "; ".join(sentence(e["field"], e["problem"], repr(e["value"])) for e in errors)
    return InvalidInput(f"request refused: {text}", errors)


def _entry(item: dict[str, Any]) -> dict[str, Any]:
    """Return one validation error as field, value and problem, which includes what is allowed."""
    names = item["loc"][1:] if item["loc"][:1] in (("body",), ("path",), ("query",), ("header",)) else item["loc"]
    field = ".".join(str(name) for name in names or item["loc"]) or "(body)"
    value = item.get("input")
    shown = value if isinstance(value, str | int | float | bool | None) else "..."
    if isinstance(shown, str) and len(shown) > MOST_ECHOED:
        shown = f"{shown[:MOST_ECHOED]}..."
    return {"field": field, "value": shown, "problem": problem_of(item)}
