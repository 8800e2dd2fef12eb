"""``/v1/plan``: the solver and the throughput model by themselves, without a cluster or a log."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict

from services.api.gateway import Api
from services.api.route_parts.bodies import described, read_body
from services.api.route_parts.parameters import PROBLEMS, problems
from shared.planning.performance import model_shape, throughput
from shared.planning.standalone import (
    MAX_PROBLEM_BYTES,
    StandaloneAnswer,
    StandaloneProblem,
    parse_problem,
    solve_standalone,
)

router = APIRouter(prefix="/v1/plan", tags=["plans"], responses=PROBLEMS)


@router.post("/solve", responses=problems(413, 415), openapi_extra=described(StandaloneProblem, required=True))
async def solve(request: Request, api: Api) -> StandaloneAnswer:
    """Find the best worker counts for the tasks of a problem, and prove that they are."""
    body = await read_body(request, MAX_PROBLEM_BYTES)
    # In a thread: a large problem takes tenths of a second to read.
    problem = await asyncio.to_thread(parse_problem, body)
    return await api.computations.run(request, partial(solve_standalone, problem))


class ThroughputQuery(BaseModel):
    """Parameters of ``shared.planning.performance.throughput``; optional ones that are not given are searched."""

    model_config = ConfigDict(extra="forbid")

    layers: int
    hidden: int
    heads: int
    sequence_length: int
    global_batch: int
    workers: int
    vocabulary: int = 51200
    hardware: str = "a100-80"
    tensor: int | None = None
    pipeline: int | None = None
    micro_batch: int | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    interleave: int | None = None
    sequence_parallel: bool | None = None
    distributed_optimizer: bool | None = None
    overlap: bool = True


@router.get("/throughput")
async def predict(request: Request, api: Api, query: Annotated[ThroughputQuery, Query()]) -> dict[str, Any]:
    """Predict the iteration time of a GPT model on a number of workers, in the given layout or else in the best."""
    given = query.model_dump()
    model = model_shape(
        **{name: given.pop(name) for name in ("layers", "hidden", "heads", "sequence_length", "vocabulary")}
    )
    return await api.computations.run(request, partial(throughput, model, **given))
