"""Requests of every shape that the OpenAPI document allows, and of others: schemathesis over all operations."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

TIMEOUT_S = 60.0
"""Of a request: no answer within it is a failure. Nothing that is asked here takes longer than 20 s."""

UNAVAILABLE = 503
"""What asks an agent that there is none of, or for too much, is answered so."""

schemathesis.serializer.alias("application/x-tar", "application/octet-stream")

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


def course(
    url: str,
    document: dict[str, Any],
    *,
    examples: int,
    seed: int,
    there: Mapping[str, Sequence[str]],
    without: Collection[str] = (),
) -> Counter[tuple[str, int]]:
    """Ask each operation so many times in each of two ways: as the document allows, and otherwise.

    Each answer has a status, a type and a body that the document names; none is of the kind 5xx but 503.

    Args:
        url: of the server; requests come from its own user.
        document: the OpenAPI document.
        examples: of each way.
        seed: another one, other requests.
        there: path parameter -> values that lead somewhere, in place of the first, the third, ... of an operation.
        without: operations that are left out.

    Returns:
        (operation, status) -> number of answers.
    """
    found: Counter[tuple[str, int]] = Counter()
    schema = schemathesis.openapi.from_dict(document)
    leads_somewhere: defaultdict[str, Iterator[bool]] = defaultdict(lambda: itertools.cycle((True, False)))
    with requests.Session() as session:

        def ask(case: schemathesis.Case[Any]) -> None:
            _end_streams(case)
            if next(leads_somewhere[case.operation.label]):
                _lead(case, there)
            response = case.call(base_url=url, session=session, timeout=TIMEOUT_S)
            found[case.operation.label, response.status_code] += 1
            assert response.status_code < 500 or response.status_code == UNAVAILABLE, response.text
            case.validate_response(response, checks=CHECKS)

        for item in schema.get_all_operations():
            assert isinstance(item, Ok), item.err()
            operation = item.ok()
            if operation.label in without:
                continue
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                try:
                    _draw(operation.as_strategy(generation_mode=mode), ask, examples, seed)
                except Unsatisfiable:
                    assert mode is GenerationMode.NEGATIVE, operation.label  # nothing of it can be wrong
    return found


def _draw(
    strategy: SearchStrategy[schemathesis.Case[Any]],
    ask: Callable[[schemathesis.Case[Any]], None],
    examples: int,
    seed: int,
) -> None:
    """Ask so many requests; the seed decides which."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def asked(case: schemathesis.Case[Any]) -> None:
        ask(case)

    asked()


def _end_streams(case: schemathesis.Case[Any]) -> None:
    """Ask for what a stream has by now, not for what comes."""
    if case.query and "follow" in case.query:
        case.query["follow"] = "false"


def _lead(case: schemathesis.Case[Any], there: Mapping[str, Sequence[str]]) -> None:
    """Have the path name what is there."""
    for name in case.path_parameters or ():
        case.path_parameters[name] = there[name][len(str(case.query)) % len(there[name])]
