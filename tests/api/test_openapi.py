"""The OpenAPI document: the one in the repository is the application's, and it is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openapi_spec_validator import validate

from services.api import openapi
from services.api.http.problems import MEDIA_TYPE
from services.api.main import application

FILE = Path(__file__).resolve().parents[2] / "docs" / "openapi.json"


def operations() -> dict[str, dict[str, Any]]:
    paths = openapi.document(application())["paths"]
    return {f"{method} {path}": one for path, methods in paths.items() for method, one in methods.items()}


def test_the_file_is_the_application_s() -> None:
    made = openapi.text(application())
    assert FILE.read_text() == made, "make openapi"


def test_it_is_valid() -> None:
    validate(openapi.document(application()))


def test_every_operation_names_its_errors() -> None:
    for name, operation in operations().items():
        errors = {int(status) for status in operation["responses"] if int(status) >= 400}
        wanted = {421, 422}
        if "/v1/" in name:
            wanted |= {401, 403, 429, 503}
        if "{" in name:
            wanted |= {404}
        if "requestBody" in operation:
            wanted |= {413, 415}
        assert wanted <= errors, name
        for status in errors - ({503} if name == "get /readyz" else set()):
            schema = operation["responses"][str(status)]["content"][MEDIA_TYPE]["schema"]
            assert schema == {"$ref": "#/components/schemas/Problem"}
