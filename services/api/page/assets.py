"""The files of the live page, with the type and the entity tag that each is sent with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePath

INDEX = "index.html"
"""The page itself, which names the other files."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        # Nothing but files of this server: no other site, no script or style inside the page.
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No text becomes markup, whatever a task is called.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""The policy under which browsers show the page."""

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Asset:
    """A file of the page. ``etag``: of its bytes, as the header ``ETag`` has it."""

    content: bytes
    media_type: str
    etag: str


@cache
def assets() -> Mapping[str, Asset]:
    """Return the files of the page by their names; they are read once."""
    found = {}
    for path in files(__package__).iterdir():
        media_type = _MEDIA_TYPES.get(PurePath(path.name).suffix)
        if media_type is not None:
            content = path.read_bytes()
            found[path.name] = Asset(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
