"""``/`` and ``/tasks/{name}``: the live page and that of a task, and their files below ``/page/``.

They need no credentials: what they show does.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response, status

from services.api.page.assets import CONTENT_SECURITY_POLICY, INDEX, assets
from shared.errors import NotFound

router = APIRouter(include_in_schema=False)

# Browsers ask each time whether a file has changed: after an update all files are of one version.
_HEADERS = {"Cache-Control": "no-cache", "Content-Security-Policy": CONTENT_SECURITY_POLICY}

KnownTags = Annotated[str | None, Header(alias="If-None-Match")]


@router.get("/")
async def index(known: KnownTags = None) -> Response:
    """Send the page."""
    return _sent(INDEX, known)


@router.get("/tasks/{name}")
async def task(name: str, known: KnownTags = None) -> Response:
    """Send the page of a task, which is the same document: its script tells them apart by the address."""
    return _sent(INDEX, known)


@router.get("/page/{name}")
async def asset(name: str, known: KnownTags = None) -> Response:
    """Send a file of the page."""
    return _sent(name, known)


def _sent(name: str, known: str | None) -> Response:
    """Return a file, or that the browser has it.

    Raises:
        NotFound: there is none.
    """
    found = assets().get(name)
    if found is None:
        raise NotFound(f"the page has no file {name[:100]!r}")
    headers = {**_HEADERS, "ETag": found.etag}
    if known is not None and found.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)
