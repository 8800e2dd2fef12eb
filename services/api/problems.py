"""Problem documents (RFC 9457): the answer to every error, those of FastAPI included."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shared.errors import InvalidInput, Unavailable, UnicronError

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


RETRY_AFTER_S = 2
"""When a client may ask again for what is unavailable: services notice within this time that the log or the bus is back
(``shared.outages.LONGEST_PAUSE_S``)."""


class TooLarge(InvalidInput):
    """A body above the limit."""

    code = "too-large"
    status = 413


class TooManyRequests(UnicronError):
    """One client asks for more at once than is its due."""

    code = "too-many-requests"
    status = 429
    exit_code = 5


class Busy(Unavailable):
    """All clients together ask for more at once than this machine does."""

    code = "busy"


class TimeLimit(Unavailable):
    """What was asked for takes longer than is allowed."""

    code = "time-limit"


RETRIED = frozenset({429, 503})
"""Status codes of what may succeed later."""


def problem_response(problem: dict[str, Any], headers: dict[str, str] | None = None) -> JSONResponse:
    """Return a response with a problem document and its status."""
    return JSONResponse(problem, status_code=problem["status"], media_type=MEDIA_TYPE, headers=headers)


def install(app: FastAPI) -> None:
    """Answer every error of ``app`` with a problem document."""

    @app.exception_handler(UnicronError)
    async def _unicron(_: Request, err: UnicronError) -> JSONResponse:
        return problem_response(err.problem(), {"Retry-After": str(RETRY_AFTER_S)} if err.status in RETRIED else None)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, err: HTTPException) -> JSONResponse:
        phrase = HTTPStatus(err.status_code).phrase
        code = phrase.lower().replace(" ", "-")
        detail = err.detail
        if err.status_code == HTTPStatus.NOT_FOUND and detail == phrase:
            detail = f"no such path: {request.url.path} (see /docs)"
        if err.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (err.headers or {}).get("Allow", "another method")
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
    async def _validation(_: Request, err: RequestValidationError) -> JSONResponse:
        errors = [_entry(item) for item in err.errors()]
        text = "; ".join(f"{e['field']}: {e['problem']} (given: {e['value']!r})" for e in errors)
        return problem_response(InvalidInput(f"request refused: {text}", errors).problem())

    @app.exception_handler(Exception)
    async def _other(_: Request, err: Exception) -> JSONResponse:
        logger.error("unexpected error", exc_info=err)
        return problem_response(UnicronError(f"unexpected error: {type(err).__name__}").problem())


def _entry(item: dict[str, Any]) -> dict[str, Any]:
    """Return one validation error of FastAPI as field, value and problem, which includes what is allowed."""
    where, *names = item["loc"]
    field = ".".join(str(name) for name in names) or str(where)
    value = item.get("input")
    shown = value if isinstance(value, str | int | float | bool | None) else "..."
    return {"field": field, "value": shown, "problem": item["msg"]}
