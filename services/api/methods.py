"""The HTTP methods of a path."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match
from starlette.types import Scope

CHANGES = ("DELETE", "PATCH", "POST", "PUT")
"""Methods that change something."""


def allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> str:
    """Return the methods of a request's path, as in the header ``Allow``; empty: there is no such path."""
    methods = {
        method
        for method in ("GET", *CHANGES)
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    }
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted({*methods, "OPTIONS"})) if methods else ""
