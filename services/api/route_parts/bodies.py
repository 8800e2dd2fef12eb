"""Request bodies of bounded size, and how the OpenAPI document describes them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from services.api.http.problems import TooLarge, refused_request
from shared.errors import InvalidInput

SMALL_BODY_BYTES = 1 << 16
"""Limit of a body with a few options: a reason in words has 200 characters."""

REFERENCE = "#/components/schemas/{model}-Input"
"""Where the OpenAPI document has the model of a body; that of an answer may have the same name, and other fields."""

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Return the body.

    Raises:
        TooLarge: it is larger than ``limit_bytes``. A body whose announced length is larger is not read at all; of any
            other, no more than the limit is.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > len(str(limit_bytes)) or int(announced) > limit_bytes):
        raise _too_large(limit_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
    return bytes(body)


def options(model: type[M], *, required: bool = False) -> Callable[[Request], Awaitable[M]]:
    """Return a FastAPI dependency that reads options from a small body; without a body, all have their defaults.

    ``required``: without one the request is refused.
    """

    async def read(request: Request) -> M:
        body = await read_body(request, SMALL_BODY_BYTES)
        try:
            return model.model_validate_json(body) if body or required else model()
        except ValidationError as err:
            raise refused_request(err.errors(include_url=False)) from err

    return read


def decoded(body: bytes) -> str:
    """Return the text of a body.

    Raises:
        InvalidInput: it is not UTF-8.
    """
    try:
        return body.decode()
    except UnicodeDecodeError as err:
        raise InvalidInput(f"the body is not UTF-8: {err}") from err


def parsed_json(body: bytes) -> Any:
    """Return what the JSON of a body says.

    Raises:
        InvalidInput: it is not JSON.
    """
    try:
        return json.loads(decoded(body))
    except RecursionError as err:
        raise InvalidInput("the body is nested too deeply") from err
    except ValueError as err:
        raise InvalidInput(f"the body is not JSON: {err}; for YAML set Content-Type: application/yaml") from err


def described(
    model: type[BaseModel], *, required: bool = False, yaml: bool = False, merge_patch: bool = False
) -> dict[str, Any]:
    """Return the description of a body for ``openapi_extra`` of an endpoint that reads it itself.

    Args:
        model: of the body (``services.api.openapi.BODIES``).
        required: whether there has to be one.
        yaml: whether it may be YAML, too.
        merge_patch: whether it may also have the media type of merge patches.
    """
    schema = {"schema": {"$ref": REFERENCE.format(model=model.__name__)}}
    content: dict[str, Any] = {"application/json": schema}
    if merge_patch:
        content["application/merge-patch+json"] = schema
    if yaml:
        content["application/yaml"] = {"schema": {"type": "string", "description": "the same fields as YAML"}}
    return {"requestBody": {"required": required, "content": content}}


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit_bytes} bytes, the most that is allowed")
