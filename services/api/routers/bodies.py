"""Request bodies of bounded size."""

from __future__ import annotations

from fastapi import Request

from services.api.problems import TooLarge


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Return the body.

    Raises:
        TooLarge: it is larger than ``limit_bytes``. A body whose announced length is larger is not read at all; of any
            other, no more than the limit is.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
    return bytes(body)


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit_bytes} bytes, the most that is allowed")
