"""What is wrong with a field that a model refuses: in words of this project where pydantic's are for programmers."""

from __future__ import annotations

from typing import Any

from shared.names import NAME_PATTERN, NAME_RULE

MISSING = "is missing"
"""What is wrong with a field that has to be given and was not."""


def problem_of(item: Any) -> str:
    """Return what is wrong with a field. ``item``: one of pydantic's ``ValidationError.errors()``."""
    match item["type"]:
        case "missing":
            return MISSING
        case "string_pattern_mismatch" if item["ctx"]["pattern"] == NAME_PATTERN:
            return NAME_RULE
        case _:
            return str(item["msg"]).removeprefix("Value error, ")


def sentence(field: str, problem: str, given: str) -> str:
    """Return what is wrong with a field as part of an error's sentence. ``given``: its value, as it is shown."""
    return f"{field}: {problem}" if problem == MISSING else f"{field}: {problem} (given: {given})"
