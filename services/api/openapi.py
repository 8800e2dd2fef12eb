"""The OpenAPI document of the interface: ``/openapi.json``, and ``docs/openapi.json`` in the repository.

FastAPI describes the endpoints. Two things it cannot know: the bodies that endpoints read themselves
(``services.api.route_parts.bodies``), and the problem document that every error has. ``make openapi`` writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from services.api.access.browser_sessions import COOKIE
from services.api.http.problems import Problem
from services.api.route_parts.bodies import REFERENCE
from shared.interface.models import (
    DrainRequest,
    NodeFault,
    NodeRequest,
    NoteRequest,
    RankFault,
    ReportRequest,
    StopOptions,
    TaskChange,
)
from shared.planning.standalone import StandaloneProblem
from shared.tasks.specification import TaskSpec

BODIES = (
    DrainRequest,
    NodeFault,
    NodeRequest,
    NoteRequest,
    RankFault,
    ReportRequest,
    StandaloneProblem,
    StopOptions,
    TaskChange,
    TaskSpec,
)
"""Models of the bodies that endpoints read themselves."""

_DESCRIPTION = """\
Errors are problem documents (RFC 9457) with a stable `code`. Unknown query parameters are refused. `HEAD` and `OPTIONS`
are answered on every path. The answer to a change has the header `Unicron-Position`: a read with `min_position` of that
value, of any gateway over the same log, shows what it has made. Over loopback the server's own user needs no token."""

_COOKIE = (
    "A browser has it from a link that `unicron open` prints. `-PORT` follows the name where the host has a port, and "
    "`__Host-` precedes it with TLS. Changes need the header `Origin`."
)


def install(app: FastAPI) -> None:
    """Have ``app`` answer ``/openapi.json`` with ``document``."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def document(app: FastAPI) -> dict[str, Any]:
    """Return the document."""
    made = get_openapi(
        title=app.title, version=app.version, summary=app.summary, description=_DESCRIPTION, routes=app.routes
    )
    _, bodies = models_json_schema([(body, "validation") for body in BODIES], by_alias=True, ref_template=REFERENCE)
    _, problem = models_json_schema([(Problem, "serialization")], ref_template="#/components/schemas/{model}")
    components = made.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas |= {f"{name}-Input": schema for name, schema in bodies["$defs"].items()} | problem["$defs"]
    components["schemas"] = dict(sorted(schemas.items()))
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": COOKIE, "description": _COOKIE},
    }
    for path, operation in _operations(made):
        operation["security"] = [{"token": []}, {"session": []}, {}] if path.startswith("/v1/") else []
    return made


def _operations(made: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, operations in made["paths"].items():
        for operation in operations.values():
            yield path, operation


def text(app: FastAPI) -> str:
    """Return the document as the file in the repository has it."""
    return json.dumps(document(app), indent=1, ensure_ascii=False) + "\n"
