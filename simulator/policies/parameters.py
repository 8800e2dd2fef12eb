"""The parameters of the policies, from ``parameters.json``: each with its unit, its source and how it is known.

``common`` holds what several policies use. No value was fitted to the results of the Unicron paper's evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from shared.errors import InvalidInput

COMMON = "common"
"""The name under which the parameters of all policies are."""

Known = Literal["read", "recalled", "derived", "assumed"]
"""How a value is known. ``read``: it stands in the source. ``recalled``: it is remembered from the source and was not
compared with it. ``derived``: it follows from the source, or from a measurement, as the text says. ``assumed``: the
source is silent."""


class Parameter(NamedTuple):
    """A number, its unit, where it comes from, and how it is known."""

    value: float
    unit: str
    source: str
    known: Known


@cache
def _documents() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("parameters.json").read_text(encoding="utf-8")
    documents: dict[str, dict[str, Any]] = json.loads(text)
    return documents


def policies() -> list[str]:
    """Return the names under which there are parameters, ``common`` among them."""
    return list(_documents())


@cache
def parameters(policy: str) -> Mapping[str, Parameter]:
    """Return the parameters of a policy by name.

    Raises:
        InvalidInput: no such policy.
    """
    if policy not in _documents():
        problem = f"unknown; known: {', '.join(policies())}"
        raise InvalidInput.of("policy", policy, problem, f"policy: {policy!r} is {problem}")
    return MappingProxyType({name: Parameter(**fields) for name, fields in _documents()[policy].items()})


def value(policy: str, name: str) -> float:
    """Return the value of a parameter.

    Raises:
        InvalidInput: no such policy, or no such parameter of it.
    """
    known = parameters(policy)
    if name not in known:
        problem = f"unknown; known for {policy}: {', '.join(known)}"
        raise InvalidInput.of("parameter", name, problem, f"parameter: {name!r} is {problem}")
    return known[name].value


def common(name: str) -> float:
    """Return the value of a parameter that several policies use.

    Raises:
        InvalidInput: no such parameter.
    """
    return value(COMMON, name)
