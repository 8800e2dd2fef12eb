"""``/v1/plan``: planning by itself, about no cluster and no log."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from services.api.routers.bodies import read_body
from services.api.routers.parameters import PROBLEMS
from shared.planning.standalone import (
    MAX_PROBLEM_BYTES,
    StandaloneAnswer,
    StandaloneProblem,
    parse_problem,
    solve_standalone,
)

router = APIRouter(prefix="/v1/plan", tags=["plans"], responses=PROBLEMS)

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": StandaloneProblem.model_json_schema()}},
    }
}


@router.post("/solve", openapi_extra=_BODY)
async def solve(request: Request) -> StandaloneAnswer:
    """Find the best worker counts for the tasks of a problem, and prove that they are."""
    body = await read_body(request, MAX_PROBLEM_BYTES)
    # In a thread: a large problem takes a second, most of it outside the interpreter's lock.
    return await asyncio.to_thread(lambda: solve_standalone(parse_problem(body)))
